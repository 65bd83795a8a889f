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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    "Lineage",
    "check_finite",
    "common",
    "decoded",
    "encoded",
    "ended",
    "fault",
    "load",
    "newest_common",
    "newest_sound",
    "nothing_to_resume",
    "owned",
    "rewind",
    "rounds",
    "save",
]

FORMAT = "gossamer checkpoint 1"
MAX_DEPTH = 100  # of a nested state; an optimizer has five or six
MAX_MANIFEST_BYTES = 64 << 20  # some 100,000 tensors; a larger one is a mistake or an attack


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
        kept = [
            *islice((r for r in reversed(_rounds(folder)) if r <= round and _whole(folder, r, worker, digest)), keep)
        ]
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
    saved = (content["bytes"], content["sha256"])
    try:
        found = (tensor_file.stat().st_size, _sha256(tensor_file))
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}; {instead}") from error
    if found != saved:
        raise CheckpointError(
            f"{where} has changed: its size in bytes and sha256 were {saved} and now are {found}; {instead}"
        )
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
        return str(error).partition(";")[0]
    return None


def newest_sound(
    rounds: Iterable[int], faults: Callable[[int], Sequence[str | None]]
) -> tuple[int | None, dict[int, str]]:
    """The newest of these rounds that has no fault, or None; and the first fault of each newer one.

    Args: `faults` is called with one round after the other, newest first, until a round has none.

    >>> newest_sound([10, 20, 30], lambda round: [None, "is cut short" if round > 20 else None])
    (20, {30: 'is cut short'})
    """
    skipped: dict[int, str] = {}
    for round in sorted(rounds, reverse=True):
        found = next((one for one in faults(round) if one is not None), None)
        if found is None:
            return round, skipped
        skipped[round] = found
    return None, skipped


def rounds(folder: Path, worker: int, digest: str | Lineage | None = None) -> list[int]:
    """The rounds of which this worker has a complete generation (of this configuration, if given), ascending.

    Complete means a sound manifest and a tensor file of the right size; its content is checked by `load`.
    """
    return [round for round in _rounds(folder) if _whole(folder, round, worker, digest)]


def _whole(folder: Path, round: int, worker: int, digest: str | Lineage | None) -> bool:
    """Whether a generation is complete, as `rounds` has it."""
    manifest, tensor_file = _paths(folder, round, worker)
    with contextlib.suppress(CheckpointError, OSError):
        return tensor_file.stat().st_size == _manifest(manifest, round, worker, digest)["bytes"]
    return False


def common(lists: Sequence[Sequence[int]]) -> list[int]:
    """The rounds in all of these lists, one per worker, ascending."""
    return sorted(set(lists[0]).intersection(*lists[1:])) if lists else []


def newest_common(lists: Sequence[Sequence[int]]) -> int | None:
    """The newest round in all of these lists, one per worker; None when there is none.

    >>> newest_common([[80, 100], [100, 120], [100]]), newest_common([[100], []])
    (100, None)
    """
    return max(common(lists), default=None)


def owned(folder: Path, owners: Iterable[int], digest: str | Lineage) -> list[list[int]]:
    """The rounds of this configuration that each owner has a complete generation of here, one list per owner."""
    return [rounds(folder, owner, digest) for owner in owners]


def nothing_to_resume(
    folder: Path, owners: Iterable[int], owned: Sequence[Sequence[int]], skipped: Mapping[int, str] | None = None
) -> CheckpointError:
    """Why a run cannot be resumed from this folder, where no round of its configuration has checkpoints of all owners.

    Args:
        owners: those whose checkpoints should be here.
        owned: the rounds of this configuration, one list per owner, those on other machines too.
        skipped: the rounds that all owners have, each with its fault.
    """
    if skipped:
        found = "; ".join(f"round {round}: {why}" for round, why in skipped.items())
        return CheckpointError(
            f"no checkpoint of '{folder}' is sound ({found}); bring sound files back, or start again with another --out"
        )
    if any(owned):
        return CheckpointError(
            f"no round has checkpoints of all workers (they own {[*map(list, owned)]}); bring the files of '{folder}' back, or "
            "start again with another --out"
        )
    if any(rounds(folder, owner) for owner in owners):
        return CheckpointError(
            f"run.toml has changed since the checkpoints in '{folder}' were written; restore it, or start again with another "
            "--out"
        )
    return CheckpointError(f"'{folder}' has no checkpoints to resume from; start again with another --out")


def ended(folder: Path, rounds: int, *, kept: bool = True) -> str:
    """The message for a resumed run that has already ended, and whose checkpoints were `kept`."""
    scores = f"gossamer evaluate {folder} scores it" if kept else f"gossamer report {folder} shows it"
    return f"the run has ended after {rounds} rounds; {scores}"


def rewind(folder: Path, round: int, worker: int) -> None:
    """Removes this worker's generations after `round`, from which it resumes.

    Otherwise a worker that was ahead would keep such a generation until it reaches that round again, and the next resume could
    combine it with newly computed ones of the others. Call it once all workers know the round that they resume from.
    """
    _forget(folder, worker, [r for r in _rounds(folder) if r > round])


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
