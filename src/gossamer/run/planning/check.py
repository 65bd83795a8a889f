"""What a run file will do, before anything is trained: `gossamer check`. It builds no model, and of text reads
whether its files have the field."""

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gossamer.clock import SERVER
from gossamer.clock.durations import Durations
from gossamer.data.documents import SourceFiles, holds_tokens, is_as_long_as_its_text, must_have_text, source_files
from gossamer.data.settings import passes_over, passes_warning
from gossamer.data.token_files import opened_binaries
from gossamer.data.tokenizer import Tokenizer, local_tokenizer, vocabulary
from gossamer.errors import ConfigError, DataError, GossamerError, installs
from gossamer.layout import Layout, Leaf
from gossamer.network.links import Network, doubts_of
from gossamer.network.pricing import price
from gossamer.network.timeline import spread_s
from gossamer.optimizers.inner import InnerConfig, without_momentum
from gossamer.record.logs.trace import Entry, from_entries
from gossamer.report.table import digits_text
from gossamer.rounds import stability
from gossamer.rounds.compatibility.combination import Kind, rules_over_time
from gossamer.rounds.compatibility.combine import Method
from gossamer.run.config.document import EXPERIMENT, KINDS
from gossamer.run.config.experiment_file import drafts, table_faults
from gossamer.run.config.layouts import holding_of, layout_for
from gossamer.run.config.pipeline import cuts_of, stage_in
from gossamer.run.config.resolve import document_faults, resolve, run_faults, settings_of
from gossamer.run.config.resolved import InPairs, ResolvedRun, RunSettings, WithServer
from gossamer.run.config.run_file import RunConfig, parse
from gossamer.run.config.user_parts import given_faults, named
from gossamer.run.planning.traffic import extent, period_of, play_rounds, traffic
from gossamer.run.worker.stages.timing import in_stages
from gossamer.settings.user_code import is_code
from gossamer.transport.bucket.bucket import S3_LIMIT, ObjectLimit, object_limit, too_large
from gossamer.transport.keys import dealt, keys_for
from gossamer.transport.processes.launch import device_of

ROUNDS, _MANY_WORKERS = 8, 64
"""Rounds that are played for a price, where there are not many workers."""
_DRAWN_ROUNDS, _FEW_WORKERS = 64, 16
"""The same where rounds vary by chance, for few workers."""
_MOST_PRICED = 100_000
"""Messages whose times on networks are computed, which takes some seconds."""
_BYTES = 4  # of a number in fp32
Verb = Literal["simulate", "train"]
"""The verbs that train: one process for all workers, or real processes."""


class Copies(NamedTuple):
    """A quantity that each worker keeps in memory."""

    what: str
    copies: float
    """Number of copies, each of the size of the model."""
    bytes: int


class HeldExperts(NamedTuple):
    """A mixture of experts, each of which lies on some workers."""

    total: int
    """Experts of a layer."""
    held: int
    """Experts of a layer that a worker holds."""
    share: float
    """The share of experts in the parameters (f)."""
    payload_ratio: float
    """The size of the model relative to a worker's copy, `1 / (1 - f + f O/M)`."""
    sent_ratio: float
    """The bytes that a worker would send for means with all experts, relative to those that it sends."""


class StageSize(NamedTuple):
    """A stage of a worker, which is a process in a real run."""

    layers: tuple[int, ...]
    parameters: int
    bytes: int
    """Memory, without activations."""


class OnNetwork(NamedTuple):
    """A round on one of the declared networks; None for what the network file does not give."""

    name: str
    round_s: float | None
    utilisation: float | None
    """Share of the time spent computing, averaged over the workers."""
    between_stages: float | None
    """Share of the time in which the stages of a worker wait for each other, averaged over the workers."""
    note: str = ""
    spread_s: float = 0.0
    """Half of the 95 % interval of `round_s`, where it depends on chance."""


class AroundDocuments(NamedTuple):
    """The special tokens of a tokenizer, as they are written."""

    before: tuple[str, ...]
    """The tokens before each document."""
    after: tuple[str, ...]
    """The tokens after each document, the last of which ends it."""
    padding: str | None


class TextFiles(NamedTuple):
    """The files of a source on this machine."""

    source: str
    files: int
    bytes: int
    """The size of the files as they are, of which data.max_bytes may leave some out."""
    left_out: Mapping[str, int]
    """Number of files of a folder that will not be read, by their ending."""


class Examined(NamedTuple):
    """The known facts of a run that can start; None for what is unknown without its tokenizer, or does not apply."""

    name: str
    kind: Kind
    method: str
    workers: int
    topology: str | None
    spectral_gap: float | None = None
    """The spectral gap of the mean mixing matrix; None where there is no closed form."""
    vocabulary: int | None = None
    parameters: int | None = None
    experts: HeldExperts | None = None
    """The experts that each worker holds; None where each worker holds the whole model."""
    sent_bytes: float | None = None
    """Bytes that one worker sends in a round (a local phase of an asynchronous run), averaged over workers and rounds."""
    most_bytes: float | None = None
    """The same for the worker that sends most."""
    kept: tuple[Copies, ...] = ()
    networks: tuple[OnNetwork, ...] = ()
    disagreement: float | None = None
    """Factor by which the disagreement of the workers is predicted to change per round; None where nothing is predicted."""
    rounds: int = 0
    tokens: int = 0
    """Tokens of all workers together; at most, where local steps adapt."""
    warnings: tuple[str, ...] = ()
    processes: int = 0
    """Number of processes in a real run: one for each stage of a worker, without the server."""
    stages: tuple[StageSize, ...] = ()
    """The stages of a worker that is cut."""
    refused: Mapping[Verb, Sequence[str]] = {}
    """Reasons why one of the two verbs that train cannot run it."""
    here: tuple[str, ...] = ()
    """What this machine lacks for it."""
    text: tuple[TextFiles, ...] = ()
    """The files of each source; none of a stream, and where they are not on this machine."""
    passes: float | None = None
    """The least number of passes over the text; None where it cannot be known without reading the text."""
    documents: AroundDocuments | None = None
    """The special tokens; None where the tokenizer is not known, or the batches are the user's own."""
    peers: Mapping[str, Sequence[int]] = {}
    """The workers that each of the machines with keys may fill."""
    code: tuple[str, ...] = ()
    """The user's Python code that the run names. It is not imported, so nothing is known of it."""
    adapts: bool = False
    """Whether local steps adapt while the run trains, so that workers may train on fewer tokens."""

    @property
    def worker_bytes(self) -> int:
        """Memory of one worker, without activations."""
        return sum(kept.bytes for kept in self.kept if not kept.what.startswith("server"))


def examine_run(config: RunConfig, refused: Mapping[Verb, Sequence[str]] | None = None) -> Examined:
    """What this run will do. A function of the run file, of a tokenizer file that it names, and of this machine.

    Args: `refused` as in `Examined`, where it is known.
    Raises: ConfigError and PairingError, as `gossamer.run.config.resolve.resolve`; DataError for an unreadable tokenizer file.
    Cost: a few rounds played on tensors without data, and priced: some 10 ms, and seconds for hundreds of workers.
    """
    refused = {"train": run_faults(config, real=True)} if refused is None else refused
    run = resolve(config, real=bool(refused.get("simulate")))
    words, m = local_tokenizer(run.data.tokenizer), run.method
    vocab_size = None if words is None else words.vocab_size
    documents = None if words is None or run.data.own else _document_separators(words)
    layout, (text, most_tokens, missing) = _layout(run, vocab_size), _text_files(run, vocab_size)
    passes = None if most_tokens is None else passes_over(run.data.shards, most_tokens, run.worker_tokens)
    topology = None if isinstance(m, WithServer) else m.topology
    sent, most, kept, networks, partly = counted(run, layout) if layout else (None, None, (), (), ())
    doubts = [_endless(documents, run.data.tokenizer)]
    doubts += [doubt for name, network in config.network.items() for doubt in doubts_of(network, f"network.{name}")]
    in_store = any(network.store is not None for network in config.network.values())
    doubts += [_too_large(run, kept, S3_LIMIT) if in_store else "", passes_warning(passes)]
    starts = f", after {run.loop.synchronous_steps} synchronous steps" if run.loop.synchronous_steps else ""
    return _known_of(config, run, vocab_size, layout, missing)._replace(
        method=_words(m) + starts,
        topology=None if topology is None else topology.name,
        spectral_gap=None if topology is None else stability.mean_gap(topology),
        sent_bytes=sent,
        most_bytes=most,
        kept=kept,
        networks=networks,
        disagreement=_disagreement(m, run.loop.steps),
        rounds=run.rounds,
        tokens=sum(run.worker_tokens),
        warnings=(*run.warnings, *filter(None, doubts), *partly),
        stages=_stages(run, layout, kept) if layout else (),
        refused={verb: (*sentences,) for verb, sentences in refused.items() if sentences},
        text=text,
        passes=passes,
        documents=documents,
        adapts=bool(_adapting_note(run)),
    )


def must_fit_its_store(run: ResolvedRun, url: str) -> None:
    """Raises ConfigError for a run whose state is larger than an object of the store at this address may be.

    Nothing is known of a folder, of other stores than S3 and Azure, and of a model that the user's code makes.
    """
    limit = object_limit(url)
    layout = None if limit is None else _layout(run, vocabulary(run.data.tokenizer))
    if limit and layout and (sentence := _too_large(run, counted(run, layout, 1).kept, limit)):
        raise ConfigError(f"--store got '{url}', and {sentence}")


def _too_large(run: RunSettings, kept: Sequence[Copies], limit: ObjectLimit) -> str:
    """Why a store would refuse the state of a run; empty where it takes it."""
    state = ("weights", "server: state") if run.kind == "server" else ("weights", "inner optimizer", "outer state")
    return too_large(sum(one.bytes for one in kept if one.what in state), limit)


def _disagreement(method: Method | WithServer | InPairs, steps: int) -> float | None:
    """The predicted factor by which the workers' disagreement changes per round; None where nothing is predicted."""
    if not isinstance(method, Method):
        return None
    merge = method.schedule.merge
    _, least = stability.least_stable(rules_over_time(method.rule, steps), method.topology, merge)
    predicted = stability.stability_of(least, method.topology, merge)
    return None if predicted is None else predicted.radius


def passes_of(config: RunConfig) -> float | None:
    """The least number of passes of a run over its text; None where it cannot be known without reading that, or here."""
    run = settings_of(config)
    _, most, _ = _text_files(run, vocabulary(run.data.tokenizer))
    return None if most is None else passes_over(run.data.shards, most, run.worker_tokens)


def _document_separators(words: Tokenizer) -> AroundDocuments:
    before, after = (tuple(map(words.token, ids)) for ids in (words.before, words.after))
    return AroundDocuments(before, after, None if words.pad is None else words.token(words.pad))


def _endless(documents: AroundDocuments | None, tokenizer: str) -> str:
    """A warning about documents that nothing ends; empty where something does."""
    if documents is None or documents.after:
        return ""
    return (
        f"data.tokenizer is '{tokenizer}', in which no token ends a document, so they run together and no sample ends; name its "
        "eos_token in a tokenizer_config.json next to it"
    )


def _text_files(run: RunSettings, vocab_size: int | None) -> tuple[tuple[TextFiles, ...], list[int] | None, list[str]]:
    """The files of each source, the most tokens that each can have, and why there are none or too few on this machine, for which
    the run may not be meant.
    """
    if run.data.own or run.data.streamed:
        return (), None, []
    try:
        sources = source_files(run.data.sources)
        if not holds_tokens(sources):
            for path in _read_of(sources, run.data.max_bytes):
                must_have_text(path, run.data.text_field)
            most = _most_tokens(run, sources)
        elif vocab_size is not None:
            opened = opened_binaries(run.data, vocab_size, sources)
            most = [sum(len(one.tokens) for one in files.values()) for files in opened]
        else:
            most = None
    except DataError as error:
        return (), None, [str(error)]
    sizes = [sum(path.stat().st_size for path in one.files) for one in sources]
    text = [TextFiles(one.source, len(one.files), size, one.left_out) for one, size in zip(sources, sizes, strict=True)]
    if most is not None and (fewest := _too_few(run, most, sum(sizes))) is not None:
        return tuple(text), None, [fewest]
    return tuple(text), most, []


def _too_few(run: RunSettings, most: Sequence[int], size: int) -> str | None:
    """Why some worker has no window of text, by the most tokens that each source can have; None where it may have one.

    Args: `size` are the bytes of all sources.
    """
    data, window = run.data, run.data.seq_len + 1
    needs = f"but one window needs data.seq_len + 1 = {window}"
    if sum(most) < window:
        return (
            f"the text of data.source {data.source!r:.60} has {size:,} bytes and at most {sum(most)} tokens, {needs}; give more "
            "text, or lower data.seq_len"
        )
    if isinstance(data.shards, tuple):
        tokens, worker = min((most[place], worker) for worker, place in enumerate(data.shards))
        if tokens < window:
            return (
                f"the training text of worker {worker} is data.source {data.sources[data.shards[worker]]!r:.60} and has at most "
                f"{tokens} tokens, {needs}; give more text, none that a source before it has too, or raise data.max_bytes"
            )
    elif data.shards == "contiguous" and (tokens := sum(most) // run.workers) < window:
        return (
            f"the training text of one of {run.workers} workers has at most {tokens} tokens, {needs}; give more text, lower "
            "data.seq_len, or set data.shards = 'iid'"
        )
    return None


def _read_of(sources: Sequence[SourceFiles], max_bytes: int | None) -> Iterator[Path]:
    """The files that will be read as far as their sizes tell: those after `max_bytes` may hold anything."""
    left = math.inf if max_bytes is None else max_bytes
    for path in (path for one in sources for path in one.files):
        if left <= 0:
            return
        yield path
        left -= path.stat().st_size


def _most_tokens(run: RunSettings, sources: Sequence[SourceFiles]) -> list[int] | None:
    """The most tokens that each source can have, as one is a byte at least; None where a file is compressed."""
    most, left = list[int](), math.inf if run.data.max_bytes is None else run.data.max_bytes
    for one in sources:
        if not all(map(is_as_long_as_its_text, one.files)):
            return None
        size = min(sum(path.stat().st_size for path in one.files), left)
        left -= size
        most.append(int(size) + 2 * len(one.files))  # each text file, with a token before and after it
    return most


def _layout(run: RunSettings, vocab_size: int | None) -> Layout | None:
    """The layout of the model; None where it is not known without its tokenizer, or is made by the user's code."""
    return None if vocab_size is None or run.model.own else layout_for(run.model, vocab_size)


def _experts(run: RunSettings, layout: Layout) -> HeldExperts | None:
    held = holding_of(run, layout)
    if held is None:
        return None
    shared, total, resident = held.spans[0][1], len(held.holders.part_of), len(held.holders.resident(0))
    sent_ratio = 2 * (1 - 1 / run.workers) * layout.numel / held.ring_numbers(0)
    return HeldExperts(total, resident, 1 - shared / layout.numel, held.smaller, sent_ratio)


def _known_of(
    config: RunConfig, run: RunSettings, vocab_size: int | None, layout: Layout | None, missing: Sequence[str]
) -> Examined:
    """The facts of a run that do not follow from its method: its length, and the size of its model.

    Args: `missing` is what this machine lacks of its text.
    """
    kind = "server" if config.server is not None else "pair" if config.pair is not None else "rule"
    return Examined(
        name=config.name,
        kind=config.kind,
        method=f"{getattr(config, kind).name}, codec {config.codec.name}",
        workers=config.workers,
        topology=None if kind == "server" else config.topology.name,
        vocabulary=vocab_size,
        parameters=None if layout is None else layout.numel,
        experts=None if layout is None else _experts(run, layout),
        rounds=config.length.rounds,
        tokens=sum(run.worker_tokens),
        processes=sum(run.processes),
        here=(*missing, *_lacking(run)),
        peers=dealt(run.peers),
        code=tuple(named(config).values()),
    )


def examine_document(document: Mapping[str, Any]) -> tuple[list[Examined], list[str]]:
    """What each run of a run file or an experiment file will do, and a sentence for every error.

    Raises: ConfigError for a document that is neither.
    """
    if not any(key in document for key in EXPERIMENT):
        examined = _checked(document)
        return ([examined], []) if isinstance(examined, Examined) else ([], examined)
    runs = drafts(document)
    examined = {run.label: _checked(run.document) for run in runs}
    sound = [one for one in examined.values() if isinstance(one, Examined)]
    wrong = {label: one for label, one in examined.items() if not isinstance(one, Examined)}
    faults = [*table_faults(document), *_by_label(wrong, len(runs))]
    for scale in document.get("scale", {}):
        news = dict[str, list[str]]()
        for draft in drafts(document, scale=scale):
            known = wrong.get(draft.label, ())
            news[draft.label] = [one for one in document_faults(draft.document) if one not in known]
        faults += [f"scale.{scale}: {sentence}" for sentence in _by_label(news, len(runs))]
    return sound, faults


def _by_label(wrong: Mapping[str, Sequence[str]], runs: int) -> Iterator[str]:
    """Faults with the label of their run; one that all of several runs share comes once."""
    for sentence in dict.fromkeys(sentence for some in wrong.values() for sentence in some):
        labels = [label for label, some in wrong.items() if sentence in some]
        yield from [sentence] if 1 < len(labels) == runs else (f"{label}: {sentence}" for label in labels)


def _checked(document: Mapping[str, Any]) -> Examined | list[str]:
    """The facts of one run, or all its errors."""
    try:
        simulated, trained = document_faults(document), document_faults(document, real=True)
        if simulated and trained:
            both = [sentence for sentence in simulated if sentence in trained]
            by_verb = {"simulate": simulated, "train": trained}
            return both or [f"gossamer {verb} cannot run it: {one}" for verb, some in by_verb.items() for one in some]
        config = parse(document)
        if faults := given_faults(config):
            return faults
        if {*KINDS} & named(config).keys():  # its method is the user's code
            run, vocab_size = settings_of(config), vocabulary(config.data.tokenizer)
            return _known_of(config, run, vocab_size, _layout(run, vocab_size), _text_files(run, vocab_size)[2])
        return examine_run(config, {"simulate": simulated, "train": trained})
    except GossamerError as error:
        return [str(error)]


def inner_copies(config: InnerConfig, layout: Layout) -> float:
    """The memory of the inner optimizer, in models."""
    averages = 2.0 if config.averaging is not None else 0.0
    config = without_momentum(config)
    if config.optimizer not in ("muon", "spectral_muon"):
        kept = {"acco_adamw": 4.0, "accum_adamw": 3.0, "adamw": 2.0, "qh_adopt": 2.0, "sgd": float(config.momentum > 0)}
        return averages + kept[config.optimizer]
    # One momentum for hidden matrices, AdamW's two moments for the rest.
    return averages + 2.0 - sum(leaf.stop - leaf.start for leaf in layout.leaves if is_hidden(leaf)) / layout.numel


def is_hidden(leaf: Leaf) -> bool:
    """Whether Muon updates this leaf, as a matrix inside a layer."""
    return len(leaf.shape) == 2 and leaf.name.startswith("model.layers.")


def _words(method: Method | WithServer | InPairs) -> str:
    rule, codec = method.rule, method.codec
    options = ", ".join(f"{key} = {value}" for key, value in rule.options.items() if value is not None)
    back = f", sums back in {codec.back.name}" if codec.back else ""
    return f"{rule.name}({options}), codec {codec.name}{back}"


_PACKAGES = {
    "record.wandb_project": ("wandb", "wandb"),
    "record.trackio_project": ("trackio", "trackio"),
    "record.tensorboard": ("tensorboard", "tensorboard"),
    "record.prometheus_port": ("prometheus_client", "prometheus"),
}
"""The package that a key needs, and the extra that has it."""


def _lacking(run: RunSettings) -> Iterator[str]:
    """What this machine lacks for a run, which may be meant for another."""
    try:
        device_of(run.loop.device)
        if run.pipeline.stages > 1:
            # It imports the pipelines of torch.
            from gossamer.run.worker.stages.torch_stage import must_have_schedules

            must_have_schedules()
    except ConfigError as error:
        yield str(error)
    needed = {key: packages for key, packages in _PACKAGES.items() if attrgetter(key)(run)}
    if run.data.streamed:
        needed[f"data.source {run.data.source!r:.60}"] = ("datasets", "data")
    if run.data.tokenizer != "bytes":
        needed[f"data.tokenizer '{run.data.tokenizer}'"] = ("tokenizers", "data")
    try:
        keys_for(run.peers, run.workers)
    except ConfigError as error:
        yield str(error)
    for key, (package, extra) in needed.items():
        if importlib.util.find_spec(package) is None:
            yield f"{key} needs the package '{package}', which is not installed; run {installs(extra)}"


def _stages(run: ResolvedRun, layout: Layout, kept: Sequence[Copies]) -> tuple[StageSize, ...]:
    """The stages of a worker that is cut."""
    if run.pipeline.stages == 1:
        return ()
    cuts, stage_of = cuts_of(run.pipeline, run.model, run.data), stage_in(run.pipeline, run.model, run.data)
    layers = [[*range(a, b)] for a, b in pairwise((0, *cuts, run.model.shape.layers))]
    stages: list[StageSize] = []
    for stage in range(run.pipeline.stages):
        leaves = tuple(leaf for leaf in layout.leaves if stage_of(leaf.name) == stage)
        parameters = sum(leaf.stop - leaf.start for leaf in leaves)
        copies = sum(one.copies for one in kept if not one.what.startswith(("server", "inner optimizer")))
        if not is_code(run.inner.optimizer):
            copies += inner_copies(run.inner, Layout(leaves, parameters))
        stage_layers = tuple(k for piece in layers[stage :: run.pipeline.stages] for k in piece)
        stages.append(StageSize(stage_layers, parameters, round(copies * parameters * _BYTES)))
    return tuple(stages)


_MOST_PARTS = 12
"""Most parts of a run that changes on its way, each of which is priced."""


class Counted(NamedTuple):
    """What a run sends, keeps and takes, in the terms of `Examined`."""

    sent_bytes: float
    most_bytes: float
    kept: tuple[Copies, ...]
    networks: tuple[OnNetwork, ...]
    warnings: tuple[str, ...] = ()


def counted(run: ResolvedRun, layout: Layout, rounds: int | None = None) -> Counted:
    """Bytes, memory and seconds, by so many played rounds or by whole periods of what is sent; unless given, by as many rounds as
    their seconds need.

    Of a run that changes on its way they are the means over its rounds, and the most memory.
    """
    parts = run.parts_of_run()
    if parts == [run]:
        return _counted(run, layout, rounds, run.rounds)
    whole = sum(part.rounds for part in parts)
    weighed = [(part, part.rounds) for part in parts] if len(parts) <= _MOST_PARTS else _representative(parts)
    # A part of few rounds may lie anywhere in the period of what is sent: it is counted by whole periods too.
    each = [_counted(part, layout, rounds, whole) for part, _ in weighed]
    shares = [count / whole for _, count in weighed]
    return Counted(
        _mean([one.sent_bytes for one in each], shares),
        max(one.most_bytes for one in each),
        tuple(max(rows, key=lambda row: row.copies) for rows in zip(*(one.kept for one in each), strict=True)),
        tuple(_mean_network(some, shares, run) for some in zip(*(one.networks for one in each), strict=True)),
        each[-1].warnings,
    )


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    return math.fsum(share * value for value, share in zip(values, shares, strict=True))


def _mean_network(parts: Sequence[OnNetwork], shares: Sequence[float], run: ResolvedRun) -> OnNetwork:
    """A round on one network, averaged over the parts of a run by their shares of its rounds; unknown where one of them is."""
    seconds = list[float]()
    for part in parts:
        if part.round_s is None:
            return part
        seconds.append(part.round_s)
    round_s = _mean(seconds, shares)
    computing_s = _mean([(part.utilisation or 0.0) * s for part, s in zip(parts, seconds, strict=True)], shares)
    spread_s = math.hypot(*(share * part.spread_s for part, share in zip(parts, shares, strict=True)))
    note = "; ".join(filter(None, (_adapting_note(run), f"the mean of {len(parts)} parts of the run")))
    first_s = _first_change_s(run.networks[parts[-1].name])
    if first_s < round_s * run.rounds:
        note += f", each priced as from the start, and the network changes after {digits_text(first_s)} s"
    return parts[-1]._replace(round_s=round_s, utilisation=computing_s / round_s, spread_s=spread_s, note=note)


def _representative(parts: Sequence[ResolvedRun]) -> list[tuple[ResolvedRun, float]]:
    """A few parts and the number of rounds that each counts for.

    They are the first, which may be a synchronous start, and of each group of consecutive ones those with the fewest and the
    most local steps. A price is nearly linear in these, so the two are weighed to have the mean local steps of their group.
    """
    edges = [1 + k * (len(parts) - 1) // (_MOST_PARTS // 2) for k in range(_MOST_PARTS // 2 + 1)]
    weighed = [(parts[0], float(parts[0].rounds))]
    for group in (parts[a:b] for a, b in pairwise(edges)):
        few, many = (how(group, key=lambda part: part.full_steps) for how in (min, max))
        count = sum(part.rounds for part in group)
        beyond = sum(part.rounds * (part.full_steps - few.full_steps) for part in group)
        high = beyond / max(1, many.full_steps - few.full_steps)
        weighed += [(few, count - high), (many, high)]
    return weighed


def _counted(run: ResolvedRun, layout: Layout, rounds: int | None, most: int) -> Counted:
    size = _BYTES * layout.numel

    def kept(what: str, copies: float) -> Copies:
        return Copies(what, copies, round(copies * size))

    held = holding_of(run, layout)
    held_layout = layout if held is None else held.of(0)[0]  # all workers hold as much
    part = held_layout.numel / layout.numel
    rows = [kept("weights", part), kept("gradients", part)]
    if not is_code(run.inner.optimizer):
        rows.append(kept("inner optimizer", part * inner_copies(run.inner, held_layout)))
    m = run.method
    if run.kind != "rounds" or not isinstance(m, Method):
        sent = traffic(run, layout)
        rows += [kept("outer state", sent.state_copies), kept("messages", sent.sent_bytes / size)]
        if isinstance(m, WithServer):
            regions = m.rule.regions
            rows.append(kept("server: state" if regions is None else "server of a region: state", m.rule.state_copies))
            rows += [] if regions is None else [kept("server of all: state", regions.rule.state_copies)]
        # Real processes measure their own seconds.
        priced = () if run.network is None else (_on_a_clock(run, sent.sent_bytes, size),)
        return Counted(sent.sent_bytes, sent.most_bytes, tuple(rows), priced)
    rounds, few = extent(run, m, whole := _rounds(run, m, rounds, most))
    sent, entries = play_rounds(run, m, layout, rounds, few)
    messages = (_message_bytes(entries) + sent.flight_copies * size) / size
    rows += [kept("outer state", sent.state_copies), kept("messages", messages)]
    sends = sum(max(1, len(operation.sends)) for entry in entries for operation in entry.operations)
    if len(few) == run.workers and sends * len(run.networks) <= _MOST_PRICED:
        networks = [_priced(run, name, entries, m, layout) for name in run.networks]
    else:
        note = "unknown: a round of so many workers and messages takes too long to price"
        networks = [OnNetwork(name, None, None, None, note) for name in run.networks]
    alone = f"what is sent was counted in the first {rounds:,} of {whole:,} rounds alone"
    warnings = () if rounds == whole else (alone,)
    return Counted(sent.sent_bytes, sent.most_bytes, tuple(rows), tuple(networks), warnings)


def _rounds(run: RunSettings, m: Method, given: int | None, most: int) -> int:
    """The number of rounds to play: about as many as asked for in whole periods, and not more than `most`."""
    period, some = period_of(run, m), ROUNDS if given is None else given
    drawn = any(network.jitter for network in run.networks.values()) or m.topology.name == "random"
    if drawn and given is None and run.networks and run.workers <= _FEW_WORKERS:
        some = _DRAWN_ROUNDS
    some = 1 if run.workers > _MANY_WORKERS else some
    return min(most, period * -(-min(some, run.rounds) // period))


def _message_bytes(entries: Sequence[Entry]) -> int:
    """The most bytes of its own payload and of received ones that a worker holds at one time."""
    held = [0]
    for entry in entries:
        for operation in entry.operations:  # one payload for all peers, or a part of it for each owner
            most = max((size for _, size in operation.sends), default=0)
            held.append((operation.sent_bytes if operation.kind == "mean" else most) + operation.received_bytes)
    return max(held)


def _adapting_note(run: ResolvedRun) -> str:
    """A note about the price of a run whose local steps adapt; empty for others."""
    adapts_itself = isinstance(run.method, Method) and run.method.rule.adapted is not None
    adapts = "run.adapt" if run.loop.adapt else "the rule" if adapts_itself else ""
    return f"at the local steps that {adapts} begins with" if adapts else ""


def _first_change_s(network: Network) -> float:
    return min((change.at_s for change in network.changes), default=math.inf)


def _priced(run: ResolvedRun, name: str, entries: Sequence[Entry], m: Method, layout: Layout) -> OnNetwork:
    """A round on a network, by the trace that the played rounds would leave."""
    network = run.networks[name]
    if network.step_s is None:
        return OnNetwork(name, None, None, None, f"unknown: network.{name} has no step_s")
    trace = from_entries(entries)
    try:
        steps = in_stages(network, run, layout)
        timeline = price(trace, steps.network, steps.computing)
    except ConfigError as error:  # it describes other workers, which is no fault: a run in rounds does not need it
        return OnNetwork(name, None, None, None, f"unknown: {error}")
    rounds = trace.rounds / m.sends_per_round
    note, first_s = _adapting_note(run), _first_change_s(network)
    if first_s < timeline.total_s / rounds * run.rounds and rounds < run.rounds:
        changes = f"the network changes after {digits_text(first_s)} s"
        note = f"{note}{'; ' if note else ''}of the first {rounds:g} rounds, and {changes}"
    return OnNetwork(
        name,
        timeline.total_s / rounds,
        timeline.mean_utilisation,
        timeline.mean_between_stages,
        note,
        spread_s(timeline) * trace.rounds / rounds,
    )


def _on_a_clock(run: ResolvedRun, sent_bytes: float, size: int) -> OnNetwork:
    """The inner steps of one round, on the network whose seconds decide what is computed."""
    assert run.network is not None and run.network_name is not None
    m, links, note = run.method, Durations(run.network, run.workers), ""
    compute = [run.local_steps_of(i) * links.step_s[i] for i in range(run.workers)]
    cycles = compute
    if isinstance(m, WithServer) and not run.events.overlap:
        push, fetch, near = round(sent_bytes), size // run.events.fragments, m.rule.regions is not None
        cycles = [
            s + links.transfer_s(i, SERVER, push, near=near) + links.transfer_s(SERVER, i, fetch, near=near)
            for i, s in enumerate(compute)
        ]
        note = "without waiting for a quorum" if m.rule.window is not None else ""
    steps_per_s = math.fsum(run.local_steps_of(i) / s for i, s in enumerate(cycles))
    utilisation = math.fsum(c / s for c, s in zip(compute, cycles, strict=True)) / run.workers
    return OnNetwork(run.network_name, run.workers * run.full_steps / steps_per_s, utilisation, 0.0, note)
