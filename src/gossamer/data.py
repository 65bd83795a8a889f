"""Training text: documents from files or a stream, tokens from them, and batches as pure functions of worker and step.

Files are tokenised once, into one array of tokens for training and one for validation; a batch is windows of it at
random places. A stream is read in order, a part of it by each worker, and packed into windows without a gap. Either way
a piece of text is kept for validation by a hash of what it says, so that every worker, machine and format agrees on it.
"""

import functools
import glob
import hashlib
import io
import itertools
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.errors import ConfigError, DataError, choose
from gossamer.rng import numpy_rng

__all__ = [
    "Corpus",
    "DataConfig",
    "Document",
    "FileCorpus",
    "Piece",
    "StreamCorpus",
    "Tokenizer",
    "Tokens",
    "fingerprint",
    "load_tokenizer",
    "open_corpus",
]

PIECE_CHARS = 1 << 16  # longer documents are dealt in pieces, or one book could be all of the validation text
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")  # all but the last two are one document a file
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on, and in what portions."""

    source: str | tuple[str, ...] = "stdlib"
    """"stdlib" (the source of this machine's Python), files, folders or globs, or a stream "hf:NAME[:CONFIG]"."""
    text_field: str = "text"
    """The field or column with the text, in jsonl, parquet and streams."""
    tokenizer: str = "bytes"
    """"bytes", the path of a tokenizers JSON file or of a folder with a tokenizer.json, or a name on the Hub."""
    seq_len: int = 128
    """Tokens of a sequence that the model predicts from."""
    batch_size: int = 8
    """Sequences per worker in a forward and backward pass."""
    accumulate: int = 1
    """Passes per inner step, their gradients averaged."""
    shards: Literal["iid", "contiguous"] = "iid"
    """Whether workers draw from all training text, or each only from its own n-th of it, in the order of documents."""
    val_fraction: float = 0.05
    """The part of the text that is kept for validation."""
    max_bytes: int | None = None
    """Text of files beyond so many bytes of UTF-8 is left out."""
    cache: str | None = None
    """A folder that keeps tokenised files, which are then mapped and not held in memory."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "accumulate", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"data.{name} is {value} but must be at least 1; raise it")
        if not 0 < self.val_fraction < 1:
            raise ConfigError(
                f"data.val_fraction is {self.val_fraction} but must be above 0 and below 1; 0.05 is usual"
            )
        if self.shards not in ("iid", "contiguous"):
            raise ConfigError(choose("data.shards", str(self.shards), ("iid", "contiguous")) + "; correct the name")
        if not self.source or not all(self.sources):
            raise ConfigError(f"data.source is {self.source!r} but must name text; give a path, 'stdlib' or 'hf:NAME'")
        if not self.tokenizer:
            raise ConfigError("data.tokenizer is '' but must name one; 'bytes' needs no file")
        if any(source.startswith("hf:") for source in self.sources):
            if len(self.sources) > 1:
                raise ConfigError(f"data.source is {self.source!r}, but a stream must be the only source; name one")
            for name, value in [("max_bytes", self.max_bytes), ("cache", self.cache)]:
                if value is not None:
                    raise ConfigError(
                        f"data.{name} is {value!r}, which works for files only; leave it out for a stream"
                    )
            if self.shards == "contiguous":
                raise ConfigError(
                    "data.shards is 'contiguous', but a stream deals its documents to the workers itself; leave it out"
                )

    @property
    def sources(self) -> tuple[str, ...]:
        """The source as a tuple."""
        return (self.source,) if isinstance(self.source, str) else self.source


class Corpus(Protocol):
    """Open training data. Workers may ask for their batches from several threads, each worker from one at a time."""

    vocab_size: int
    tokenizer: "Tokenizer"

    def batch(self, worker: int, step: int) -> Tensor:
        """The training batch of a worker, int64 `[batch_size, seq_len + 1]`; equal arguments give equal batches.

        Args: `step` counts batches: with accumulation an inner step takes several, each with a number of its own.
        """
        ...

    def validation(self, num_batches: int) -> list[Tensor]:
        """So many validation batches, int64 `[batch_size, seq_len + 1]`, the same for every worker and seed."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values: where streams stand, and what files must still say."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes a state back. Raises DataError when it is of other data."""
        ...


def open_corpus(config: DataConfig, workers: int, seed: int) -> Corpus:
    """Opens the data of a run; the Python standard library as bytes takes a tenth of a second.

    Raises: DataError when text is missing, empty, unreadable or too short; ConfigError when a package is missing.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if config.sources[0].startswith("hf:"):
        return StreamCorpus(config, tokenizer, workers)
    return FileCorpus(config, tokenizer, workers, seed)


def fingerprint(corpus: Corpus) -> str:
    """What workers compare to know that they have the same text; nothing of a stream, which nobody has read yet."""
    return str(corpus.state().get("fingerprint", ""))


# Tokenizers


class Tokenizer(NamedTuple):
    """Text to token ids and back."""

    vocab_size: int
    end: int | None
    """The token that is put after each document; None where the vocabulary has none."""
    encode: Callable[[Sequence[str]], list[NDArray[Any]]]
    """The ids of each text, without special tokens."""
    decode: Callable[[Sequence[int]], str]
    json: Callable[[], str]
    """The same tokenizer as a document of the `tokenizers` library."""


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `DataConfig.tokenizer` names.

    Raises: DataError when it is missing or no tokenizer.

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
    from tokenizers import Tokenizer as Library

    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    local = path.is_file() or path.suffix == ".json"
    try:
        library = Library.from_file(str(path)) if local else Library.from_pretrained(name)
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
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    itself = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    alphabet = {chr(byte if byte in itself else next(others)): byte for byte in range(256)}
    library = Library(models.BPE(vocab=alphabet, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return library.to_str()


# Documents


class Document(NamedTuple):
    """One text, with a name for messages."""

    name: str
    text: str


def _documents(path: Path, text_field: str) -> Iterator[Document]:
    """The documents of one file: a text file is one, a line of jsonl and a row of parquet are one each."""
    if path.suffix == ".jsonl":
        return _jsonl(path, text_field)
    if path.suffix == ".parquet":
        return _parquet(path, text_field)
    return _text(path)


def _text(path: Path) -> Iterator[Document]:
    try:
        yield Document(f"'{path}'", path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' has byte 0x{error.object[error.start]:02x} at offset {error.start}, which is not UTF-8; convert "
            "the file, or leave it out of data.source"
        ) from None


def _jsonl(path: Path, text_field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            name = f"line {number} of '{path}'"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{name} is not JSON ({error}); repair or remove the line") from None
            if not isinstance(row, dict):
                raise DataError(f"{name} is {type(row).__name__} but must be a JSON object with a field '{text_field}'")
            yield Document(name, _field(row, text_field, name))


def _parquet(path: Path, text_field: str) -> Iterator[Document]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(
            f"'{path}' needs the package pyarrow, which is missing ({error}); run pip install 'gossamer[data]'"
        ) from None
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                raise DataError(_no_field(f"'{path}'", text_field, names))
            rows = itertools.count()
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for row in batch.to_pylist():
                    name = f"row {next(rows)} of '{path}'"
                    yield Document(name, _field(row, text_field, name))
    except (ArrowException, OSError) as error:
        raise DataError(f"'{path}' cannot be read as parquet: {error}; write it again, or leave it out") from error


def _field(row: Mapping[str, Any], text_field: str, name: str) -> str:
    """The text of a row; a null is an empty one."""
    if text_field not in row:
        raise DataError(_no_field(name, text_field, row))
    value = row[text_field]
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"field '{text_field}' in {name} is of type {type(value).__name__} but must be text; set data.text_field "
            f"to one that is, of: {', '.join(map(str, row))}"
        )
    return value or ""


def _no_field(name: str, text_field: str, fields: Iterable[str]) -> str:
    return (
        f"{name} has no field '{text_field}'; it has: {', '.join(fields) or 'none'}; set data.text_field to one of them"
    )


def _utf8(document: Document) -> bytes:
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{document.name} has the lone surrogate {document.text[error.start]!r} at character {error.start}, which "
            "UTF-8 has no bytes for; repair or remove it"
        ) from None


def _files(sources: Sequence[str]) -> list[Path]:
    """Every file of the sources, each once: in the order given, inside a folder or glob by path."""
    found: list[Path] = []
    for source in sources:
        if source == "stdlib":
            found += _stdlib()
            continue
        path = Path(source).expanduser()
        if path.is_dir():
            inside = [p for p in _by_path(path.rglob("*")) if p.suffix in SUFFIXES]
        elif path.is_file():
            inside = [path]
        else:
            inside = _by_path(map(Path, glob.glob(str(path), recursive=True)))
        if not inside:
            raise DataError(
                f"data.source '{source}' names no readable file (the working folder is '{Path.cwd()}'); give an "
                f"existing file, a folder or a glob of files that end in one of: {', '.join(SUFFIXES)}"
            )
        for p in inside:
            if p.suffix not in SUFFIXES:
                raise DataError(
                    f"'{p}' ends in '{p.suffix}' but files must end in one of: {', '.join(SUFFIXES)}; convert it, or "
                    "give it the ending of what it is"
                )
        found += inside
    return list(dict.fromkeys(found))


def _by_path(paths: Iterable[Path]) -> list[Path]:
    return sorted((path for path in paths if path.is_file()), key=Path.as_posix)


def _stdlib() -> list[Path]:
    """The modules of the running Python's standard library.

    Left out are installed packages, tests, and tables rather than text: codecs, pydoc topics and build settings.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    left_out = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
        "__pycache__",
    }
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        found += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not found:
        raise DataError(
            f"this Python keeps no source of its standard library in '{root}'; set data.source to other text"
        )
    return sorted(found, key=Path.as_posix)


# Tokens of files


class Tokens(NamedTuple):
    """Tokenised files."""

    train: NDArray[Any]
    val: NDArray[Any]
    fingerprint: str
    """A hash of all tokens."""


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    last: bool
    """Whether the document ends here."""


def _pieces(documents: Iterable[Document], max_bytes: int | None) -> Iterator[Piece]:
    left = max_bytes
    for document in documents:
        raw, text = _utf8(document), document.text
        if left is not None:
            raw = raw[:left]
            left -= len(raw)
            text = raw.decode(errors="ignore")
        for start in range(0, len(text), PIECE_CHARS):
            stop = start + PIECE_CHARS
            yield Piece(text[start:stop], stop >= len(text))
        if left == 0:
            return


def _held_out(text: str, val_fraction: float) -> bool:
    """Whether a text is for validation: when its hash, as a number between 0 and 1, is below the fraction."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64


def _tokenise(config: DataConfig, tokenizer: Tokenizer, files: Sequence[Path], train: BinaryIO, val: BinaryIO) -> str:
    """Writes the tokens of all files; returns their hash."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    end = b"" if tokenizer.end is None else np.array(tokenizer.end, dtype).tobytes()
    digest = hashlib.blake2b(digest_size=16)
    documents = itertools.chain.from_iterable(_documents(path, config.text_field) for path in files)
    pieces = _pieces(documents, config.max_bytes)
    while group := list(itertools.islice(pieces, 64)):
        for piece, ids in zip(group, tokenizer.encode([piece.text for piece in group]), strict=True):
            held_out = _held_out(piece.text, config.val_fraction)
            tokens = ids.astype(dtype).tobytes() + (end if piece.last else b"")
            (val if held_out else train).write(tokens)
            digest.update(b"v" if held_out else b"t")
            digest.update(tokens)
    return digest.hexdigest()


def _load_tokens(config: DataConfig, tokenizer: Tokenizer) -> Tokens:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    files = _files(config.sources)
    try:
        if config.cache is not None:
            return _cached_tokens(config, tokenizer, files, dtype)
        train, val = io.BytesIO(), io.BytesIO()
        fingerprint = _tokenise(config, tokenizer, files, train, val)
    except OSError as error:
        raise DataError(f"the text cannot be read: {error}; correct the file or data.source") from error
    return Tokens(np.frombuffer(train.getbuffer(), dtype), np.frombuffer(val.getbuffer(), dtype), fingerprint)


def _cached_tokens(config: DataConfig, tokenizer: Tokenizer, files: Sequence[Path], dtype: np.dtype[Any]) -> Tokens:
    """Tokens as files in the cache folder, under a name that changes with the text, the tokenizer and the options."""
    assert config.cache is not None
    stamps = [(path.resolve().as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    made_of = [1, stamps, tokenizer.json(), config.text_field, config.val_fraction, config.max_bytes]
    name = hashlib.blake2b(json.dumps(made_of).encode(), digest_size=12).hexdigest()
    folder = Path(config.cache).expanduser() / f"tokens-{name}"
    if not folder.is_dir():
        scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
        scratch.mkdir(parents=True)
        try:
            with (scratch / "train.bin").open("wb") as train, (scratch / "val.bin").open("wb") as val:
                fingerprint = _tokenise(config, tokenizer, files, train, val)
                sizes = {"train": train.tell(), "val": val.tell()}
            (scratch / "manifest.json").write_text(json.dumps({"bytes": sizes, "fingerprint": fingerprint}))
            _publish(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        train, val = (_mapped(folder / f"{side}.bin", manifest["bytes"][side], dtype) for side in ("train", "val"))
        return Tokens(train, val, str(manifest["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the token cache '{folder}' is damaged ({error!r}); remove that folder, to have it made anew"
        ) from None


def _publish(scratch: Path, folder: Path) -> None:
    """Gives a finished folder its name, unless another process was faster."""
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _mapped(path: Path, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes and not {size}")
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)


class FileCorpus:
    """Tokenised files. A batch is windows at random places, drawn by `numpy_rng(seed, worker, step, "data")`.

    Where the training or the validation text would be shorter than one window, as with one small file, the last
    `val_fraction` of all text validates instead.

    Raises: DataError when there is not enough text for one window on either side, or in one worker's shard.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, workers: int, seed: int) -> None:
        self.vocab_size, self.tokenizer = tokenizer.vocab_size, tokenizer
        self._config, self._workers, self._seed = config, workers, seed
        self._window = config.seq_len + 1
        train, val, self._fingerprint = _load_tokens(config, tokenizer)
        if min(len(train), len(val)) < self._window:
            whole = np.concatenate([train, val])
            cut = len(whole) - int(config.val_fraction * len(whole))
            train, val = whole[:cut], whole[cut:]
        self._train, self._val = train, val
        self._check_lengths()

    def _check_lengths(self) -> None:
        if not len(self._train):
            raise DataError(
                f"the text of data.source {self._config.source!r} has 0 bytes; give files that are not empty"
            )
        shard = min(high - low for low, high in map(self._shard, range(self._workers)))
        for what, got in [("the training text", shard), ("the validation text", len(self._val))]:
            if got < self._window:
                per_worker = " of one worker" if what == "the training text" and shard < len(self._train) else ""
                raise DataError(
                    f"{what}{per_worker} has {got} tokens, but one window needs data.seq_len + 1 = {self._window}; "
                    f"give more text, lower data.seq_len, or change data.val_fraction = {self._config.val_fraction}"
                )

    def _shard(self, worker: int) -> tuple[int, int]:
        """The training tokens that a worker draws from, first and behind the last."""
        if self._config.shards == "iid":
            return 0, len(self._train)
        return len(self._train) * worker // self._workers, len(self._train) * (worker + 1) // self._workers

    def batch(self, worker: int, step: int) -> Tensor:
        """See `Corpus.batch`."""
        assert 0 <= worker < self._workers, worker
        low, high = self._shard(worker)
        places = numpy_rng(self._seed, worker, step, "data")
        starts = places.integers(low, high - self._window + 1, size=self._config.batch_size)
        return self._windows(self._train, starts)

    def validation(self, num_batches: int) -> list[Tensor]:
        """See `Corpus.validation`; the windows are spread evenly over the validation text."""
        size = self._config.batch_size
        starts = np.linspace(0, len(self._val) - self._window, num_batches * size).astype(np.int64)
        return [self._windows(self._val, starts[k * size : (k + 1) * size]) for k in range(num_batches)]

    def _windows(self, tokens: NDArray[Any], starts: NDArray[np.int64]) -> Tensor:
        windows = np.stack([tokens[start : start + self._window] for start in starts]).astype(np.int64)
        if windows.max() >= self.vocab_size:
            raise DataError(
                f"the token cache '{self._config.cache}' holds token {windows.max()}, but the vocabulary has only "
                f"{self.vocab_size}; remove that folder, to have it made anew"
            )
        return torch.from_numpy(windows)

    def state(self) -> dict[str, Any]:
        """See `Corpus.state`."""
        return {"fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Corpus.restore`."""
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                f"the text has changed: its tokens hash to {self._fingerprint} and hashed to "
                f"{state['fingerprint']!r:.60}; resume with the files that the run began with"
            )


# Streams


class StreamCorpus:
    """A data set that `datasets` streams, dealt to the workers by files, or by documents where files do not divide.

    A worker's documents are packed in order into windows of `seq_len + 1` tokens, again from the start after the last.
    A batch is a function of worker and step alone: one that is not the next is found by reading on, or from the start.

    Raises: ConfigError when the package datasets is missing; DataError when the stream cannot be opened or breaks off.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, workers: int) -> None:
        self.vocab_size, self.tokenizer = tokenizer.vocab_size, tokenizer
        self._shape = (config.batch_size, config.seq_len + 1)
        open_pass = _open_stream(config.sources[0])
        self._train = [
            _Packed(config, tokenizer, functools.partial(open_pass, worker, workers), held_out=False)
            for worker in range(workers)
        ]
        self._val = _Packed(config, tokenizer, functools.partial(open_pass, 0, 1), held_out=True)
        self._val_batches: list[Tensor] = []

    def batch(self, worker: int, step: int) -> Tensor:
        """See `Corpus.batch`."""
        packed = self._train[worker]
        if step < packed.step:
            packed.restore(START)
        while packed.step < step:
            packed.take()
        return torch.from_numpy(packed.take().reshape(self._shape))

    def validation(self, num_batches: int) -> list[Tensor]:
        """See `Corpus.validation`. Cost: reads `1 / val_fraction` times as much text from the start of the stream."""
        while len(self._val_batches) < num_batches:
            self._val_batches.append(torch.from_numpy(self._val.take().reshape(self._shape)))
        return self._val_batches[:num_batches]

    def state(self) -> dict[str, Any]:
        """See `Corpus.state`; the places of the workers that have read anything here."""
        return {"streams": {str(worker): packed.state() for worker, packed in enumerate(self._train) if packed.step}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Corpus.restore`; costs nothing until the next batch, which reads on in the file where the worker was."""
        for worker, packed in enumerate(self._train):
            if str(worker) in state["streams"]:
                packed.restore(state["streams"][str(worker)])


START = {"step": 0, "place": None, "used": 0, "hash": None}


class _Packed:
    """A place in the endless sequence of one worker's tokens; `step` batches lie behind it."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, open_pass: Callable[[], Any], *, held_out: bool
    ) -> None:
        self._config, self._tokenizer, self._open_pass, self._held_out = config, tokenizer, open_pass, held_out
        self.restore(START)

    def restore(self, state: Mapping[str, Any]) -> None:
        step, place, used, self._hash = state["step"], state["place"], state["used"], state["hash"]
        if not (
            type(step) is type(used) is int and min(step, used) >= 0 and (place is None or isinstance(place, dict))
        ):
            raise DataError(f"a stream cannot be at {dict(state)!r:.200}; resume from an older checkpoint")
        self.step = step
        self._place: dict[str, Any] | None = place  # of the data set, just before the current document
        self._used: int = used  # tokens of the current document that are behind us
        self._document: NDArray[np.int64] | None = None  # None until it is read (again)

    def state(self) -> dict[str, Any]:
        known = self._hash if self._document is None else _hash(self._document)
        return {"step": self.step, "place": self._place, "used": self._used, "hash": known}

    def take(self) -> NDArray[np.int64]:
        """The tokens of the next batch, flat."""
        try:
            return self._take()
        except DataError:
            self.restore(START)  # else a second try would go on from the middle of a batch
            raise

    def _take(self) -> NDArray[np.int64]:
        missing = self._config.batch_size * (self._config.seq_len + 1)
        parts: list[NDArray[np.int64]] = []
        if self._document is None:
            self._begin(self._place)
            self._document = self._next_document()
            if self._used > len(self._document) or self._hash not in (None, _hash(self._document)):
                raise DataError(
                    f"the stream '{self._config.source}' has changed: the document at step {self.step} hashed to "
                    f"{self._hash!r:.40} and now to '{_hash(self._document)}'; resume with the data the run began with"
                )
        while missing:
            if self._used == len(self._document):
                self._document, self._used = self._next_document(), 0
            part = self._document[self._used : self._used + missing]
            self._used += len(part)
            missing -= len(part)
            parts.append(part)
        self.step += 1
        return np.concatenate(parts)

    def _begin(self, place: dict[str, Any] | None) -> None:
        """Opens the stream at a place, as an object of its own: one that was restored would begin there again."""
        self._stream = self._open_pass()
        if place is not None:
            self._stream.load_state_dict(place)
        self._rows: Iterator[dict[str, Any]] = iter(self._stream)
        self._ahead = place  # the stream itself knows where it is only after the first row

    def _next_document(self) -> NDArray[np.int64]:
        """The tokens of the next document on our side of the split; begins anew after the last."""
        passes = 0
        name = f"a document of the stream '{self._config.source}'"
        while True:
            self._place = self._ahead
            try:
                row = next(self._rows, None)
                self._ahead = self._stream.state_dict()
            except Exception as error:  # file systems and formats behind datasets each raise their own
                raise DataError(
                    f"the stream '{self._config.source}' broke off ({error}); resume from the last checkpoint when it "
                    "can be read"
                ) from error
            if row is None:
                passes += 1
                if passes == 2:
                    side = "validation" if self._held_out else "training"
                    raise DataError(
                        f"the stream '{self._config.source}' has 0 documents for {side} in one worker's part; give "
                        f"more documents, fewer workers or another data.val_fraction than {self._config.val_fraction}"
                    )
                self._begin(None)
                continue
            document = Document(name, _field(row, self._config.text_field, name))
            _utf8(document)
            if document.text and _held_out(document.text, self._config.val_fraction) == self._held_out:
                tokens = self._tokenizer.encode([document.text])[0].astype(np.int64)
                return tokens if self._tokenizer.end is None else np.append(tokens, self._tokenizer.end)


def _hash(tokens: NDArray[np.int64]) -> str:
    return hashlib.blake2b(tokens.tobytes(), digest_size=8).hexdigest()


def _open_stream(source: str) -> Callable[[int, int], Any]:
    """`(worker, workers) -> a fresh pass over that worker's documents` of "hf:NAME[:CONFIG]"."""
    try:
        from datasets import load_dataset
        from datasets.distributed import split_dataset_by_node
    except ImportError as error:
        raise ConfigError(
            f"data.source '{source}' needs the package datasets, which is missing ({error}); "
            "run pip install 'gossamer[data]'"
        ) from None
    name, _, subset = source.removeprefix("hf:").partition(":")
    try:
        stream = load_dataset(name, subset or None, split="train", streaming=True)
    except Exception as error:  # the hub, the network and the data set's own configuration each raise their own
        raise DataError(
            f"data.source '{source}' cannot be opened as a data set with a split 'train' ({error}); give "
            "'hf:NAME' or 'hf:NAME:CONFIG' of one that this machine can reach, or a folder of its files"
        ) from error
    return lambda worker, workers: split_dataset_by_node(stream, rank=worker, world_size=workers)
