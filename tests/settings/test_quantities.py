"""A number of a file or an option may be written with its unit; another unit, or a digit too few, gets a sentence."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.cli import main
from gossamer.errors import ConfigError
from gossamer.network.links import Network, read_network
from gossamer.run.config.document import parse_overrides
from gossamer.run.config.run_file import LoopSettings
from gossamer.settings import quantities
from gossamer.settings.quantities import BITS_PER_SECOND, BYTES, SECONDS, TOKENS, Unit

UNITS = [one for one in vars(quantities).values() if isinstance(one, Unit)]
SLOW = 'uplink_bps = {}\ndownlink_bps = "1 Gbit/s"\nlatency_s = ["20 ms", 0.5]\nstep_s = "0.5 min"\n'


@given(unit=st.sampled_from(UNITS), data=st.data(), number=st.floats(1e-3, 1e9))
def test_a_number_with_a_unit_is_so_many_of_the_units_own(unit: Unit, data: st.DataObject, number: float) -> None:
    name, space = data.draw(st.sampled_from(sorted(unit.factors))), data.draw(st.sampled_from(["", " "]))
    assert unit.number(f"{number!r}{space}{name}") == number * unit.factors[name]
    assert unit.number(repr(number)) == number
    assert unit.number(unit.example) > 0


@pytest.mark.parametrize(
    "text", ["", "Mbit/s", "2,5 Mbit/s", "25 mbit/s", "25 MB/s", "1e", "0x10", "--1", "1 2", "1 Mbit/s s"]
)
def test_other_text_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is no number with one of the units"):
        BITS_PER_SECOND.number(text)


def test_a_network_file_takes_units_and_is_the_one_of_plain_numbers(tmp_path: Path) -> None:
    path = tmp_path / "network.toml"
    path.write_text(SLOW.format('"25 Mbit/s"'))
    assert read_network(path) == Network(uplink_bps=25e6, downlink_bps=1e9, latency_s=(0.02, 0.5), step_s=30.0)
    path.write_text(SLOW.format('"25 Mbyte"'))
    with pytest.raises(ConfigError, match=r"uplink_bps is '25 Mbyte' but must be .*, or with its unit as '25 Mbit/s'"):
        read_network(path)


def test_keys_of_a_run_file_take_units() -> None:
    written = parse_overrides(["timeout_s=5 min", "tokens=1.5M", "pace_s='20 ms'"])
    settings = LoopSettings(**written)
    assert (settings.timeout_s, settings.tokens, settings.pace_s) == (300.0, 1_500_000, 0.02)
    assert settings == LoopSettings(timeout_s=300.0, tokens=1_500_000, pace_s=0.02)
    with pytest.raises(ConfigError, match=r"with its unit as '1\.7B'"):
        LoopSettings(tokens="1.5 parsecs")  # type: ignore[arg-type]


@pytest.mark.full
def test_options_of_a_plan_take_units_and_slow_links_and_long_plans_are_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "network.toml"
    path.write_text(SLOW.format("25.0"))
    words = ["plan", str(path), "--local-steps", "15", "--codec", "bf16"]
    assert main([*words, "--tokens", "1.5B"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("uplink_bps of the network is 25 bit/s; Mbit/s are written as uplink_bps = '25 Mbit/s'")
    assert "years; plan for fewer --tokens" in shown
    path.write_text(SLOW.format('"25 Mbit/s"'))
    hours = []
    for given_hours in ("2 d", "48"):
        assert main([*words, "--hours", given_hours, "--json"]) == 0
        hours.append(json.loads(capsys.readouterr().out)["hours"])
    assert hours == [48.0, 48.0]
    assert main([*words, "--hours", "2 days"]) == 2
    assert "'2 days' is no number with one of the units min, h, d; write it as '2 d'" in capsys.readouterr().err


def test_bytes_are_decimal_or_binary_as_written() -> None:
    assert (BYTES.number("1 kB"), BYTES.number("1 KiB"), TOKENS.number("3e2M"), SECONDS.number(".5 h")) == (
        1e3,
        1024.0,
        3e8,
        1800.0,
    )
