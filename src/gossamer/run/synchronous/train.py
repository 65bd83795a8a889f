"""One real worker: this process trains its replica and exchanges with its peers; no step of the loop is a global barrier.

Each process records its own part of the run (`metrics-003.jsonl`, `trace-003.jsonl`, its checkpoints); results over all
workers, such as the mean model's, are computed afterwards by `gossamer evaluate`.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from gossamer.data.tokenizer import load_tokenizer
from gossamer.errors import CheckpointError, ConfigError, DataError, GossamerError
from gossamer.network.pacing import note_of
from gossamer.record import checkpoint
from gossamer.record.addresses import Address, write_address
from gossamer.record.fault import Fault
from gossamer.record.folder import RunFolder, Unrecorded
from gossamer.record.lineage import Lineage
from gossamer.record.locks import locked
from gossamer.record.logs.pipeline_work import PipelineWork, write_pipeline
from gossamer.record.logs.seconds import recorded_s
from gossamer.record.logs.stage_seconds import end_logs_of_others, stage_lines, stage_log
from gossamer.record.progress import echo, quieted
from gossamer.record.whole_files import Appender, atomic_write, make_folder
from gossamer.rounds.setup import Setup, in_sides
from gossamer.rounds.stopwatch import Stopwatch
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.inputs import note_inputs
from gossamer.run.bookkeeping.journal import Journal, Save, saved_when_unreadable
from gossamer.run.bookkeeping.resume import History, Resume, resumed
from gossamer.run.bookkeeping.which_round import (
    Agreement,
    KeptRounds,
    Start,
    begin_or_resume,
    decode_faults,
    decode_kept,
    encode_kept,
    kept_by,
    together,
)
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.pipeline import stage_in
from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.run.participant.agreement import compare_first_batches, use_equal_threads, use_recorded_threads
from gossamer.run.participant.rendezvous import listening_towards
from gossamer.run.synchronous.regroup import Meeting, SlowStages, copy_on
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.shards import Shards
from gossamer.run.worker.stages.checkpoints import Store, partition_of
from gossamer.run.worker.stages.own_process import LocalStages
from gossamer.run.worker.stages.recovery import recover_own
from gossamer.run.worker.stages.timing import pipeline_work
from gossamer.run.worker.task import Task, found_by_each, on_device, task_of
from gossamer.run.worker.worker import RoundReport, Worker
from gossamer.stop_signals import Asked, leaving
from gossamer.topologies import Topology
from gossamer.transport.alike import short_settings
from gossamer.transport.contract import Delivery, Reduce
from gossamer.transport.keys import Keys, keys_for
from gossamer.transport.processes.board import Board
from gossamer.transport.processes.group import GroupTransport, all_reduce
from gossamer.transport.processes.launch import agree, join, leave, part
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.pipe import Pipe
from gossamer.transport.processes.sockets import SocketTransport
from gossamer.transport.processes.stopping import Stopping
from gossamer.transport.sockets.connection import Endpoint

log = logging.getLogger("gossamer")

AHEAD = 3
"""Rounds whose batches a worker prefetches from a stream at the start of the first: the current one, the next, which
its peers may have reached when it requests a stop, and one more to detect a broken stream in time.
"""
KEPT = 16
"""The most generations that a worker keeps while the store does not answer; a worker leads the slowest one by fewer
checkpoints.
"""


def train(run: ResolvedRun, folder: Path, *, resume: Resume = False, meeting: Meeting | None = None) -> None:
    """Joins the other processes by the variables of their launcher, trains to the end and leaves.

    On a stop request to any process, all save and end after the same round. With [peers] the processes exchange over
    our encrypted connections, otherwise over a torch process group.

    Args: `meeting` is the one at which the processes have agreed on their stages, where they may change.
    Raises: ConfigError, DataError, CheckpointError; PeerError naming the worker that failed first; TrainingError;
        KeyboardInterrupt when the run was stopped.
    """
    loop, keys = run.loop, keys_for(run.peers, run.workers)
    if keys is not None and loop.backend == "nccl":
        raise ConfigError(
            f"the run has [peers] and run.backend is '{loop.backend}', which cannot encrypt; set it to 'auto'"
        )
    member = join(
        run.workers,
        parts=run.processes,
        backend=loop.backend,
        device=loop.device,
        threads=loop.threads,
        timeout_s=loop.timeout_s,
        group=keys is None,
        keys=keys,
        part_is="stage" if loop.shards == 1 else "shard",
    )
    failed: GossamerError | OSError | KeyboardInterrupt | None = None
    with leaving(f"{member.name(member.rank)} is asked to leave after its round") as asked:
        asked.at_once = True
        try:
            with locked(folder, member.worker, member.part, member.parts):
                train_member(run, folder, member, keys, resume=resume, asked=asked, varies=meeting is not None)
                if meeting is not None:
                    meeting.dismiss()
        except (GossamerError, OSError, KeyboardInterrupt) as error:
            failed = error
        asked.over = True
        left = leave()  # must not be interrupted by a signal: threads inside torch would abort the process
    if not left:
        # A transfer with a dead peer blocks the process group, or a thread inside torch would abort the process on its
        # return during Python's shutdown.
        with contextlib.suppress(OSError):  # the reader of its output may be gone
            if failed is not None:
                echo(f"gossamer: {str(failed) or 'stopped'}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0 if failed is None else 130 if isinstance(failed, KeyboardInterrupt) else 2)
    if failed is not None:
        raise failed


def train_member(
    run: ResolvedRun,
    folder: Path,
    member: Member,
    keys: Keys | None = None,
    *,
    resume: Resume = False,
    asked: Asked | None = None,
    varies: bool = False,
) -> None:
    """Trains the worker that this process is; bitwise equal to the simulator, unless local steps adapt to measured seconds.

    Args:
        keys: those of the run; None exchanges over the process group.
        resume: continues from the newest round of which every worker has a sound checkpoint; "auto" starts if there is
            none.
        asked: the stop request of this process; before training it ends at once.
        varies: whether the stages may change, for which each process of a worker keeps a copy of the checkpoints of the one
            before it.
    Raises: as `train`.
    Cost: one model, its gradients and states, and messages in flight.
    """
    if resume:
        use_recorded_threads(run, folder, member.worker)
    use_equal_threads(run, member)
    m = run.in_rounds
    task = task_of(run)
    # Every worker resolves the rule for its topology independently, like the text and the user's code.
    found = {**{f"rule.{name}": value for name, value in m.rule.options.items()}, **found_by_each(task, run.parts)}
    past = resumed(run, folder, resume)
    # All shards read their worker's checkpoints, written by the first of them.
    store = Store(run, folder, partition_of(run, member.worker), member.part if run.loop.shards == 1 else 0)
    agreement = _agreement(store, member, found, past)
    try:
        start = begin_or_resume(store, task, past, agreement)
    except GossamerError:
        part(member, min(run.loop.timeout_s, 10.0))  # so that all can report the reason rather than a lost store
        raise
    if start.round == run.rounds:
        part(member, run.loop.timeout_s)  # the store's host must not leave while another process still reads it
        return
    compare_first_batches(member, task, run.loop.timeout_s)
    with contextlib.ExitStack() as open_:
        pipe = Pipe(member, run.loop.timeout_s) if member.parts > 1 else None
        if pipe is not None:
            open_.callback(pipe.close)
        open_.enter_context(quieted(member.part > 0))  # one process per worker prints
        stopwatch = Stopwatch(member.worker, recorded_s(folder, member.worker, start.cut))
        own = None if keys is None else [_connections(run, folder, member, keys, open_)]
        trainer = _trainer(run, task, member, pipe, stopwatch, own)
        stopped, unreadable = _train_rounds(trainer, start, member, asked or Asked(), open_, varies=varies)
    with contextlib.suppress(GossamerError):  # other processes' errors, when this one is done
        part(member, run.loop.timeout_s)  # the store's host must not leave while another process still uses it
    if stopped is not None:
        if unreadable is not None:
            raise DataError(saved_when_unreadable(unreadable, folder, stopped))
        raise KeyboardInterrupt(
            f"stopped after round {stopped} of {run.rounds}, and saved; resume with --resume {quote(str(folder))}"
        )


class _Trainer(NamedTuple):
    """The objects with which this process trains."""

    worker: Worker
    transports: tuple[GroupTransport | SocketTransport, ...]
    """One transport, or one to each stage if peers are in stages and this worker is not."""
    stopwatch: Stopwatch
    stages: LocalStages | None
    """This process's stages, if a worker has several."""
    pipe: Pipe | None
    """The pipe to the other processes of the worker."""


def _connections(
    run: ResolvedRun, folder: Path, member: Member, keys: Keys, open_: contextlib.ExitStack
) -> SocketTransport:
    """Encrypted connections with all other workers, closed by `open_`."""
    key, timeout_s = int(run.digest, 16), run.loop.timeout_s
    # Listens before publishing its address, as readers may connect at once.
    listener, address = listening_towards(os.environ["MASTER_ADDR"])
    open_.callback(listener.close)
    addresses = agree(member, run.digest, address, timeout_s=timeout_s)
    write_address(folder, Address(member.worker, address, key))
    transport = SocketTransport(member, Endpoint(listener, key, member.secret, timeout_s, keys=keys), addresses)
    open_.callback(transport.close, at_once=True)
    return transport


def _trainer(
    run: ResolvedRun,
    task: Task,
    member: Member,
    pipe: Pipe | None,
    stopwatch: Stopwatch,
    transports: Sequence[GroupTransport | SocketTransport] | None,
) -> _Trainer:
    """The trainer of this process; `transports` are those over encrypted connections."""
    loop, m = run.loop, run.in_rounds
    sides = [member] if run.pipeline.workers is None or pipe else list(map(member.on_side, range(run.pipeline.stages)))
    transports = transports or [
        GroupTransport(side, run=int(run.digest, 16), timeout_s=loop.timeout_s) for side in sides
    ]
    cut = shard = None
    if pipe is not None and loop.shards > 1:
        shard = lambda whole: Shards(whole, run, member, pipe)  # noqa: E731
    elif pipe is not None:
        cut = lambda whole: LocalStages(whole, run, pipe, member.device)  # noqa: E731
    replica = Replica(member.worker, run, task, member.device, cut=cut, shard=shard)
    reduce = _timed_all_reduce(loop.timeout_s, stopwatch) if loop.reduction == "all_reduce" else None
    stages = replica.staged if isinstance(replica.staged, LocalStages) else None

    def with_sides(setup: Setup) -> Setup:
        stage_of = stage_in(run.pipeline, run.model, run.data)
        return in_sides(setup, m.codec, transports, stage_of)

    worker = Worker(replica, m, transports[0], reduce, sides=with_sides if len(transports) > 1 else None)
    return _Trainer(worker, (*transports,), stopwatch, stages, pipe)


class _StopReasons:
    """The reasons for which this process wants all to stop after a round: a request, its stream, or cuts that do not suit."""

    def __init__(self, asked: Asked, slow: SlowStages | None) -> None:
        self._asked, self._slow, self._is_uneven = asked, slow, False
        self.unreadable: DataError | None = None
        """The error of its stream, which ends the run after a round."""

    def has_any(self) -> bool:
        """Whether there is a reason."""
        return self._asked.is_set() or self.unreadable is not None or self._is_uneven

    def read_ahead(self, replica: Replica, round: int, rounds: int) -> None:
        """Reads the batches of the next rounds, unless the stream has failed."""
        if self.unreadable is not None:
            return
        try:
            replica.read_ahead(round, rounds)
        except DataError as error:
            log.warning("%s; all workers are asked to stop after a round and to save", error)
            self.unreadable = error

    def compare_stages(self) -> None:
        """Looks whether other cuts would suit the processes better, where they may vary."""
        if self._slow is not None and not self._is_uneven and self._slow.noticed():
            log.warning("a process is slow; all are asked to stop after a round, and to start again with other cuts")
            self._is_uneven = True


def _train_rounds(
    trainer: _Trainer,
    start: Start,
    member: Member,
    asked: Asked,
    open_: contextlib.ExitStack,
    *,
    varies: bool,
) -> tuple[int | None, DataError | None]:
    """Trains from this start to the end and records it, with files closed by `open_`.

    Returns: the rounds after which all were stopped, saved for resumption, None at the end of the run; and the error of
        this worker's stream, if any.
    """
    store, worker, stopwatch, first = start.store, trainer.worker, trainer.stopwatch, start.round

    def copy(round: int) -> None:
        if varies and trainer.pipe is not None:
            copy_on(store, trainer.pipe, worker.index, round)

    run, line = store.run, _go_on(worker, start, member, copy)
    board = Board(member.entries, member.rank, member.ranks, patience_s=min(2.0, run.loop.timeout_s / 4))
    record, log_of_stages = _record(store, member, worker, start.cut, open_), None
    if trainer.stages is not None:
        log_of_stages = stage_log(store.folder, member.worker, member.part, member.parts, start.cut)
        open_.callback(log_of_stages.close)
    save = _saver(store.path, line, worker, board, first, copy, writes=_writes(store, member))
    journal = Journal(run, lambda: record, _validator(run, trainer), save, kind="validation")
    if not first:
        journal.begin(worker=member.worker)
    stopped: int | None = None
    asked.left_s, asked.at_once = lambda: worker.replica.phase_left_s, False
    reasons = _StopReasons(asked, SlowStages(run, board) if varies else None)
    stopping = open_.enter_context(Stopping(member, reasons.has_any, first))
    stopwatch.start()
    for round in range(first, run.rounds):
        reasons.read_ahead(worker.replica, round, min(AHEAD, round - first + 1, run.rounds - round))
        report, deliveries = _trained_round(trainer, round, run, log_of_stages)
        journal.log(worker, round, report)
        reasons.compare_stages()
        if worker.pacer is not None and round + 1 < run.rounds:
            _adapt(worker, report, deliveries, board, worker.loop.method.topology)
        # After local steps have adapted, so that a checkpoint here has those of the next round.
        journal.end_own_round(worker.replica, round + 1)
        record.log_seconds(stopwatch.round(round))
        if round + 1 < run.rounds and stopping.after(round + 1):
            journal.save(round + 1)
            stopped = round + 1
            break
    for transport in trainer.transports:
        transport.close()
    return stopped, reasons.unreadable


def _trained_round(
    trainer: _Trainer, round: int, run: RunSettings, log_of_stages: Appender | None
) -> tuple[RoundReport, list[Delivery]]:
    """A round of this process, with deliveries, seconds in the stopwatch and the log of its stages."""
    worker, transports, stopwatch, stages, pipe = trainer
    waited_s = 0.0
    if pipe is not None:
        pipe.round, waited_s = round, pipe.waited_s
        recover_own(worker, transports[0], pipe, round)
    report = worker.train_round(round)
    # Taken before the stages exchange payload sizes, as that wait is not part of a local phase.
    between_s = 0.0 if pipe is None else pipe.waited_s - waited_s
    if stages is not None and log_of_stages is not None:
        report = _end_in_stages(stages, log_of_stages, report, round, worker.index)
    if worker.replica.shards is not None:
        report = report._replace(operations=worker.replica.shards.end_round(report.operations))
    deliveries = [one for transport in transports for one in transport.deliveries()]
    stopwatch.phase(report.whole.compute_s - between_s)
    stopwatch.waited([one for transport in transports for one in transport.waits()], deliveries)
    return report, deliveries


def _end_in_stages(
    stages: LocalStages, log_of_stages: Appender, report: RoundReport, round: int, worker: int
) -> RoundReport:
    """The round's report with the payloads of all stages, after logging this process's."""
    sent = sum(one.sent_bytes for some in report.operations for one in some)
    report = report._replace(operations=stages.end_round(report.operations))
    log_of_stages.write(stage_lines([stages.seconds(round, worker, sent)]))
    return report


def _record(
    store: Store, member: Member, worker: Worker, newest: int | None, open_: contextlib.ExitStack
) -> RunFolder | Unrecorded:
    """The record of this process: one process per worker writes."""
    run, folder = store.run, store.folder
    if not member.part:
        record = open_.enter_context(
            RunFolder(
                folder,
                run.document,
                run.record,
                worker=worker.index,
                resume_round=newest,
                traced_per_round=worker.loop.method.sends_per_round,
            )
        )
        note_inputs(run, worker.replica.task, folder, member.worker, 0, member.parts)
        write_pipeline(folder, _work(run, worker.replica.task))
        return record
    # Its machine may have no other process of the worker that would write the file.
    if newest is not None or not (folder / "run.toml").exists():
        make_folder(folder)
        atomic_write(folder / "run.toml", run.document.encode())
    note_inputs(run, worker.replica.task, folder, member.worker, member.part, member.parts)
    return Unrecorded()


def _work(run: RunSettings, task: Task) -> PipelineWork | None:
    """The work of an inner step in stages, independent of this process's stage."""
    if run.pipeline.stages == 1:
        return None
    words = task.tokenizer or load_tokenizer(run.data.tokenizer)
    return pipeline_work(run, layout_for(run.model, words.vocab_size))


def _validator(run: RunSettings, trainer: _Trainer) -> Callable[[], Mapping[str, Any]]:
    """The validation function of this worker."""
    replica, stages = trainer.worker.replica, trainer.stages
    if (shards := replica.shards) is not None:
        scored = [on_device(batch, replica.device) for batch in replica.task.data.validation(run.loop.eval_batches)]
        return lambda: {"loss": shards.validate(replica.task.loss, scored)}
    if stages is None:
        probe = Probe(run, replica.task, replica.device)
        return lambda: {"loss": probe.loss(replica.scored, replica.buffers)}
    batches = [on_device(batch, replica.device) for batch in replica.task.data.validation(run.loop.eval_batches)]

    def validate() -> Mapping[str, Any]:
        with replica.holding_evaluated():
            return {"loss": stages.validate(batches)}

    return validate


def _agreement(store: Store, member: Member, found: Mapping[str, Any], past: History | None) -> Agreement:
    """The checkpoints of all workers, after all have agreed on one configuration.

    Args: `found` has the inputs that each worker computes and all must share.
    Raises: PeerError when workers differ.
    """
    run, me = store.run, member.worker
    common, timeout_s = f"{run.digest} {found}", run.loop.timeout_s
    settings = short_settings({**run.decisive, **found})
    own = KeptRounds({}) if past is None else kept_by(store, [me], past.lineage, past.before)[me]
    facts = agree(member, common, encode_kept(own), settings=settings, timeout_s=timeout_s)
    # By process, each of which has a stage of a worker.
    owners = [member.owner(rank) for rank in range(member.ranks)]
    named = [(i, member.name(rank), decode_kept(i, facts[rank])) for rank, i in enumerate(owners)]
    kept = {i: together({name: one for j, name, one in named if i == j}) for i in {*owners}}

    def read(round: int) -> dict[int, Fault | None]:
        mine = None if past is None else store.fault(round, me, past.lineage)
        faults = decode_faults(agree(member, common, mine and mine.encoded, timeout_s=timeout_s))
        found: dict[int, Fault | None] = dict.fromkeys(kept)
        return found | {i: fault for i, fault in zip(owners, faults, strict=True) if fault is not None}

    return Agreement(kept, read, speaks=member.rank == 0)


def _go_on(worker: Worker, start: Start, member: Member, copy: Callable[[int], None]) -> Lineage:
    """Resumes a worker from its checkpoint of a round (0 for the start); returns the lineage of checkpoints from now on.

    Args: `copy` copies the checkpoint of a round to another process of the worker.
    """
    store, me, round = start.store, worker.index, start.round
    run, writes = store.run, _writes(store, member)

    def restore(me: int, line: Lineage) -> None:
        if not store.begins_without(round, me, line):
            worker.restore(store.load(worker.replica.task, round, me, line))
            state = worker.state()  # for shards: all are restored together
            if writes:
                store.take_over(me, round, state, line, run.lineage)
            return
        # It receives the remaining state from others before it trains. No checkpoint is written until then: if killed,
        # it repeats this.
        worker.replica.steps_taken = run.timetable.steps_before(me, round)
        if "streams" in worker.replica.task.data.state():
            raise CheckpointError(
                f"stage {member.part} of worker {me} has no checkpoint of round {round}, and with it the place in "
                f"'{run.data.source}' is lost, which is read as it comes; bring its checkpoint back, or start again with "
                "another --out"
            )

    line = start.go_on([me], restore, rewinds=writes)
    if start.past is None:
        return line
    if round:
        copy(round)  # before anybody removes what other stages have saved
    # With changed stages, a process reads files that another one removes next.
    agree(member, "all have taken over what other stages have saved", timeout_s=run.loop.timeout_s)
    if writes:
        store.forget_others(me)
    if member.part == 0:
        end_logs_of_others(store.folder, me, member.parts, round)
    return line


def _timed_all_reduce(timeout_s: float, stopwatch: Stopwatch) -> Reduce:
    """The backend's all-reduce, whose seconds are counted."""
    reduce = all_reduce(timeout_s)
    return lambda frames, ticket: stopwatch.blocking(lambda: reduce(frames, ticket))


def _writes(store: Store, member: Member) -> bool:
    """Whether this process writes checkpoints: each stage its own, and of shards the first those of the whole worker."""
    return store.run.loop.shards == 1 or member.part == 0


def _saver(
    store: Path,
    line: Lineage,
    worker: Worker,
    board: Board,
    newest: int,
    copy: Callable[[int], None],
    *,
    writes: bool = True,
) -> Save:
    """Saves this worker, keeping every generation that the slowest worker may still need; `copy` as of `_go_on`."""
    warned = False

    def save(finished: int) -> None:
        nonlocal newest, warned
        # Gossip lets workers run ahead of the slowest, by more than two generations if these are frequent. It posts the
        # round already on disk, not the one about to be saved, as it may be killed while saving.
        since = board.saved(newest)
        owned = checkpoint.rounds(store, worker.index, line) if board.gone else []
        if len(owned) >= KEPT and owned[1 - KEPT] > since:
            since = owned[1 - KEPT]
            if not warned:
                log.warning(
                    "worker %d deletes checkpoints before round %d without knowing whether all workers have newer ones, as the "
                    "store of the run does not answer and %d are kept; look at the log of the launcher",
                    worker.index,
                    since,
                    KEPT,
                )
            warned = True
        state = worker.state()
        if writes:
            checkpoint.save(store, finished, worker.index, state, digest=line, since=since)
        copy(finished)
        newest = finished

    return save


def _adapt(
    worker: Worker, report: RoundReport, deliveries: Sequence[Delivery], board: Board, topology: Topology
) -> None:
    """Adapts local steps for the next round to the other workers' notes so far."""
    n = worker.run.workers
    mine = worker.pace_note(report, _uplinks(deliveries, topology))
    read = {i: note_of(text, n) for i, text in board.circulate(mine.text).items()}
    notes = {i: note for i, note in read.items() if note is not None}
    worker.adapt({**notes, worker.index: mine})


def _uplinks(deliveries: Sequence[Delivery], topology: Topology) -> dict[int, float]:
    """The uplink rate of each peer in bytes per second, from its messages; simultaneous ones share its link."""
    sent, seconds = dict[int, float](), dict[int, float]()
    for ticket, peer, payload_bytes, took_s, _ in deliveries:
        if ticket.leg == 0:
            at_once = len(topology.mixing(ticket.round).sends_to(peer))
            sent[peer] = sent.get(peer, 0.0) + at_once * payload_bytes
            seconds[peer] = seconds.get(peer, 0.0) + took_s
    return {peer: size / max(seconds[peer], 1e-6) for peer, size in sent.items()}
