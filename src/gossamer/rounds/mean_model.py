"""The mean model, `(1/n) Σ_i x_i`: over vectors in one process, or over n processes, with bitwise the same result."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.topologies.mixing import widen
from gossamer.transport.contract import Ticket, Transport


def mean_of(vectors: Sequence[Tensor]) -> Tensor:
    """The mean model, `(1/n) Σ_i x_i`, summed in worker order in fp32 at least; equal vectors are their own mean, bit for bit."""
    return vectors[0].clone() if _equal(vectors) else _mean(vectors)


def mean_over_workers(
    tensors: Sequence[Tensor], transport: Transport, n: int, round: int, fragment: int
) -> list[Tensor]:
    """`mean_of` each tensor over all n workers, as flat vectors, bitwise the same on every worker.

    A collective: worker k sums chunk k of every tensor in worker order, and sends the sum to all others.

    Args: `round` and `fragment` name the messages; no other message in flight may have these names.
    Raises: TransportError and PeerError from the transport.
    Cost: 2 (n-1)/n of the tensors each way, and twice their memory.
    """
    flats = [t.detach().reshape(-1).to(tensors[0].device) for t in tensors]  # buffers may be on another device
    if n == 1:
        return [t.clone() for t in flats]
    i, others = transport.worker, [j for j in range(n) if j != transport.worker]
    there, alike, back = (Ticket(round, fragment, leg) for leg in range(3))
    chunks = [[t[t.numel() * j // n : t.numel() * (j + 1) // n] for t in flats] for j in range(n)]
    verdict = torch.zeros(len(flats), dtype=torch.uint8, device=flats[0].device)
    for j in others:
        transport.expect(there, j, chunks[i])
        transport.expect(alike, j, [verdict])
        transport.expect(back, j, chunks[j])

    def swapped(ticket: Ticket, frames: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        for j in others:
            transport.post(ticket, j, frames[j])
        transport.wait(ticket)
        return [came[1] for came in sorted([*transport.collect(ticket).items(), (i, frames[i])])]

    parts = [*zip(*swapped(there, chunks), strict=True)]
    # Whether vectors are equal is known only when all their chunks are.
    verdict = torch.tensor([_equal(part) for part in parts], dtype=torch.uint8, device=verdict.device)
    verdicts = torch.stack([one for (one,) in swapped(alike, [[verdict]] * n)]).amin(0).tolist()
    sums = [part[0] if same else _mean(part) for part, same in zip(parts, verdicts, strict=True)]
    return [torch.cat(pieces) for pieces in zip(*swapped(back, [sums] * n), strict=True)]


def _equal(vectors: Sequence[Tensor]) -> bool:
    return all(torch.equal(vectors[0], x) for x in vectors[1:])


def _mean(vectors: Sequence[Tensor]) -> Tensor:
    total = widen(vectors[0])
    for x in vectors[1:]:
        total = total + widen(x)
    return (total / len(vectors)).to(vectors[0].dtype)
