"""Text in files, tokenised once or by other tools; a batch consists of windows at random places."""

import contextlib
import functools
import hashlib
import io
import itertools
import json
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.data.bins import Binary, TokenArray, closer_hash, is_for_validation, open_binary, sampled_hash
from gossamer.data.documents import (
    Document,
    SourceFiles,
    besides,
    held_out,
    holds_tokens,
    read_documents,
    source_files,
    utf8,
)
from gossamer.data.settings import DataConfig, must_fit_memory
from gossamer.data.tokenizer import Tokenizer
from gossamer.errors import DataError
from gossamer.rng import numpy_rng

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PIECE_CHARS = 1 << 16  # longer documents are cut, so that one book cannot become the whole validation text


class SourceRead(NamedTuple):
    """Statistics of a source that was read."""

    source: str
    files: int
    bytes: int
    """Bytes of UTF-8 text, or of token files."""
    documents: int | None
    """None for token files that do not state it."""
    tokens: int
    left_out: Mapping[str, int]
    """How many files of a folder were not read, by their ending."""
    train_tokens: int
    """Those that are not for validation."""

    def in_words(self) -> str:
        """One line.

        >>> SourceRead("texts", 2, 5_000, 7, 1_200, {".zst": 1}, 1_100).in_words()
        "text of 'texts': 2 files, 5,000 bytes, 7 documents, 1,200 tokens; left out: 1 .zst"
        """
        counts = (
            f"{count:,} {unit if count != 1 else unit[:-1]}"
            for unit, count in zip(self._fields[1:5], self[1:5], strict=True)
            if count is not None
        )
        return f"text of '{self.source}': {', '.join(counts)}{besides(self.left_out)}"


class Tokens(NamedTuple):
    """Tokenised files."""

    train: TokenArray
    val: TokenArray
    ends: Sequence[int]
    """The end of each source in the training tokens."""
    read: tuple[SourceRead, ...]
    """Statistics of each source."""
    fingerprint: str
    """A hash of all tokens and of their split; for token files, of their sizes and samples (`sampled_hash`)."""
    files: str = ""
    """`closer_hash` of files of tokens."""


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    first: bool
    """Whether the document begins here."""
    last: bool
    """Whether it ends here."""
    source: int
    """The index of its source."""


def _pieces(documents: Iterable[tuple[int, Document]], max_bytes: int | None) -> Iterator[Piece]:
    left = max_bytes
    for source, document in documents:
        raw, text = utf8(document), document.text
        if left is not None:
            raw = raw[:left]
            left -= len(raw)
            text = raw.decode(errors="ignore")
        for start in range(0, len(text), PIECE_CHARS):
            stop = start + PIECE_CHARS
            yield Piece(text[start:stop], start == 0, stop >= len(text), source)
        if left == 0:
            return


class _Tokenised(NamedTuple):
    """What was tokenised."""

    ends: list[int]
    """The end of each source in the training tokens."""
    read: list[tuple[int, int, int, int]]
    """The files, bytes, documents and tokens of each source."""
    fingerprint: str


def _tokenise(
    config: DataConfig, tokenizer: Tokenizer, sources: Sequence[SourceFiles], train: BinaryIO, val: BinaryIO
) -> _Tokenised:
    """Writes the tokens of all files. Raises: DataError for a file; OSError only where tokens cannot be written."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    before, after = (np.array(ids, dtype).tobytes() for ids in (tokenizer.before, tokenizer.after))
    digest = hashlib.blake2b(digest_size=16)
    lengths, read = [0] * len(sources), [[0, 0, 0, 0] for _ in sources]

    def documents() -> Iterator[tuple[int, Document]]:
        for place, source in enumerate(sources):
            for path in source.files:
                read[place][0] += 1
                for document in read_documents(path, config.text_field):
                    yield place, document

    pieces = _pieces(documents(), config.max_bytes)
    while group := list(itertools.islice(pieces, 64)):
        for piece, ids in zip(group, tokenizer.encode([piece.text for piece in group]), strict=True):
            kept = held_out(piece.text, config.val_fraction)
            tokens = (before if piece.first else b"") + ids.astype(dtype).tobytes() + (after if piece.last else b"")
            (val if kept else train).write(tokens)
            count = len(tokens) // dtype.itemsize
            lengths[piece.source] += 0 if kept else count
            for k, more in enumerate((len(piece.text.encode()), piece.first, count), start=1):
                read[piece.source][k] += more
            digest.update(b"v" if kept else b"t")
            digest.update(tokens)
    counts = [(files, size, count, tokens) for files, size, count, tokens in read]
    return _Tokenised([*itertools.accumulate(lengths)], counts, digest.hexdigest())


def _load_tokens(config: DataConfig, tokenizer: Tokenizer) -> Tokens:
    sources = source_files(config.sources)
    if holds_tokens(sources):
        return _ready_tokens(config, tokenizer, sources)
    if config.cache is not None:
        return _cached_tokens(config, tokenizer, sources)
    train, val = io.BytesIO(), io.BytesIO()
    written = _tokenise(config, tokenizer, sources, train, val)
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    return _tokens(sources, np.frombuffer(train.getbuffer(), dtype), np.frombuffer(val.getbuffer(), dtype), written)


def _tokens(sources: Sequence[SourceFiles], train: NDArray[Any], val: NDArray[Any], written: _Tokenised) -> Tokens:
    lengths = [stop - start for start, stop in itertools.pairwise((0, *written.ends))]
    read = tuple(
        SourceRead(source.source, *counts, source.left_out, length)
        for source, counts, length in zip(sources, written.read, lengths, strict=True)
    )
    return Tokens(TokenArray([train]), TokenArray([val]), written.ends, read, written.fingerprint)


def opened_binaries(config: DataConfig, vocab_size: int, sources: Sequence[SourceFiles]) -> list[dict[Path, Binary]]:
    """The files of tokens of each source. Raises: DataError as `open_binary`, and for options that only apply to text."""
    for key in ("max_bytes", "cache"):
        if (value := getattr(config, key)) is not None:
            raise DataError(
                f"data.{key} is {value!r:.60}, but data.source names files of tokens, which are mapped whole; remove data.{key}"
            )
    return [{path: open_binary(path, vocab_size) for path in source.files} for source in sources]


def _ready_tokens(config: DataConfig, tokenizer: Tokenizer, sources: Sequence[SourceFiles]) -> Tokens:
    """The tokens of .bin files, which are mapped and not copied.

    A file whose name has "val" in it is for validation; of a source without one, its last `val_fraction` is.
    """
    train, val, ends, read = TokenArray([]), TokenArray([]), list[int](), list[SourceRead]()
    for source, files in zip(sources, opened_binaries(config, tokenizer.vocab_size, sources), strict=True):
        tokens, kept = (
            TokenArray([one.tokens for path, one in files.items() if is_for_validation(path) is held])
            for held in (False, True)
        )
        size, total = sum(one.tokens.nbytes for one in files.values()), len(tokens) + len(kept)
        if not len(kept):
            tokens, kept = tokens.cut(len(tokens) - int(config.val_fraction * len(tokens)))
        train, val = train + tokens, val + kept
        ends.append(len(train))
        documents = _documents(files.values())
        read.append(SourceRead(source.source, len(files), size, documents, total, source.left_out, len(tokens)))
    parts = [*train.parts, *val.parts]
    split = f"{len(train)} {len(val)} {sampled_hash(parts)}"
    fingerprint = hashlib.blake2b(split.encode(), digest_size=16).hexdigest()
    return Tokens(train, val, ends, tuple(read), fingerprint, closer_hash(parts))


def _documents(files: Iterable[Binary]) -> int | None:
    counts = [one.documents for one in files]
    return None if None in counts else sum(count or 0 for count in counts)


def _cached_tokens(config: DataConfig, tokenizer: Tokenizer, sources: Sequence[SourceFiles]) -> Tokens:
    """Tokens as files in the cache folder, under a name that changes with the text, the tokenizer and the options.

    The name depends on the content of the text, not on path or times: a copy of the text, here or on another machine
    that shares the folder, uses them too. One process tokenises, and concurrent ones wait for it.

    Files with unchanged times are taken as they are; others, such as copies, are read and hashed.
    """
    assert config.cache is not None
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    cache = Path(config.cache).expanduser()
    try:
        folder = cache / f"tokens-{_cache_name(config, tokenizer, sources, cache)}"
        if not folder.is_dir():
            with _alone(cache / f".{folder.name}.lock"):
                if not folder.is_dir():  # another process wrote it while this one waited
                    _write_tokens(folder, config, tokenizer, sources)
    except OSError as error:
        raise DataError(
            f"data.cache is '{config.cache}', which cannot be written ({error}); make room or give the right to write "
            "there, or name another folder"
        ) from error
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        train, val = (_mapped(folder / f"{side}.bin", manifest["files"][side], dtype) for side in _SIDES)
        ends = [int(end) for end in manifest["ends"]]
        if len(ends) != len(sources) or [0, *ends] != sorted([0, *ends]) or ends[-1] != len(train):
            raise ValueError(f"its sources end at {ends} of {len(train)} tokens")
        read = [(int(a), int(b), int(c), int(d)) for a, b, c, d in manifest["read"]]
        return _tokens(sources, train, val, _Tokenised(ends, read, str(manifest["fingerprint"])))
    except (ArithmeticError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"the token cache '{folder}' is damaged ({error!r:.200}); remove that folder, and it will be written again"
        ) from None


_SIDES = ("train", "val")


def _write_tokens(folder: Path, config: DataConfig, tokenizer: Tokenizer, sources: Sequence[SourceFiles]) -> None:
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    began = _stamps(sources)
    try:
        scratch.mkdir(parents=True)
        with (scratch / "train.bin").open("wb") as train, (scratch / "val.bin").open("wb") as val:
            written = _tokenise(config, tokenizer, sources, train, val)
        if _stamps(sources) != began:
            raise DataError(
                f"the text of data.source {config.source!r:.80} changed while it was tokenised for data.cache; start again once "
                "it is written"
            )
        files = {side: _seal(scratch / f"{side}.bin") for side in _SIDES}
        (scratch / "manifest.json").write_text(json.dumps({"files": files, **written._asdict()}))
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """A lock between processes of this machine; a process that dies releases it.

    Where the system or the file system has no locks, several may hold it: each writes a separate scratch folder, and
    the first to finish is used.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _stamps(sources: Sequence[SourceFiles]) -> list[tuple[Any, ...]]:
    """File metadata that detects changes since the files were read."""
    try:
        statuses = [(path, path.stat()) for source in sources for path in source.files]
    except OSError as error:
        raise DataError(f"the text cannot be read: {error}; correct the file or data.source") from error
    return [(path.resolve().as_posix(), now.st_size, now.st_mtime_ns, now.st_ctime_ns) for path, now in statuses]


def _cache_name(config: DataConfig, tokenizer: Tokenizer, sources: Sequence[SourceFiles], cache: Path) -> str:
    made_of = [
        5,
        _content(sources, cache),
        tokenizer.json(),
        tokenizer.before,
        tokenizer.after,
        config.text_field,
        config.val_fraction,
        config.max_bytes,
    ]
    return hashlib.blake2b(json.dumps(made_of).encode(), digest_size=12).hexdigest()


def _content(sources: Sequence[SourceFiles], cache: Path) -> str:
    """A hash of all text and of how it is divided into sources and files.

    Cost: reads all of it, about a second for a gigabyte, unless the cache knows files with these paths, sizes and times.
    """
    stamps = _stamps(sources)
    known = cache / f"text-{hashlib.blake2b(json.dumps(stamps).encode(), digest_size=12).hexdigest()}"
    if known.is_file() and re.fullmatch("[0-9a-f]{64}", hexadecimal := known.read_text(errors="replace")[:65]):
        return hexadecimal
    digest = hashlib.blake2b(digest_size=32)
    for source in sources:
        digest.update(b"source")
        for path in source.files:
            try:
                with path.open("rb") as file:
                    file_hash = hashlib.file_digest(file, hashlib.blake2b).hexdigest()
            except OSError as error:
                raise DataError(f"'{path}' cannot be read ({error}); correct it, or leave it out") from error
            # The suffix gives the format.
            digest.update(f"{file_hash} {''.join(path.suffixes[-2:]).lower()}\n".encode())
    with contextlib.suppress(OSError):  # a read-only cache works too; the text is then hashed each time
        cache.mkdir(parents=True, exist_ok=True)
        scratch = known.with_name(f".{known.name}.{secrets.token_hex(8)}")
        scratch.write_text(digest.hexdigest())
        scratch.replace(known)
    return digest.hexdigest()


def _publish(scratch: Path, folder: Path) -> None:
    """Renames a finished folder into place, unless another process was faster."""
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _seal(path: Path) -> list[Any]:
    """A file's size, its times and the hash of its content."""
    now = path.stat()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, hashlib.blake2b).hexdigest()
    return [now.st_size, now.st_mtime_ns, now.st_ctime_ns, digest]


def _mapped(path: Path, seal: Sequence[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The tokens of a file, memory-mapped. Raises ValueError if they are not those that were written."""
    size, *times, digest = seal
    now = path.stat()
    if now.st_size != size:
        raise ValueError(f"{path.name} has {now.st_size} bytes and not {size}")
    if [now.st_mtime_ns, now.st_ctime_ns] != times and _seal(path)[-1] != digest:
        raise ValueError(f"{path.name} was altered after it was written")
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)


class FileCorpus:
    """Tokenised files. A batch is windows at random places, drawn by `numpy_rng(seed, worker, step, "data")`. With `data.windows`
    the places are drawn once for each worker, and each epoch has all of them in its own order.

    If the training or the validation text would be shorter than one window, as with one small file, the last
    `val_fraction` of all text is the validation text instead, unless each worker has a source.

    Args: `scored`: all text is for validation, in windows no longer than the text.
    Raises: DataError when there is not enough text for one window on either side, or in one worker's shard.
    """

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, workers: int, seed: int, *, scored: bool = False
    ) -> None:
        self.vocab_size, self.tokenizer = tokenizer.vocab_size, tokenizer
        self._config, self._workers, self._seed = config, workers, seed
        self._window = config.seq_len + 1
        train, val, self._ends, self.read, self._fingerprint, self.files = _load_tokens(config, tokenizer)
        if scored:
            self._train, self._val = TokenArray([]), train + val
            self._window = min(self._window, len(self._val))
            if self._window < 2:
                raise DataError(
                    f"the text of '{config.source}' has {self._window} token{'s' * (self._window != 1)}, but at least 2 can be "
                    "scored; give a longer one"
                )
            return
        if isinstance(config.shards, tuple):  # a file that moves to another source moves to other workers
            self._fingerprint = hashlib.blake2b(
                f"{self._fingerprint} {self._ends}".encode(), digest_size=16
            ).hexdigest()
        if min(len(train), len(val)) < self._window and not isinstance(config.shards, tuple):
            whole = train + val
            train, val = whole.cut(len(whole) - int(config.val_fraction * len(whole)))
        self._train, self._val = train, val
        self._check_lengths()
        # A worker is in a few epochs at most, and all workers of a simulation share this corpus.
        self._places = functools.lru_cache(maxsize=256)(self._drawn_places)
        self._order = functools.lru_cache(maxsize=256)(self._drawn_order)

    def _check_lengths(self) -> None:
        if not len(self._train) + len(self._val):
            raise DataError(
                f"the text of data.source {self._config.source!r} has 0 bytes; give files that are not empty"
            )
        shards = [self._shard(worker) for worker in range(self._workers)]
        shard, worker = min((high - low, worker) for worker, (low, high) in enumerate(shards))
        if isinstance(self._config.shards, tuple) and shard < self._window:
            source = self._config.sources[self._config.shards[worker]]
            raise DataError(
                f"the training text of worker {worker} is data.source {source!r:.60} and has {shard} tokens, but "
                f"one window needs data.seq_len + 1 = {self._window}; give more text, none that a source before it has too, or "
                "raise data.max_bytes"
            )
        if isinstance(self._config.shards, tuple) and not len(self._val):
            raise DataError(
                f"the validation text has 0 tokens: data.val_fraction = {self._config.val_fraction} of the documents, chosen by "
                "their content, are held out, and of data.source none is; give more documents, or raise data.val_fraction"
            )
        for text, got in [("the training text", shard), ("the validation text", len(self._val))]:
            if got < self._window:
                per_worker = " of one worker" if text == "the training text" and shard < len(self._train) else ""
                raise DataError(
                    f"{text}{per_worker} has {got} tokens, but one window needs data.seq_len + 1 = {self._window}; "
                    f"give more text, lower data.seq_len, or change data.val_fraction = {self._config.val_fraction}"
                )

    def _shard(self, worker: int) -> tuple[int, int]:
        """The range of training tokens that a worker draws from: first, and one past the last."""
        if isinstance(self._config.shards, tuple):
            source = self._config.shards[worker]
            return self._ends[source - 1] if source else 0, self._ends[source]
        if self._config.shards == "iid":
            return 0, len(self._train)
        return len(self._train) * worker // self._workers, len(self._train) * (worker + 1) // self._workers

    def batch(self, worker: int, step: int) -> Tensor:
        """See `Corpus.batch`."""
        assert 0 <= worker < self._workers, worker
        low, high = self._shard(worker)
        if self._config.windows is not None:
            return self._windows(self._train, self._places(worker)[self.samples(worker, step)])
        places = numpy_rng(self._seed, worker, step, "data")
        return self._windows(self._train, places.integers(low, high - self._window + 1, size=self._config.batch_size))

    def samples(self, worker: int, step: int) -> list[int]:
        """The numbers of a batch's windows; all different where windows do not repeat."""
        size, windows = self._config.batch_size, self._config.windows
        numbers = range(step * size, (step + 1) * size)
        if windows is None:
            return [*numbers]
        return [int(self._order(worker, n // windows)[n % windows]) for n in numbers]

    def _drawn_places(self, worker: int) -> NDArray[np.int64]:
        """The starts of a worker's repeated windows."""
        low, high = self._shard(worker)
        draws = numpy_rng(self._seed, worker, "windows")
        return draws.integers(low, high - self._window + 1, size=self._config.windows)

    def _drawn_order(self, worker: int, epoch: int) -> NDArray[np.int64]:
        """The order of a worker's windows in an epoch."""
        return numpy_rng(self._seed, worker, epoch, "order").permutation(self._config.windows or 0)

    def read_ahead(self, worker: int, step: int, batches: int) -> None:
        """See `Corpus.read_ahead`: a no-op, as all text is in memory."""

    def validation(self, num_batches: int) -> list[Tensor]:
        """See `Corpus.validation`; the windows are spread evenly over the validation text."""
        must_fit_memory(self._config, num_batches)
        size = self._config.batch_size
        starts = np.linspace(0, len(self._val) - self._window, num_batches * size).astype(np.int64)
        return [self._windows(self._val, starts[k * size : (k + 1) * size]) for k in range(num_batches)]

    def batches_of_all(self, most_tokens: int) -> int:
        """The number of validation batches that cover the validation text, or `most_tokens` of it."""
        tokens = min(len(self._val) - 1, most_tokens)
        return -(-tokens // (self._config.batch_size * (self._window - 1)))

    def _windows(self, tokens: TokenArray, starts: NDArray[np.int64]) -> Tensor:
        windows = np.stack([tokens.window(int(start), self._window) for start in starts])
        if windows.max() >= self.vocab_size or windows.min() < 0:
            bad = windows.max() if windows.max() >= self.vocab_size else windows.min()
            where, remedy = (
                (
                    f"data.source {self._config.source!r:.60} has",
                    "name the tokenizer that it was made with as data.tokenizer",
                )
                if self._config.cache is None
                else (
                    f"the token cache '{self._config.cache}' holds",
                    "remove that folder, and it will be written again",
                )
            )
            raise DataError(f"{where} token {bad}, but the vocabulary has only {self.vocab_size}; {remedy}")
        return torch.from_numpy(windows)

    def state(self) -> dict[str, Any]:
        """See `Corpus.state`."""
        return {"fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Corpus.restore`."""
        if state["fingerprint"] != self._fingerprint:
            remedy = (
                ", or if they spell special tokens of its tokenizer, with the version of Gossamer that it began with"
            )
            remedy = remedy if self.tokenizer.special else ""
            raise DataError(
                f"the text of data.source {self._config.source!r:.80} is another than when the checkpoint was saved: its tokens "
                f"hash to {self._fingerprint} and hashed to {state['fingerprint']!r:.60}; restore its files as they were{remedy}"
            )
