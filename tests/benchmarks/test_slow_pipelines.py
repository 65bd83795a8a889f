"""The benchmark of pipelines on its smallest run: two stages behind a really slow link cost about their price."""

import pipelines
import pytest
import slow_links

from gossamer.run.config.resolve import run_faults
from gossamer.run.config.run_file import parse


@pytest.mark.netns
def test_two_stages_behind_a_really_slow_link_take_about_as_long_as_priced() -> None:
    rate_mbps, steps = 4.0, 2
    with slow_links.limited([rate_mbps * 1e6] * 2, [rate_mbps * 1e6] * 2) as places:
        line = pipelines.measure("TAH-Quant", rate_mbps, steps, places)
    assert 128 * 4.3 / 8 < line.forward_bytes < 128 * 4.5 / 8, "of 128 channels"
    assert line.backward_bytes == 128 * 6.5 / 8
    transfers_s = (line.forward_bytes + line.backward_bytes) * 8 / (slow_links.GOODPUT * rate_mbps * 1e6)
    assert line.priced < 1 / (transfers_s / 2), "no faster than its links, of which both directions may be busy at once"
    assert 0.5 < line.measured / line.priced < 2


@pytest.mark.parametrize("arm", pipelines.ARMS)
def test_every_arm_can_start_with_one_timed_step(arm: str) -> None:
    assert run_faults(parse(pipelines.document(arm, 1)), real=True) == []


def test_the_page_has_a_line_for_each_arm_and_rate() -> None:
    line = pipelines.Line("dense", 80.0, 512.0, 512.0, 0.1, 11_000.0, 10_000.0)
    page = pipelines.page(
        [line, line._replace(arm="ResBM", forward_bytes=32.0, backward_bytes=32.0)], 2, 0.5, "command"
    )
    assert (
        "| 80 Mbit/s | dense | 512 | 512 | 0.100 s | 11,000 | 10,000 | 1.10 |\n| 80 Mbit/s | ResBM | 32 | 32 |" in page
    )
    assert "    command\n" in page and "2 inner steps after a first one" in page
