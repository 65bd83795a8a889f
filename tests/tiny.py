"""Run documents that train in a second."""

from pathlib import Path
from typing import Any

from gossamer.run.config import RunConfig, parse
from gossamer.run.document import with_settings

TEXT = Path(__file__).parents[1] / "docs" / "adr"
"""A few short texts; to tokenise the standard library takes as long as a dozen inner steps."""


def document(**overrides: Any) -> dict[str, Any]:
    """A tiny run; overrides are dotted keys with double underscores for the dots."""
    base = {
        "name": "tiny",
        "workers": 3,
        "rule": {"name": "gasloc"},
        "topology": {"name": "random"},
        "model": {"size": "0.2m"},
        "data": {"source": str(TEXT), "seq_len": 16, "batch_size": 2},
        "run": {"steps": 12, "local_steps": 2, "eval_every": 6, "eval_batches": 2, "checkpoint_every": 2, "threads": 1},
        "record": {"tensorboard": False, "export": False},
    }
    return with_settings(base, {key.replace("__", "."): value for key, value in overrides.items()})


def tiny(**overrides: Any) -> RunConfig:
    """The validated tiny run."""
    return parse(document(**overrides))
