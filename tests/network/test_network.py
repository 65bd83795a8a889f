"""Networks: what a file may say of links and workers, and what it may not."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.network.links import Change, Network, Route, Site, from_toml, links_of, read_network, to_toml

RATES, SECONDS = st.floats(1e3, 1e9), st.floats(0, 5)


@st.composite
def networks(draw: st.DrawFn, n: int) -> Network:
    """Any network of n workers."""

    def option(values: st.SearchStrategy[float]) -> float | tuple[float, ...]:
        return draw(st.one_of(values, st.lists(values, min_size=n, max_size=n).map(tuple)))

    cut = draw(st.integers(1, n - 1))
    sites = {"a": Site(workers=tuple(range(cut)), uplink_bps=draw(RATES)), "b": Site(workers=tuple(range(cut, n)))}
    return Network(
        uplink_bps=option(RATES),
        downlink_bps=option(RATES),
        latency_s=option(SECONDS),
        step_s=option(SECONDS),
        jitter=draw(st.floats(0, 0.5)),
        jitter_kind=draw(st.sampled_from(("lognormal", "uniform"))),
        seed=draw(st.integers(0, 99)),
        duplex=draw(st.sampled_from(("full", "half"))),
        mean=draw(st.sampled_from(("owners", "ring", "tree"))),
        sites=draw(st.sampled_from([{}, sites])),
    )


@settings(max_examples=50, deadline=None)
@given(networks(3))
def test_a_network_comes_back_from_its_toml(network: Network) -> None:
    assert from_toml(to_toml(network)) == network


def test_an_infinite_link_comes_back_from_its_toml() -> None:
    network = Network(uplink_bps=math.inf, downlink_bps=(1e9, math.inf))
    assert from_toml(to_toml(network)) == network


LINKS = "uplink_bps = 1e9\ndownlink_bps = 1e9\n"
SITES = "sites.a.workers = [0]\nsites.b.workers = [1]\nsites.c.workers = [2]\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("uplink_bps = 1e9", "'downlink_bps' is needed"),
        ("uplink_bps = 1e9\ndownlink_bps = 0", "downlink_bps is 0"),
        ("uplink_bps = nan\ndownlink_bps = 1e9", "uplink_bps is nan"),
        ("uplink_bps = true\ndownlink_bps = 1e9", "uplink_bps is True"),
        ("uplink_bps = [1e9, -1.0]\ndownlink_bps = 1e9", r"uplink_bps\[1\] is -1.0"),
        ("uplink_bps = '1 Gbit'\ndownlink_bps = 1e9", "uplink_bps is '1 Gbit'"),
        ("uplink_bps = 1" + "0" * 400 + "\ndownlink_bps = 1e9", "uplink_bps is 1000"),
        ("uplink_bps = 1e9\ndownlink_bps = 1e9\nlatency_s = -0.1", "latency_s is -0.1"),
        ("uplink_bps = 1e9\ndownlink_bps = 1e9\nstep_s = inf", "step_s is inf"),
        ("uplink_bps = 1e9\ndownlink_bps = 1e9\nlatency = 0.1", "did you mean 'latency_s'"),
        ("uplink_bps =", "not TOML"),
        (LINKS + "duplex = 'both'", "unknown duplex 'both'"),
        (LINKS + "mean = 'rign'", "did you mean 'ring'"),
        (LINKS + "jitter = 0.1", "jitter is 0.1 without step_s"),
        (LINKS + "step_s = 1\njitter = 0.6\njitter_kind = 'uniform'", "from 0 to 0.577"),
        (LINKS + "step_s = 1\njitter = true", "jitter is True"),
        (LINKS + "seed = -1", "seed is -1"),
        (LINKS + "sites = 3", "sites is 3 but must be tables"),
        (LINKS + "sites.a = 3", "sites.a is 3 but must be a table"),
        (LINKS + "[sites.a]", "'workers' is needed"),
        (LINKS + "[sites.a]\nworkers = 3", "sites.a.workers is 3"),
        (LINKS + "[sites.a]\nworkers = [0, 1.0]", r"sites.a.workers\[1\] is 1.0"),
        (LINKS + "[sites.a]\nworkers = [0, 2]", "not worker 1"),
        (LINKS + "[sites.a]\nworkers = [0, 0]", "worker 0 is in two sites, or twice"),
        (
            LINKS + "[sites.a]\nworkers = [0]\nuplink_bps = 0",
            "sites.a.uplink_bps is 0 but must be a number of bits per second from 1 to 1e18, or inf",
        ),
        (LINKS + "[sites.a]\nworkers = [0]\nuplink = 1e9", "did you mean 'uplink_bps'"),
        (LINKS + "routes = 3", "routes is 3 but must be tables"),
        (LINKS + SITES + "[[routes]]\nlatency_s = 1", "'between' is needed"),
        (LINKS + SITES + "[[routes]]\nbetween = ['a', 'd']", "unknown site in routes.between 'd'"),
        (LINKS + SITES + "[[routes]]\nbetween = ['a', 'a']", "must name two sites"),
        (LINKS + SITES + "[[routes]]\nbetween = ['a', 'b']\nlatency_s = -1", r"routes\[0\].latency_s is -1"),
        (LINKS + SITES + "[[routes]]\nbetween = ['a', 'b']", "none between a and c"),
        (LINKS + SITES + "[[routes]]\nbetween = ['a', 'b']\n[[routes]]\nbetween = ['b', 'a']", "two routes"),
        (LINKS + "[[changes]]\nat_s = 1\nfactor = 0\nworker = 0", r"changes\[0\].factor is 0"),
        (LINKS + "[[changes]]\nat_s = 1\nfactor = 0.1", "must name one of the two"),
        (
            LINKS + "[[changes]]\nat_s = 1\nfactor = 0.1\nsite = 'x'",
            "changes names the site 'x' and the network has no sites",
        ),
        (LINKS + "[[changes]]\nat_s = 1\nfactor = 0.1\nworker = -1", r"changes\[0\].worker is -1"),
        (
            LINKS + SITES + "[[changes]]\nat_s = 1\nfactor = 0.1\nsite = {a = 1}",
            r"changes\[0\].site is {'a': 1} but must be text",
        ),
        (
            LINKS + SITES + "[[routes]]\nbetween = [{a = 1}, 'b']",
            r"between is {'a': 1} but must be a list of the names of two sites",
        ),
        (
            LINKS + SITES + "[[routes]]\nbetween = [['a'], 'b']",
            r"between is \['a'\] but must be a list of the names of two sites",
        ),
        ("uplink_bps = []\ndownlink_bps = 1e9", "uplink_bps is an empty list"),
        (LINKS + "step_s = []", "step_s is an empty list"),
    ],
)
def test_a_network_that_cannot_be_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_toml(text)


def test_a_network_file_is_read_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wan.toml").write_text("uplink_bps = 1e8\ndownlink_bps = 1e9\nlatency_s = 0.05\n")
    assert read_network(tmp_path / "wan.toml") == Network(uplink_bps=1e8, downlink_bps=1e9, latency_s=0.05)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_network(tmp_path / "lan.toml")


def test_the_documented_file_is_a_network() -> None:
    import gossamer.network.links

    _, _, example = (gossamer.network.links.__doc__ or "").partition("\n\n")
    network = from_toml(example.rpartition("\n\n")[0])
    assert network.workers == 3
    assert network.sites["paris"] == Site(workers=(0, 1), uplink_bps=2e8, downlink_bps=2e8)
    assert network.routes == (Route(between=("paris", "tokyo"), latency_s=0.12, bandwidth_bps=1e8, loss=0.001),)
    assert network.changes == (Change(at_s=3600, factor=0.1, worker=2),)
    assert from_toml(to_toml(network)) == network


def test_a_network_knows_how_many_workers_it_describes() -> None:
    assert Network(uplink_bps=1e9, downlink_bps=1e9).workers is None
    assert Network(uplink_bps=1e9, downlink_bps=1e9, step_s=(1, 2)).workers == 2
    assert Network(uplink_bps=1e9, downlink_bps=1e9, sites={"a": Site(workers=(1, 0, 2))}).workers == 3


def test_sites_and_changes_of_other_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="the sites have 1 workers but the run has 2"):
        links_of(Network(uplink_bps=1e9, downlink_bps=1e9, sites={"a": Site(workers=(0,))}), 2)
    late = Network(uplink_bps=1e9, downlink_bps=1e9, changes=(Change(at_s=1, factor=0.5, worker=2),))
    with pytest.raises(ConfigError, match="names worker 2 but the run has 2"):
        links_of(late, 2)
