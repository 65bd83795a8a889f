"""Writes into the pages what committed outcomes say and what is counted: experiments, methods, numbers that name their source.

make results
"""

import logging

from generators import bound, casts, experiments, measured_losses, prices, slow_uplink, sources


def write() -> None:
    """Writes all of it."""
    for outcomes in experiments.outcome_files():
        outcomes.with_suffix(".md").write_text(experiments.page(outcomes), encoding="utf-8")
        if (picture := experiments.drawn(outcomes)) is not None:
            outcomes.with_suffix(".svg").write_bytes(picture)
    (sources.RESULTS / "methods.md").write_text(prices.prices_page(), encoding="utf-8")
    (sources.RESULTS / "casts.md").write_text(casts.casts_page(), encoding="utf-8")
    slow_uplink.FIGURE.write_bytes(slow_uplink.drawn_at_equal_time())
    measured_losses.FILE.write_text(measured_losses.measured_losses(), encoding="utf-8")
    measured_losses.PAGE.write_text(measured_losses.losses_page(), encoding="utf-8")
    for page in bound.with_sources():
        file = sources.ROOT / page
        file.write_text(bound.filled(file.read_text(encoding="utf-8"), bound.numbers_of(page), page), encoding="utf-8")


if __name__ == "__main__":
    logging.getLogger("gossamer").setLevel(logging.ERROR)  # a warning about an unstable pairing is none about a page
    write()
