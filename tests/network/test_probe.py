"""The probe: over real processes on loopback, and what it makes of measurements."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from commands import run
from gossamer.cli import main
from gossamer.cli import probe as verb
from gossamer.errors import ConfigError, PeerError
from gossamer.models.sizes import ModelConfig
from gossamer.network.links import Route, StepOf, read_network
from gossamer.network.probe import Measured, network_of, probe
from gossamer.network.probe import _measured as measured
from gossamer.network.probe import _seconds as step_seconds


@pytest.mark.full
def test_three_workers_on_loopback_write_a_network_that_can_be_read(tmp_path: Path) -> None:
    out = tmp_path / "network.toml"
    limits = ["--max-bytes", 65536, "--test-s", 0.05]
    code, output = run(
        "probe", "--local", 3, "--out", out, *limits, "--set", "model.size=0.2m", "--set", "run.threads=1"
    )
    assert code == 0, output
    shown = re.search(
        r"links: ([\d.,]+)( to [\d.,]+)? Mbit/s up, [\d.,]+( to [\d.,]+)? Mbit/s down, latency [\d.]+", output
    )
    network = read_network(out)
    assert network.workers == 3 and isinstance(network.uplink_bps, tuple)
    assert shown is not None and float(shown[1].replace(",", "")) == pytest.approx(
        min(network.uplink_bps) / 1e6, rel=0.01
    )
    assert isinstance(network.step_s, tuple) and all(0 < step_s < 10 for step_s in network.step_s)
    assert network.step_of == StepOf(model=ModelConfig(size="0.2m"))
    code, output = run("plan", out, "--local-steps", 15, "--method", "gasloc")
    assert code == 0 and output.splitlines()[1].startswith("0.2m with a vocabulary of 256"), output
    code, output = run("plan", out)
    assert code == 0 and "measured with model" not in output, output
    code, output = run("plan", out, "--model", "1m", "--local-steps", 15, "--method", "gasloc")
    assert code == 0 and "measured with model 0.2m" in output and "probe again" in output, output
    assert run("plan", out, "--model", "1m", "--step-s", 0.5, "--method", "gasloc")[0] == 0
    for option in (network.uplink_bps, network.downlink_bps):
        assert isinstance(option, tuple) and all(1e5 < bandwidth_bps < 1e12 for bandwidth_bps in option)
    latencies = [route.latency_s for route in network.routes] or [network.latency_s]
    assert all(0 < latency_s < 5 for latency_s in latencies), latencies  # type: ignore[operator]
    code, output = run("probe", "--local", 3, "--out", out)
    assert code == 2 and "already exists" in output


def test_the_run_file_of_a_probe_is_for_as_many_workers_as_were_started(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("workers = 4\n")
    code, output = run("probe", tmp_path / "run.toml", "--local", 3, "--out", tmp_path / "network.toml")
    assert code == 2 and "3 workers were started but the run file has workers = 4" in output, output


@pytest.mark.parametrize("fact", [None, 0.0, -1.0, math.inf, "1.0", [1.0]])
def test_what_is_no_time_of_a_step_is_refused(fact: Any) -> None:
    with pytest.raises(PeerError, match="as the seconds of its inner step"):
        step_seconds(1, fact)


def test_a_probe_without_a_launcher_is_refused_with_the_command(tmp_path: Path) -> None:
    code, output = run("probe", "--out", tmp_path / "network.toml")
    assert code == 2 and "is not set" in output
    assert run("probe", "--local", 1, "--out", tmp_path / "network.toml")[0] == 2


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--max-bytes", "inf", "--max-bytes is inf but must be a whole number from 16384 to 1073741824"),
        ("--max-bytes", "nan", "--max-bytes is nan but must be"),
        ("--max-bytes", "16 kB", "--max-bytes is 16000 but must be"),
        ("--test-s", "0", "--test-s is 0.0 but must be a number above 0 and at most 60"),
        ("--test-s", "2 min", "--test-s is 120.0 but must be"),
    ],
)
def test_a_test_out_of_bounds_is_refused_before_any_worker_is_started(
    option: str,
    value: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = list[object]()
    monkeypatch.setattr(verb, "_started", lambda *some: started.append(some) or 0)
    assert main(["probe", "--local", "2", "--out", str(tmp_path / "network.toml"), option, value]) == 2
    assert words in capsys.readouterr().err and not started


def test_workers_that_are_all_alike_need_no_routes() -> None:
    network = network_of([{j: Measured(0.0101, 1.2345e8) for j in range(4) if j != i} for i in range(4)])
    assert network.uplink_bps == network.downlink_bps == (1.23e8,) * 4
    assert network.latency_s == 0.0101
    assert not network.routes and not network.sites


def test_a_slow_uplink_is_the_worker_s_and_not_that_of_its_routes() -> None:
    network = network_of([{j: Measured(0.01, 1e7 if i == 2 else 1e8) for j in range(3) if j != i} for i in range(3)])
    assert network.uplink_bps == (1e8, 1e8, 1e7)
    assert network.downlink_bps == (1e8, 1e8, 1e8)
    assert not network.routes


def test_latencies_that_differ_become_routes_between_sites_of_one_worker() -> None:
    far = {(0, 2), (2, 0), (1, 2), (2, 1)}
    network = network_of(
        [{j: Measured(0.1 if (i, j) in far else 0.001, 1e8) for j in range(3) if j != i} for i in range(3)]
    )
    assert network.latency_s == 0
    assert [site.workers for site in network.sites.values()] == [(0,), (1,), (2,)]
    assert network.routes[1] == Route(between=("worker-0", "worker-2"), latency_s=0.1)


def test_a_pair_that_is_slow_both_ways_has_a_separate_bottleneck() -> None:
    network = network_of(
        [{j: Measured(0.01, 2e6 if {i, j} == {0, 1} else 1e8) for j in range(4) if j != i} for i in range(4)]
    )
    assert network.uplink_bps == (1e8,) * 4
    assert [route.bandwidth_bps for route in network.routes] == [2e6, *[math.inf] * 5]


def test_routes_are_left_out_where_not_all_pairs_met() -> None:
    ring = [{j % 4: Measured(0.1 * (1 + i), 1e8) for j in (i - 1, i + 1)} for i in range(4)]
    assert not network_of(ring).routes


@pytest.mark.parametrize("fact", [None, {}, {"x": [1.0, 1.0]}, {"3": [1.0, 1.0]}, {"1": [1.0]}, {"1": [0.0, 1.0]}])
def test_what_is_no_measurement_is_refused(fact: Any) -> None:
    with pytest.raises(PeerError, match="as its measurements"):
        measured(0, fact, 3)


@pytest.mark.parametrize(
    ("options", "words"), [({"max_bytes": 1}, "max_bytes is 1 but"), ({"test_s": 0.0}, "test_s is 0.0 but")]
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        probe(**options)
