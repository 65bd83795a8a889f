"""Checkpoints of one worker at the end of one round: plain files that can be verified, never a pickle.

    checkpoints/round-000120/worker-003.safetensors     every tensor of the state
    checkpoints/round-000120/worker-003.json            the manifest: everything else, and the hash of the tensor file
    checkpoints/aside/round-000120/worker-003.*         generations set aside because some files were damaged

The manifest identifies the state: the digest of the settings, worker, round and inner step, and as text the rule,
codec, schedule, topology, number of workers and local steps. Format 1, up to 0.1.0, has no step and no text.

Each worker writes independently, without a barrier. The manifest is written last, and a generation exists once its
manifest does. The previous generation is removed only then, so a kill or a power cut at any time leaves a complete one.
All workers resume from the newest round that all of them still have.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import with_config
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import TypedDict

from gossamer.errors import CheckpointError, TrainingError
from gossamer.finite import must_be_finite
from gossamer.record.fault import Fault, FaultKind
from gossamer.record.jsonl import short
from gossamer.record.lineage import Lineage, OddField, odd_field
from gossamer.record.tensor_file import TENSOR_TYPES, write_tensors
from gossamer.record.whole_files import atomic_write, make_folder, sync_folder, worker_suffix, writing
from gossamer.settings.schema import RECORD, Records

FORMAT, FIRST_FORMAT = "gossamer checkpoint 2", "gossamer checkpoint 1"
MAX_DEPTH = 100  # levels of a nested state; an optimizer has five or six
MAX_MANIFEST_BYTES = 64 << 20  # some 100,000 tensors; a larger one is a mistake or an attack
ASIDE = "aside"
"""The folder for checkpoints set aside because some were damaged. It is never removed: a file that is unreadable today,
for example on a disconnected disk, may be sound and the only copy.
"""


@with_config(RECORD)
class _FirstManifest(TypedDict):
    manifest_sha256: str
    format: str
    round: int
    worker: int
    digest: str
    bytes: int
    sha256: str
    state: Any
    """JSON for all but the tensors, as `encoded` makes it."""


@with_config(RECORD)
class _Manifest(_FirstManifest):
    step: int | None
    """Inner steps completed by its worker; null where the state does not count them, as for a server."""
    of: dict[str, str]
    """See `gossamer.record.lineage.state_is_of`; empty where only the digest was known at saving."""


_MANIFESTS: dict[str, Records[Any]] = {
    FORMAT: Records[_Manifest](_Manifest),
    FIRST_FORMAT: Records[_FirstManifest](_FirstManifest),
}


def save(
    folder: Path,
    round: int,
    worker: int,
    state: Any,
    *,
    digest: str | Lineage,
    keep: int = 2,
    since: int | None = None,
) -> None:
    """Writes one generation of one worker, then removes its generations before the newest `keep`.

    Tensors that share memory are written separately, and are loaded as tensors that do not share it.

    Args:
        round: finished rounds, from 0.
        state: nested dicts (with str or int keys), lists and tuples of tensors, ints, floats, bools, strings and None.
        digest: identifies the configuration and describes the state; `load` refuses the checkpoint for any other.
        keep: with two, workers may be a whole checkpoint interval apart and still share a round.
        since: also keep every generation from this round on; the round that the slowest worker is known to have.
    Raises: CheckpointError when the state holds anything else, or writing fails; TrainingError, with nothing written,
        when its "x", "outer" or "under_way" (parameters, outer state, messages in flight) are not finite.
    Cost: one write and two reads of all tensors, no copy of contiguous CPU tensors.

    >>> import tempfile
    >>> store = Path(tempfile.mkdtemp())
    >>> save(store, 120, 3, {"x": torch.ones(2), "step": 7, "betas": (0.9, 0.95)}, digest="d")
    >>> load(store, 120, 3, "d")
    {'x': tensor([1., 1.]), 'step': 7, 'betas': (0.9, 0.95)}
    """
    assert keep >= 1, keep
    tensors: dict[str, Tensor] = {}
    tree = encoded(state, "state", tensors)
    check_finite(tensors, f"worker {worker} after round {round}")
    lineage = _as_lineage(digest)
    manifest, tensor_file = files_of(folder, round, worker)
    scratch = _scratch(folder, worker)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size, sha256 = write_tensors(scratch, tensors)
        document = _sealed(
            {
                "format": FORMAT,
                "round": round,
                "worker": worker,
                "digest": lineage.digest,
                "step": _step_of(state),
                "of": {**lineage.of},
                "bytes": size,
                "sha256": sha256,
                "state": tree,
            }
        )
        if len(document) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"the state of worker {worker} needs a manifest of {len(document)} bytes and at most "
                f"{MAX_MANIFEST_BYTES} are allowed; keep long lists and texts out of it, or as tensors"
            )
        # If a round is saved again, the old manifest must not describe the new tensors.
        manifest.unlink(missing_ok=True)
        # The manifest comes last, once the name of the tensors is on the disk: a checkpoint counts from its manifest on.
        _move(scratch, tensor_file)
        sync_folder(tensor_file.parent)
        atomic_write(manifest, document)
        sync_folder(folder)
        kept = [*itertools.islice(_sound_until(folder, round, worker, digest), keep)]
        if not kept:
            raise CheckpointError(
                f"the checkpoint of worker {worker} at round {round} is not in '{folder}' any more as it was written there; look "
                "who else writes in that folder, then resume"
            )
        oldest = min(kept) if since is None else min(since, *kept)
        _forget(folder, worker, [r for r in _rounds(folder) if r < oldest])
    except OSError as error:
        whole = next(_sound_until(folder, round - 1, worker, digest), None)
        instead = (
            "start again: there is no earlier one" if whole is None else f"resume: that of round {whole} is complete"
        )
        raise CheckpointError(
            f"the checkpoint of worker {worker} at round {round} could not be written to '{folder}': {error.strerror or error}; "
            f"free some space or choose another folder, then {instead}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def load(folder: Path, round: int, worker: int, digest: str | Lineage) -> Any:
    """The state that was saved, bit for bit; tensors are on the CPU and own their memory.

    Raises: CheckpointError when a file is missing, cut short, changed since, of another run, or not finite as in `save`.
    Cost: three reads of the tensor file.
    """
    manifest, tensor_file = files_of(folder, round, worker)
    content = _manifest(manifest, round, worker, digest)
    where = f"checkpoint file '{tensor_file}'"
    instead = f"remove '{manifest}' and resume from an older round"
    try:
        size, sha256 = _size(tensor_file), _sha256(tensor_file)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}; {instead}") from error
    if size != content["bytes"]:
        raise CheckpointError(f"{where} {_of_another_size(size, content['bytes'])}; {instead}")
    if sha256 != content["sha256"]:
        raise CheckpointError(f"{where} has changed: its sha256 was {content['sha256']:.64} and is {sha256}; {instead}")
    try:
        tensors = load_file(tensor_file)
        check_finite(tensors, where)
        return decoded(content["state"], tensors)
    except TrainingError as error:
        raise CheckpointError(f"{error}; {instead}") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} does not hold what its manifest describes ({error!r:.200}); {instead}"
        ) from error


def take(folder: Path, round: int, worker: int, manifest: bytes, tensors: bytes) -> None:
    """Writes a generation that another process has saved, from the content of its files; `load` checks it.

    Raises: DiskError.
    """
    path, tensor_file = files_of(folder, round, worker)
    make_folder(tensor_file.parent)
    with writing(path):
        path.unlink(missing_ok=True)  # as in `save`: no manifest may describe the tensors of another
    atomic_write(tensor_file, tensors)
    atomic_write(path, manifest)


def forget_before(folder: Path, round: int, worker: int) -> None:
    """Removes this worker's generations before a round."""
    _forget(folder, worker, [r for r in _rounds(folder) if r < round])


def fault(folder: Path, round: int, worker: int, digest: str | Lineage) -> Fault | None:
    """The reason why a generation cannot be resumed from; None for a sound one. Cost: that of `load`."""
    try:
        load(folder, round, worker, digest)
    except CheckpointError as error:
        return Fault.of(error)
    return None


def generation_faults(folder: Path, worker: int, digest: str | Lineage | None = None) -> dict[int, Fault | None]:
    """The fault of each generation of which this worker has a file, by round, ascending.

    None stands for one that is complete (of this configuration, if given): it has a sound manifest and a tensor file of the right
    size, whose content is checked by `load`. A round whose path is not a folder is damaged for every worker.
    """
    places = ((round, files_of(folder, round, worker)) for round in _rounds(folder))
    there = (round for round, some in places if _is_no_folder(some[0].parent) or any(map(os.path.lexists, some)))
    return {round: _fault(folder, round, worker, digest) for round in there}


def rounds(folder: Path, worker: int, digest: str | Lineage | None = None) -> list[int]:
    """The rounds of which this worker has a complete generation, ascending; `generation_faults` has the others as well."""
    return [round for round, why in generation_faults(folder, worker, digest).items() if why is None]


def owners(folder: Path) -> list[int]:
    """The workers that have a manifest of any generation, ascending."""
    return sorted({worker for _, _, worker in _numbered(folder.glob("round-*/worker-*.json"))})


def says_what_it_is_of(folder: Path, round: int, worker: int) -> bool:
    """Whether a sound generation has a description besides the digest; those up to 0.1.0 have none."""
    manifest, _ = files_of(folder, round, worker)
    return bool(_manifest(manifest, round, worker, None).get("of"))


def saved_text(store: Path) -> str:
    """The hash of the training text in the checkpoints of a run folder, in stages or not; empty if none has it.

    Cost: reads a manifest.
    """
    for path, round, worker in _numbered(sorted(store.glob("**/round-*/worker-*.json"))):
        try:
            data = dict(dict(_manifest(path, round, worker, None)["state"]["dict"])["data"]["dict"])
        except (CheckpointError, KeyError, TypeError, ValueError):
            continue  # skip damaged ones, and those without text
        if isinstance(fingerprint := data.get("fingerprint"), str):
            return fingerprint
    return ""


def _sound_until(folder: Path, round: int, worker: int, digest: str | Lineage) -> Iterator[int]:
    """The rounds up to this one whose checkpoints of a worker are sound by `_fault`, the newest first."""
    return (r for r in reversed(_rounds(folder)) if r <= round and _fault(folder, r, worker, digest) is None)


def _fault(folder: Path, round: int, worker: int, digest: str | Lineage | None) -> Fault | None:
    """The fault of one generation, as in `generation_faults`."""
    manifest, tensor_file = files_of(folder, round, worker)
    try:
        saved, size = _manifest(manifest, round, worker, digest)["bytes"], _size(tensor_file)
    except CheckpointError as error:
        return Fault.of(error)
    except OSError as error:
        return Fault(FaultKind.DAMAGED, f"checkpoint file '{tensor_file}' cannot be read: {error.strerror or error}")
    if size == saved:
        return None
    return Fault(FaultKind.DAMAGED, f"checkpoint file '{tensor_file}' {_of_another_size(size, saved)}")


def _size(path: Path) -> int:
    """The size of a file. Raises OSError, also for a path that is not a file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is no file")
    return status.st_size


def _of_another_size(size: int, saved: int) -> str:
    return (
        f"is cut short: it has {size} of {saved} bytes" if size < saved else f"has changed from {saved} to {size} bytes"
    )


def rewind(folder: Path, round: int, worker: int, *, aside: bool = False) -> None:
    """Removes this worker's generations after `round`, from which it resumes.

    Otherwise a worker that was ahead would keep such a generation until it reaches that round again, and the next resume could
    combine it with newly computed ones of the others. Call it once all workers know the round that they resume from.

    Args: `aside` moves them into the folder 'aside' instead, which is never searched: a file that is unreadable today,
        for example on a disconnected disk, may be sound, and with it the generation of all workers. A name that exists
        there already, from an earlier rewind, gets a number.
    """
    with contextlib.suppress(OSError):  # an unfinished file of a killed worker
        _scratch(folder, worker).unlink(missing_ok=True)
    gone = [r for r in _rounds(folder) if r > round]
    for place in [place for r in gone if _is_no_folder(place := files_of(folder, r, worker)[0].parent)]:
        # It may be a link to a disconnected disk. If it stayed, the run could not save on reaching that round again.
        with contextlib.suppress(FileNotFoundError):  # another worker has moved it
            os.replace(place, _free_place(folder / ASIDE, f"{place.name}.no-folder"))
    if not aside:
        _forget(folder, worker, gone)
        return
    for old in gone:
        for path in files_of(folder, old, worker):
            if os.path.lexists(path):
                os.replace(path, _free_place(folder / ASIDE / path.parent.name, path.name))
        with contextlib.suppress(OSError):  # as in `_forget`
            files_of(folder, old, worker)[0].parent.rmdir()


def _free_place(folder: Path, name: str) -> Path:
    """A path in a folder, which is created, that does not replace another file."""
    folder.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return next(folder / one for one in names if not os.path.lexists(folder / one))


def check_finite(tensors: Mapping[str, Tensor], whose: str) -> None:
    """Raises TrainingError for parameters, outer state or messages that are not finite.

    An infinite second moment of an inner optimizer is allowed: it only stops a parameter.
    """
    paths = {name: name.partition(" ")[2] for name in tensors}
    kept = {name: path for name, path in paths.items() if path.split(".")[1:2] in (["x"], ["outer"], ["under_way"])}
    must_be_finite({f"{path} of {whose}": tensors[name] for name, path in kept.items()})


def files_of(folder: Path, round: int, worker: int) -> tuple[Path, Path]:
    """The manifest and the tensor file of one generation."""
    stem = folder / f"round-{round:06d}" / f"worker{worker_suffix(worker)}"
    return stem.with_suffix(".json"), stem.with_suffix(".safetensors")


def _scratch(folder: Path, worker: int) -> Path:
    """The scratch path of the tensors; a kill leaves it, and the next start removes it."""
    return folder / f".worker{worker_suffix(worker)}.safetensors"


def _rounds(folder: Path) -> list[int]:
    """The rounds that any worker has a folder for, ascending."""
    matches = (re.fullmatch(r"round-(\d{6,})", path.name) for path in folder.glob("round-*"))
    return sorted(int(match[1]) for match in matches if match)


def _numbered(manifests: Iterable[Path]) -> Iterator[tuple[Path, int, int]]:
    """These manifests with their rounds and workers; without those of other names."""
    for path in manifests:
        match [re.fullmatch(r"[a-z]+-(\d{1,9})", name) for name in (path.parent.name, path.stem)]:
            case [re.Match() as round, re.Match() as worker]:
                yield path, int(round[1]), int(worker[1])
            case _:
                pass


def _forget(folder: Path, worker: int, gone: Sequence[int]) -> None:
    """Deletes this worker's files of these rounds, and the folders that are empty then."""
    for round in gone:
        manifest, tensor_file = files_of(folder, round, worker)
        if _is_no_folder(manifest.parent):  # it holds no file of this worker
            continue
        manifest.unlink(missing_ok=True)  # first, so that no manifest is ever without its tensors
        tensor_file.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another worker may remove the empty folder meanwhile
            for scratch in manifest.parent.glob(f".{manifest.stem}.*"):
                scratch.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other workers may still have files there, or remove the folder right now
            manifest.parent.rmdir()


def _move(scratch: Path, target: Path) -> None:
    """Moves the file to its place; the folder may vanish meanwhile, when a worker that is ahead finds it empty."""
    while True:
        try:
            target.parent.mkdir(exist_ok=True)
            os.replace(scratch, target)
            return
        except (FileExistsError, FileNotFoundError):
            # A dangling link exists for mkdir and is no folder for the file: retrying would never end.
            if _is_no_folder(target.parent) or not scratch.exists():
                raise


def _is_no_folder(place: Path) -> bool:
    """Whether the path exists and is not a reachable folder: a file, or a dangling link."""
    return os.path.lexists(place) and not place.is_dir()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(content: dict[str, Any]) -> bytes:
    """A manifest as JSON whose first line is the hash of the rest, so that every changed byte is detected."""
    body = json.dumps(content, allow_nan=False).removeprefix("{").encode()
    return _seal(body) + body


def _seal(body: bytes) -> bytes:
    return f'{{"manifest_sha256": "{hashlib.sha256(body).hexdigest()}",\n'.encode()


def _as_lineage(digest: str | Lineage) -> Lineage:
    return digest if isinstance(digest, Lineage) else Lineage(digest)


def _step_of(state: Any) -> int | None:
    step = state.get("steps_taken") if isinstance(state, dict) else None
    return step if isinstance(step, int) else None


def _manifest(path: Path, round: int, worker: int, digest: str | Lineage | None) -> _FirstManifest:
    """The content of a manifest. Everything is checked that needs no tensors."""
    where = f"checkpoint file '{path}'"
    try:
        with path.open("rb") as file:
            document = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        # A dangling link, as to an unmounted disk, is an unreadable file rather than a missing one.
        if not os.path.lexists(path) and os.path.lexists(path.with_suffix(".safetensors")):
            raise CheckpointError(
                f"{where} is missing, as if it was lost or its worker was stopped while it saved; resume from an older round",
                FaultKind.UNFINISHED,
            ) from error
        raise CheckpointError(
            f"{where} cannot be read: {error.strerror}; resume from a round that worker {worker} owns, or copy its "
            "files here",
            FaultKind.DAMAGED if os.path.lexists(path) or _is_no_folder(path.parent) else FaultKind.ABSENT,
        ) from error
    seal, newline, body = document.partition(b"\n")
    if len(document) > MAX_MANIFEST_BYTES or seal + newline != _seal(body):
        raise CheckpointError(
            f"{where} is cut short, changed or not a checkpoint ({len(document)} bytes do not match their own sha256); "
            "remove it and resume from an older round"
        )
    try:
        value = json.loads(document)
        number = value.get("format", FORMAT) if isinstance(value, dict) else FORMAT  # the parser names the needed type
        kind = _MANIFESTS.get(str(number))
        if kind is None:
            raise CheckpointError(
                f"{where} has format {number!r:.60} but needs {FORMAT!r}, or that of 0.1.0; resume with the version that wrote "
                "it, or start again with another --out",
                FaultKind.FOREIGN,
            )
        content: _FirstManifest = kind.of(value, "the manifest")
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not a manifest of '{FORMAT}' ({error}); resume from a folder that gossamer wrote"
        ) from error
    for name, value, needed in (("round", content["round"], round), ("worker", content["worker"], worker)):
        if value != needed:
            raise CheckpointError(
                f"{where} has {name} {value} but needs {needed}; bring back the file that belongs here, or resume from an older "
                "round",
                FaultKind.MISPLACED,
            )
    if digest is not None:
        _must_be_of(_as_lineage(digest), where, content, round)
    return content


def _must_be_of(lineage: Lineage, where: str, content: _FirstManifest, round: int) -> None:
    """Raises CheckpointError, naming the first field that differs, for a manifest of another run."""
    of = content.get("of")
    odd = odd_field(of, lineage.of) if of and lineage.of else None  # a caller with only a digest compares that
    if odd is None and not lineage.owns(content["digest"], round):
        odd = OddField("digest", short(content["digest"]), repr(lineage.digest))
    if odd is not None:
        raise CheckpointError(
            f"{where} has {odd.field} {odd.saved} but needs {odd.current}; resume with the run file, folder and version that "
            "wrote it",
            FaultKind.FOREIGN,
        )


def encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for one part of a state; its tensors are put into `tensors` under the names the JSON refers to."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case Tensor() if value.layout is torch.strided and value.dtype in TENSOR_TYPES:
            name = f"{len(tensors)} {path}".encode("ascii", "backslashreplace").decode()
            tensors[name] = value.detach().cpu().contiguous()
            return {"tensor": name}
        case dict() if all(type(key) in (str, int) for key in value):
            return {"dict": [[key, encoded(part, f"{path}.{key}", tensors)] for key, part in value.items()]}
        case list() | tuple() if type(value) in (list, tuple):
            parts = [encoded(part, f"{path}.{place}", tensors) for place, part in enumerate(value)]
            return parts if type(value) is list else {"tuple": parts}
    kind = f"{value.layout} tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    raise CheckpointError(
        f"a checkpoint cannot hold {path}, a {kind}; allowed are dense tensors, numbers, strings, None, and lists, "
        "tuples and dicts (with str or int keys) of these: convert it before saving"
    )


def decoded(value: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """The part of a state that this JSON encodes; raises KeyError, TypeError or ValueError if it is invalid."""
    if depth > MAX_DEPTH:  # an explicit bound: other libraries change the interpreter's
        raise ValueError(f"JSON nested more than {MAX_DEPTH} deep")

    def inner(part: Any) -> Any:
        return decoded(part, tensors, depth + 1)

    match value:
        case None | bool() | int() | str() | float():
            return value
        case list():
            return [inner(part) for part in value]
        case {"tuple": [*parts]}:
            return tuple(inner(part) for part in parts)
        case {"dict": [*items]}:
            return {key: inner(part) for key, part in items}
        case {"float": str(text)}:
            return float(text)
        case {"tensor": str(name)}:
            return tensors[name]
    raise ValueError(f"unknown JSON {value!r:.80}")
