"""Run documents that train in a second."""

import os
import wsgiref
from pathlib import Path
from typing import Any

from gossamer.run.config.document import with_settings
from gossamer.run.config.run_file import RunConfig, parse
from gossamer.transport.sockets.header import Limits

DEVICE = os.environ.get("GOSSAMER_TEST_DEVICE", "cpu")
"""Where tiny runs train; `make gpu` says cuda."""
PARAMETERS = 47_328
"""Of the tiny run's model, whose tokens are bytes."""
OF_ONE_LAYER = 26_720
"""Parameters of that model with one layer."""
TEXT = Path(wsgiref.__file__).parent
"""A few short texts that nobody here edits; to tokenise the standard library takes as long as a dozen inner steps."""


def document(**overrides: Any) -> dict[str, Any]:
    """A tiny run; overrides are dotted keys with double underscores for the dots."""
    base = {
        "name": "tiny",
        "workers": 3,
        "rule": {"name": "gasloc"},
        "topology": {"name": "random"},
        "model": {"size": "0.2m", "hidden_size": 32, "intermediate_size": 64},
        "data": {"source": str(TEXT), "seq_len": 16, "batch_size": 2},
        "run": {
            "steps": 12,
            "local_steps": 2,
            "eval_every": 6,
            "eval_batches": 2,
            "checkpoint_every": 2,
            "threads": 1,
            "device": DEVICE,
        },
        "record": {"tensorboard": False, "export": False},
    }
    if "model__size" in overrides:
        base["model"] = {}
    return with_settings(base, {key.replace("__", "."): value for key, value in overrides.items()})


def tiny(**overrides: Any) -> RunConfig:
    """The validated tiny run."""
    return parse(document(**overrides))


def single(**overrides: Any) -> RunConfig:
    """The tiny run of a model of one layer, for what is the same with more: a step takes half as long."""
    return tiny(model__layers=1, **overrides)


def preset_document(**overrides: Any) -> dict[str, Any]:
    """A tiny run of a model of the preset shape, whose hidden states codecs may cut into tiles of 64 channels."""
    return document(**{"model__size": "0.2m", **overrides})


def preset(**overrides: Any) -> RunConfig:
    """The validated run of the preset shape."""
    return parse(preset_document(**overrides))


def limits(workers: int) -> Limits:
    """What the workers of a run that no test names may say at most."""
    return Limits(workers, 10_000, 1_000_000, 4)
