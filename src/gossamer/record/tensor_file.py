"""Named tensors in the format of `safetensors`: a file that is hashed while it is written, or bytes."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TENSOR_TYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of the types of numbers, in the order in which a file has them: widest first, so that every tensor is aligned."""
_PLACES = {dtype: place for place, dtype in enumerate(TENSOR_TYPES)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Writes a file with the bytes of `tensor_bytes`, and syncs it.

    Returns: its size in bytes, and its sha256.
    Raises: OSError when writing fails.
    Cost: one write and one read of all tensors, no copy.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(tensors):
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())  # the manifest, which is written next, refers to these bytes
        return file.tell(), digest.hexdigest()


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of `safetensors.torch.save`, of tensors on the CPU that are contiguous, and may share memory. Cost: one copy.

    >>> from safetensors.torch import load
    >>> x = torch.arange(3)
    >>> load(tensor_bytes({"all": x, "last": x[2:]}))["last"]
    tensor([2])
    """
    return b"".join(_parts(tensors))


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """The buffers of the file in order: the size of the header, the header, and each tensor."""
    assert sys.byteorder == "little", "the format has the lowest byte of a number first"
    ordered = sorted(tensors.items(), key=lambda item: (_PLACES[item[1].dtype], item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": TENSOR_TYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        yield tensor.view(-1).view(torch.uint8).numpy()
