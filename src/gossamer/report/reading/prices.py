"""What recorded runs cost on networks, be their workers whole replicas or in stages."""

import logging
from collections.abc import Mapping
from pathlib import Path

from gossamer.network.inner_steps import inner_steps
from gossamer.network.links import Network
from gossamer.network.pricing import price
from gossamer.network.timeline import Timeline
from gossamer.record.logs.pipeline_work import has_stages, read_pipeline
from gossamer.record.logs.trace import Trace

__all__ = ["prices_of"]

log = logging.getLogger("gossamer")


def prices_of(
    run_folder: Path, run_toml: str, trace: Trace, networks: Mapping[str, Network]
) -> dict[str, Timeline]:  # fmt: skip
    """The timelines of a run in rounds, by name of network; none of a run in stages that does not say what they have to do.

    Args: `run_toml` is the text of its run file.
    Raises: DataError for a spoilt record, ConfigError for a network of other workers or stages.
    """
    work = read_pipeline(run_folder)
    if networks and work is None and has_stages(run_toml):
        log.warning(
            "'%s' is a run in stages without pipeline.json, which an earlier version did not write, so its time on a network is "
            "not shown; gossamer price says it",
            run_folder,
        )
        return {}
    steps = {name: inner_steps(network, work, trace.workers) for name, network in networks.items()}
    return {name: price(trace, one.network, one.computing) for name, one in steps.items()}
