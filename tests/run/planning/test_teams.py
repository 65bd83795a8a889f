"""Who takes part in a plan: all, some, the workers of one site, or one machine alone, to which a plan never prefers less."""

import json
import math
import random
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossamer.cli import main
from gossamer.cli.printed_plan import team_in_words
from gossamer.errors import ConfigError
from gossamer.models.sizes import ModelConfig
from gossamer.network.links import Change, Network, Route, Site, links_of, to_toml
from gossamer.run.config.resolve import run_faults
from gossamer.run.config.run_file import parse
from gossamer.run.planning.candidates import price_recipes
from gossamer.run.planning.check import examine_run
from gossamer.run.planning.choice import ALONE, SITE_ALONE, Candidate
from gossamer.run.planning.plan import PlanSettings, RunPlan, bits_per_parameter, plan
from gossamer.run.planning.planned_run_file import run_toml
from gossamer.run.planning.teams import network_without, sites_apart, slow_teams

BITS = bits_per_parameter(["bf16", "int8", "fp4"], 85_347_072)
SITES = {"here": Site(workers=(0, 1, 2, 3)), "there": Site(workers=(4, 5, 6, 7))}
FAST_INSIDE = Network(
    uplink_bps=10e9,
    downlink_bps=10e9,
    latency_s=0.0005,
    step_s=0.5,
    sites=SITES,
    routes=(Route(between=("here", "there"), latency_s=0.03, bandwidth_bps=1e6),),
)
SLOWER_TOGETHER = {
    "two workers and a modem": Network(uplink_bps=(1e5, 1e5), downlink_bps=1e5, latency_s=0.5, step_s=0.5),
    "eight workers and modems": Network(uplink_bps=(1e4,) * 8, downlink_bps=1e4, latency_s=0.05, step_s=0.5),
    "a fast box and two laptops": Network(
        uplink_bps=(50e6, 20e6, 20e6), downlink_bps=(50e6, 20e6, 20e6), latency_s=0.02, step_s=(0.2, 2.0, 4.0)
    ),
    "four workers whose packets are lost": Network(
        uplink_bps=(50e6,) * 4, downlink_bps=50e6, latency_s=0.08, loss=0.02, step_s=0.5
    ),
    "two sites and a thin route": FAST_INSIDE,
}


def made(network: Network, size: str = "134m", **options: Any) -> RunPlan:
    return plan(network, ModelConfig(size=size), PlanSettings(**{"codecs": BITS, **options}))


def named(found: RunPlan, method: str) -> list[Candidate]:
    return [one for one in found.candidates if one.method == method]


def is_no_worse_than_alone(found: RunPlan) -> bool:
    """Whether nobody alone has the tokens more than 1 % sooner at an expected loss that is as low, or lower."""
    best, scale = found.best, found.choice.scale

    def nats(one: Candidate) -> float:
        own = one.penalty(scale)
        assert own is not None
        return own.nats

    return not any(
        1.01 * one.seconds_per_token < best.seconds_per_token and nats(one) <= nats(best) + 1e-12
        for method in (ALONE, SITE_ALONE)
        for one in named(found, method)
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("network", SLOWER_TOGETHER.values(), ids=SLOWER_TOGETHER)
def test_where_workers_are_slower_together_one_machine_or_site_is_taken_alone(network: Network) -> None:
    found = made(network, local_steps=(30, 480))
    assert is_no_worse_than_alone(found)
    step_s = min(network.step_s) if isinstance(network.step_s, tuple) else network.step_s
    alone = min(named(found, ALONE), key=lambda one: one.seconds_per_token)
    assert step_s is not None and alone.seconds_per_token == pytest.approx(step_s / 1024)
    if network is FAST_INSIDE:
        assert found.choice.hours < found.choice.hours_of(alone) and len(found.best.left_out) == 4
    else:
        assert found.best == alone and found.choice.hours == pytest.approx(20 * found.parameters * step_s / 1024 / 3600)


def drawn(seed: int) -> Network:
    """A network of up to six workers, of any speeds and links, in sites or not."""
    draw = random.Random(seed)
    n = draw.randint(1, 6)

    def some(low: float, high: float) -> Any:
        values = tuple(math.exp(draw.uniform(math.log(low), math.log(high))) for _ in range(n))
        return values if draw.random() < 0.5 else values[0]

    network = Network(
        uplink_bps=(*[math.exp(draw.uniform(math.log(1e4), math.log(1e11)))] * n,),
        downlink_bps=some(1e5, 1e11),
        latency_s=some(1e-4, 0.3),
        step_s=some(0.02, 5.0),
        loss=draw.choice((0.0, 0.0, 0.01)),
    )
    network = replace(network, uplink_bps=some(1e4, 1e11)) if draw.random() < 0.5 else network
    if n > 2 and draw.random() < 0.4:
        cut = draw.randint(1, n - 1)
        sites = {"a": Site(workers=tuple(range(cut))), "b": Site(workers=tuple(range(cut, n)))}
        between = Route(between=("a", "b"), latency_s=0.02, bandwidth_bps=math.exp(draw.uniform(10, 22)))
        network = replace(network, sites=sites, routes=(between,))
    return network


def test_a_choice_is_never_later_than_a_machine_or_a_site_alone_at_a_loss_that_is_no_lower() -> None:
    for seed in range(1000):
        network = drawn(seed)
        n = network.workers or 1
        found = made(
            network, workers=n, local_steps=(30, 480), codecs={"bf16": 16.0, "fp4": BITS["fp4"]}, rounds=1, seed=seed
        )
        assert is_no_worse_than_alone(found), (seed, found.best)
        assert len(named(found, ALONE)) == len({*links_of(network, n).step_s.tolist()}), seed  # pyright: ignore


def test_each_kind_of_machine_and_each_site_alone_are_rows_and_written_as_runs_of_theirs() -> None:
    network = replace(FAST_INSIDE, step_s=(0.5, 0.4, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0))
    found = made(network, "0.2m", local_steps=(30,))
    assert [(one.left_out.count(1), one.round_s) for one in named(found, ALONE)] == [(0, 0.4), (1, 0.5), (1, 1.0)]
    assert {one.left_out for one in named(found, SITE_ALONE)} == {(4, 5, 6, 7), (0, 1, 2, 3)}
    for one in (*named(found, ALONE), *named(found, SITE_ALONE)):
        assert one.name == one.method and one.local_steps == (1,) * (8 - len(one.left_out))
        document = tomllib.loads(run_toml(found, one))
        assert document["rule"] == {"name": "data_parallel"} and not run_faults(parse(document))
        own = document["network"]["planned"]
        assert document["workers"] == len(one.local_steps) and "sites" not in own and "routes" not in own
    slower = max(named(found, SITE_ALONE), key=lambda one: one.round_s)
    assert team_in_words(slower) == " on workers 4, 5, 6, 7", "also where fewer are left out than stay:"
    assert team_in_words(slower._replace(left_out=(0,))) == " on workers 1, 2, 3, 4"
    assert tomllib.loads(run_toml(found, slower))["network"]["planned"]["step_s"] == [1.0] * 4


def test_a_plan_for_one_worker_is_that_machine_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "one.toml").write_text("uplink_bps = 1e7\ndownlink_bps = 1e7\nstep_s = 0.5\n")
    words = ["plan", str(file), "--workers", "1", "--model", "0.2m", "--out", str(tmp_path / "run.toml"), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["method"] == "one machine alone" and found["chosen"]["loss"]["nats"] == 0
    assert found["hours"] == pytest.approx(20 * found["parameters"] * 0.5 / 1024 / 3600)
    assert [one["method"] for one in found["candidates"]] == ["one machine alone"]
    assert parse(tomllib.loads((tmp_path / "run.toml").read_text())).workers == 1
    with pytest.raises(ConfigError, match=r"step_s of worker 0 is 0\.0 but must be above 0"):
        made(Network(uplink_bps=1e7, downlink_bps=1e7, step_s=0.0), "0.2m", workers=1)
    assert main([*words[:6], "--method", "diloco"]) == 2
    assert "--method got 'diloco' but one worker exchanges nothing; leave --method out" in capsys.readouterr().err
    assert main(words[:6]) == 0
    printed = capsys.readouterr().out
    assert not [words for words in ("--method", "no price", "how methods differ") if words in printed]
    assert main([*words[:6], "--race", "1"]) == 2
    assert "--race has only one candidate, one machine alone, as nothing else is near it" in capsys.readouterr().err
    assert not price_recipes(made(Network(uplink_bps=1e7, downlink_bps=1e7, step_s=1.0), "0.2m", workers=1)).candidates


@pytest.mark.full
def test_with_everybody_the_machine_alone_is_shown_and_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "slow.toml").write_text(to_toml(SLOWER_TOGETHER["two workers and a modem"]))
    assert main(["plan", str(file), "--model", "10m", "--keep-all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    alone = [one for one in found["candidates"] if one["method"] == "one machine alone"]
    assert found["chosen"]["left_out"] == [] and len(alone) == 1 and alone[0]["hours"] < found["hours"]


def test_workers_may_be_dropped_down_to_one_and_so_may_sites() -> None:
    half = Network(uplink_bps=(*[25e6] * 4, *[2.5e6] * 4), downlink_bps=25e6, step_s=0.5)
    assert (4, 5, 6, 7) in slow_teams(half, 8, 192_960)
    assert slow_teams(FAST_INSIDE, 8, 192_960) == [(4, 5, 6, 7)]
    three = replace(
        FAST_INSIDE,
        sites={"a": Site(workers=(0, 1)), "b": Site(workers=(2, 3)), "c": Site(workers=(4, 5, 6, 7), uplink_bps=1e5)},
        routes=(),
    )
    assert {(4, 5, 6, 7), (2, 3, 4, 5, 6, 7)} <= {*slow_teams(three, 8, 192_960)}
    slow_in_a_site = replace(FAST_INSIDE, step_s=(*[0.5] * 3, 50.0, *[0.5] * 4))
    assert (3,) in slow_teams(slow_in_a_site, 8, 192_960)


def test_sites_of_other_sizes_are_left_out_in_both_orders_and_each_of_few_alone() -> None:
    """A large site has less for each worker, and a small one less in all; sites of one kind are not tried twice."""
    large, thin, small = tuple(range(8)), (8, 9), (10, 11)
    links = {"large": (large, 8e7), "thin": (thin, 3e7), "small": (small, 4e7)}
    sites = {name: Site(workers=workers, uplink_bps=bps, downlink_bps=bps) for name, (workers, bps) in links.items()}
    network = Network(uplink_bps=1e10, downlink_bps=1e10, step_s=0.5, sites=sites)
    assert {large, thin, small, (*thin, *small), (*large, *thin)} <= {*slow_teams(network, 12, 192_960)}
    alike = {name: replace(sites["small"], workers=(2 * k, 2 * k + 1)) for k, name in enumerate("abc")}
    assert slow_teams(replace(network, sites=alike), 6, 192_960) == [(2, 3, 4, 5), (4, 5)]


def test_methods_are_tried_within_each_site_of_a_kind() -> None:
    inside = {"uplink_bps": 25e9, "downlink_bps": 25e9, "step_s": 0.3}
    thin = (Route(between=("large", "small"), latency_s=0.02, bandwidth_bps=30e6),)
    sites = {"large": Site(workers=(0, 1, 2, 3, 4, 5)), "small": Site(workers=(6, 7))}
    found = made(Network(**inside, sites=sites, routes=thin), "134m", local_steps=(15,))
    assert {(6, 7), (0, 1, 2, 3, 4, 5)} <= {one.left_out for one in found.candidates if one.method == "DiLoCo"}
    alike = {one.left_out for one in made(FAST_INSIDE, local_steps=(15,)).candidates if one.method == "DiLoCo"}
    assert alike == {(), (4, 5, 6, 7)}, "both sites are of one kind"


def test_of_a_network_without_some_workers_sites_routes_and_changes_are_those_of_the_others() -> None:
    network = replace(
        FAST_INSIDE,
        step_s=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
        changes=(Change(at_s=5, factor=0.5, worker=1), Change(at_s=6, factor=0.5, site="there")),
    )
    fewer = network_without(network, 8, (1, 4))
    assert fewer.sites == {"here": Site(workers=(0, 1, 2)), "there": Site(workers=(3, 4, 5))}
    assert fewer.step_s == (1.0, 3.0, 4.0, 6.0, 7.0, 8.0) and fewer.routes == network.routes
    assert fewer.changes == network.changes[1:]
    one_site = network_without(network, 8, (4, 5, 6, 7))
    assert not one_site.sites and not one_site.routes and one_site.changes == network.changes[:1]


@pytest.mark.full
def test_sites_as_single_workers_are_expected_as_they_are_when_written_so_with_less_doubt() -> None:
    network = replace(FAST_INSIDE, routes=(Route(between=("here", "there"), latency_s=0.03, bandwidth_bps=1e8),))
    found = made(network, local_steps=(120, 480))
    ours = [one for one in found.candidates if one.site > 1]
    assert {one.name for one in ours} == {"DiLoCo of sites", "GASLoC 1-Peer of sites"}
    written = Network(
        uplink_bps=(40e9, 40e9),
        downlink_bps=40e9,
        latency_s=0.0005,
        step_s=0.5,
        sites={"here": Site(workers=(0,)), "there": Site(workers=(1,))},
        routes=network.routes,
    )
    as_two = made(written, local_steps=(120, 480), batch_size=32, rounds=64)
    for one in ours:
        (other,) = [
            two
            for two in as_two.candidates
            if (two.method, two.codec, two.local_steps) == (one.method, one.codec, one.local_steps)
        ]
        assert one._replace(site=1) == other
    flat = [one for one in found.candidates if one.name == "DiLoCo" and one.full_steps == 480 and one.codec == "fp4"]
    best = min((one for one in ours if one.method == "DiLoCo"), key=lambda one: found.choice.hours_of(one))
    apart, of_sites = found.choice.loss(flat[0]), found.choice.loss(best)
    assert apart and of_sites and of_sites.half < 0.5 * apart.half and of_sites.nats <= apart.nats


def test_the_run_file_of_sites_as_workers_has_their_batches_and_links_and_its_check_their_seconds() -> None:
    found = made(replace(FAST_INSIDE, step_s=(0.5,) * 4 + (0.7,) * 4), "0.2m", local_steps=(30,), tokens=1e8)
    one = next(one for one in found.candidates if one.name == "DiLoCo of sites" and one.codec == "bf16")
    text = run_toml(found, one)
    run = parse(tomllib.loads(text))
    assert run.workers == 2 and run.data.accumulate == 4 and "gossamer train --shards 4" in text
    examined = examine_run(run)
    assert examined.networks[0].round_s == pytest.approx(one.round_s, rel=1e-6)
    assert examined.tokens == pytest.approx(1e8, rel=0.01), "of all processes together"
    for other in found.candidates:
        if other.site > 1:
            file = parse(tomllib.loads(text := run_toml(found, other)))
            refused = bool(run_faults(replace(file, run=replace(file.run, shards=other.site)), real=True))
            assert ("gossamer.Outer(site=...)" in text) is refused, f"{other.name}, {other.codec}"
    mixed = replace(FAST_INSIDE, sites={"a": Site(workers=(0, 1, 2)), "b": Site(workers=(3, 4, 5, 6, 7))}, routes=())
    assert all(one.site == 1 for one in made(mixed, "0.2m", local_steps=(30,)).candidates), "a batch is one number"


def test_sites_that_are_not_priced_as_one_worker_each_are_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=0.5)
    words = ["plan", str(tmp_path / "net.toml"), "--model", "0.2m", "--local-steps", "30", "--codec", "bf16"]
    for sizes, part in (
        ((2, 1), "sites of unlike size (2 and 1 workers) are not priced as one worker each"),
        ((2, 2), ""),
    ):
        workers = [tuple(range(start, start + size)) for start, size in zip((0, 2), sizes, strict=True)]
        sites = {name: Site(workers=some) for name, some in zip("ab", workers, strict=True)}
        (tmp_path / "net.toml").write_text(to_toml(replace(fast, sites=sites)))
        assert main([*words, "--method", "diloco"]) == 0
        output = " ".join(capsys.readouterr().out.split())
        assert part in output and ("are not priced" in output) is bool(part)
    changing = replace(FAST_INSIDE, changes=(Change(at_s=5, factor=0.5, worker=1),))
    assert "[[changes]]" in sites_apart(changing) and not sites_apart(FAST_INSIDE)
    several = {"a": Site(workers=(0,)), "b": Site(workers=(1, 2, 3)), "c": Site(workers=(4, 5))}
    assert "(1 to 3 workers)" in sites_apart(replace(fast, sites=several))
    assert not sites_apart(replace(fast, sites={name: Site(workers=(k,)) for k, name in enumerate("abc")}))


def test_fast_groups_of_a_probed_network_are_planned_as_named_sites_are() -> None:
    """A probe writes each worker as a site, and each pair as a route."""
    near = (0, 2, 4, 6)
    probed = Network(
        uplink_bps=1e9,
        downlink_bps=1e9,
        latency_s=0.0,
        step_s=0.5,
        sites={f"worker-{i}": Site(workers=(i,)) for i in range(8)},
        routes=tuple(
            Route(
                between=(f"worker-{i}", f"worker-{j}"),
                latency_s=0.0005 if (i in near) == (j in near) else 0.03,
                bandwidth_bps=math.inf if (i in near) == (j in near) else 2e7,
            )
            for i in range(8)
            for j in range(i + 1, 8)
        ),
    )
    options = {"codecs": {"exact": 32.0, "bf16": 16.0}, "local_steps": (30, 120), "rounds": 4}
    found = made(probed, "1m", **options)
    assert {one.left_out for one in named(found, SITE_ALONE)} == {near, (1, 3, 5, 7)}
    ours = [one for one in found.candidates if one.site == 4]
    assert {one.name for one in ours} == {"DiLoCo of sites", "GASLoC 1-Peer of sites"}
    written = replace(
        probed,
        sites={"worker-0": Site(workers=near), "worker-1": Site(workers=(1, 3, 5, 7))},
        routes=(Route(between=("worker-0", "worker-1"), latency_s=0.03, bandwidth_bps=4 * 2e7),),
        latency_s=0.0005,
    )
    by_hand = {
        (one.name, one.codec, one.full_steps): one for one in made(written, "1m", **options).candidates if one.site == 4
    }
    for one in ours:
        assert one.round_s == pytest.approx(by_hand[one.name, one.codec, one.full_steps].round_s, rel=0.01)
    document = tomllib.loads(run_toml(found, ours[0]))
    assert document["workers"] == 2 and set(document["network"]["planned"]["sites"]) == {"worker-0", "worker-1"}
    assert run_faults(parse(document)) == []
    slower = replace(probed, routes=tuple(replace(one, bandwidth_bps=2e8) for one in probed.routes))
    assert not [one for one in made(slower, "1m", **options).candidates if one.site > 1], "all pairs are alike"
