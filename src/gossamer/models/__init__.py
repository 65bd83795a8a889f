"""The built-in model and its sizes, and models from a folder."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.models.llama import Llama as Llama
    from gossamer.models.llama import build_model as build_model
    from gossamer.models.pretrained import pretrained as pretrained
    from gossamer.models.sizes import ModelConfig as ModelConfig

_HOMES = {"Llama": "llama", "ModelConfig": "sizes", "build_model": "llama", "pretrained": "pretrained"}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Imported at first use, as sizes are needed without torch.
        if name not in _HOMES:
            raise AttributeError(f"module 'gossamer.models' has no attribute '{name}'")
        return getattr(importlib.import_module(f"gossamer.models.{_HOMES[name]}"), name)
