"""Properties of gossip on a topology, as a table and as plain values, for `gossamer topology`."""

import math
from typing import Any

from gossamer.rounds.stability import Gossip, Outlook
from gossamer.topologies import Topology

_TAGS = ("static", "everyone", "tree", "symmetric", "doubly_stochastic", "psd", "exchangeable")


def gossip_table(topology: Topology, outlook: Outlook) -> str:
    """The properties of a topology, and the stability of gossip with momentum on it, as text.

    >>> from gossamer.rounds.stability import outlook
    >>> from gossamer.topologies import random
    >>> print(gossip_table(random(8), outlook(random(8), alpha=1.0, gamma=0.5)))
    symmetric, doubly stochastic, psd, exchangeable
    spectral gap of the mean round 0.5714, condition number of its Laplacian 1
    <BLANKLINE>
    momentum 0.5, gossip step 1     disagreement   steady     largest stable   best step for
                                    per round      variance   momentum         this momentum
    after mixing (site "post")      x 0.807        2.72       0.859            0.795
    before mixing (site "pre")      x 0.866        3.59       0.744            0.808
    of drifts (site "drift")        x 0.655        2.09       1.000            1.06
    without momentum                x 0.655        0.75                        1
    """
    facts = [tag.replace("_", " ") for tag in _TAGS if getattr(topology, tag)]
    if topology.period is not None and topology.period > 1:
        facts.append(f"repeats after {topology.period} rounds")
    if topology.exact_rounds:
        facts.append(f"exact after {topology.exact_rounds} round{'s' * (topology.exact_rounds > 1)}")
    if not outlook.gossip and topology.doubly_stochastic:
        gap = "" if outlook.spectral_gap is None else f"spectral gap {outlook.spectral_gap:.4g}\n\n"
        return f"{', '.join(facts)}\n{gap}too many workers to search for the momenta with which gossip on it stays together"
    if not outlook.gossip:
        why = "not doubly stochastic: gossip does not preserve the mean here; push rules such as 'sgp' do"
        return f"{', '.join(['column stochastic', *facts])}\n\n{why}"
    lines = [", ".join(facts)]
    if outlook.spectral_gap is not None:
        of, chi = "" if topology.static else " of the mean round", outlook.laplacian_condition
        condition = "" if chi is None else f", condition number of its Laplacian {chi:.4g}"
        lines.append(f"spectral gap{of} {outlook.spectral_gap:.4g}{condition}")
    after, before, drifts, without = outlook.gossip
    alpha, gamma, _ = after.consensus
    table = [
        (f"momentum {gamma:g}, gossip step {alpha:g}", "disagreement", "steady", "largest stable", "best step for"),
        ("", "per round", "variance", "momentum", "this momentum"),
        _row('after mixing (site "post")', after, _largest_momentum_text(after)),
        _row('before mixing (site "pre")', before, _largest_momentum_text(before)),
        _row('of drifts (site "drift")', drifts, _largest_momentum_text(drifts)),
        _row("without momentum", without, ""),
    ]
    return "\n".join([*lines, "", *(f"{a:<31} {b:<14} {c:<10} {d:<16} {e}" for a, b, c, d, e in table)])


def gossip_facts(topology: Topology, outlook: Outlook) -> dict[str, Any]:
    """The same as plain values: `gossip` is empty where gossip does not preserve the mean."""
    sites = ("after mixing", "before mixing", "of drifts", "without momentum")
    return {
        "tags": [tag for tag in _TAGS if getattr(topology, tag)],
        "period": topology.period,
        "exact_rounds": topology.exact_rounds,
        "spectral_gap": outlook.spectral_gap,
        "laplacian_condition": outlook.laplacian_condition,
        "gossip": {
            site: {
                "momentum": one.consensus.gamma,
                "gossip_step": one.consensus.alpha,
                "radius": one.stability.radius,
                "variance": one.stability.variance,
                "largest_momentum": one.largest_gamma,
                "best_gossip_step": one.best_alpha,
            }
            for site, one in zip(sites, outlook.gossip, strict=False)
        },
    }


def _row(title: str, gossip: Gossip, largest: str) -> tuple[str, ...]:
    radius, variance, _ = gossip.stability
    return title, f"x {radius:.3f}", f"{variance:.3g}", largest, f"{gossip.best_alpha:g}"


def _largest_momentum_text(gossip: Gossip) -> str:
    return "none" if math.isnan(gossip.largest_gamma) else f"{gossip.largest_gamma:.3f}"
