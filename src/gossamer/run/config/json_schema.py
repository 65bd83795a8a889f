"""The JSON schema of run files and experiment files, from which editors complete and explain their keys."""

import json
from typing import Any

from pydantic import TypeAdapter

from gossamer.report.figures import Figure
from gossamer.run.config.experiment_file import TuneConfig
from gossamer.run.config.recipes import recipes
from gossamer.run.config.run_file import RunConfig


def json_schema() -> dict[str, Any]:
    """The JSON schema of a run file or an experiment file, from which editors complete and explain its keys."""
    schema = TypeAdapter(RunConfig).json_schema(ref_template="#/$defs/{model}")
    figure = TypeAdapter(Figure).json_schema()
    schema["title"] = "A run of gossamer, or an experiment of several"
    schema["properties"] |= {
        "method": {"enum": sorted(recipes()), "description": "A recipe, whose settings the keys of the file override."},
        "variant": {
            "type": "array",
            "items": {"type": "object"},
            "description": "Dotted keys of each variant, and a label.",
        },
        "sweep": {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "array"}},
                {"type": "array", "items": {"type": "object"}},
            ],
            "description": "Lists of values by dotted key, or a list of points, each with its settings.",
        },
        "scale": {
            "type": "object",
            "additionalProperties": {"type": "object"},
            "description": "Dotted keys of other sizes.",
        },
        "figure": figure,
        "tune": TypeAdapter(TuneConfig).json_schema(),
    }
    # TOML has no null, and JSON no infinity.
    text = json.dumps(schema)
    return json.loads(text, parse_constant=lambda _: None, object_hook=_without_null_default)


def _without_null_default(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "default" or value is not None}
