"""The state of a worker as bytes, for sending: the content of a checkpoint, without the files."""

import json
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from gossamer.errors import CheckpointError, TrainingError
from gossamer.record.checkpoint import MAX_MANIFEST_BYTES, check_finite, decoded, encoded
from gossamer.record.tensor_file import tensor_bytes


def packed(state: Any) -> bytes:
    """The bytes of a state; as in `checkpoint.save`, tensors that share memory are written separately. Cost: one copy.

    >>> import torch
    >>> unpacked(packed({"x": torch.ones(2), "step": 7}))
    {'x': tensor([1., 1.]), 'step': 7}
    """
    return _joined(*_split_tensors(state))


class Snapshot:
    """A copy of a state; see `packable_snapshot`."""

    def __init__(self, state: Any) -> None:
        self._tree, tensors = _split_tensors(state)
        self._copies = {name: tensor.clone() for name, tensor in tensors.items()}

    def __call__(self) -> bytes:
        """The packed state."""
        return _joined(self._tree, self._copies)

    def tensors(self, *keys: str) -> list[Tensor]:
        """The tensors under these keys of the state, in its order."""
        return [one for name, one in self._copies.items() if name.partition(" ")[2].split(".")[1] in keys]


def packable_snapshot(state: Any) -> Snapshot:
    """A function that returns `packed(state)` as of now, even if the tensors change. Cost: one copy, a third of
    packing.

    >>> import torch
    >>> x = torch.ones(2)
    >>> then = packable_snapshot({"x": x})
    >>> x.zero_()
    tensor([0., 0.])
    >>> unpacked(then())
    {'x': tensor([1., 1.])}
    """
    return Snapshot(state)


def _split_tensors(state: Any) -> tuple[bytes, dict[str, Tensor]]:
    """The JSON of a state, and the tensors that it refers to."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(encoded(state, "state", tensors), allow_nan=False).encode()
    return tree, tensors


def _joined(tree: bytes, tensors: dict[str, Tensor]) -> bytes:
    return len(tree).to_bytes(8, "little") + tree + tensor_bytes(tensors)


def unpacked(raw: bytes) -> Any:
    """The state from another worker's bytes. Raises: CheckpointError for an invalid state, or one not finite as in
    `checkpoint.save`.
    """
    size = int.from_bytes(raw[:8], "little")
    try:
        if size > min(len(raw), MAX_MANIFEST_BYTES):
            raise ValueError(f"its description would have {size} bytes")
        tensors = load(raw[8 + size :])
        check_finite({name: tensors[name] for name in tensors}, "its donor")
        return decoded(json.loads(raw[8 : 8 + size]), tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError, TrainingError) as error:
        raise CheckpointError(
            f"the {len(raw)} bytes that a peer sent are no state of a worker ({error}); install the same gossamer version on all "
            "machines, or join through another worker"
        ) from None
