"""Token files of other tools: nanoGPT, llm.c and modded-nanogpt, and Megatron."""

import hashlib
import mmap
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import DataError

_HEADER_BYTES = 256 * 4
_OF_MAGIC = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
"""The first number of a header of llm.c, and the numbers that follow the header: those of GPT-2, and of Llama 3."""
_MEGATRON = b"MMIDIDX\x00\x00"
_OF_CODE = {1: np.dtype("u1"), 4: np.dtype("<i4"), 5: np.dtype("<i8"), 8: np.dtype("<u2")}
_SAMPLE_BYTES = 1 << 16
_CLOSER_SAMPLES = 1 << 10
_VALIDATION = re.compile(r"(^|[^a-z])(val|valid|validation)([^a-z]|$)")


class TokenArray:
    """A concatenation of token arrays; only requested windows are copied."""

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        self.parts = tuple(part for part in parts if len(part))
        self._ends = [*accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def window(self, start: int, size: int) -> NDArray[np.int64]:
        """`size` tokens from `start`, int64, across array boundaries."""
        pieces, k = [], bisect_right(self._ends, start)
        while size > 0:
            part = self.parts[k][start - (self._ends[k - 1] if k else 0) :][:size]
            _must_not_be_cut(part)
            pieces.append(part.astype(np.int64))
            start, size, k = start + len(part), size - len(part), k + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def cut(self, at: int) -> tuple["TokenArray", "TokenArray"]:
        """The tokens before `at`, and those from `at` on."""
        starts = [0, *self._ends]
        split = [max(0, at - start) for start in starts[: len(self.parts)]]
        pairs = [(part[:k], part[k:]) for part, k in zip(self.parts, split, strict=True)]
        return TokenArray([before for before, _ in pairs]), TokenArray([after for _, after in pairs])

    def __add__(self, other: "TokenArray") -> "TokenArray":
        return TokenArray([*self.parts, *other.parts])


def _must_not_be_cut(tokens: NDArray[Any]) -> None:
    """Raises DataError where a mapped file has become shorter: reading beyond its end ends the process without a word."""
    mapped: mmap.mmap | None = getattr(tokens, "_mmap", None)
    if not isinstance(tokens, np.memmap) or mapped is None:
        return
    whole, size = tokens.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY + len(mapped), mapped.size()
    if size < whole:
        raise DataError(
            f"'{tokens.filename}' had at least {whole:,} bytes when the run began, and was cut to {size:,} while it was read; "
            "restore it, or remove the folder if it is a token cache, and resume from the last checkpoint"
        )


class Binary(NamedTuple):
    """A file of tokens."""

    tokens: NDArray[Any]
    """Memory-mapped, so that a file may exceed memory."""
    documents: int | None
    """The number of documents, where the file states it."""


def open_binary(path: Path, vocab_size: int) -> Binary:
    """The tokens of a .bin file, whose kind is detected.

    With an .idx file of the same name next to it, it is Megatron's; with a header of 256 numbers and a known magic
    number, llm.c's. Else it is plain, as nanoGPT writes it: 16 bits a token, or 32 where the vocabulary needs them or
    every second 16 bits are 0.

    Raises: DataError for a file that cannot be read or is damaged, and for tokens beyond the vocabulary in its
        beginning, middle or end.
    """
    try:
        size, index = path.stat().st_size, path.with_suffix(".idx")
        if index.is_file():
            dtype, offset, count, documents = _megatron(index, path, size)
        else:
            (dtype, offset, count), documents = _with_header(path, size) or _flat_tokens(path, size, vocab_size), None
        tokens = np.memmap(path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)
        for sample in _samples(tokens):
            _check_token_ids(path, sample, vocab_size)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read ({error}); correct it, or leave it out") from error
    return Binary(tokens, documents)


def is_for_validation(path: Path) -> bool:
    """Whether a file of tokens is for validation, by its name.

    >>> [is_for_validation(Path(name)) for name in ("val.bin", "fineweb_val_000000.bin", "train.bin", "valley.bin")]
    [True, True, False, False]
    """
    return _VALIDATION.search(path.stem.lower()) is not None


def sampled_hash(arrays: Sequence[NDArray[Any]]) -> str:
    """A hash of the sizes of arrays, and of the beginning, middle and end of each: hashing a whole terabyte would take
    an hour.
    """
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str} {len(array)} ".encode())
        for sample in _samples(array):
            digest.update(sample.tobytes())
    return digest.hexdigest()


def closer_hash(arrays: Sequence[NDArray[Any]]) -> str:
    """As `sampled_hash`, of many more places, to compare workers and checkpoints; a small file is hashed whole.

    Cost: reads 64 MiB of each array at most.
    """
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        count = _SAMPLE_BYTES // array.itemsize
        last = max(0, len(array) - count)
        starts = [last * k // (_CLOSER_SAMPLES - 1) for k in range(_CLOSER_SAMPLES)]
        if len(array) <= _CLOSER_SAMPLES * count:
            starts = [*range(0, len(array), count)]
        digest.update(f"{array.dtype.str} {len(array)} ".encode())
        for start in starts:
            digest.update(array[start : start + count].tobytes())
    return digest.hexdigest()


def _samples(tokens: NDArray[Any]) -> list[NDArray[Any]]:
    count = _SAMPLE_BYTES // tokens.itemsize
    middle = max(0, (len(tokens) - count) // 2)
    return [tokens[:count], tokens[middle : middle + count], tokens[-count:]] if len(tokens) else []


def _with_header(path: Path, size: int) -> tuple[np.dtype[Any], int, int] | None:
    """The tokens after the header of llm.c; None for a file without one."""
    with path.open("rb") as file:
        header = np.frombuffer(file.read(_HEADER_BYTES), "<i4") if size >= _HEADER_BYTES else np.empty(0, "<i4")
    if not len(header) or int(header[0]) not in _OF_MAGIC:
        return None
    dtype, count = _OF_MAGIC[int(header[0])], int(header[2])
    if count * dtype.itemsize != size - _HEADER_BYTES:
        raise DataError(
            f"the header of '{path}' says {count:,} tokens of {dtype.itemsize} bytes, but {size - _HEADER_BYTES:,} bytes follow "
            "it; the file was cut or is another kind: write or fetch it again"
        )
    return dtype, _HEADER_BYTES, count


def _flat_tokens(path: Path, size: int, vocab_size: int) -> tuple[np.dtype[Any], int, int]:
    with path.open("rb") as file:
        begin = file.read(min(size // 4 * 4, _SAMPLE_BYTES))
    wide = vocab_size > 1 << 16 or (len(begin) >= 64 and not np.frombuffer(begin, "<u2")[1::2].any())
    dtype = np.dtype("<u4" if wide else "<u2")
    if size % dtype.itemsize:
        raise DataError(
            f"'{path}' has {size:,} bytes, which are no whole tokens of {dtype.itemsize} bytes; it was cut or holds no tokens"
        )
    return dtype, 0, size // dtype.itemsize


def _megatron(index: Path, path: Path, size: int) -> tuple[np.dtype[Any], int, int, int]:
    """The index of a file: dtype, offset, number of tokens and number of documents."""

    def damaged(why: str) -> DataError:
        return DataError(f"'{index}' is no index of Megatron for '{path.name}': {why}; write both files again")

    with index.open("rb") as file:
        head = file.read(len(_MEGATRON) + 8 + 1 + 8 + 8)
        if len(head) < len(_MEGATRON) + 25 or not head.startswith(_MEGATRON):
            raise damaged("it does not begin like one")
        version, code, sequences, documents = np.frombuffer(
            head[len(_MEGATRON) :], [("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")]
        )[0].item()
        if version != 1 or code not in _OF_CODE:
            raise damaged(f"it has version {version} and kind {code}, and only version 1 of whole numbers is read")
        rest = index.stat().st_size - len(head)
        if rest < 12 * sequences:
            raise damaged(f"it names {sequences:,} sequences and has {rest:,} bytes for them")
        lengths = np.memmap(index, "<i4", "r", len(head), (sequences,)) if sequences else np.empty(0, "<i4")
    dtype, count = _OF_CODE[code], int(lengths.sum(dtype=np.int64))
    if count * dtype.itemsize != size or (lengths < 0).any():
        raise damaged(
            f"its {sequences:,} sequences have {count:,} tokens of {dtype.itemsize} bytes, and the file {size:,} bytes"
        )
    return dtype, 0, count, max(0, documents - 1)  # it holds the end of each document, and a leading zero


def _check_token_ids(path: Path, tokens: NDArray[Any], vocab_size: int) -> None:
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        bad = int(tokens.max()) if int(tokens.max()) >= vocab_size else int(tokens.min())
        raise DataError(
            f"'{path}' has token {bad}, but the vocabulary of data.tokenizer has {vocab_size:,}; name the tokenizer that made "
            'the file, such as data.tokenizer = "gpt2" or the path of its tokenizer.json'
        )
