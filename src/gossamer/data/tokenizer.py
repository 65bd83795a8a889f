"""Tokenizers: bytes, a file of the tokenizers library, or a name on the Hub."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import DataError, require

__all__ = ["Tokenizer", "load_tokenizer", "local_file", "vocabulary"]

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(NamedTuple):
    """Text to token ids and back."""

    vocab_size: int
    end: int | None
    """The token after each document; None where the vocabulary has none."""
    encode: Callable[[Sequence[str]], list[NDArray[Any]]]
    """The ids of each text, without special tokens."""
    decode: Callable[[Sequence[int]], str]
    json: Callable[[], str]
    """The same tokenizer as a document of the `tokenizers` library."""


def local_file(name: str) -> Path | None:
    """The file of a tokenizer on this machine; None for "bytes" and for a name on the Hub."""
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    return path if path.is_file() or path.suffix == ".json" else None


def vocabulary(tokenizer: str) -> int | None:
    """How many tokens it has; None for one on the Hub, which is not asked.

    Raises: DataError for a file that is no tokenizer.

    >>> vocabulary("bytes"), vocabulary("gpt2")
    (256, None)
    """
    if tokenizer == "bytes" or local_file(tokenizer) is not None:
        return load_tokenizer(tokenizer).vocab_size
    return None


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `DataConfig.tokenizer` names.

    Raises: DataError when it is missing or no tokenizer; MissingPackageError without the library.

    >>> bytewise = load_tokenizer("bytes")
    >>> bytewise.encode(["né"])[0].tolist(), bytewise.decode([110, 195, 169])
    ([110, 195, 169], 'né')
    """
    if name == "bytes":
        return Tokenizer(
            vocab_size=256,
            end=0,
            encode=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
            decode=lambda ids: bytes(ids).decode(errors="replace"),
            json=_bytes_as_json,
        )
    library_of = require("tokenizers", "data", f"data.tokenizer '{name}'", "use 'bytes'").Tokenizer
    path = local_file(name)
    try:
        library = library_of.from_file(str(path)) if path is not None else library_of.from_pretrained(name)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"data.tokenizer is '{name}', which cannot be opened as a tokenizer ({error}); give 'bytes', the path of a "
            "tokenizers JSON file, or a name on the Hugging Face Hub that this machine can reach"
        ) from error
    library.no_truncation()
    library.no_padding()
    vocabulary = library.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"the tokenizer '{name}' has a vocabulary of 0 tokens; train it before it is used")
    return Tokenizer(
        vocab_size=max(vocabulary.values()) + 1,  # ids may leave gaps
        end=next((vocabulary[token] for token in END_TOKENS if token in vocabulary), None),
        encode=lambda texts: [
            np.array(encoding.ids, np.uint32)
            for encoding in library.encode_batch_fast(list(texts), add_special_tokens=False)
        ],
        decode=lambda ids: library.decode(list(ids), skip_special_tokens=False),
        json=library.to_str,
    )


def _bytes_as_json() -> str:
    """Bytes as a byte-level BPE without a merge: each byte is written as the one character that stands for it there."""
    itself = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    alphabet = {chr(byte if byte in itself else next(others)): byte for byte in range(256)}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": bytewise,
        "post_processor": None,
        "decoder": bytewise,
        "model": {"type": "BPE", "vocab": alphabet, "merges": []},
    }
    return json.dumps(document, ensure_ascii=False)
