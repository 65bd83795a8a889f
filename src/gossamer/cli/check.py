"""`gossamer check`: what a run file will do, or all its errors, before anything is trained."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gossamer.cli.output import Json, print_json
from gossamer.cli.run_file_options import NO_CHANGES, Changes, File
from gossamer.cli.tables import print_sentence
from gossamer.collector import uncollected
from gossamer.errors import ConfigError
from gossamer.record.progress import echo

if TYPE_CHECKING:
    from gossamer.run.planning.check import AroundDocuments, Examined, HeldExperts, TextFiles


def command(file: File = None, /, *, changes: Changes = NO_CHANGES, json: Json = False) -> int:
    """Shows what each run of a file will do and keep in memory, or every reason why it cannot start; trains nothing.

    With --json the runs of an experiment file are a list.
    """
    from gossamer.run.config.document import load_document, parse_overrides

    if file is None:
        raise ConfigError("no run file was given (got none, need one); name a TOML file such as configs/gasloc.toml")
    document = load_document(file, parse_overrides([*changes.words]))
    with uncollected():
        from gossamer.run.planning.check import examine_document  # late: imports torch

        results, wrong = examine_document(document)
    for sentence in wrong:
        echo(f"gossamer: {sentence}", file=sys.stderr)
    if wrong:
        return 2
    if json:
        print_json([_as_json(one) for one in results] if len(results) > 1 else _as_json(results[0]))
    else:
        for place, one in enumerate(results):
            head, *rows = lines(one)
            if place:
                echo()
            print_sentence(head)
            texts_at = rows[0].index(one.method, len("  method"))
            for row in rows:
                print_sentence(row, texts_at)
    return 0


def lines(examined: "Examined") -> list[str]:
    """The table of one run, with the method as its first row."""
    rows = [(head, text) for head, text in _rows(examined) if text is not None]
    width = max(len(head) for head, _ in rows)
    (verb, *more) = [verb for verb in ("simulate", "train") if verb not in examined.refused]
    start = "can start" if more else f"can start with gossamer {verb} only"
    elsewhere = ", but not on this machine" if examined.here else ""
    return [f"{examined.name}: {start}{elsewhere}", *(f"  {head:<{width}}  {text}" for head, text in rows)]


def _rows(run: "Examined") -> Iterator[tuple[str, str | None]]:
    """The rows of a run's table; None for the text of a row that is left out."""
    unknown = "unknown, as Python code decides it" if run.code else "unknown without the tokenizer"
    gap = _known(run.spectral_gap, ", spectral gap {:.4g}".format) or ""
    size = f"{{:,}} (vocabulary of {run.vocabulary or 0:,})".format
    most, phase = _known(run.most_bytes, _megabytes), "round" if run.kind == "rounds" else "local phase"
    memory = f"{_megabytes(run.worker_bytes)} per worker, without activations" if run.kept else unknown
    yield "method", f"{run.method}, {_KINDS[run.kind]}, {run.workers} workers"
    yield "topology", _known(run.topology, lambda name: name + gap)
    yield "parameters", _known(run.parameters, size) or unknown
    yield from (("text", _files(one)) for one in run.text)
    yield "passes over the text", _known(run.passes, ("about {:,.3g}" if run.adapts else "at least {:,.3g}").format)
    yield "documents", _known(run.documents, _documents)
    yield "experts", _known(run.experts, _experts)
    sends = _known(run.sent_bytes, lambda sent: f"{_megabytes(sent)} per worker and {phase}, at most {most}")
    yield "sends", sends or unknown
    for kept in run.kept:
        models = f"{kept.copies:.3g} model{'' if kept.copies == 1 else 's'}"
        yield f"keeps {kept.what}", f"{models}, {_megabytes(kept.bytes)}"
    yield "memory", memory
    yield from _stages(run)
    yield from ((f"on {network.name}", _seconds(network)) for network in run.networks)
    yield "disagreement", _known(run.disagreement, "x {:.3f} per round, predicted".format)
    most_tokens = f"{'at most ' if run.adapts else ''}{run.tokens:,} tokens"
    yield "length", f"{run.rounds:,} round{'s' if run.rounds > 1 else ''}, {most_tokens}"
    yield "peers", _peers_in_words(run.peers) if run.peers else None
    yield from (("Python code", f"{name}, which is not imported here") for name in run.code)
    yield from (("this machine", sentence) for sentence in run.here)
    yield from ((f"not {verb}", sentence) for verb, sentences in run.refused.items() for sentence in sentences)
    yield from (("warning", sentence) for sentence in run.warnings)


_T = TypeVar("_T")


def _known(value: _T | None, words: Callable[[_T], str]) -> str | None:
    """A value in words; None, which has no row, for one that is unknown or does not apply."""
    return None if value is None else words(value)


def _megabytes(size: float) -> str:
    """Bytes in megabytes, from ten gigabytes on in those.

    >>> _megabytes(2.5e6), _megabytes(1.685e11)
    ('2.5 MB', '168.5 GB')
    """
    return f"{size / 1e9:,.4g} GB" if size >= 1e10 else f"{size / 1e6:,.4g} MB"


def _stages(examined: "Examined") -> list[tuple[str, str]]:
    rows = [
        (
            f"stage {k}",
            f"layers {', '.join(map(str, stage.layers))}: {stage.parameters:,} parameters, {_megabytes(stage.bytes)}",
        )
        for k, stage in enumerate(examined.stages)
    ]
    return [("stages", f"{len(rows)} of a worker, {examined.processes} processes in all"), *rows] if rows else []


_KINDS = {
    "rounds": "in rounds",
    "server": "with a server",
    "pair": "in pairs",
    "no waiting": "without waiting",
}


def _peers_in_words(peers: Mapping[str, Sequence[int]]) -> str:
    """The slots that each machine may fill.

    >>> _peers_in_words({"berlin": range(0, 4), "paris": range(4, 5), "hub": range(5, 5)})
    'encrypted: berlin is workers 0 to 3, paris is worker 4, hub is no worker'
    """
    words = [
        f"{'worker' if len(numbers) == 1 else 'workers'} {numbers[0]}"
        + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
        if numbers
        else "no worker"
        for numbers in peers.values()
    ]
    return "encrypted: " + ", ".join(f"{name} is {word}" for name, word in zip(peers, words, strict=True))


def _files(text: "TextFiles") -> str:
    from gossamer.data.documents import besides

    counts = f"{text.files:,} file{'s' * (text.files != 1)}, {text.bytes / 1e6:,.4g} MB"
    return f"'{text.source}': {counts}{besides(text.left_out)}"


def _documents(documents: "AroundDocuments") -> str:
    """The text around a document, with the zero byte written as \\x00."""
    around = " ".join([*documents.before, "TEXT", *documents.after])
    padding = "nothing pads a batch" if documents.padding is None else f"padded with {documents.padding}"
    return f"{around}, {padding}".replace("\0", "\\x00")


def _experts(experts: "HeldExperts") -> str:
    return (
        f"each worker holds {experts.held} of {experts.total}; experts are {experts.share:.1%} of the parameters; its copy is "
        f"{experts.payload_ratio:.2f} times smaller than the model, and means send {experts.sent_ratio:.2f} times less"
    )


def _seconds(network: Any) -> str:
    from gossamer.network.timeline import format_utilisation
    from gossamer.report.table import spread_text

    if network.round_s is None:
        return network.note
    note = f" ({network.note})" if network.note else ""
    seconds = spread_text(network.round_s, network.spread_s)
    return f"{seconds} s per round, {format_utilisation(network.utilisation, network.between_stages)}{note}"


def _as_json(examined: "Examined") -> dict[str, Any]:
    return examined._asdict() | {"worker_bytes": examined.worker_bytes if examined.kept else None}
