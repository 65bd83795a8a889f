"""Text in files: tokenised once; a batch consists of windows at random places."""

import functools
import hashlib
import io
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.data.documents import Document, files_of, held_out, read_documents, utf8
from gossamer.data.settings import DataConfig
from gossamer.data.tokenizer import Tokenizer
from gossamer.errors import DataError
from gossamer.rng import numpy_rng

__all__ = ["FileCorpus", "Piece", "Tokens"]

PIECE_CHARS = 1 << 16  # longer documents are cut, so that one book cannot become the whole validation text


class Tokens(NamedTuple):
    """Tokenised files."""

    train: NDArray[Any]
    val: NDArray[Any]
    ends: Sequence[int]
    """Where in the training tokens each source ends."""
    fingerprint: str
    """A hash of all tokens and of their split."""


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    last: bool
    """Whether the document ends here."""
    source: int
    """The place of its source."""


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
            yield Piece(text[start:stop], stop >= len(text), source)
        if left == 0:
            return


def _tokenise(
    config: DataConfig, tokenizer: Tokenizer, files: Mapping[Path, int], train: BinaryIO, val: BinaryIO
) -> tuple[list[int], str]:
    """Writes the tokens of all files; returns where each source ends in those for training, and a hash of all and their split."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    end = b"" if tokenizer.end is None else np.array(tokenizer.end, dtype).tobytes()
    digest = hashlib.blake2b(digest_size=16)
    lengths = [0] * len(config.sources)
    documents = (
        (source, document) for path, source in files.items() for document in read_documents(path, config.text_field)
    )
    pieces = _pieces(documents, config.max_bytes)
    while group := list(itertools.islice(pieces, 64)):
        for piece, ids in zip(group, tokenizer.encode([piece.text for piece in group]), strict=True):
            kept = held_out(piece.text, config.val_fraction)
            tokens = ids.astype(dtype).tobytes() + (end if piece.last else b"")
            (val if kept else train).write(tokens)
            lengths[piece.source] += 0 if kept else len(tokens) // dtype.itemsize
            digest.update(b"v" if kept else b"t")
            digest.update(tokens)
    return [*itertools.accumulate(lengths)], digest.hexdigest()


def _load_tokens(config: DataConfig, tokenizer: Tokenizer) -> Tokens:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    files = files_of(config.sources)
    try:
        if config.cache is not None:
            return _cached_tokens(config, tokenizer, files, dtype)
        train, val = io.BytesIO(), io.BytesIO()
        ends, fingerprint = _tokenise(config, tokenizer, files, train, val)
    except OSError as error:
        raise DataError(f"the text cannot be read: {error}; correct the file or data.source") from error
    return Tokens(np.frombuffer(train.getbuffer(), dtype), np.frombuffer(val.getbuffer(), dtype), ends, fingerprint)


def _cached_tokens(config: DataConfig, tokenizer: Tokenizer, files: Mapping[Path, int], dtype: np.dtype[Any]) -> Tokens:
    """Tokens as files in the cache folder, under a name that changes with the text, the tokenizer and the options."""
    assert config.cache is not None
    stamps = [
        (path.resolve().as_posix(), path.stat().st_size, path.stat().st_mtime_ns, source)
        for path, source in files.items()
    ]
    made_of = [
        2,
        len(config.sources),
        stamps,
        tokenizer.json(),
        config.text_field,
        config.val_fraction,
        config.max_bytes,
    ]
    name = hashlib.blake2b(json.dumps(made_of).encode(), digest_size=12).hexdigest()
    folder = Path(config.cache).expanduser() / f"tokens-{name}"
    if not folder.is_dir():
        scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
        scratch.mkdir(parents=True)
        try:
            with (scratch / "train.bin").open("wb") as train, (scratch / "val.bin").open("wb") as val:
                ends, fingerprint = _tokenise(config, tokenizer, files, train, val)
                sizes = {"train": train.tell(), "val": val.tell()}
            manifest = {"bytes": sizes, "ends": ends, "fingerprint": fingerprint}
            (scratch / "manifest.json").write_text(json.dumps(manifest))
            _publish(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        train, val = (_mapped(folder / f"{side}.bin", manifest["bytes"][side], dtype) for side in ("train", "val"))
        ends = [int(end) for end in manifest["ends"]]
        if len(ends) != len(config.sources) or [0, *ends] != sorted([0, *ends]) or ends[-1] != len(train):
            raise ValueError(f"its sources end at {ends} of {len(train)} tokens")
        return Tokens(train, val, ends, str(manifest["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"the token cache '{folder}' is damaged ({error!r}); remove that folder, and it will be written again"
        ) from None


def _publish(scratch: Path, folder: Path) -> None:
    """Renames a finished folder into place, unless another process was faster."""
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
    """Tokenised files. A batch is windows at random places, drawn by `numpy_rng(seed, worker, step, "data")`. With `data.windows`
    the places are drawn once for each worker, and each epoch has all of them in an order of its own.

    If the training or the validation text would be shorter than one window, as with one small file, the last
    `val_fraction` of all text is the validation text instead, unless each worker has a source.

    Raises: DataError when there is not enough text for one window on either side, or in one worker's shard.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, workers: int, seed: int) -> None:
        self.vocab_size, self.tokenizer = tokenizer.vocab_size, tokenizer
        self._config, self._workers, self._seed = config, workers, seed
        self._window = config.seq_len + 1
        train, val, self._ends, self._fingerprint = _load_tokens(config, tokenizer)
        if isinstance(config.shards, tuple):  # a file that moves from one source to another moves to other workers
            self._fingerprint = hashlib.blake2b(
                f"{self._fingerprint} {self._ends}".encode(), digest_size=16
            ).hexdigest()
        if min(len(train), len(val)) < self._window and not isinstance(config.shards, tuple):
            whole = np.concatenate([train, val])
            cut = len(whole) - int(config.val_fraction * len(whole))
            train, val = whole[:cut], whole[cut:]
        self._train, self._val = train, val
        self._check_lengths()
        # A worker has a few epochs under way at most, and all workers of a simulation share this corpus.
        self._places = functools.lru_cache(maxsize=256)(self._drawn_places)
        self._order = functools.lru_cache(maxsize=256)(self._drawn_order)

    def _check_lengths(self) -> None:
        if not len(self._train):
            raise DataError(
                f"the text of data.source {self._config.source!r} has 0 bytes; give files that are not empty"
            )
        shard, worker = min(
            (high - low, worker) for worker in range(self._workers) for low, high in [self._shard(worker)]
        )
        if isinstance(self._config.shards, tuple) and shard < self._window:
            source = self._config.sources[self._config.shards[worker]]
            raise DataError(
                f"the training text of worker {worker} is data.source {source!r:.60} and has {shard} tokens, but "
                f"one window needs data.seq_len + 1 = {self._window}; give more text, none that a source before it has too, or "
                "raise data.max_bytes"
            )
        for what, got in [("the training text", shard), ("the validation text", len(self._val))]:
            if got < self._window:
                per_worker = " of one worker" if what == "the training text" and shard < len(self._train) else ""
                raise DataError(
                    f"{what}{per_worker} has {got} tokens, but one window needs data.seq_len + 1 = {self._window}; "
                    f"give more text, lower data.seq_len, or change data.val_fraction = {self._config.val_fraction}"
                )

    def _shard(self, worker: int) -> tuple[int, int]:
        """The range of training tokens that a worker draws from: the first, and one past the last."""
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
        """Which windows a batch consists of; each has a number of its own where they do not come again."""
        size, windows = self._config.batch_size, self._config.windows
        numbers = range(step * size, (step + 1) * size)
        if windows is None:
            return [*numbers]
        return [int(self._order(worker, n // windows)[n % windows]) for n in numbers]

    def _drawn_places(self, worker: int) -> NDArray[np.int64]:
        """Where the windows of a worker begin that come again."""
        low, high = self._shard(worker)
        return numpy_rng(self._seed, worker, "windows").integers(
            low, high - self._window + 1, size=self._config.windows
        )

    def _drawn_order(self, worker: int, epoch: int) -> NDArray[np.int64]:
        """Their order in an epoch."""
        return numpy_rng(self._seed, worker, epoch, "order").permutation(self._config.windows or 0)

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
                f"{self.vocab_size}; remove that folder, and it will be written again"
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
