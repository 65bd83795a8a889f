"""Tokenizers: bytes, a file of the tokenizers library, or a name on the Hub."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import DataError, first_line, require

# End tokens for a tokenizer whose post-processor adds none, without a tokenizer_config.json.
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eos|>",
    "<EOS>",
    "[EOS]",
    "<|end|>",
)
_MOST_IDS = 1 << 24  # the widest vocabularies have a million
_TRIED = (
    "The quick brown fox isn't 12,345.678 metres from (the) lazy dog's kennel: \"why?\" -- e-mail it; 100% of A/B_tests!",
    "def f(x):\n\treturn [2 ** k for k in range(x) if k != 0]  # ünïcode, ΑΒΓ, 漢字, \U0001f642\r\n\n   indented",
)
"""Sample text that tokenizers split differently."""
PAD_TOKENS = ("<pad>", "<|pad|>", "<|padding|>", "<PAD>", "[PAD]")


class Tokenizer(NamedTuple):
    """Text to token ids and back."""

    vocab_size: int
    before: tuple[int, ...]
    """The tokens that its post-processor puts before each document and prompt, such as <|bos|>."""
    after: tuple[int, ...]
    """The tokens after each document: its post-processor's, else the end token; empty if it has none."""
    pad: int | None
    """The padding token for batches of prompts; the last of `after` by default."""
    encode: Callable[[Sequence[str]], list[NDArray[Any]]]
    """The ids of each text, without special tokens even where the text spells one. Raises: DataError if it fails."""
    decode: Callable[[Sequence[int]], str]
    token: Callable[[int], str]
    """The text form of a token."""
    json: Callable[[], str]
    """The same tokenizer as a document of the `tokenizers` library."""
    special: frozenset[str] = frozenset()
    """Its special tokens. Text that spells one is encoded as text, so that no document can end early."""

    @property
    def end(self) -> int | None:
        """The token at which a text ends."""
        return self.after[-1] if self.after else None


def local_file(name: str) -> Path | None:
    """The file of a tokenizer on this machine; None for "bytes" and for a name on the Hub."""
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    return path if path.is_file() or path.suffix == ".json" else None


def local_tokenizer(name: str) -> Tokenizer | None:
    """The tokenizer; None for one on the Hub, which is not contacted. Raises: as `load_tokenizer`."""
    return load_tokenizer(name) if name == "bytes" or local_file(name) is not None else None


def vocabulary(tokenizer: str) -> int | None:
    """Its number of tokens; None for one on the Hub, which is not contacted.

    Raises: DataError for a file that is no tokenizer.

    >>> vocabulary("bytes"), vocabulary("gpt2")
    (256, None)
    """
    local = local_tokenizer(tokenizer)
    return None if local is None else local.vocab_size


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of a tokenizer's behaviour: vocabulary, special tokens around a document, and splits of sample text.

    Not of its file, which differs between versions of the library.
    """
    words = [tokenizer.token(id) for id in range(tokenizer.vocab_size)]
    cut = [ids.tolist() for ids in tokenizer.encode(_TRIED)]
    made_of = [tokenizer.vocab_size, tokenizer.before, tokenizer.after, words, cut]
    return hashlib.blake2b(json.dumps(made_of).encode(), digest_size=16).hexdigest()


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `DataConfig.tokenizer` names.

    Documents are encoded with its post-processor. Where that adds no end token, the `eos_token` of a
    tokenizer_config.json next to it follows, or else the first of `END_TOKENS` that the vocabulary has.

    Raises: DataError when it is missing or no tokenizer; MissingPackageError without the library.

    >>> bytewise = load_tokenizer("bytes")
    >>> bytewise.encode(["né"])[0].tolist(), bytewise.decode([110, 195, 169])
    ([110, 195, 169], 'né')
    """
    return _bytewise() if name == "bytes" else _of_library(name)


def _bytewise() -> Tokenizer:
    return Tokenizer(
        vocab_size=256,
        before=(),
        after=(0,),
        pad=0,
        encode=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
        decode=lambda ids: bytes(ids).decode(errors="replace"),
        token=lambda id: "\0" if id == 0 else _ALPHABET[id],
        json=_bytes_as_json,
    )


def _of_library(name: str) -> Tokenizer:
    library, named = _opened(name)
    padding = library.padding or {}
    library.no_truncation()
    library.no_padding()
    vocabulary = library.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"the tokenizer '{name}' has a vocabulary of 0 tokens; train it before it is used")
    if (widest := max(vocabulary.values())) >= _MOST_IDS:  # the library would list every unused id below it
        raise DataError(
            f"the tokenizer '{name}' gives a token the id {widest:,}, and ids are below {_MOST_IDS:,}; repair its file, or give "
            "data.tokenizer another"
        )

    def first(*tokens: str | None) -> int | None:
        return next((vocabulary[token] for token in tokens if token in vocabulary), None)

    special = frozenset(token.content for token in library.get_added_tokens_decoder().values() if token.special)
    as_json = _without_special_words(library, special)
    library.encode_special_tokens = True  # text that spells a special token is encoded as text

    def encode(texts: Sequence[str]) -> list[NDArray[Any]]:
        with _encoding(name):
            encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    with _encoding(name):
        before, after = _added(library, vocabulary)
    end = first(named.get("eos_token"), *END_TOKENS)
    after = after or (() if end is None else (end,))
    pad = first(named.get("pad_token"), padding.get("pad_token"), *PAD_TOKENS)
    return Tokenizer(
        vocab_size=max(*vocabulary.values(), *before, *after) + 1,  # ids may leave gaps
        before=before,
        after=after,
        pad=after[-1] if pad is None and after else pad,
        encode=encode,
        decode=lambda ids: library.decode(list(ids), skip_special_tokens=False),
        token=library.id_to_token,
        json=as_json,
        special=special,
    )


def _opened(name: str) -> tuple[Any, dict[str, str]]:
    """A tokenizer of the library from a file or from the Hub, and the special tokens that are named next to it."""
    library_of = require("tokenizers", "data", f"data.tokenizer '{name}'", "use 'bytes'").Tokenizer
    path = local_file(name)
    try:
        library = library_of.from_file(str(path)) if path is not None else library_of.from_pretrained(name)
        return library, _named(name, path)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"data.tokenizer is '{name}', which cannot be opened as a tokenizer ({first_line(error)}); give 'bytes', the path of "
            "a tokenizers JSON file, or a name on the Hugging Face Hub that this machine can reach"
        ) from error


@contextlib.contextmanager
def _encoding(name: str) -> Iterator[None]:
    """A context in which a tokenizer that fails raises DataError."""
    try:
        yield
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"the tokenizer '{name}' cannot encode a text ({first_line(error)}); repair its file, or give data.tokenizer another"
        ) from error


def _without_special_words(library: Any, special: frozenset[str]) -> Callable[[], str]:
    """Removes special tokens from the vocabulary of the tokenizer's model; returns a function that gives the original
    as JSON.

    `encode_special_tokens` keeps the library from looking for special tokens in a text, but its model matches those in
    its own vocabulary, as in a Unigram model. Their ids stay: the library keeps them outside its model.
    """
    if special.isdisjoint(library.get_vocab(with_added_tokens=False)):
        return library.to_str
    whole = library.to_str()
    document = json.loads(whole)
    model = document["model"]
    words, unknown = model["vocab"], model.get("unk_token")
    if isinstance(words, list):  # positions are the ids; no text has an empty word
        model["vocab"] = [["" if word in special else word, score] for word, score in words]
    else:  # a removed word becomes the unknown token, and so does text that spells it
        kept = {word: id for word, id in words.items() if word not in special or word == unknown}
        model["vocab"] = kept
        if "merges" in model:
            prefix = model.get("continuing_subword_prefix") or ""
            pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
            made = ((pair, pair[0] + pair[1].removeprefix(prefix)) for pair in pairs)
            model["merges"] = [pair for pair, word in made if word in kept and {*pair} <= kept.keys()]
    library.model = type(library).from_str(json.dumps(document)).model
    return lambda: whole


def _named(name: str, path: Path | None) -> dict[str, str]:
    """The special tokens in the tokenizer_config.json next to a tokenizer, by role."""
    if path is not None:
        config = path.with_name("tokenizer_config.json")
    else:
        from huggingface_hub import hf_hub_download  # a dependency of tokenizers
        from huggingface_hub.errors import EntryNotFoundError

        try:
            config = Path(hf_hub_download(name, "tokenizer_config.json"))
        except EntryNotFoundError:
            return {}
    if not config.is_file():
        return {}
    document = json.loads(config.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"'{config}' is no JSON object")
    given = ((key, value["content"] if isinstance(value, dict) else value) for key, value in document.items())
    return {key: value for key, value in given if key.endswith("_token") and isinstance(value, str)}


def _added(library: Any, vocabulary: dict[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the post-processor of a tokenizer puts before and after a text."""
    for text in itertools.chain("a", vocabulary):  # the first that it does not encode as empty
        if bare := library.encode(text, add_special_tokens=False).ids:
            whole = library.encode(text)
            start = whole.special_tokens_mask.index(0) if 0 in whole.special_tokens_mask else 0
            return tuple(whole.ids[:start]), tuple(whole.ids[start + len(bare) :])
    return (), ()


def _alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level BPE."""
    itself = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in itself else next(others)) for byte in range(256)]


_ALPHABET = _alphabet()


def _bytes_as_json() -> str:
    """The byte tokenizer as a byte-level BPE without merges: each byte is written as its character there.

    Byte 0, which ends a document, is a special token and is written as itself: the character that stands for it, Ā, is also text.
    """
    end = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": "\0", **end}],
        "normalizer": None,
        "pre_tokenizer": bytewise,
        "post_processor": None,
        "decoder": bytewise,
        "model": {
            "type": "BPE",
            "vocab": {"\0": 0} | {character: byte for byte, character in enumerate(_ALPHABET) if byte},
            "merges": [],
        },
    }
    return json.dumps(document, ensure_ascii=False)
