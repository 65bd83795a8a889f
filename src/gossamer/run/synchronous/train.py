"""One real worker: this process trains its replica and exchanges with its peers; no step of the loop is a global barrier.

Each process records its own part of the run (`metrics-003.jsonl`, `trace-003.jsonl`, its checkpoints); what needs all workers,
such as the mean model, is computed afterwards by `gossamer evaluate`.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from gossamer.data.tokenizer import load_tokenizer
from gossamer.errors import GossamerError
from gossamer.network.pacing import note_of
from gossamer.record import checkpoint
from gossamer.record.checkpoint import Lineage
from gossamer.record.folder import RunFolder, Unrecorded
from gossamer.record.logs.pipeline_work import PipelineWork, write_pipeline
from gossamer.record.logs.stage_seconds import StageLog, end_logs_of_others, stage_log
from gossamer.record.progress import quieted, say
from gossamer.record.whole_files import atomic_write, make_folder
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.setup import in_sides
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.journal import Journal, Save
from gossamer.run.bookkeeping.resume import History, Resume, history
from gossamer.run.bookkeeping.spent_seconds import Stopwatch, recorded_s
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.pipeline import cuts_of, stage_in
from gossamer.run.config.run_file import RunConfig, decisive, digest, dump
from gossamer.run.config.settle import in_rounds
from gossamer.run.config.user_parts import own_parts
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.stages.checkpoints import Store, partition_of
from gossamer.run.worker.stages.own_process import OwnStages
from gossamer.run.worker.stages.resplit import as_saved, exchanged, laid_anew, lays_anew, measured_speeds
from gossamer.run.worker.stages.timing import pipeline_work
from gossamer.run.worker.task import Task, found_by_each, moved, task_of
from gossamer.run.worker.worker import RoundReport, Worker
from gossamer.topologies import Topology
from gossamer.transport.alike import short_settings
from gossamer.transport.contract import Delivery, Reduce
from gossamer.transport.processes.board import Board
from gossamer.transport.processes.group import GroupTransport, all_reduce
from gossamer.transport.processes.launch import agree, join, leave
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.pipe import Pipe

__all__ = ["end_round", "train", "train_member", "train_round"]

log = logging.getLogger("gossamer")

KEPT = 16
"""Most generations that a worker keeps while the store does not answer; who leads the slowest leads it by fewer checkpoints."""


def train(config: RunConfig, folder: Path, *, resume: Resume = False) -> None:
    """Joins the other processes by torchrun's environment variables, trains to the end and leaves.

    Raises: ConfigError, DataError, CheckpointError; PeerError naming the worker that failed first; TrainingError.
    """
    run = config.run
    member = join(
        config.workers, parts=config.pipeline.processes(config.workers), backend=run.backend, device=run.device,
        threads=run.threads, timeout_s=run.timeout_s,
    )  # fmt: skip
    failed: GossamerError | OSError | None = None
    try:
        train_member(config, folder, member, resume=resume)
    except (GossamerError, OSError) as error:
        failed = error
    if not leave():
        # A transfer that a dead peer will never finish holds the process group, or a thread is still inside torch and would
        # abort the process when it comes back while Python shuts down.
        if failed is not None:
            print(f"gossamer: {failed}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if failed is None else 2)
    if failed is not None:
        raise failed


def train_member(config: RunConfig, folder: Path, member: Member, *, resume: Resume = False) -> None:
    """Trains the worker that this process is; bitwise equal to the simulator, unless local steps adapt to measured seconds.

    Args: `resume` continues from the newest round of which every worker has a sound checkpoint; "auto" starts where nobody has.
    Cost: one model, its gradients and states, the message in flight and those it receives.
    """
    parts = own_parts(config)
    m, _, warnings = in_rounds(config, parts, real=True)
    for sentence in warnings if member.part == 0 else ():
        log.warning(sentence)
    task = task_of(config, parts)
    # The settled step is found by every worker on its own, as its text and the user's code are.
    found = {**{f"rule.{name}": value for name, value in m.rule.options.items()}, **found_by_each(task, parts)}
    past = history(config, folder) if resume else None
    laid = config
    if past is not None and config.pipeline.resplit_every:
        laid = as_saved(config, folder, member, past.lineage)
    store = Store(config, folder, partition_of(laid, member.worker), member.part)
    newest = _agreed_round(store, member, found, past, auto=resume == "auto")
    if newest == config.rounds:
        dist.barrier()  # whoever hosts the store must not leave while another still reads it
        if member.rank == 0:
            say(checkpoint.ended(folder, config.rounds))
        return
    with contextlib.ExitStack() as open_:
        pipe = Pipe(member, config.run.timeout_s) if member.parts > 1 else None
        if pipe is not None:
            open_.callback(pipe.close)
        open_.enter_context(quieted(member.part > 0))  # a worker speaks once
        stopwatch = Stopwatch(member.worker, recorded_s(folder, member.worker, newest))

        def make(laid: RunConfig) -> _Made:
            return _made(laid, task, in_rounds(laid, parts, real=True).method, member, pipe, stopwatch)

        _train_rounds(_Laid(laid, store, make(laid)), member, make, past, newest, open_)


class _Made(NamedTuple):
    """What this process trains with."""

    worker: Worker
    transports: tuple[GroupTransport, ...]
    """One, or where peers are in stages and this worker is not, one to each stage."""
    stopwatch: Stopwatch
    part: OwnStages | None
    """Its stages, where a worker has several processes."""
    pipe: Pipe | None


def _made(
    config: RunConfig, task: Task, m: Method, member: Member, pipe: Pipe | None, stopwatch: Stopwatch
) -> _Made:  # fmt: skip
    run = config.run
    sides = (
        [member]
        if config.pipeline.workers is None or pipe
        else list(map(member.on_side, range(config.pipeline.stages)))
    )
    transports = tuple(GroupTransport(side, run=int(digest(config), 16), timeout_s=run.timeout_s) for side in sides)
    cut = None if pipe is None else lambda whole: OwnStages(whole, config, pipe, member.device)
    replica = Replica(member.worker, config, task, member.device, cut=cut)
    reduce = _timed_all_reduce(run.timeout_s, stopwatch) if run.reduction == "all_reduce" else None
    part = replica.staged if isinstance(replica.staged, OwnStages) else None
    worker = Worker(replica, m, transports[0], reduce)
    if len(transports) > 1:
        stage_of = stage_in(config.pipeline, config.model, config.data)
        worker.loop.fragments = [in_sides(each, m.codec, transports, stage_of) for each in worker.loop.fragments]
    return _Made(worker, transports, stopwatch, part, pipe)


class _Laid(NamedTuple):
    """What of a process changes when the stages of the run are laid anew."""

    config: RunConfig
    """With the cuts of now."""
    store: Store
    made: _Made


def _train_rounds(
    now: _Laid, member: Member, make: Callable[[RunConfig], _Made], past: History | None, newest: int | None,
    open_: contextlib.ExitStack,
) -> None:  # fmt: skip
    """Trains from round `newest` to the end, and records it, with files that `open_` closes."""
    (_, store, made), first = now, newest or 0
    config, run, stopwatch, pipe = store.config, store.config.run, made.stopwatch, made.pipe
    line = Lineage(digest(config))
    if past is not None and newest is not None:
        line = _restore(made.worker, past, store, member, newest)
    board = Board(member.entries, member.rank, member.ranks, patience_s=min(2.0, run.timeout_s / 4))
    record = _record(store, member, made.worker, newest, open_)
    stages = made.part and open_.enter_context(
        stage_log(store.folder, member.worker, member.part, member.parts, newest)
    )
    save, journal = _keepers(now, config, line, board, first, record)
    if not first:
        journal.begin(worker=member.worker)
    stopwatch.start()
    spent_s = 0.0
    for round in range(first, config.rounds):
        if pipe is not None:
            pipe.round = round
        waited_s = 0.0 if pipe is None else pipe.waited_s
        report = train_round(made.worker, round, config)
        between_s = 0.0 if pipe is None else pipe.waited_s - waited_s
        if made.part is not None and stages is not None:
            report, computed_s = _end_in_stages(made.part, stages, report, round, member.worker)
            spent_s += computed_s
        deliveries = [one for transport in made.transports for one in transport.deliveries()]
        stopwatch.phase(report.whole.compute_s - between_s)
        stopwatch.waited([one for transport in made.transports for one in transport.waits()], deliveries)
        journal.enter(made.worker, round, report)
        if made.worker.pacer is not None and round + 1 < config.rounds:
            _adapt(made.worker, report, deliveries, board, made.worker.loop.method.topology)
        before = now
        if lays_anew(config, round + 1):
            now, spent_s = _lay_anew(now, member, make, spent_s), 0.0
        if now is not before:
            _, store, made = now
            record.log("resplit", round=round, cuts=cuts_of(now.config.pipeline, config.model, config.data))
            save, journal = _keepers(now, config, line, board, first, record)
        end_round(journal, made.worker.replica, round + 1)
        if now is not before and run.checkpoint_every:
            _keep_only(store, member, round + 1, save)
        record.log_seconds(stopwatch.round(round))
    for transport in made.transports:
        transport.close()


def _end_in_stages(
    part: OwnStages, stages: StageLog, report: RoundReport, round: int, worker: int
) -> tuple[RoundReport, float]:  # fmt: skip
    """A round with the payloads of all stages, and the seconds that the stages of this process have computed, which it logs."""
    sent = sum(size for some in report.operations for one in some for _, size in one.sends)
    report = report._replace(operations=part.end_round(report.operations))
    seconds = part.seconds(round, worker, sent)
    stages.log(seconds)
    return report, seconds.compute_s


def _keepers(
    now: _Laid, config: RunConfig, line: Lineage, board: Board, first: int, record: RunFolder | Unrecorded
) -> tuple[Save, Journal]:  # fmt: skip
    """What saves this process, and what enters its rounds into the record."""
    save = _saver(now.store.path, line, now.made.worker, board, first)
    return save, Journal(config, lambda: record, _validator(config, now.made), save, kind="validation")


def _record(
    store: Store, member: Member, worker: Worker, newest: int | None, open_: contextlib.ExitStack
) -> RunFolder | Unrecorded:  # fmt: skip
    """Where this process records the run: one process of a worker does."""
    config, folder = store.config, store.folder
    if not member.part:
        record = open_.enter_context(RunFolder(
            folder, dump(config), config.record, worker=worker.index, resume_round=newest,
            traced_per_round=worker.loop.method.sends_per_round,
        ))  # fmt: skip
        write_pipeline(folder, _work(config, worker.replica.task))
        return record
    # Its machine may have no other process of the worker, which would write the file.
    if newest is not None or not (folder / "run.toml").exists():
        make_folder(folder)
        atomic_write(folder / "run.toml", dump(config).encode())
    return Unrecorded()


def _work(config: RunConfig, task: Task) -> PipelineWork | None:
    """What an inner step in stages has to do, whichever of them this process has."""
    if config.pipeline.stages == 1:
        return None
    words = task.tokenizer or load_tokenizer(config.data.tokenizer)
    return pipeline_work(config, layout_for(config.model, words.vocab_size))


def _lay_anew(now: _Laid, member: Member, make: Callable[[RunConfig], _Made], spent_s: float) -> _Laid:
    """Gives the stages other layers, where the seconds that all have computed ask for it; the same where they do not."""
    laid, store, made = now
    own = None if made.part is None else [member.part, spent_s]
    said = agree(member, "how long stages have computed", own, timeout_s=laid.run.timeout_s)
    found = laid_anew(laid, measured_speeds(laid, said))
    if found is laid:
        return now
    state, there = made.worker.state(), partition_of(found, member.worker)
    if made.pipe is not None:
        state = exchanged(laid, made.worker.replica.task, made.pipe, state, (store.own, there))
    for transport in made.transports:
        transport.close()
    anew = make(found)
    anew.worker.restore(state)
    return _Laid(found, store._replace(own=there), anew)


def _keep_only(store: Store, member: Member, finished: int, save: Save) -> None:
    """After stages were laid anew, removes what they saved before, once all have saved what they have now."""
    config = store.config
    if not config.due(config.run.checkpoint_every, finished):
        save(finished)
    agree(member, "all have saved the layers of other stages", timeout_s=config.run.timeout_s)
    store.forget_others(member.worker)


def _validator(config: RunConfig, made: _Made) -> Callable[[], Mapping[str, Any]]:
    """What finds the validation loss of this worker."""
    replica, part = made.worker.replica, made.part
    if part is None:
        probe = Probe(config, replica.task, replica.device)
        return lambda: {"loss": probe.loss(replica.scored, replica.buffers)}
    batches = [moved(batch, replica.device) for batch in replica.task.data.validation(config.run.eval_batches)]

    def validate() -> Mapping[str, Any]:
        with replica.holding_evaluated():
            return {"loss": part.validate(batches)}

    return validate


def _agreed_round(
    store: Store, member: Member, found: Mapping[str, Any], past: History | None, *, auto: bool
) -> int | None:
    """The round to resume from, as all workers agree with one configuration; None for a run that starts.

    Args: `found` is what each worker finds on its own and all must have in common.
    Raises: CheckpointError when there is none to resume from, PeerError when workers differ.
    """
    config, me = store.config, member.worker
    owned = [] if past is None else store.rounds([me], past.lineage)[0]
    common, timeout_s = f"{digest(config)} {found}", config.run.timeout_s
    settings = short_settings({**decisive(config), **found})
    facts = agree(member, common, owned, settings=settings, timeout_s=timeout_s)
    if past is None:
        return None

    def faults(round: int) -> list[str | None]:
        return agree(member, common, store.fault(round, me, past.lineage), timeout_s=timeout_s)

    return past.newest(
        store.folder, facts, faults, auto=auto, owners=[me], speaks=member.rank == 0, store=store.path
    )  # fmt: skip


def _restore(worker: Worker, past: History, store: Store, member: Member, round: int) -> Lineage:
    """Restores a worker from its checkpoint of this round, zero being the start; returns whose checkpoints count from now on."""
    me, line, config = worker.index, past.lineage, store.config
    if round:
        worker.restore(store.load(worker.replica.task, round, me, line))
        store.take_over(me, round, worker.state(), line, Lineage(digest(config)))
    checkpoint.rewind(store.path, round, me)
    going_on = past.go_on(store.folder, round)
    agree(member, "all have taken over what other stages have saved", timeout_s=config.run.timeout_s)
    store.forget_others(me)
    if member.part == 0:
        end_logs_of_others(store.folder, me, member.parts, round)
    return going_on


def _nothing() -> None:
    """After an inner step of a worker that has nothing in flight, or a stop of one that keeps no log."""


def train_round(
    worker: Worker, round: int, config: RunConfig, after_stop: Callable[[], None] = _nothing
) -> RoundReport:  # fmt: skip
    """One round of this worker; after the last one, nothing is in flight."""
    loop = worker.loop
    overlaps = config.schedule.overlap_steps or loop.method.rule.delay_rounds
    report, after_step = RoundReport([], []), loop.advance if overlaps else _nothing
    for segment in worker.segments(round):
        report.phases.append(worker.train(segment, after_step))
        report.operations.append(worker.send(segment))
        worker.receive(segment)
        after_stop()
    worker.replica.step_on_gradient(round)
    if round + 1 == config.rounds:
        worker.receive_rest()
    return report


def end_round(journal: Journal, replica: Replica, finished: int) -> None:
    """Writes what is due after so many rounds of one worker."""
    step = replica.steps_taken
    journal.end_round(finished, worker=replica.index, step=step, tokens=step * journal.config.step_tokens)


def _timed_all_reduce(timeout_s: float, stopwatch: Stopwatch) -> Reduce:
    """The backend's all-reduce, whose seconds are counted."""
    reduce = all_reduce(timeout_s)
    return lambda frames, ticket: stopwatch.blocking(lambda: reduce(frames, ticket))


def _saver(store: Path, line: Lineage, worker: Worker, board: Board, newest: int) -> Save:
    """Saves this worker, and keeps every generation that the slowest worker may still need."""
    said = False

    def save(finished: int) -> None:
        nonlocal newest, said
        # Gossip lets workers run ahead of the slowest, by more than two generations if those are close together.
        since = board.saved(newest)
        owned = checkpoint.rounds(store, worker.index, line) if board.gone else []
        if len(owned) >= KEPT and owned[1 - KEPT] > since:
            since = owned[1 - KEPT]
            if not said:
                log.warning(
                    "worker %d deletes checkpoints before round %d without knowing whether all workers have newer ones, as the "
                    "store of the run does not answer and %d are kept; look at the log of the launcher",
                    worker.index, since, KEPT,
                )  # fmt: skip
            said = True
        checkpoint.save(store, finished, worker.index, worker.state(), digest=line, since=since)
        newest = finished

    return save


def _adapt(
    worker: Worker, report: RoundReport, deliveries: Sequence[Delivery], board: Board, topology: Topology
) -> None:  # fmt: skip
    """Local steps for the next round, by the notes that the other workers have published so far."""
    n = worker.config.workers
    mine = worker.pace_note(report, _uplinks(deliveries, topology))
    read = {i: note_of(text, n) for i, text in board.circulate(mine.text).items()}
    notes = {i: note for i, note in read.items() if note is not None}
    worker.adapt({**notes, worker.index: mine})


def _uplinks(deliveries: Sequence[Delivery], topology: Topology) -> dict[int, float]:
    """The bytes per second that each peer's link can send, by the messages that came; those it sent at once share its link."""
    sent, seconds = dict[int, float](), dict[int, float]()
    for ticket, peer, payload_bytes, took_s, _ in deliveries:
        if ticket.leg == 0:
            at_once = len(topology.mixing(ticket.round).sends_to(peer))
            sent[peer] = sent.get(peer, 0.0) + at_once * payload_bytes
            seconds[peer] = seconds.get(peer, 0.0) + took_s
    return {peer: size / max(seconds[peer], 1e-6) for peer, size in sent.items()}
