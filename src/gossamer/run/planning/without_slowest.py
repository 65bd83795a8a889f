"""What a plan would be without its slowest worker, whom the others wait for or mix with less."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gossamer.network.links import Network, links_of
from gossamer.run.planning.plan import Candidate, RunPlan, plan, plan_rows

__all__ = ["LeftOut", "without_slowest"]

_FEWEST = 3
"""Two are needed for a plan."""
_FAR = 1.1
"""A worker is slowest by far if its round takes so many times as long as that of the next."""
_STEPS = 30
"""Inner steps of the round by which workers are compared."""


class LeftOut(NamedTuple):
    """A worker that might be left out, and what the others would then do."""

    worker: int
    others: Candidate
    """Chosen for them as a plan chooses for all."""

    def __str__(self) -> str:
        others = self.others
        *_, computing, hours, loss = plan_rows([others])[0]
        return (
            f"without worker {self.worker}, the slowest, the other {len(others.local_steps)} would take {others.method} with "
            f"{others.full_steps} local steps: {computing} of it computing, {hours} h/1e9 tokens, loss {loss}"
        )


def without_slowest(made: RunPlan) -> LeftOut | None:
    """The plan for all others, where one worker is slowest by far; None where none is, or sites, routes or changes name it.

    A round of 30 inner steps and one model sent tells how fast a worker is.

    Cost: as `gossamer.run.planning.plan.plan`.

    >>> from gossamer.models.sizes import ModelConfig
    >>> slow = Network(uplink_bps=(25e6, 25e6, 25e6, 2.5e6), downlink_bps=25e6, step_s=0.5)
    >>> left = without_slowest(plan(slow, ModelConfig(size="0.2m")))
    >>> left.worker, left.others.method, len(left.others.local_steps)
    (3, 'DiLoCo', 3)
    """
    network, n = made.network, len(made.best.local_steps)
    if n < _FEWEST or network.sites or network.changes or made.replica:
        return None
    links = links_of(network, n)
    assert links.step_s is not None
    round_s = _STEPS * links.step_s + 8 * 4 * made.parameters / np.minimum(links.uplink_bps, links.downlink_bps)
    worker = int(round_s.argmax())
    if round_s[worker] < _FAR * np.delete(round_s, worker).max():
        return None
    others = plan(_without(network, worker), made.model, replace(made.options, workers=n - 1))
    return LeftOut(worker, others.best)


def _without(network: Network, worker: int) -> Network:
    """The network without what it says of a worker."""
    each = {
        name: value[:worker] + value[worker + 1 :]
        for name in ("uplink_bps", "downlink_bps", "latency_s", "step_s")
        if isinstance(value := getattr(network, name), tuple)
    }
    return replace(network, **each)
