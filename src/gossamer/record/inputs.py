"""The inputs of a run in addition to its checkpoints: `inputs[-003].json` of its folder, written when it begins or
resumes.

One JSON object: the settings that decide its numbers with their digest, hashes of the text, the tokenizer and the
user's parts, and the Python code that its run file names. Every command that computes from the folder compares them
first.

Where the run names code, the file also has a mark: a code of authentication over the names, options, places and hashes of that
code, by a key that never leaves the state folder of this user. So a folder received from others has no valid mark here,
and a mark copied from another folder allows only code that this user has run before.
"""

import hmac
import json
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import DataError
from gossamer.record.whole_files import atomic_write, worker_suffix
from gossamer.settings.schema import RECORD, Records

_KEY_FILE = "run-folders.key"
_KEY_BYTES = 32
_LARGEST_BYTES = 16 << 20
_Word = Annotated[str, Field(max_length=4096)]


@with_config(RECORD)
class CodeInput(TypedDict):
    """Python code that a run file names."""

    kind: _Word
    """Its purpose: `rule`, `model`, `data`, …"""
    name: _Word
    """"package.module:name"."""
    options: str
    """Its options, as JSON."""
    path: _Word
    """The file of its module; empty where there is none."""
    sha256: _Word
    """`gossamer.settings.user_code.hash_of_code`; empty for an installed package, which is identified by its version."""


@with_config(RECORD)
class Inputs(TypedDict):
    """The content of the file."""

    format: Literal[1]
    gossamer: _Word
    """The version that wrote it."""
    digest: _Word
    settings: dict[str, Any]
    """The settings in the digest: dotted keys with their values."""
    found: dict[str, _Word]
    """By name, a hash of each input that all workers share."""
    own: dict[str, _Word]
    """The same for inputs of this worker only."""
    code: list[CodeInput]
    mark: _Word
    """`mark_of` of the code; empty where there is none, or the state folder could not be written."""


_FILE = Records[Inputs](Inputs)


def write_inputs(folder: Path, inputs: Inputs, worker: int | None, part: int = 0, parts: int = 1) -> None:
    """Writes the inputs that a worker began with into its run folder atomically. Raises: DiskError."""
    text = f"{json.dumps(inputs, indent=1)}\n"
    atomic_write(folder / f"inputs{worker_suffix(worker, part, parts)}.json", text.encode())


def read_inputs(folder: Path) -> dict[Path, Inputs]:
    """The recorded inputs of a run folder, by file; empty for one of 0.2.0 or before. Raises: DataError for a spoilt file."""
    records: dict[Path, Inputs] = {}
    for path in sorted(Path(folder).glob("inputs*.json")):
        try:
            with path.open("rb") as file:
                raw = file.read(_LARGEST_BYTES + 1)
        except OSError as error:
            raise DataError(f"'{path}' cannot be read ({error.strerror or error}); restore it") from None
        if len(raw) > _LARGEST_BYTES:
            raise DataError(f"'{path}' has more than {_LARGEST_BYTES} bytes, which no run writes; restore it")
        records[path] = _FILE.known(raw, str(path))
    return records


TEXT_FILE = "text.json"


class TextRecord(NamedTuple):
    """The text of a run, which the folder has if its corpus was read from files."""

    fingerprint: str
    """The hash of all tokens."""
    train_tokens: list[int] | None
    """The tokens of each source for training; None in a record of an older version."""


def read_text_record(folder: Path) -> TextRecord | None:
    """The text of the run in a folder; None if it has no record of one. Raises: DataError for a spoilt record."""
    path = folder / TEXT_FILE
    if not os.path.lexists(path):
        return None
    try:
        record = json.loads(path.read_bytes())
        sources = record.get("sources", [])
        is_counted = sources and all("train_tokens" in one for one in sources)
        return TextRecord(
            str(record["fingerprint"]), [int(one["train_tokens"]) for one in sources] if is_counted else None
        )
    except (ArithmeticError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"'{path}' does not say what text the run was trained on ({error!r:.80}); restore it, or remove it to compare nothing"
        ) from None


class StateKey(NamedTuple):
    """The key that authenticates this user's run folders on this machine."""

    path: Path
    key: bytes
    """Empty where it can be neither read nor created."""
    why: str = ""
    """Why not."""


def state_key(*, make: bool) -> StateKey:
    """The key in the state folder of this user (`XDG_STATE_HOME`, else `~/.local/state`).

    Args: `make` creates one if there is none, readable by its owner only.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "gossamer"
    except RuntimeError as error:  # there is no home
        return StateKey(Path("~/.local/state/gossamer") / _KEY_FILE, b"", str(error))
    path = folder / _KEY_FILE
    try:
        if make and not os.path.lexists(path):
            _make_key(path)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(_KEY_BYTES + 1)
    except OSError as error:
        return StateKey(path, b"", error.strerror or str(error))
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        return StateKey(
            path, b"", f"others on this machine may read it; remove it, or run chmod 600 {quote(str(path))}"
        )
    return StateKey(path, key) if len(key) == _KEY_BYTES else StateKey(path, b"", "it holds no key; remove it")


def _make_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f".{_KEY_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        # Written atomically and never replacing another: workers that start together share one key.
        try:
            os.link(scratch, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def mark_of(code: Sequence[CodeInput], key: bytes) -> str:
    """The authentication code of the code that a run names, which only the owner of the key can compute.

    >>> mark_of([], b"a") == mark_of([], b"a"), mark_of([], b"a") == mark_of([], b"b")
    (True, False)
    """
    named = [[one["kind"], one["name"], one["options"], one["path"], one["sha256"]] for one in code]
    content = json.dumps(sorted(named))
    return hmac.new(key, b"gossamer run folder 1\n" + content.encode(), "sha256").hexdigest()
