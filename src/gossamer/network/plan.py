"""Before anything is trained or rented: what each method would send on a network, how long it takes, and which to take.

Each candidate is written down as the trace that its run would leave and priced like a recorded one (`gossamer.network.pricing`),
so a plan knows all that a network file can say. What it does not know is how much a token teaches: many local steps and
few peers learn a little less from each. Hence the choice: the fewest local steps that keep the workers computing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import tomli_w

from gossamer.errors import ConfigError
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.network.links import Links, Network, links_of, to_options
from gossamer.network.pacing import Pace, fitting_steps, uplinks_bps, whole_steps
from gossamer.network.pricing import price
from gossamer.network.utilisation import step_seconds
from gossamer.record.trace import Integers, Trace, from_targets
from gossamer.topologies.matching import random_matchings

__all__ = ["EXACT", "PLAN_HEADINGS", "Candidate", "Plan", "matched_steps", "plan", "plan_rows", "run_toml"]

EXACT: Mapping[str, float] = {"exact": 32.0}
"""The codec that sends fp32 as it is."""

_METHODS: dict[str, tuple[str, int | None]] = {
    "data parallel": ("data_parallel", None),
    "DiLoCo": ("diloco", None),
    "GASLoC 2-Peer": ("gasloc", 2),
    "GASLoC 1-Peer": ("gasloc", 1),
}
"""Rule and peers of each method (None for everyone), those first that mix more."""

_BACK_BITS = 16.0
"""Of the sum of a lossy mean, in bf16."""
_LIMIT_WORKERS = 2000
_LIMIT_MESSAGES = 10**7
"""A mean has a message for each pair of workers: more of them would take gigabytes to write down."""


class Candidate(NamedTuple):
    """A method with its settings, and what it costs."""

    method: str
    codec: str
    back: str | None
    """What sums travel back in from their owners; None where there are none, or they do so in fp32."""
    local_steps: tuple[int, ...]
    """Inner steps of each worker in a round."""
    round_s: float
    """Seconds of a round, in the mean over the planned ones."""
    round_bytes: float
    """Bytes that a worker sends in a round, in the mean over the workers."""
    utilisation: float
    """Share of the time spent computing, in the mean over the workers."""
    seconds_per_token: float
    """Of all workers together."""

    @property
    def full_steps(self) -> int:
        """Inner steps of the worker that takes most."""
        return max(self.local_steps)


class Plan(NamedTuple):
    """All candidates, the one to take, and what they were made for."""

    candidates: tuple[Candidate, ...]
    best: Candidate
    target: float
    """The utilisation that was asked for."""
    network: Network
    """With the step time that was used."""
    model: ModelConfig
    parameters: int
    seq_len: int
    batch_size: int
    seed: int


def plan(
    network: Network,
    model: ModelConfig,
    *,
    vocab_size: int = 256,
    workers: int | None = None,
    seq_len: int = 128,
    batch_size: int = 8,
    local_steps: Sequence[int] = (15, 30, 60, 120, 240),
    codecs: Mapping[str, float] = EXACT,
    target: float = 0.9,
    step_s: float | None = None,
    peak_flops: float | None = None,
    mfu: float = 0.4,
    rounds: int = 64,
    seed: int = 0,
) -> Plan:
    """Prices data parallelism, DiLoCo and GASLoC with one and two peers, and takes one.

    DiLoCo is tried with each of `local_steps`, and GASLoC with those as the steps of its fastest worker; the others take
    as many as let them be ready in time (`matched_steps`). Taken is the first candidate that keeps the workers computing
    for the target share of the time, fewest local steps first, then more mixing, then the order of `codecs`; if none does,
    the one with the least time per token.

    Args:
        workers: needed where the network describes any number of them.
        seq_len, batch_size: of one worker's inner step; their product is its tokens.
        codecs: bits per parameter by name, for DiLoCo and GASLoC. Sums of what a lossy one made travel back in bf16 where that
            is less to send, and else its payloads go to everyone whole.
        step_s: seconds of an inner step where the network gives none; or else `6·N·tokens / (peak_flops·mfu)`.
        rounds: how many to price, fewer where everyone hears everyone and rounds are all alike; a network that changes
            after these is priced as it is until then.
    Raises: ConfigError for what cannot be, or when nothing tells the step time.
    Cost: some 10 ms for each candidate, up to a minute where links are uneven or shared and there are hundreds of workers.
    """
    n = network.workers if workers is None else workers
    if n is None:
        raise ConfigError(
            f"the network is the same for any number of workers and workers is {workers}; give the number of workers"
        )
    if not 2 <= n <= _LIMIT_WORKERS:
        raise ConfigError(
            f"a plan for {n} workers was asked for but it needs from 2 to {_LIMIT_WORKERS}; choose another number"
        )
    if not 0 < target <= 1:
        raise ConfigError(f"the target utilisation is {target} but must be above 0 and at most 1; 0.9 is usual")
    if not local_steps or min(local_steps) < 1:
        raise ConfigError(f"the local steps to try are {list(local_steps)} but must be whole numbers from 1; give some")
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{name} is {value} but must be at least 1; give that of a worker's inner step")
    for name, value in (("step_s", step_s), ("peak_flops", peak_flops)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value} but must be a number above 0; correct it, or leave it out")
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu is {mfu} but must be above 0 and at most 1; 0.4 is usual")
    for name, bits in codecs.items():
        if not 0 < bits <= 64:
            raise ConfigError(
                f"codec '{name}' has {bits} bits per parameter but must have from above 0 to 64; correct it"
            )
    parameters = parameter_count(model, vocab_size)
    if network.step_s is None:
        if step_s is None and peak_flops is None:
            raise ConfigError(
                f"the seconds of an inner step are {step_s} and the network gives no step_s; give --step-s or --peak-flops, "
                "or step_s in the network file"
            )
        seconds = step_seconds(parameters, seq_len * batch_size, peak_flops, mfu) if peak_flops else step_s
        network = replace(network, step_s=seconds)
    links = links_of(network, n)

    candidates = []
    for method, (rule, peers) in _METHODS.items():
        if peers is not None and peers >= n:
            continue
        for steps in (1,) if rule == "data_parallel" else sorted(set(local_steps)):
            for codec, bits in EXACT.items() if rule == "data_parallel" else codecs.items():
                payload_bytes = math.ceil(parameters * bits / 8)
                own = (steps,) * n if peers is None else matched_steps(links, steps, peers * payload_bytes)
                some = rounds if peers is not None else _rounds_of_means(network, n, rounds)
                back = "bf16" if peers is None and codec not in EXACT and (bits + _BACK_BITS) / n < bits else None
                mean_bytes = math.ceil(parameters * (bits + _BACK_BITS) / 8) if back else 2 * payload_bytes
                trace = _trace(n, peers, payload_bytes, mean_bytes if back or codec in EXACT else None, own, some, seed)
                timeline = price(trace, network)
                tokens = seq_len * batch_size * int(trace.steps.sum())
                candidates.append(
                    Candidate(
                        method=method,
                        codec=codec,
                        back=back,
                        local_steps=own,
                        round_s=timeline.total_s / trace.rounds,
                        round_bytes=float(trace.sent_bytes.mean()) / trace.rounds,
                        utilisation=timeline.mean_utilisation,
                        seconds_per_token=timeline.total_s / tokens,
                    )
                )
    enough = [candidate for candidate in candidates if candidate.utilisation >= target]
    # `min` takes the first of equals, and candidates are in the order of their methods and codecs.
    best = min(enough, key=lambda c: c.full_steps) if enough else min(candidates, key=lambda c: c.seconds_per_token)
    return Plan(tuple(candidates), best, target, network, model, parameters, seq_len, batch_size, seed)


def matched_steps(links: Links, full_steps: int, sent_bytes: float) -> tuple[int, ...]:
    """How many inner steps each worker takes so that all are done sending together, as far as one step allows.

    The worker that would be done first with `full_steps` takes that many (`gossamer.network.pacing`). The link of a site
    counts in even parts. A slow downlink is not made up for: what comes late through it is sent by somebody else.

    Raises: ConfigError when no worker needs any time for a step.

    >>> fast = Network(uplink_bps=(4.8e6, 4.8e5), downlink_bps=4.8e6, step_s=1.0)
    >>> matched_steps(links_of(fast, 2), 30, sent_bytes=1e6)
    (30, 15)
    """
    assert links.step_s is not None
    if not links.step_s.min() > 0:
        raise ConfigError(
            f"step_s goes down to {links.step_s.min()} but must be above 0 to match workers by it; give seconds of a step"
        )
    exchange_s = 8 * sent_bytes / uplinks_bps(links)
    paces = [Pace(*pace) for pace in zip(links.step_s.tolist(), exchange_s.tolist(), strict=True)]
    return tuple(whole_steps(fitting_steps(pace, paces, full_steps), full_steps) for pace in paces)


def run_toml(
    plan: Plan, candidate: Candidate | None = None, *, name: str = "planned", steps: int = 300, adapt: bool = False,
    weigh_steps: bool = False,
) -> str:  # fmt: skip
    """A run file that trains as planned, on this machine's Python sources read as bytes until `data` names something else.

    Args:
        candidate: the best one unless given.
        steps: inner steps; raised to whole rounds.
        adapt, weigh_steps: as in `gossamer.run.config.LoopConfig`; the planned local steps are then those to begin with. Data
            parallelism has none, and is written without.
    """
    chosen = plan.best if candidate is None else candidate
    rule, peers = _METHODS[chosen.method]
    own = chosen.local_steps
    document = {
        "name": name,
        "workers": len(own),
        "seed": plan.seed,
        "rule": {"name": rule},
        "topology": {"name": "complete"} if peers is None else {"name": "random", "peers": peers},
        "codec": {"name": chosen.codec, **({"back": chosen.back} if chosen.back else {})},
        "model": {
            key: value for key in ModelConfig.__dataclass_fields__ if (value := getattr(plan.model, key)) is not None
        },
        "data": {"source": "stdlib", "seq_len": plan.seq_len, "batch_size": plan.batch_size},
        "run": {
            "steps": -(-steps // chosen.full_steps) * chosen.full_steps,
            "local_steps": own[0] if len(set(own)) == 1 else list(own),
            **({"adapt": True} if adapt and chosen.full_steps > 1 else {}),
            **({"weigh_steps": True} if weigh_steps and rule != "data_parallel" else {}),
        },
        "network": {"planned": to_options(plan.network)},
    }
    head = (
        f"# {chosen.method} with {chosen.full_steps} local steps, planned for {plan.parameters:,} parameters: "
        f"{chosen.round_bytes / 1e6:.4g} MB sent and {chosen.round_s:.4g} s a round, {chosen.utilisation:.1%} of it computing.\n"
    )
    return head + tomli_w.dumps(document)


PLAN_HEADINGS = ("method", "codec", "steps", "MB/round", "s/round", "computing", "h/1e9 tokens")
"""Of the columns of `plan_rows`."""


def plan_rows(plan: Plan) -> list[tuple[str, ...]]:
    """All candidates in words, for a table under `PLAN_HEADINGS`."""
    rows = []
    for one in plan.candidates:
        most, fewest = one.full_steps, min(one.local_steps)
        rows.append(
            (
                one.method,
                f"{one.codec}, {one.back} back" if one.back else one.codec,
                str(most) if fewest == most else f"{fewest}-{most}",
                f"{one.round_bytes / 1e6:.4g}",
                f"{one.round_s:.4g}",
                f"{one.utilisation:.1%}",
                f"{one.seconds_per_token * 1e9 / 3600:.4g}",
            )
        )
    return rows


def _rounds_of_means(network: Network, n: int, rounds: int) -> int:
    if not network.jitter and not network.changes:
        return 1
    return max(1, min(rounds, _LIMIT_MESSAGES // n**2))


def _trace(
    n: int,
    peers: int | None,
    payload_bytes: int,
    mean_bytes: int | None,
    steps: tuple[int, ...],
    rounds: int,
    seed: int,
) -> Trace:
    """What a run of so many rounds would leave; `mean_bytes` go through chunk owners there and back, if that is how it is."""
    if peers is not None:
        return from_targets(_gossip_targets(n, peers, rounds, seed), payload_bytes, steps)
    everyone = np.array([[j for j in range(n) if j != i] for i in range(n)])
    targets = np.broadcast_to(everyone, (rounds, *everyone.shape))
    if mean_bytes is not None:
        return from_targets(targets, round(mean_bytes / n), steps, kind="mean")
    return from_targets(targets, payload_bytes, steps)


def _gossip_targets(n: int, peers: int, rounds: int, seed: int) -> Integers:
    """Whom each worker sends to in the topology "random", `[rounds, n, peers]`; itself for nobody."""
    targets = np.tile(np.arange(n)[:, None], (rounds, 1, peers))
    for r in range(rounds):
        matchings = random_matchings(n, peers, seed, r).reshape(peers, -1, 2)
        for k, pairs in enumerate(matchings):
            targets[r, pairs[:, 0], k], targets[r, pairs[:, 1], k] = pairs[:, 1], pairs[:, 0]
    return targets
