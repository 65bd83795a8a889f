"""Attackers for tests: a transport that falsifies messages after its sender's own checks."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gossamer import rng
from gossamer.transport.contract import Ticket, Transport

Attack = Literal["sign flip", "scale 10", "scale 10^6", "noise", "replay", "nan"]
ATTACKS: tuple[Attack, ...] = get_args(Attack)

_REPLAYED_ROUNDS = 10
_FACTORS: dict[str, float] = {"sign flip": -1.0, "scale 10": 10.0, "scale 10^6": 1e6, "nan": torch.nan}


class Attacker:
    """The transport of a worker that falsifies its messages from a round on; exact codecs only, whose frames are the message.

    sign flip, scale 10, scale 10^6, nan:  a multiple of the message: -1, 10, 10^6, NaN
    noise:   the message and Gaussian noise ten times as long as the way from its last message, of the round before, to this one
    replay:  its message of ten rounds ago, or its first one

    Args: `transport` is the underlying one, which carries the falsified frames.
    """

    def __init__(self, transport: Transport, attack: Attack, from_round: int, seed: int = 0) -> None:
        self._transport, self._attack, self._from_round, self._seed = transport, attack, from_round, seed
        self._sent: deque[tuple[Ticket, list[Tensor]]] = deque(maxlen=_REPLAYED_ROUNDS + 1)
        self._false: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """Sends falsified frames; the same to all receivers of a ticket."""
        if not self._sent or self._sent[-1][0] != ticket:
            self._sent.append((ticket, [frame.clone() for frame in frames]))
            self._false = self._falsified(ticket.round)
        self._transport.post(ticket, peer, frames if ticket.round < self._from_round else self._false)

    def _falsified(self, round: int) -> list[Tensor]:
        latest = self._sent[-1][1]
        if self._attack == "replay":
            return self._sent[0][1]
        if self._attack != "noise":
            return [_FACTORS[self._attack] * frame for frame in latest]
        before = self._sent[-2][1] if len(self._sent) > 1 else latest
        length = sum(float((a - b).double().square().sum()) for a, b in zip(latest, before, strict=True)) ** 0.5
        size = sum(frame.numel() for frame in latest)
        draw = torch.Generator().manual_seed(rng.key(self._seed, self._transport.worker, round, "noise") % (1 << 63))
        spread = 10.0 * length / size**0.5
        return [frame + spread * torch.randn(frame.shape, generator=draw, dtype=frame.dtype) for frame in latest]
