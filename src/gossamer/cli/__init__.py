"""The command line: `gossamer VERB`, with one module for each verb.

A verb is the function `command` of the module of its name, and a line of `VERBS`. Its module is imported only when the verb is
called, and imports what is slow inside its function, so that `gossamer --help` and `gossamer VERB --help` answer at once.
"""

import contextlib
import errno
import gc
import importlib
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    convert,
)

from gossamer.cli.help_columns import OPTIONS, HelpColumns
from gossamer.errors import ConfigError, GossamerError, UserCodeError, choose
from gossamer.record.progress import echo, printable
from gossamer.stop_signals import ignore_stop_signals, interrupted, without_lost_terminal
from gossamer.version import __version__

__all__ = ["VERBS", "app", "main"]

_GROUPS = {
    "Start": {
        "demo": "Compare four methods on a small model (two minutes).",
        "play": "Kill workers and slow links on a page while eight train.",
        "init": "Write commented run files to start from.",
        "check": "Show what a run file will do, or list all its errors.",
    },
    "Simulate and compare": {
        "simulate": "Train all workers of a run in this process.",
        "compare": "Simulate all variants of an experiment file.",
        "tune": "Search settings for every method with one budget.",
    },
    "Train on machines": {
        "train": "Train real workers, on one machine or on several.",
        "doctor": "Find what keeps this machine from taking part.",
        "keys": "Make a key, so that a run is encrypted.",
    },
    "Look": {
        "status": "Show who takes part in a run, and how far each is.",
        "watch": "Serve a live page of runs.",
        "report": "Write a page with the curves of several runs.",
        "evaluate": "Score and export the mean model of a run.",
        "audit": "Train the workers again, and find the first that differs.",
    },
    "Plan": {
        "probe": "Measure the links between workers.",
        "plan": "Price every method on a network, and pick one.",
        "price": "Price a recorded run on a network.",
        "topology": "Show a topology, and how stable gossip is on it.",
        "utilisation": "Show utilisation as a function of bandwidth.",
        "goodput": "Show what failures of chips cost.",
    },
    "More": {
        "list": "List rules, topologies, codecs and methods.",
        "completion": "Print a script that completes commands in a shell.",
    },
}
"""Groups of verbs by purpose, in the order in which a user needs them."""
VERBS = {verb: line for lines in _GROUPS.values() for verb, line in lines.items()}
"""Each verb with its line in `gossamer --help`, in the order of that list."""


def _convert(kind: Any, tokens: Sequence[Token]) -> Any:
    """Converts words as cyclopts does, except whole numbers, which it would round.

    Raises: ConfigError for an address in place of a path, which would lose a slash and name a folder of this machine.
    """
    takes_paths = Path in (kind, *get_args(kind))
    for token in tokens if takes_paths else ():
        if "://" in token.value:
            given = f"{token.keyword} got '{token.value}'" if token.keyword else f"'{token.value}' was given"
            raise ConfigError(
                f"{given}, which is an address, and a file or folder of this machine is needed; gossamer status, watch and "
                "train --store take the address of a store"
            )
    if kind is int and not re.fullmatch(r"[+-]?\d+", tokens[0].value):
        raise CoercionError(token=tokens[0], target_type=int)
    return convert(kind, tokens)


app = App(
    name="gossamer",
    help="Pretrain language models over slow, uneven networks: gossip, local steps, outer optimizers.",
    version=__version__,
    help_format="plaintext",
    help_formatter=HelpColumns(),
    group_parameters=OPTIONS["Options"],
    default_parameter=Parameter(negative=(), show_default=False, converter=_convert),
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
"""The parser of all verbs. It raises its errors; `main` prints them."""
_titles = [Group(title, sort_key=place) for place, title in enumerate(_GROUPS)]
for _group, _lines in zip(_titles, _GROUPS.values(), strict=True):
    for _order, (_verb, _help) in enumerate(_lines.items()):
        app.command(f"gossamer.cli.{_verb}:command", name=_verb, help=_help, sort_key=_order, group=_group)
app["--help"].group = app["--version"].group = _titles[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, or 2 with one sentence on stderr for anything a user or peer can cause."""
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(_Printable("gossamer: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[log])
    interrupted()
    for stream in (sys.stdout, sys.stderr):
        # A terminal or a locale without some character shows another in its place: that must not end a command.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            # A worker's stream may be a pipe by now; it is reconfigured nevertheless.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="replace")
    try:
        return _code_of(argv)
    finally:
        if argv is None:  # this process has nothing else to do, and Python's shutdown must not change its exit code
            ignore_stop_signals()
            gc.freeze()  # else the shutdown would traverse all of torch, for half a second, to free what ends anyway


class _Printable(logging.Formatter):
    """Log records may quote files and peers, as printed text may."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _code_of(argv: Sequence[str] | None) -> int:
    try:
        code = app(sys.argv[1:] if argv is None else [*argv])
        sys.stdout.flush()  # so that a closed pipe raises here
        return code or 0
    except CycloptsError as error:
        _complain(_usage(error))
        return 2
    except GossamerError as error:
        if isinstance(error, UserCodeError) and error.__cause__ is not None:
            # The frames of the user's code, without ours that called it.
            cause = error.__cause__.with_traceback(_users(error.__cause__.__traceback__))
            echo("".join(traceback.format_exception(cause)).removesuffix("\n"), file=sys.stderr)
        _complain(str(error))
        return 2
    except KeyboardInterrupt as stop:  # a verb whose run can be resumed has its own message
        ignore_stop_signals()
        _complain(str(stop) or "stopped")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None and without_lost_terminal():
            return 0  # as with a pipe that is closed: nobody reads the result
        _complain(_of_the_system(error))
        return 2


def _complain(sentence: str) -> None:
    """Prints the last sentence of a command; nothing where its terminal is gone."""
    with contextlib.suppress(OSError):
        echo(f"gossamer: {sentence}", file=sys.stderr)
    without_lost_terminal()  # so that Python's last flush does not fail either


def _of_the_system(error: OSError) -> str:
    """The sentence for an error of the system or of a network library; advice about disks where it names a file or a disk."""
    if error.filename is not None or error.errno in _OF_A_DISK:
        return f"{error}; check that path, its permissions and the space on its disk"
    of_a_network = isinstance(error, ConnectionError | TimeoutError)
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = "a connection failed" if of_a_network else "the system or a library refused something"
    return f"{where} ({reason}); look whether what the command reaches for is there, then start it again"


_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def _users(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from its first frame outside of Gossamer and the import system on."""
    ours = (str(Path(__file__).parents[1]), "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((*ours, importlib.__file__)):
        trace = trace.tb_next
    return trace


def _usage(error: CycloptsError) -> str:
    """One sentence for arguments that no verb accepts, with the nearest valid name."""
    words = " ".join(["gossamer", *(error.command_chain or ())])
    if isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)  # of `_convert`
    match error:
        case UnknownCommandError(unused_tokens=[word, *_]):
            return choose("command", word, [*VERBS, "--help", "--version"])
        case UnknownOptionError(token=token, argument_collection=arguments):
            shown = [argument for argument in arguments if argument.parameter.parse is not False]
            options = [name for argument in shown for name in argument.names if name.startswith("--")]
            return choose(f"option of {words}", token.keyword or token.value, options)
        case UnusedCliTokensError(unused_tokens=[word, *_]):
            return f"{words} got '{word}' but takes no further arguments; remove it, or see {words} --help"
        case MissingArgumentError(argument=argument, keyword=None) if argument is not None:
            return f"{words} was given no {argument.name}, and needs one; see {words} --help"
    text = " ".join(str(error).split()).rstrip(".").replace('"', "'")
    return f"{text[:1].lower()}{text[1:]}; see {words} --help"
