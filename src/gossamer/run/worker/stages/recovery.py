"""Recovery of a worker's lost stage, in a simulation and in real processes.

Between two rounds a stage is parameters, an outer state and an inner optimizer. The first two come from the same stage
of another worker, or as the mean of the stages before and after it; the third is reset. Its position in the data
follows from the round.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.optimizers import Joined
from gossamer.rounds.loop import OuterLoop
from gossamer.run.config.pipeline import LostStage, donor_of
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.stages.in_one_process import spans_of
from gossamer.run.worker.worker import Worker
from gossamer.transport import wire
from gossamer.transport.contract import Ticket, Transport
from gossamer.transport.processes.pipe import Flow, Pipe
from gossamer.tree import leaves

Span = tuple[int, int]
"""The first layer of a stage, and the one after its last."""
_FRAGMENT = 1 << 16
"""Its number in tickets: above those of all exchanges (fragments and moments)."""


def mean_of_neighbours(before: Tensor, behind: Tensor, squares: tuple[float, float]) -> Tensor:
    """The recovery of a lost stage from its neighbours, given the squared norms (ω) of their last gradients.

    W_s = (ω_(s-1) W_(s-1) + ω_(s+1) W_(s+1)) / (ω_(s-1) + ω_(s+1))

    Values that are not floating-point are equal in all stages, and stay unchanged. Without gradients both weigh the
    same.

    Source: CheckFree, arXiv 2506.15461, algorithm 1.
    Differs: its learning rate is not raised by a tenth afterwards; the outer state is averaged with the same weights.

    >>> mean_of_neighbours(torch.tensor([1.0]), torch.tensor([5.0]), (3.0, 1.0))
    tensor([2.])
    """
    if not before.is_floating_point():
        return before
    total = squares[0] + squares[1]
    share = squares[0] / total if min(squares) > 0 and total < math.inf else 0.5
    return (share * before.float() + (1 - share) * behind.float()).to(before.dtype)


def stand_in(name: str, lost: Span, neighbour: Span) -> str:
    """The parameter of a neighbouring stage that replaces one of a lost stage: of the layer at the same relative
    position.

    >>> [stand_in(f"model.layers.{k}.w", (2, 4), (4, 6)) for k in (2, 3)], stand_in("model.layers.3.w", (2, 4), (1, 2))
    (['model.layers.4.w', 'model.layers.5.w'], 'model.layers.1.w')
    """
    words = name.split(".")
    words[2] = str(neighbour[0] + (int(words[2]) - lost[0]) * (neighbour[1] - neighbour[0]) // (lost[1] - lost[0]))
    return ".".join(words)


def lost_before(round: int, run: RunSettings) -> list[LostStage]:
    """The stages lost right before a round."""
    return [one for one in run.pipeline.lost if one.after == round]


def recover_all(workers: Sequence[Worker], round: int) -> None:
    """Recovers the stages lost before a round, for all workers in this process."""
    run = workers[0].run
    for one in lost_before(round, run):
        worker, spans = workers[one.worker], spans_of(run)
        lost, names = spans[one.stage], _names(worker, spans[one.stage])
        donor = donor_of(one, run.pipeline, run.workers)
        if donor is None:
            sides = [spans[one.stage - 1], spans[one.stage + 1]]
            values = _mean(*(_given(worker, lost, names, side) for side in sides))
        else:
            values = _taken(workers[donor].loop, names)
        _go_on(worker, names, values)


def recover_own(worker: Worker, transport: Transport, pipe: Pipe, round: int) -> None:
    """As `recover_all`, by each process of a real run: it sends or receives the state of a lost stage.

    Neighbours communicate through their worker's connections, peers through those of their stage. Raises: PeerError.
    """
    run = worker.run
    for number, one in enumerate(lost_before(round, run)):
        donor, spans = donor_of(one, run.pipeline, run.workers), spans_of(run)
        lost, names = spans[one.stage], _names(worker, spans[one.stage])
        mine = worker.index == one.worker and pipe.part == one.stage
        if donor is None and mine:
            like = [torch.zeros(1, dtype=torch.float64), *_taken(worker.loop, names)]
            sides = (pipe.part - 1, pipe.part + 1)
            _go_on(worker, names, _mean(*(_received(pipe, side, like) for side in sides)))
        elif donor is None and worker.index == one.worker and abs(pipe.part - one.stage) == 1:
            payload = wire.pack_frames(_given(worker, lost, names, spans[pipe.part]))
            pipe.send(Flow("recovery", pipe.part), one.stage, payload, length_first=False)
            pipe.flush()
        elif donor is not None and pipe.part == one.stage and (mine or worker.index == donor):
            ticket, own = Ticket(round, _FRAGMENT + number), _taken(worker.loop, names)
            if mine:
                transport.expect(ticket, donor, own)
            else:
                transport.post(ticket, one.worker, own)
            transport.wait(ticket)
            came = transport.collect(ticket)
            if mine:
                _go_on(worker, names, came[donor])


def _names(worker: Worker, span: Span) -> list[str]:
    """The names of these layers' parameters, which any process can derive, as all layers are alike."""
    own = (leaf.name.split(".", 3) for setup in worker.loop.fragments for leaf in setup.part.layout.leaves)
    kinds = sorted({words[3] for words in own if words[1] == "layers"})
    return [f"model.layers.{k}.{kind}" for k in range(*span) for kind in kinds]


def _given(worker: Worker, lost: Span, names: Sequence[str], own: Span) -> list[Tensor]:
    """A neighbour's contribution to a lost stage: the squared norm of its last gradient, and its parameters."""
    staged = worker.replica.staged
    assert staged is not None
    square = torch.tensor([staged.squares().get(own[0], 0.0)], dtype=torch.float64)
    return [square, *_taken(worker.loop, [stand_in(name, lost, own) for name in names])]


def _received(pipe: Pipe, side: int, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors received from another stage of this worker, of these forms."""
    size = wire.frames_bytes(like)
    pipe.expect(Flow("recovery", side), side, [size], size)
    return wire.unpack_frames(pipe.receive(Flow("recovery", side), side).to(like[-1].device), like)


def _mean(before: Sequence[Tensor], behind: Sequence[Tensor]) -> list[Tensor]:
    squares = (before[0].item(), behind[0].item())
    return [mean_of_neighbours(a, b, squares) for a, b in zip(before[1:], behind[1:], strict=True)]


def _slices(loop: OuterLoop, names: Sequence[str]) -> list[Tensor]:
    """The live slices of these parameters, and of each vector `[k P]` of the outer state; whole tensors that belong to
    no parameter.
    """
    parts = [setup.part for setup in loop.fragments]
    places = {leaf.name: (p, leaf) for p, part in enumerate(parts) for leaf in part.layout.leaves}
    sizes, found = [part.layout.numel for part in parts], list[Tensor]()
    for column in zip(*([part.x, *leaves(part.s)] for part in parts), strict=True):
        if all(x.numel() and not x.numel() % size for x, size in zip(column, sizes, strict=True)):
            for p, leaf in map(places.__getitem__, names):
                found.append(column[p].view(-1, sizes[p])[:, leaf.start : leaf.stop])
        else:
            found += column
    return found


def _taken(loop: OuterLoop, names: Sequence[str]) -> list[Tensor]:
    """A copy of a worker's values of these parameters and of their outer state."""
    return [slice.clone(memory_format=torch.contiguous_format) for slice in _slices(loop, names)]


@torch.no_grad()
def _go_on(worker: Worker, names: Sequence[str], values: Sequence[Tensor]) -> None:
    """Writes the recovered values into these parameters and their outer state; resets their inner optimizer."""
    for mine, theirs in zip(_slices(worker.loop, names), values, strict=True):
        mine.copy_(theirs)
    for setup in worker.loop.fragments:
        if setup.rule.unsent is not None:  # the codec's error, which the donor still has to send
            for leaf in setup.part.layout.leaves:
                if leaf.name in names:
                    setup.rule.unsent(setup.part.s)[leaf.start : leaf.stop] = 0.0
    worker.loop.reset_distrust_counts()
    parameters, optimizer = dict(worker.replica.model.named_parameters()), cast(Any, worker.replica.optimizer)
    for part in optimizer.parts.values() if isinstance(optimizer, Joined) else (optimizer,):
        for name in names:
            part.state.pop(parameters[name], None)
