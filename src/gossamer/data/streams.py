"""Streamed text: each worker reads its part in order and packs it into windows without gaps."""

import functools
import hashlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.data.documents import Document, field, held_out, utf8
from gossamer.data.settings import DataConfig, must_fit_memory
from gossamer.data.tokenizer import Tokenizer
from gossamer.errors import DataError, first_line, require
from gossamer.rng import numpy_rng

log = logging.getLogger("gossamer")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds between attempts to reopen a stream: the first pause, doubled after each attempt, up to the longest."""
_LASTING = (ValueError, TypeError, LookupError, FileNotFoundError, PermissionError)
"""Errors that are mostly faults of the data; retried once, as an interrupted transfer may look alike."""


class StreamCorpus:
    """A data set streamed by `datasets`. Workers divide its files, or its documents if the files do not divide evenly.

    A worker's documents are packed in order into windows of `seq_len + 1` tokens; after the last document it starts
    again. A batch is a function of worker and step only: a later one is reached by reading ahead, an earlier one from
    the start.

    With `data.shuffle_buffer` that many documents at a time are read and shuffled by `numpy_rng(seed, worker, block,
    "shuffle")`. A resumed run reads the block again: unlike the rolling buffer of `datasets`, which is lost with the
    process, it continues with the next document. With `data.prefetch` a thread reads batches ahead; the state is that
    of the last batch requested, not of the last one read.

    A stream that breaks off is reopened at its position, with growing pauses, for up to `patience_s`.

    Raises: MissingPackageError without the package datasets; DataError when the stream cannot be opened or fails.
    """

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, workers: int, seed: int = 0, patience_s: float = 0.0
    ) -> None:
        self.vocab_size, self.tokenizer, self.read = tokenizer.vocab_size, tokenizer, ()
        self._config, self._shape = config, (config.batch_size, config.seq_len + 1)
        open_pass = _open_stream(config.sources[0])
        self._train = [
            _Ahead(
                _Packed(
                    config,
                    tokenizer,
                    functools.partial(open_pass, worker, workers),
                    held_out=False,
                    order=None if config.shuffle_buffer is None else functools.partial(_drawn_order, seed, worker),
                    patience_s=patience_s,
                ),
                config.prefetch,
            )
            for worker in range(workers)
        ]
        self._val = _Packed(config, tokenizer, functools.partial(open_pass, 0, 1), held_out=True, patience_s=patience_s)
        self._val_batches: list[Tensor] = []

    def batch(self, worker: int, step: int) -> Tensor:
        """See `Corpus.batch`."""
        return torch.from_numpy(self._at(worker, step).take().reshape(self._shape))

    def read_ahead(self, worker: int, step: int, batches: int) -> None:
        """See `Batches.read_ahead`. Cost: holds these batches."""
        self._at(worker, step).read_ahead(batches)

    def _at(self, worker: int, step: int) -> "_Ahead":
        """A worker's batches, positioned at this step."""
        packed = self._train[worker]
        if step < packed.batches_taken:
            packed.restore(START)
        while packed.batches_taken < step:
            packed.take()
        return packed

    def samples(self, worker: int, step: int) -> list[int]:
        """See `Corpus.samples`; windows never repeat."""
        return [*range(step * self._shape[0], (step + 1) * self._shape[0])]

    def validation(self, num_batches: int) -> list[Tensor]:
        """See `Corpus.validation`. Cost: reads `1 / val_fraction` times as much text from the start of the stream."""
        must_fit_memory(self._config, num_batches)
        while len(self._val_batches) < num_batches:
            self._val_batches.append(torch.from_numpy(self._val.take().reshape(self._shape)))
        return self._val_batches[:num_batches]

    def state(self) -> dict[str, Any]:
        """See `Corpus.state`; the positions of the workers that have read anything here."""
        streams = {str(worker): packed.state() for worker, packed in enumerate(self._train) if packed.batches_taken}
        return {"streams": streams, "reading": _READING}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Corpus.restore`; costs nothing until the next batch, which continues at the worker's position."""
        if state["streams"] and self.tokenizer.special and state.get("reading") != _READING:
            raise DataError(
                f"the stream '{self._config.source}' was begun by a version of Gossamer that took text which spells a special "
                "token for that token, and this one takes it for text; resume with that version, or start again"
            )
        for worker, packed in enumerate(self._train):
            if str(worker) in state["streams"]:
                packed.restore(state["streams"][str(worker)])


_READING = 2
"""How text becomes tokens. Before 2, text that spells a special token became that token."""
START = {"step": 0, "place": None, "used": 0, "hash": None}


def _drawn_order(seed: int, worker: int, block: int, documents: int) -> list[int]:
    """The shuffled order of a block's documents."""
    return [int(k) for k in numpy_rng(seed, worker, block, "shuffle").permutation(documents)]


class _Packed:
    """A position in the endless token sequence of one worker, after `step` batches.

    Documents are read in blocks of `data.shuffle_buffer`, else of one. Its position is the block's position in the
    stream and the document within the block: with the block's position alone, documents would be read again in another
    order.

    Args:
        order: the order of a block's documents, by the block's number and size; None without shuffling.
        patience_s: how long to retry a stream that breaks off.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        open_pass: Callable[[], Any],
        *,
        held_out: bool,
        order: Callable[[int, int], list[int]] | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._patience_s = patience_s
        self._order, self._size = order, 1 if order is None else config.shuffle_buffer or 1
        self._config, self._tokenizer, self._open_pass, self.held_out = config, tokenizer, open_pass, held_out
        self._before, self._after = (np.array(ids, np.int64) for ids in (tokenizer.before, tokenizer.after))
        self.restore(START)

    def restore(self, state: Mapping[str, Any]) -> None:
        step, place, used, self._hash = state["step"], state["place"], state["used"], state["hash"]
        block, taken = state.get("block", 0), state.get("taken", 0)  # a stream that is not shuffled has none
        if not (
            type(step) is type(used) is type(block) is type(taken) is int
            and min(step, used, block, taken) >= 0
            and (place is None or isinstance(place, dict))
        ):
            raise DataError(f"a stream cannot be at {dict(state)!r:.200}; resume from an older checkpoint")
        self.step = step
        self._place: dict[str, Any] | None = place  # of the data set, before the block of the current document
        self._used: int = used  # tokens of the current document already used
        self._block, self._taken = block, taken  # which block it is, and which document of it, in its order
        self._texts: list[NDArray[np.int64]] = []  # the documents of the block, in its order
        self._document: NDArray[np.int64] | None = None  # None until it is read (again)

    def state(self) -> dict[str, Any]:
        known = self._hash if self._document is None else _hash(self._document)
        state = {"step": self.step, "place": self._place, "used": self._used, "hash": known}
        return state if self._order is None else {**state, "block": self._block, "taken": self._taken}

    def take(self) -> NDArray[np.int64]:
        """The tokens of the next batch, flat."""
        try:
            return self._take()
        except DataError:
            self.restore(START)  # otherwise a second try would continue in the middle of a batch
            raise

    def _take(self) -> NDArray[np.int64]:
        missing = self._config.batch_size * (self._config.seq_len + 1)
        parts: list[NDArray[np.int64]] = []
        if self._document is None:
            self._begin(self._place)
            self._read_block()
            if self._taken >= len(self._texts):
                raise DataError(
                    f"the stream '{self._config.source}' has changed: it was at document {self._taken} of a block, which has "
                    f"{len(self._texts)} now; resume with the data the run began with"
                )
            self._document = self._texts[self._taken]
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
        """Positions the stream so that the next row is the one at `place`."""
        self._ahead, self._rows = place, None

    def _open(self) -> Iterator[dict[str, Any]]:
        """Opens the stream at its position, as a new object: a restored one would always begin at that position."""
        self._stream = self._open_pass()
        if self._ahead is not None:  # the stream has its own position only after the first row
            self._stream.load_state_dict(self._ahead)
        return iter(self._stream)

    def _next_row(self) -> dict[str, Any] | None:
        """The next row; None at the end of a pass.

        Raises: DataError when the stream breaks off, and retries fail for `patience_s`.
        """
        pause_s, give_up_s = FIRST_PAUSE_S, math.inf
        while True:
            try:
                self._rows = self._open() if self._rows is None else self._rows
                row = next(self._rows, None)
                self._ahead = self._stream.state_dict()
                return row
            except Exception as error:  # file systems and formats behind datasets each raise their own
                now_s, first = time.monotonic(), give_up_s == math.inf
                if first:
                    most_s = FIRST_PAUSE_S if isinstance(error, _LASTING) else math.inf
                    give_up_s = now_s + min(self._patience_s, most_s)
                if now_s + pause_s > give_up_s:
                    raise DataError(
                        f"the stream '{self._config.source}' broke off ({first_line(error)}); resume from the last checkpoint "
                        "when it can be read"
                    ) from error
                if first:
                    log.warning(
                        "the stream '%s' broke off (%s); it is opened again at its place for up to %.3g s",
                        self._config.source,
                        first_line(error),
                        give_up_s - now_s,
                    )
            # Rows read so far are kept: the reopened stream begins at the row that failed.
            self._rows = None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _next_document(self) -> NDArray[np.int64]:
        """The tokens of the next document of this split; starts again after the last."""
        self._taken += 1
        if self._taken >= len(self._texts):
            self._block, self._taken = self._block + 1, 0
            self._read_block()
        return self._texts[self._taken]

    def _read_block(self) -> None:
        """Reads the documents of a block from the stream's position. The last block of a pass may be shorter."""
        texts: list[str] = []
        name = f"a document of the stream '{self._config.source}'"
        passes = 0
        while len(texts) < self._size:
            if not texts:
                self._place = self._ahead
            row = self._next_row()
            if row is None:
                if texts:
                    break  # the next block begins the next pass: each pass has every document once
                passes += 1
                if passes == 2:
                    side = "validation" if self.held_out else "training"
                    raise DataError(
                        f"the stream '{self._config.source}' has 0 documents for {side} in one worker's part; give "
                        f"more documents, fewer workers or another data.val_fraction than {self._config.val_fraction}"
                    )
                self._begin(None)
                continue
            document = Document(name, field(row, self._config.text_field, name))
            utf8(document)
            if document.text and held_out(document.text, self._config.val_fraction) == self.held_out:
                texts.append(document.text)
        order = range(len(texts)) if self._order is None else self._order(self._block, len(texts))
        encoded = self._tokenizer.encode([texts[k] for k in order])
        self._texts = [np.concatenate([self._before, ids.astype(np.int64), self._after]) for ids in encoded]


class _Ahead:
    """The batches of a worker in order, prefetched by a thread.

    Its `step` and `state` are those of the last batch taken. After a fork the child has no such thread, and reads again
    from there.
    """

    def __init__(self, packed: _Packed, batches: int) -> None:
        self._packed, self._batches = packed, batches
        self._coming = deque[Future[tuple[NDArray[np.int64], dict[str, Any]]]]()
        self._reader: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._state = packed.state()

    @property
    def batches_taken(self) -> int:
        """The number of batches that were taken."""
        return self._state["step"]

    def state(self) -> dict[str, Any]:
        return self._state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises: as `_Packed.restore`. Waits for a batch that is being read: two must not read at once."""
        if self._process != os.getpid():
            self._process, self._reader = os.getpid(), None
            self._coming.clear()
        while self._coming:
            if not (last := self._coming.pop()).cancel():
                last.exception()
        self._packed.restore(state)
        self._state = self._packed.state()

    def take(self) -> NDArray[np.int64]:
        """The tokens of the next batch, flat."""
        if self._process != os.getpid():
            self.restore(self._state)
        try:
            self._top_up(self._batches + 1)
            batch, self._state = self._coming.popleft().result()
        except DataError:
            self.restore(START)  # as after a stream that broke off, no batch read later may be taken
            raise
        return batch

    def read_ahead(self, batches: int) -> None:
        """Prefetches the next batches. Raises DataError when not all of them can be read; the earlier ones can be taken."""
        if self._process != os.getpid():
            self.restore(self._state)
        self._top_up(batches)
        for coming in [*self._coming][:batches]:
            coming.result()

    def _top_up(self, batches: int) -> None:
        """Keeps at least this many batches in flight, unless one could not be read: none after it counts."""
        while len(self._coming) < batches:
            if not self._batches:
                if self._coming and self._coming[-1].exception() is not None:
                    return
                self._coming.append(_done(self._read))
                continue
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, thread_name_prefix="gossamer-stream")
            self._coming.append(self._reader.submit(self._read))

    def _read(self) -> tuple[NDArray[np.int64], dict[str, Any]]:
        return self._packed.take(), self._packed.state()


def _done(work: Callable[[], Any]) -> Future[Any]:
    """The result or the exception of a call."""
    done = Future[Any]()
    try:
        done.set_result(work())
    except DataError as error:
        done.set_exception(error)
    return done


def _hash(tokens: NDArray[np.int64]) -> str:
    return hashlib.blake2b(tokens.tobytes(), digest_size=8).hexdigest()


def _open_stream(source: str) -> Callable[[int, int], Any]:
    """`(worker, workers) -> a fresh pass over that worker's documents` of "hf:NAME[:CONFIG]"."""
    require("datasets", "data", f"data.source '{source}'")
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    name, _, subset = source.removeprefix("hf:").partition(":")
    try:
        stream = load_dataset(name, subset or None, split="train", streaming=True)
    except Exception as error:  # the hub, the network and the data set's own configuration each raise their own
        raise DataError(
            f"data.source '{source}' cannot be opened as a data set with a split 'train' ({first_line(error)}); give "
            "'hf:NAME' or 'hf:NAME:CONFIG' of one that this machine can reach, or a folder of its files"
        ) from error
    return lambda worker, workers: split_dataset_by_node(stream, rank=worker, world_size=workers)
