"""A model of `transformers` from a folder, as the model of a run."""

from pathlib import Path
from typing import Any

from torch import nn

from gossamer.errors import ConfigError, require


def pretrained(folder: str | Path, dtype: str = "float32") -> nn.Module:
    """The causal language model that `save_pretrained` has written into a folder, such as the `model` of a run.

    Args:
        folder: with config.json and the weights; nothing is downloaded.
        dtype: of its parameters.
    Raises: ConfigError when nothing can be opened there; MissingPackageError without transformers.
    """
    transformers: Any = require("transformers", "integrations", "a model from a folder")
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model is '{folder}', which transformers cannot open ({str(error).splitlines()[0][:200]}); give a folder that "
            "save_pretrained has written"
        ) from None
