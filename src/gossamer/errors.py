"""Everything Gossamer raises on purpose, in one tree.

* GossamerError
  x ConfigError        a run file, an option or a command line that cannot work
    + PairingError     a rule, topology and codec that cannot be combined
    + MissingPackageError  an optional package that is not installed
  x DataError          missing, empty or unreadable training data
  x DiskError          a full disk, or a file that cannot be written
  x CheckpointError    a checkpoint that is corrupt, foreign or of another run
  x UserCodeError      code of the user raised an exception, which is its cause
  x TrainingError      losses, parameters or messages became NaN or infinite
  x TransportError     bytes did not arrive as expected
    + PeerError        a worker died, hung or speaks another configuration
      - LostConnectionError  a connection broke; the other end may be reached again
      - RefusedError   a peer sent an invalid message, which was discarded; its connection is closed

Each message says, in one sentence, what happened, what was given, what is allowed and what to do. The command line
prints it without a traceback and exits with code 2. Our own invariants use `assert`.
"""

import contextlib
import difflib
import importlib
import shlex
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType


class GossamerError(Exception):
    """Anything a user or a peer can cause; its message needs no traceback."""


class ConfigError(GossamerError, ValueError):
    """A run file, an option or a command line that cannot work."""


class PairingError(ConfigError):
    """A rule, a topology and a codec that cannot be combined."""


class MissingPackageError(ConfigError):
    """A package of one of Gossamer's extras that is needed and not installed."""


class DataError(GossamerError, ValueError):
    """Training data that is missing, empty or unreadable."""


class DiskError(GossamerError, OSError):
    """A full disk, or a file or folder that cannot be written."""


class CheckpointError(GossamerError, ValueError):
    """A checkpoint that is corrupt, foreign or belongs to another run.

    Args: `kind` is that of `gossamer.record.fault.FaultKind`, by which a run decides how to resume.
    """

    def __init__(self, sentence: str, kind: str = "damaged") -> None:
        super().__init__(sentence)
        self.kind = kind


class TrainingError(GossamerError, ArithmeticError):
    """Training produced numbers that cannot be continued from."""


class UserCodeError(GossamerError):
    """Code that the user gave raised an exception, which is the cause of this one."""


class TransportError(GossamerError, ConnectionError):
    """Bytes that did not arrive as expected."""


class PeerError(TransportError):
    """A worker that died, hung or was started with another configuration."""


class LostConnectionError(PeerError):
    """A connection that broke without notice; the other end may be reached again."""


class RefusedError(PeerError):
    """A peer sent an invalid message: it was discarded, and its connection is closed.

    Args: `kind` names the fault in counts: secret, version, other run, bounds, checksum, protocol or crowd.
    """

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def choose(noun: str, got: str, allowed: Iterable[str]) -> str:
    """One sentence for a name that is not in a table, with the nearest name that is, in whatever case it was written.

    >>> choose("rule", "DilCo", ["diloco", "gossip"])
    "unknown rule 'DilCo'; did you mean 'diloco'? Allowed: diloco, gossip"
    """
    names = sorted(allowed)
    near = nearest(got, names)
    hint = f"did you mean '{near}'? " if near else ""
    return f"unknown {noun} '{got:.60}'; {hint}Allowed: {', '.join(names)}"


@contextlib.contextmanager
def reworded(change: Callable[[str], str]) -> Iterator[None]:
    """Rewords the messages of Gossamer's errors in the terms of the interface that the user called.

    >>> with reworded(lambda sentence: sentence.replace("run.timeout_s", "timeout_s")):
    ...     raise ConfigError("raise run.timeout_s")
    Traceback (most recent call last):
    gossamer.errors.ConfigError: raise timeout_s
    """
    try:
        yield
    except GossamerError as error:
        error.args = tuple(change(one) if isinstance(one, str) else one for one in error.args)
        raise


def nearest(got: str, names: Iterable[str]) -> str | None:
    """The name that is most like the given one, whatever its case, or is its last word; None where none is.

    >>> nearest("outer_lr", ["lr", "momentum"])
    'lr'
    """
    folded = {name.casefold(): name for name in names}
    if (last := got.casefold().rpartition("_")[2]) in folded:
        return folded[last]
    near = difflib.get_close_matches(got.casefold(), folded, n=1, cutoff=0.5)
    return folded[near[0]] if near else None


def first_line(error: Exception) -> str:
    """The first line of a library's error, shortened to fit into a sentence; its class name if it has no text.

    >>> first_line(RuntimeError("connection closed\\nException raised from ...")), first_line(TimeoutError())
    ('connection closed', 'TimeoutError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def require(module: str, extra: str, what: str, instead: str = "") -> ModuleType:
    """Imports an optional package of one of Gossamer's extras.

    Args:
        extra: the group of optional dependencies that has it.
        what: the feature that needs the module, such as "a chart".
        instead: the alternative, such as "set record.tensorboard = false".
    Raises: MissingPackageError with the command that installs the packages of the extra.

    >>> require("no_such_module", "plots", "a chart")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    gossamer.errors.MissingPackageError: a chart needs the extra 'plots' (...); run pip install 'matplotlib>=3.10' ...
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        way_out = f", or {instead}" if instead else ""
        raise MissingPackageError(
            f"{what} needs the extra '{extra}' ({error}); run {installs(extra)}{way_out}"
        ) from None


def installs(extra: str) -> str:
    """The command that installs the packages of an extra, by their own names: this package need not be on an index.

    >>> installs("tensorboard")
    "pip install 'tensorboard>=2.18'"
    """
    from importlib import metadata  # takes a tenth of the time to import all of Gossamer

    try:
        all_of_them = metadata.requires("gossamer") or ()
    except metadata.PackageNotFoundError:  # imported from its source, which is not installed
        return f"pip install -e '.[{extra}]' where the source of gossamer is"
    of_extra = [one for one in all_of_them if one.endswith(f"extra == '{extra}'")]
    return f"pip install {shlex.join(one.partition(';')[0].strip() for one in of_extra)}"
