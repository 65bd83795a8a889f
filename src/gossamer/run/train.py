"""One real worker: this process trains its replica and talks to its partners, and nothing in the loop waits for everybody.

Each process records its own part of the run (`metrics-003.jsonl`, `trace-003.jsonl`, its snapshots); what needs all workers,
such as the mean model, is formed afterwards by `gossamer evaluate`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from gossamer.data.corpus import fingerprint, open_corpus
from gossamer.errors import GossamerError
from gossamer.network.pacing import note_of
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder
from gossamer.run.config import RunConfig, digest, dump
from gossamer.run.evaluate import Probe
from gossamer.run.worker import Worker, joined, method
from gossamer.topologies import Topology
from gossamer.transport import Delivery
from gossamer.transport.board import Board
from gossamer.transport.group import GroupTransport, all_reduce
from gossamer.transport.launch import Member, agree, join, leave

__all__ = ["train", "train_member"]


def train(config: RunConfig, folder: Path, *, resume: bool = False) -> None:
    """Joins the other processes as torchrun's environment says, trains to the end and leaves.

    Raises: ConfigError, DataError, CheckpointError; PeerError naming the worker that failed first; TrainingError.
    """
    run = config.run
    member = join(config.workers, backend=run.backend, device=run.device, threads=run.threads, timeout_s=run.timeout_s)
    failed: GossamerError | None = None
    try:
        train_member(config, folder, member, resume=resume)
    except GossamerError as error:
        failed = error
    if not leave() and failed is not None:
        # A transfer that a dead peer will never finish holds the process group; only this ends the process.
        print(f"gossamer: {failed}", file=sys.stderr, flush=True)
        os._exit(2)
    if failed is not None:
        raise failed


def train_member(config: RunConfig, folder: Path, member: Member, *, resume: bool = False) -> None:
    """Trains the worker that this process is; bitwise what the simulator computes for it, unless local steps adapt to the clock.

    Args: `resume` continues from the newest round of which every worker has its snapshot.
    Cost: one model, its gradients and states, the message in flight and those it hears.
    """
    m = method(config)
    corpus = open_corpus(config.data, config.workers, config.seed)
    key, store = digest(config), folder / "checkpoints"
    owned = checkpoint.rounds(store, member.worker, key) if resume else []
    # The settled step and the text are found by every worker on its own, so they are part of what they must agree on.
    common = f"{key} {m.rule.options} {fingerprint(corpus)}"
    facts = agree(member, common, owned, timeout_s=config.run.timeout_s)
    newest = checkpoint.newest_common(facts)
    if resume and newest is None:
        raise checkpoint.nothing_to_resume(store, [member.worker], facts)
    if newest == config.rounds:
        dist.barrier()  # whoever hosts the store must not leave while another still reads it
        if member.worker == 0:
            print(checkpoint.ended(folder, config.rounds))
        return

    worker = Worker(member.worker, config, corpus, member.device)
    transport = GroupTransport(member.store, run=int(key, 16), timeout_s=config.run.timeout_s, device=member.device)
    worker.join(m, transport, all_reduce(config.run.timeout_s) if config.run.mean == "all_reduce" else None)
    start = 0
    if resume and newest is not None:
        worker.restore(checkpoint.load(store, newest, worker.index, key))
        checkpoint.rewind(store, newest, worker.index)
        start = newest
    probe = Probe(config, corpus, member.device)
    board = Board(member.store, worker.index, config.workers, patience_s=min(2.0, config.run.timeout_s / 4))
    record = RunFolder(
        folder, dump(config), config.record, worker=worker.index, resume_round=start if resume else None,
        traced_per_round=config.schedule.fragments,
    )  # fmt: skip
    loop = worker.loop
    between = loop.advance if config.schedule.overlap_steps or m.rule.delay_rounds else None
    with record:
        for round in range(start, config.rounds):
            phases, operations = [], []
            for stop, first, last in worker.segments(round):
                loop.announce(round, stop)
                phases.append(worker.local_phase(round, first, last, between))
                operations.append(loop.post(round, stop))
                loop.receive(round, stop)
                worker.take_in()
            worker.apply(round)

            finished = round + 1
            if finished == config.rounds:
                loop.end()
                worker.take_in()
            worker.tell(record, round, phases, operations)
            phase = joined(phases)
            if worker.pacer is not None and finished < config.rounds:
                mine = worker.measured(phase, operations, _uplinks(transport.deliveries(), m.topology))
                told = {i: note_of(text, member.n) for i, text in board.circulate(mine.text).items()}
                notes = {i: note for i, note in told.items() if note is not None}
                worker.take(worker.pacer.decided({**notes, worker.index: mine}, member.n))
            step, tokens = worker.steps_taken, worker.steps_taken * config.step_tokens
            if config.due(config.run.eval_every, finished):
                own = probe.loss(worker.evaluated)
                record.log("validation", round=round, worker=worker.index, step=step, tokens=tokens, loss=own)
                print(
                    f"round {finished} of {config.rounds}: loss {phase.loss:.4f}, validation of this worker {own:.4f}"
                )
            if config.due(config.run.checkpoint_every, finished):
                # Gossip lets workers run ahead of the slowest, by more than two generations if those are close together.
                since = board.saved(newest or 0)
                checkpoint.save(store, finished, worker.index, worker.state(), digest=key, since=since)
                newest = finished
    transport.close()


def _uplinks(deliveries: Sequence[Delivery], topology: Topology) -> dict[int, float]:
    """The bytes per second that each peer's link can send, by the messages that came; those it sent at once share its link."""
    sent, seconds = dict[int, float](), dict[int, float]()
    for ticket, peer, payload_bytes, took_s in deliveries:
        if ticket.leg == 0:
            at_once = len(topology.mixing(ticket.round).sends_to(peer))
            sent[peer] = sent.get(peer, 0.0) + at_once * payload_bytes
            seconds[peer] = seconds.get(peer, 0.0) + took_s
    return {peer: size / max(seconds[peer], 1e-6) for peer, size in sent.items()}
