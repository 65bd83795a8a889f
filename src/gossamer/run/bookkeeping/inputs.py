"""The inputs of a run besides its settings: recorded at its start, and compared before any later computation from it.

The text is compared by the hash of its tokens, the tokenizer by its behaviour, and Python code by its files.
Differences are named. Otherwise an evaluation would score another text, and an audit would blame a worker for a changed
file.
"""

import hmac
import json
import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from gossamer.data.corpus import Batches, text_fingerprint
from gossamer.data.settings import passes_over, passes_warning
from gossamer.errors import ConfigError
from gossamer.record.checkpoint import saved_text
from gossamer.record.inputs import (
    TEXT_FILE,
    CodeInput,
    Inputs,
    mark_of,
    read_inputs,
    read_text_record,
    state_key,
    write_inputs,
)
from gossamer.record.progress import say
from gossamer.record.whole_files import atomic_write
from gossamer.run.config.resolve import may_change, settings_in
from gossamer.run.config.resolved import RunSettings
from gossamer.run.config.user_parts import KEYS, code_of
from gossamer.run.worker.task import FILES, MODEL, TEXT, TOKENIZER, OwnBatches, Task, common_inputs
from gossamer.version import __version__

log = logging.getLogger("gossamer")

Purpose = Literal["evaluate", "score", "resume", "repeat"]
"""The purpose of a computation from a record: `score` is on another text, and `repeat` an audit or a replay, which
needs identical inputs.
"""
_MOST_FIRST_BATCHES = 16
"""The most workers of a simulation whose first batches are recorded."""


# --- recorded at the start -------------------------------------------------------------------------------------------------


def note_inputs(run: RunSettings, task: Task, folder: Path, worker: int | None, part: int = 0, parts: int = 1) -> None:
    """Writes the inputs of a worker, all of them (None) or a server into the run folder, and reports once the text
    read.

    Raises: DiskError.
    """
    if not part and worker in (None, 0):
        _tell_text(run, task.data, folder)
    own_key, code = b"", code_of(run.code)
    if code:
        _, own_key, why = key = state_key(make=True)
        if why and worker in (None, 0):
            log.warning(
                "'%s' could not be written (%s), so this machine will import the code that '%s' names with --allow-code alone",
                key.path,
                why,
                folder,
            )
    inputs: Inputs = {
        "format": 1,
        "gossamer": __version__,
        "digest": run.digest,
        "settings": _as_json(run.decisive),
        "found": common_inputs(task, run.parts),
        "own": _first_batches(run, task, worker),
        "code": code,
        "mark": mark_of(code, own_key) if code and own_key else "",
    }
    write_inputs(folder, inputs, worker, part, parts)


def _tell_text(run: RunSettings, data: Batches, folder: Path) -> None:
    """Reports the files read, and records them, unless already recorded.

    The file has the hash of all tokens, and for each source its files, bytes, documents and tokens for training, and
    the suffixes of files left out. Warns of a text that is repeated many times.
    """
    if not data.read:
        return
    facts = {"fingerprint": text_fingerprint(data), "sources": [one._asdict() for one in data.read]}
    text, path = f"{json.dumps(facts, indent=2)}\n", folder / TEXT_FILE
    if path.exists() and path.read_bytes() == text.encode():
        return
    for one in data.read:
        say(one.in_words())
    passes = passes_over(run.data.shards, [one.train_tokens for one in data.read], run.worker_tokens)
    if repeats := passes_warning(passes):
        log.warning("%s", repeats)
    atomic_write(path, text.encode())


def _first_batches(run: RunSettings, task: Task, worker: int | None) -> dict[str, str]:
    """Hashes of the first batches of the user's function; a site may have only those of its workers."""
    if not isinstance(task.data, OwnBatches) or worker == run.workers:
        return {}
    some = range(min(run.workers, _MOST_FIRST_BATCHES)) if worker is None else [worker]
    return {f"{_FIRST_BATCH} {i}": task.data.fingerprint(i) for i in some}


_FIRST_BATCH = "the first batch of worker"


def _as_json(value: Any) -> Any:
    """The value after a JSON round trip."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    is_plain = (
        value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_plain else str(value)


# --- compared before anything is computed ----------------------------------------------------------------------------------


def must_have_inputs(run: RunSettings, task: Task, folder: Path, purpose: Purpose) -> None:
    """Compares the text, the tokenizer and, for repetitions, the model and the batches with a record.

    Inputs missing from the folder of an earlier version are not compared. Raises: ConfigError, naming what differs;
    DataError for a spoilt record.
    """
    recorded = read_inputs(folder)
    hashes = {name: value for one in recorded.values() for name, value in one["found"].items()}
    text = None if recorded else read_text_record(folder)
    if not recorded and (fingerprint := text.fingerprint if text else saved_text(folder / "checkpoints")):
        hashes[TEXT] = fingerprint
    now = common_inputs(task, run.parts)
    for name, remedy in _COMPARED[purpose].items():
        # Empty for a stream, which is read during training, and compares its data then.
        then, here = hashes.get(name), now.get(name)
        if then and here and then != here:
            key = name.rpartition(" ")[2]
            raise ConfigError(
                f"{name} {_input_source(run, key)} is not the one that the run in '{folder}' had: it hashes to {here} and "
                f"hashed to {then}; {remedy}"
            )
    if purpose == "repeat" and isinstance(task.data, OwnBatches):
        _must_have_batches(run, task.data, folder, {k: v for one in recorded.values() for k, v in one["own"].items()})


def _must_have_batches(run: RunSettings, data: OwnBatches, folder: Path, recorded: Mapping[str, str]) -> None:
    """Compares the first batches of the user's function with those recorded. Raises: ConfigError."""
    for name, then in recorded.items():
        worker = name.rpartition(" ")[2]
        if worker.isdecimal() and int(worker) < run.workers and (here := data.fingerprint(int(worker))) != then:
            raise ConfigError(
                f"data.source {run.data.source!r:.80} returns another first batch for worker {worker} than in the run in "
                f"'{folder}': it hashes to {here} and hashed to {then}; restore what the function reads"
            )


_FILES = "restore its files as they were"
_ON_TEXT = f"{_FILES}, or train on this text in another folder with --out"
_ANOTHER = f"{_FILES}, or score the model on another text with --source"
_COMPARED: dict[Purpose, dict[str, str]] = {
    "evaluate": {TOKENIZER: _FILES, TEXT: _ANOTHER, FILES: _ANOTHER},
    "score": {TOKENIZER: _FILES},
    "resume": {
        TOKENIZER: f"{_FILES}, or train with this one in another folder with --out",
        TEXT: _ON_TEXT,
        FILES: _ON_TEXT,
    },
    "repeat": {
        TOKENIZER: _FILES,
        TEXT: _FILES,
        FILES: _FILES,
        MODEL: "restore what the function that makes the model reads",
    },
}
"""For each purpose the inputs that are compared, each with the remedy where it differs."""


def _input_source(run: RunSettings, key: str) -> str:
    value = {
        "data.source": run.data.source,
        "data.tokenizer": run.data.tokenizer,
        "model.size": run.model.size,
    }
    return f"{value[key]!r:.80}"


def changed_code(
    run: RunSettings,
    folder: Path,
    purpose: Purpose,
    *,
    without: Collection[str] = (),
    allowed: bool = False,
    speaks: bool = True,
) -> bool:
    """Compares the Python code that a run names with its record, without running any; reports code it cannot compare.

    Args:
        without: kinds that are not used.
        allowed: accept changed code, except for repetitions.
        speaks: whether this process reports uncompared and changed code.
    Returns: whether some has changed.
    Raises: ConfigError, naming it; DataError for a spoilt record.
    """
    used = run.code.keys() - {*without}
    if not used:
        return False
    recorded = read_inputs(folder)
    if not recorded and speaks:
        log.warning(
            "the code of %s is not compared: '%s' does not say what it was when the run began, as folders of gossamer 0.2.0 and "
            "before do not",
            ", ".join(KEYS[kind] for kind in sorted(used)),
            folder,
        )
    changed = _first_change([code for one in recorded.values() for code in one["code"] if code["kind"] in used], run)
    if changed is None:
        return False
    then, here = changed
    what = (
        f"the code of {KEYS[then['kind']]} '{then['name']}' has changed since the run in '{folder}' began: "
        f"'{here['path'] or then['path']}', with what it imports from its folder, hashes to {here['sha256'][:12]} and hashed "
        f"to {then['sha256'][:12]}"
    )
    if purpose == "repeat":
        raise ConfigError(f"{what}; restore it as it was")
    if not allowed:
        raise ConfigError(f"{what}; restore it, or give --allow-code to go on with it as it is now")
    if speaks:
        log.warning("%s; it is taken as it is now", what)
    return True


def _first_change(recorded: Collection[CodeInput], run: RunSettings) -> tuple[CodeInput, CodeInput] | None:
    """The first recorded code whose files differ now, as it was and as it is; None without one."""
    now = {one["kind"]: one for one in code_of(run.code)}
    both = ((then, here) for then in recorded if (here := now.get(then["kind"])) is not None)
    return next(
        (pair for pair in both if pair[0]["name"] == pair[1]["name"] and pair[0]["sha256"] != pair[1]["sha256"]), None
    )


# --- where checkpoints are of other settings -----------------------------------------------------------------------------


def why_settings_differ(folder: Path, now: RunSettings, digests: Collection[str]) -> str:
    """The reason why checkpoints with these digests do not belong to the run file next to them, and a remedy, in a
    clause.

    Args: `now` are the settings of the run file.
    """
    recorded = read_inputs(folder)
    one = next((one for one in recorded.values() if one["digest"] in digests), None)
    shown = ", ".join(sorted(digests))
    if one is None:
        return (
            f"they were written under settings with the digest {shown}, and those of run.toml have {now.digest}: run.toml was "
            "changed by hand, or they are of another run, or of another version of gossamer; restore what they belong to"
        )
    then, here = one["settings"], _as_json(now.decisive)
    keys = sorted(key for key in then.keys() | here.keys() if then.get(key) != here.get(key))
    if not keys:
        return (
            f"gossamer {one['gossamer']} wrote them and computed the digest {shown} from the same settings, for which "
            f"{__version__} computes {now.digest}; resume with gossamer {one['gossamer']}"
        )
    words = [f"{key} was {then.get(key)!r:.60} and is {here.get(key)!r:.60} in run.toml" for key in keys[:3]]
    words += [f"{len(keys) - 3} more keys differ"] if len(keys) > 3 else []
    sets = [f"--set {key}={json.dumps(here[key])}" for key in keys if key in here and may_change(key)]
    how = f", and resume with {' '.join(sets)}" if len(sets) == len(keys) else ""
    return f"run.toml was changed since: {', '.join(words)}; put {'it' if len(keys) == 1 else 'them'} back{how}"


# --- whose folder it is ------------------------------------------------------------------------------------------------


def must_be_trusted(folder: Path, *, without: Collection[str] = ()) -> None:
    """Refuses to import the code that a run folder names, unless this user has run exactly this code on this machine.

    Args: `without` are kinds that are not imported. Raises: ConfigError; DataError for a spoilt record.
    """
    code = [one for one in code_of(settings_in(folder).code) if one["kind"] not in without]
    if not code:
        return
    path, key, why = state_key(make=False)
    trusted = [one["code"] for one in read_inputs(folder).values() if key and _is_marked(one, key)]
    if any(all(_was_run(one, known) for one in code) for known in trusted):
        return
    names = ", ".join(f"{KEYS[one['kind']]} = '{one['name']}'" for one in code)
    moved = [
        f"; it ran '{then['path']}', and '{one['path']}' would be imported now"
        for known in trusted
        for then in known
        for one in code
        if (then["kind"], then["name"]) == (one["kind"], one["name"]) and then["path"] != one["path"]
    ]
    lacks = f", as '{path}' cannot be read ({why})" if why else ""
    raise ConfigError(
        f"'{folder}' names Python code ({names}), and this machine has no record of having run it from there{lacks}"
        f"{moved[0] if moved else ''}; a folder from elsewhere may name anything: read its run.toml, and give --allow-code to "
        "import what it names"
    )


def _is_marked(inputs: Inputs, key: bytes) -> bool:
    return bool(inputs["mark"]) and hmac.compare_digest(inputs["mark"].encode(), mark_of(inputs["code"], key).encode())


def _was_run(code: CodeInput, known: Collection[CodeInput]) -> bool:
    """Whether code was run before; changes of its files are checked by `changed_code`."""
    place = code["kind"], code["name"], code["options"], code["path"]
    return any((then["kind"], then["name"], then["options"], then["path"]) == place for then in known)
