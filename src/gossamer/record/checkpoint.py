"""Checkpoints of one worker at the end of one round: plain files that can be verified, never a pickle.

    checkpoints/round-000120/worker-003.safetensors     every tensor of the state
    checkpoints/round-000120/worker-003.json            the manifest: everything else, and the hash of the tensor file

Each worker writes by itself, without a barrier. The manifest is written last, and a generation exists once its manifest does.
The generation before it is removed only then, so a kill or a power cut at any time leaves a complete one. All workers resume
from the newest round that every one of them still owns.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import with_config
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import TypedDict

from gossamer.errors import CheckpointError, TrainingError
from gossamer.finite import must_be_finite
from gossamer.record.tensor_file import TENSOR_TYPES, write_tensors
from gossamer.record.whole_files import atomic_write, sync_folder, worker_suffix
from gossamer.settings.schema import RECORD, Records

__all__ = [
    "ABSENT",
    "UNFINISHED",
    "Lineage",
    "check_finite",
    "clause",
    "decoded",
    "encoded",
    "fault",
    "faults",
    "load",
    "rewind",
    "rounds",
    "save",
]

FORMAT = "gossamer checkpoint 1"
MAX_DEPTH = 100  # of a nested state; an optimizer has five or six
MAX_MANIFEST_BYTES = 64 << 20  # some 100,000 tensors; a larger one is a mistake or an attack
ASIDE = "aside"
"""The folder among the checkpoints with those that a run went back behind because some were damaged."""
ABSENT = "has no checkpoint of"
"""What is wrong where one of several that must have saved a generation has not: it may have been stopped before it did."""
UNFINISHED = "is missing, as if it was lost or its worker was stopped while it saved"
"""What is wrong with the manifest of a generation that has its tensors."""


@with_config(RECORD)
class _Manifest(TypedDict):
    manifest_sha256: str
    format: str
    round: int
    worker: int
    digest: str
    bytes: int
    sha256: str
    state: Any
    """JSON for all but the tensors, as `encoded` makes it."""


_MANIFEST = Records[_Manifest](_Manifest)


class Lineage(NamedTuple):
    """The configuration of a run that has changed on its way, with those that it had before."""

    digest: str
    """Of the present configuration, which checkpoints are written with."""
    earlier: tuple[tuple[str, int], ...] = ()
    """Digests of earlier configurations, each with the last round whose checkpoints of it belong to the run."""

    def owns(self, digest: str, round: int) -> bool:
        """Whether a checkpoint of this digest and round belongs to the run."""
        return digest == self.digest or any(digest == one and round <= last for one, last in self.earlier)


def save(
    folder: Path, round: int, worker: int, state: Any, *, digest: str | Lineage, keep: int = 2, since: int | None = None
) -> None:
    """Writes one generation of one worker, then removes its generations before the newest `keep`.

    Tensors that share memory are written separately, and are loaded as tensors that do not share it.

    Args:
        round: finished rounds, from 0.
        state: nested dicts (with str or int keys), lists and tuples of tensors, ints, floats, bools, strings and None.
        digest: identifies the configuration; `load` refuses the checkpoint for any other.
        keep: with two, workers may be a whole checkpoint interval apart and still have a round in common.
        since: also keep every generation from this round on; the round that the slowest worker is known to own.
    Raises: CheckpointError when the state holds anything else, or the disk refuses; TrainingError, with nothing written, when its
        "x", "outer" or "under_way" (parameters, outer state, messages in flight) are not finite.
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
    manifest, tensor_file = _paths(folder, round, worker)
    scratch = folder / f".{tensor_file.name}"  # what a kill leaves of it is written over
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size, sha256 = write_tensors(scratch, tensors)
        document = _sealed(
            {
                "format": FORMAT, "round": round, "worker": worker, "digest": _line(digest).digest, "bytes": size,
                "sha256": sha256, "state": tree,
            }
        )  # fmt: skip
        if len(document) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"the state of worker {worker} needs a manifest of {len(document)} bytes and at most "
                f"{MAX_MANIFEST_BYTES} are allowed; keep long lists and texts out of it, or as tensors"
            )
        # If a round is saved again, the old manifest must not describe the new tensors.
        manifest.unlink(missing_ok=True)
        _move(scratch, tensor_file)
        sync_folder(tensor_file.parent)
        atomic_write(manifest, document)
        sync_folder(folder)
        before = (r for r in reversed(_rounds(folder)) if r <= round)
        kept = [*islice((r for r in before if _fault(folder, r, worker, digest) is None), keep)]
        oldest = min(kept) if since is None else min(since, *kept)
        _forget(folder, worker, [r for r in _rounds(folder) if r < oldest])
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of worker {worker} at round {round} could not be written to '{folder}': {error}; free "
            "some space or choose another folder, then resume: the previous checkpoint is complete"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def load(folder: Path, round: int, worker: int, digest: str | Lineage) -> Any:
    """The state that was saved, bit for bit; tensors are on the CPU and own their memory.

    Raises: CheckpointError when a file is missing, cut short, changed since, of another run, or not finite as in `save`.
    Cost: three reads of the tensor file.
    """
    manifest, tensor_file = _paths(folder, round, worker)
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
        raise CheckpointError(f"{where} has changed: its sha256 was {content['sha256']} and is {sha256}; {instead}")
    try:
        tensors = load_file(tensor_file)
        check_finite(tensors, where)
        return decoded(content["state"], tensors)
    except TrainingError as error:
        raise CheckpointError(f"{error}; {instead}") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} does not hold what its manifest describes ({error!r}); {instead}") from error


def fault(folder: Path, round: int, worker: int, digest: str | Lineage) -> str | None:
    """Why a generation cannot be resumed from, in one clause; None for a sound one. Cost: that of `load`."""
    try:
        load(folder, round, worker, digest)
    except CheckpointError as error:
        return clause(error)
    return None


def faults(folder: Path, worker: int, digest: str | Lineage | None = None) -> dict[int, str | None]:
    """What is wrong with each generation of which this worker has a file, in one clause that names it, by round, ascending.

    None stands for one that is complete (of this configuration, if given): it has a sound manifest and a tensor file of the right
    size, whose content is checked by `load`.
    """
    found = {round: _fault(folder, round, worker, digest) for round in _rounds(folder)}
    return {round: why for round, why in found.items() if why != ""}


def rounds(folder: Path, worker: int, digest: str | Lineage | None = None) -> list[int]:
    """The rounds of which this worker has a complete generation, ascending; see `faults`, which has the others as well."""
    return [round for round, why in faults(folder, worker, digest).items() if why is None]


def _fault(folder: Path, round: int, worker: int, digest: str | Lineage | None) -> str | None:
    """As `faults` has it; empty where no file is there."""
    manifest, tensor_file = _paths(folder, round, worker)
    # A link that leads nowhere, as to a disk that is not mounted, is a file that cannot be read, and not none.
    if not os.path.lexists(manifest):
        return f"checkpoint file '{manifest}' {UNFINISHED}" if os.path.lexists(tensor_file) else ""
    try:
        saved, size = _manifest(manifest, round, worker, digest)["bytes"], _size(tensor_file)
    except CheckpointError as error:
        return clause(error)
    except OSError as error:
        return f"checkpoint file '{tensor_file}' cannot be read: {error.strerror or error}"
    return None if size == saved else f"checkpoint file '{tensor_file}' {_of_another_size(size, saved)}"


def _size(path: Path) -> int:
    """The bytes of a file. Raises OSError, also for what is no file."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no file")
    return found.st_size


def _of_another_size(size: int, saved: int) -> str:
    return (
        f"is cut short: it has {size} of {saved} bytes" if size < saved else f"has changed from {saved} to {size} bytes"
    )


def clause(error: CheckpointError) -> str:
    """What is wrong, without what to do."""
    return str(error).partition(";")[0]


def rewind(folder: Path, round: int, worker: int, *, aside: bool = False) -> None:
    """Removes this worker's generations after `round`, from which it resumes.

    Otherwise a worker that was ahead would keep such a generation until it reaches that round again, and the next resume could
    combine it with newly computed ones of the others. Call it once all workers know the round that they resume from.

    Args: `aside` moves them into the folder 'aside' instead, where nothing looks for them: what cannot be read today, as its
        disk is away, may be sound, and with it the generation of all workers.
    """
    gone = [r for r in _rounds(folder) if r > round]
    if not aside:
        _forget(folder, worker, gone)
        return
    for old in gone:
        for path in _paths(folder, old, worker):
            if os.path.lexists(path):
                target = folder / ASIDE / path.parent.name / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
        with contextlib.suppress(OSError):  # as in `_forget`
            _paths(folder, old, worker)[0].parent.rmdir()


def check_finite(tensors: Mapping[str, Tensor], whose: str) -> None:
    """Raises TrainingError for parameters, outer state or messages that would poison whoever continues from them.

    An infinite second moment of an inner optimizer is no poison: it only stops a parameter.
    """
    paths = {name: name.partition(" ")[2] for name in tensors}
    kept = {name: path for name, path in paths.items() if path.split(".")[1:2] in (["x"], ["outer"], ["under_way"])}
    must_be_finite({f"{path} of {whose}": tensors[name] for name, path in kept.items()})


def _paths(folder: Path, round: int, worker: int) -> tuple[Path, Path]:
    """The manifest and the tensor file of one generation."""
    stem = folder / f"round-{round:06d}" / f"worker{worker_suffix(worker)}"
    return stem.with_suffix(".json"), stem.with_suffix(".safetensors")


def _rounds(folder: Path) -> list[int]:
    """The rounds that any worker has a folder for, ascending."""
    found = (re.fullmatch(r"round-(\d{6,})", path.name) for path in folder.glob("round-*"))
    return sorted(int(match[1]) for match in found if match)


def _forget(folder: Path, worker: int, gone: Sequence[int]) -> None:
    """Deletes this worker's files of these rounds, and the folders that are empty then."""
    for round in gone:
        manifest, tensor_file = _paths(folder, round, worker)
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
            if target.parent.is_file() or not scratch.exists():
                raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(content: dict[str, Any]) -> bytes:
    """A manifest as JSON whose first line is the hash of the rest, so that every changed byte is detected."""
    body = json.dumps(content, allow_nan=False).removeprefix("{").encode()
    return _seal(body) + body


def _seal(body: bytes) -> bytes:
    return f'{{"manifest_sha256": "{hashlib.sha256(body).hexdigest()}",\n'.encode()


def _line(digest: str | Lineage) -> Lineage:
    return digest if isinstance(digest, Lineage) else Lineage(digest)


def _manifest(path: Path, round: int, worker: int, digest: str | Lineage | None) -> _Manifest:
    """The content of a manifest. Everything is checked that needs no tensors."""
    where = f"checkpoint file '{path}'"
    try:
        with path.open("rb") as file:
            document = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(
            f"{where} cannot be read: {error.strerror}; resume from a round that worker {worker} owns, or copy its "
            "files here"
        ) from error
    seal, newline, body = document.partition(b"\n")
    if len(document) > MAX_MANIFEST_BYTES or seal + newline != _seal(body):
        raise CheckpointError(
            f"{where} is cut short, changed or not a checkpoint ({len(document)} bytes do not match their own sha256); "
            "remove it and resume from an older round"
        )
    try:
        content = _MANIFEST.of(json.loads(document), "the manifest")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not a manifest of '{FORMAT}' ({error}); resume from a folder that gossamer wrote"
        ) from error
    expected: dict[str, Any] = {"format": FORMAT, "round": round, "worker": worker}
    if digest is not None and not _line(digest).owns(content["digest"], round):
        expected["digest"] = _line(digest).digest
    for name, value in expected.items():
        if content[name] != value:
            raise CheckpointError(
                f"{where} has {name} {content[name]!r} but needs {value!r}; resume with the run file, folder and "
                "version that wrote it, or start again with another --out"
            )
    return content


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
    """The part of a state that this JSON stands for; raises KeyError, TypeError or ValueError when there is none."""
    if depth > MAX_DEPTH:  # a bound of our own: other libraries move the interpreter's
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
