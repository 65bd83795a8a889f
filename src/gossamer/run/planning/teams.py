"""The workers that take part in a plan: all, those that are left without slow ones, the workers of a site, or one machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from gossamer.network.links import Change, Floats, Links, Network, Route, Site, links_of
from gossamer.network.pacing import uplinks_bps

MOST_COUNTED = 64
"""Workers of whom not only the best set to leave out is tried, but smaller ones, and those of whole sites."""
_FEW_SHARING = 8
"""The same where links are shared, as every message of each candidate is then replayed."""
_FEW_SITES = 4
"""Sites each of which is left out alone; of more only the slowest ones, as a plan of many sites takes minutes."""
_STEPS = (1, 30, 480)
"""Inner steps of the rounds by which slow workers are identified."""
_INSTANT_S = 1e-12
FASTER = 8
"""How many times as fast pairs of workers in a fast group are as those of two groups, at least."""


def slow_teams(network: Network, n: int, parameters: int) -> list[tuple[int, ...]]:
    """Sets of workers that hold all others up: without them the others read more text in a second than all do, in like rounds.

    A round is some inner steps and one model sent in fp32. Who is slow depends on how many steps these are: with one the links
    count, with many the steps. Beside the set without which most is read, where it has several workers, come those with fewer of
    them, as the rest may take fewer local steps. Two workers at least stay; each of them alone is a candidate anyhow.
    Where there are sites, those with the slowest links to others are left out as a whole too, down to one of several workers.
    No worker is left out where stages have links.

    >>> slow = Network(uplink_bps=(25e6, 25e6, 25e6, 2.5e6), downlink_bps=25e6, step_s=(0.5, 0.5, 0.5, 1.0))
    >>> slow_teams(slow, 4, 192_960)
    [(3,)]
    """
    if network.stages or n < 3:
        return []
    links, teams = links_of(network, n), set[tuple[int, ...]]()
    assert links.step_s is not None
    rates_bps = np.minimum(uplinks_bps(links), links.downlink_bps)
    sent_s = links.latency_s + 8 * 4 * parameters / rates_bps
    staying = np.arange(n, 1, -1)
    for steps in _STEPS:
        seconds = steps * links.step_s + sent_s
        order = np.argsort(-seconds, kind="stable")
        most = int(np.argmax(staying / np.maximum(seconds[order[: len(staying)]], _INSTANT_S)))
        several = n <= (_FEW_SHARING if network.shares else MOST_COUNTED)
        counts = {1, (most + 1) // 2, most} if most > 0 and several else {most}
        teams |= {tuple(sorted(map(int, order[:count]))) for count in counts}
    if n <= MOST_COUNTED:
        teams |= set(_without_sites(network, n, links))
    return sorted(teams - {()})


def _without_sites(network: Network, n: int, links: Links) -> Iterator[tuple[int, ...]]:
    """Sets of whole sites: those with the slowest links for each worker first, and those with the slowest links whatever their
    size; of equally fast ones the later first. Of few sites also each one.

    Those that leave the same sizes and links behind are tried once.
    """
    sites, known = [*network.sites.values()], list[_Kind]()

    def rate_bps(site: int) -> float:
        others = [links.route_bps[site, other] for other in range(len(sites)) if other != site]
        return min(float(links.site_uplink_bps[site]), float(links.site_downlink_bps[site]), max(others))

    def each_bps(site: int) -> float:
        return min(rate_bps(site) / len(sites[site].workers), _fastest_bps(links, site))

    def whole_bps(site: int) -> float:
        return min(rate_bps(site), len(sites[site].workers) * _fastest_bps(links, site))

    if len(sites) < 2:
        return
    orders = [sorted(range(len(sites)), key=lambda site, bps=bps: (bps(site), -site)) for bps in (each_bps, whole_bps)]
    some = [order[:count] for order in orders for count in range(1, len(sites))]
    some += [[site] for site in orders[0] if len(sites) <= _FEW_SITES]
    for gone in some:
        left_out = tuple(sorted(i for site in gone for i in sites[site].workers))
        if n - len(left_out) > 1 and (kind := kind_of(network, n, left_out)) not in known:
            known.append(kind)
            yield left_out


_Kind = tuple[Network, tuple[Site, ...], frozenset[Any], tuple[Any, ...], int]


def kind_of(network: Network, n: int, left_out: Sequence[int]) -> _Kind:
    """What the price of a team depends on: its network but for the names of its sites."""
    team = network_without(network, n, left_out)
    place = {name: k for k, name in enumerate(team.sites)}
    routes = frozenset(
        (frozenset(place[end] for end in one.between), one.latency_s, one.bandwidth_bps, one.loss)
        for one in team.routes
    )
    changes = tuple((one.at_s, one.factor, one.worker, place.get(one.site or "")) for one in team.changes)
    unnamed = replace(team, sites={}, routes=(), changes=())
    return unnamed, tuple(team.sites.values()), routes, changes, n - len(left_out)


def _fastest_bps(links: Links, site: int) -> float:
    return float(links.uplink_bps[links.site == site].max())


def site_teams(network: Network, n: int) -> list[tuple[int, ...]]:
    """For each site with several workers, all others, to be left out; none where there is but one site."""
    some = [workers for workers in places_of(network).values() if 1 < len(workers) < n]
    return [tuple(i for i in range(n) if i not in {*workers}) for workers in some]


def places_of(network: Network) -> Mapping[str, tuple[int, ...]]:
    """The workers of each site. Where each site is one worker, as `gossamer probe` writes them, those of each fast group.

    The slowest pair of a group is `FASTER` times as fast as the fastest pair of two groups, both ways; a group has the name of
    its first site. Without routes nothing says who is near whom.

    >>> from gossamer.network.links import Route, Site
    >>> sites = {name: Site(workers=(i,)) for i, name in enumerate("abc")}
    >>> thin = [Route(between=("c", near), bandwidth_bps=1e7) for near in "ab"]
    >>> places_of(Network(uplink_bps=1e9, downlink_bps=1e9, sites=sites, routes=(Route(between=("a", "b")), *thin)))
    {'a': (0, 1), 'c': (2,)}
    """
    places = {name: site.workers for name, site in network.sites.items()}
    n = len(places)
    if not network.routes or any(len(workers) > 1 for workers in places.values()) or n > MOST_COUNTED:
        return places
    links = links_of(network, n)
    order = [int(links.site[i]) for i in range(n)]
    sends = np.minimum(links.uplink_bps, links.site_uplink_bps[order])
    receives = np.minimum(links.downlink_bps, links.site_downlink_bps[order])
    rates = np.minimum(np.minimum.outer(sends, receives), links.route_bps[np.ix_(order, order)])
    rates = np.minimum(rates, rates.T)
    group, apart = np.arange(n), ~np.eye(n, dtype=bool)
    for i, j in sorted(zip(*np.nonzero(np.triu(apart)), strict=True), key=lambda pair: -rates[pair]):
        if group[i] == group[j]:
            continue
        group[group == group[j]] = group[i]
        inside = group[:, None] == group
        if inside.all():
            break
        if rates[inside & apart].min() >= FASTER * rates[~inside].max():
            named = {w: name for name, (w,) in places.items()}
            members = [tuple(np.flatnonzero(group == one).tolist()) for one in dict.fromkeys(group.tolist())]
            return {named[workers[0]]: workers for workers in members}
    return places


def sites_as_workers(network: Network, step_s: Mapping[str, float]) -> Network | None:
    """The network on which each site is one worker, of these seconds a step; None where they cannot be (`sites_apart`), or have
    one worker.

    Its processes send a shard each, so a site sends and receives as fast as all its workers together. Fast groups of single
    workers count as sites (`places_of`); between two of them the slowest route counts, once for each shard.
    """
    places = places_of(network)
    named = places.keys() == network.sites.keys()
    if len(places) < 2 or {len(workers) for workers in places.values()} == {1} or sites_apart(network):
        return None
    links = links_of(network, sum(map(len, places.values())))

    def each(values: Floats, how: Callable[[Floats], Any]) -> tuple[float, ...]:
        return tuple(float(how(values[list(workers)])) for workers in places.values())

    sites, routes = {name: replace(network.sites[name], workers=(k,)) for k, name in enumerate(places)}, network.routes
    if not named:
        links = links._replace(
            uplink_bps=np.minimum(links.uplink_bps, links.site_uplink_bps[links.site]),
            downlink_bps=np.minimum(links.downlink_bps, links.site_downlink_bps[links.site]),
        )
        sites = {name: Site(workers=(k,)) for k, name in enumerate(places)}
        routes = tuple(_route(links, a, b, places) for a, b in combinations(places, 2))

    return replace(
        network,
        uplink_bps=each(links.uplink_bps, np.sum),
        downlink_bps=each(links.downlink_bps, np.sum),
        latency_s=each(links.latency_s, np.max),
        loss=each(links.loss, np.max),
        step_s=tuple(step_s[name] for name in places),
        sites=sites,
        routes=routes,
    )


def sites_apart(network: Network) -> str:
    """Why sites of several workers are not priced as one worker each; empty where they are, or there are none.

    >>> sites_apart(Network(uplink_bps=1e9, downlink_bps=1e9, sites={"a": Site(workers=(0, 1, 2)), "b": Site(workers=(3,))}))
    ... # doctest: +ELLIPSIS
    'sites of unlike size (3 and 1 workers) are not priced as one worker each, as ...'
    """
    places = places_of(network)
    sizes = [len(workers) for workers in places.values()]
    if len(sizes) < 2 or max(sizes) == 1:
        return ""
    if len({*sizes}) > 1:
        some = " and ".join(map(str, sizes)) if len(sizes) < 3 else f"{min(sizes)} to {max(sizes)}"
        return (
            f"sites of unlike size ({some} workers) are not priced as one worker each, as each process of a site exchanges its "
            "shard with one process of another; a network file with equally many workers in each site has such rows"
        )
    if network.changes and (
        places.keys() != network.sites.keys() or any(one.worker is not None for one in network.changes)
    ):
        return "sites are not priced as one worker each, as [[changes]] are of single workers of them"
    return ""


def _route(links: Links, a: str, b: str, places: Mapping[str, tuple[int, ...]]) -> Route:
    """The route between two groups, by the routes of their workers."""
    pairs = np.ix_(links.site[list(places[a])], links.site[list(places[b])])
    return Route(
        between=(a, b),
        latency_s=float(links.route_latency_s[pairs].max()),
        bandwidth_bps=float(len(places[a]) * links.route_bps[pairs].min()),
        loss=float(links.route_loss[pairs].max()),
    )


def machines(network: Network, n: int) -> list[tuple[int, float]]:
    """The first worker of each kind, and its seconds of an inner step, the fastest first; of many workers the fastest alone.

    >>> machines(Network(uplink_bps=1e9, downlink_bps=1e9, step_s=(1.0, 0.5, 1.0)), 3)
    [(1, 0.5), (0, 1.0)]
    """
    step_s = np.broadcast_to(np.asarray(network.step_s, float), n)
    kinds, first = np.unique(step_s, return_index=True)
    return list(zip(first.tolist(), kinds.tolist(), strict=True))[: None if n <= MOST_COUNTED else 1]


def network_without(network: Network, n: int, left_out: Sequence[int]) -> Network:
    """The network without some workers, the others renumbered; where a single site is left, nothing is shared."""
    if not left_out:
        return network
    gone = {*left_out}
    number = {i: k for k, i in enumerate(i for i in range(n) if i not in gone)}
    each = {
        name: tuple(value[i] for i in number)
        for name in ("uplink_bps", "downlink_bps", "latency_s", "loss", "step_s")
        if isinstance(value := getattr(network, name), tuple)
    }
    sites = {
        name: replace(site, workers=workers)
        for name, site in network.sites.items()
        if (workers := tuple(number[i] for i in site.workers if i in number))
    }
    if len(sites) < 2:
        sites = {}
    changes = (_renumbered(change, number) for change in network.changes)
    return replace(
        network,
        **each,
        sites=sites,
        routes=tuple(route for route in network.routes if all(name in sites for name in route.between)),
        changes=tuple(one for one in changes if one is not None and (one.site is None or one.site in sites)),
    )


def _renumbered(change: Change, number: dict[int, int]) -> Change | None:
    """A change with the new number of its worker; None where that is gone."""
    if change.worker is None:
        return change
    return replace(change, worker=number[change.worker]) if change.worker in number else None


def left_out_of(network: Network, n: int, of: Network, workers: int) -> tuple[int, ...] | None:
    """The workers of n that a smaller network leaves out, by their links; None where it is not a part of the network."""
    some, every = _rows(of, workers), iter(enumerate(_rows(network, n)))
    kept = [next((i for i, row in every if row == own), None) for own in some]
    return None if None in kept else tuple(i for i in range(n) if i not in kept)


def _rows(network: Network, n: int) -> list[tuple[float, ...]]:
    """The figures of the links of each worker."""
    links = links_of(network, n)
    return list(
        zip(
            *(each.tolist() for each in (links.uplink_bps, links.downlink_bps, links.latency_s, links.loss)),
            strict=True,
        )
    )
