"""Training text: documents from files or a stream, tokens from them, and batches as pure functions of worker and step.

Files are tokenised once, into one array of tokens for training and one for validation; a batch consists of windows at random
places. With a stream, each worker reads its part in order and packs it into windows without gaps. In both cases a hash of a
text decides whether it is for validation, so all workers, machines and formats agree on the split.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from gossamer.data.settings import DataConfig, must_fit_memory
from gossamer.data.streams import StreamCorpus
from gossamer.data.token_files import FileCorpus, SourceRead
from gossamer.data.tokenizer import Tokenizer, load_tokenizer


class Batches(Protocol):
    """Open training data. Workers may ask for their batches from several threads, each worker from one at a time."""

    read: tuple[SourceRead, ...]
    """Statistics of each source of files; empty for a stream, which is read during training, and for a user's data set."""

    def batch(self, worker: int, step: int) -> Any:
        """The training batch of a worker; equal arguments give equal batches. Of text, int64 `[batch_size, seq_len + 1]`.

        Args: `step` counts batches; with accumulation an inner step takes several batches.
        """
        ...

    def read_ahead(self, worker: int, step: int, batches: int) -> None:
        """Prefetches the next batches of a worker from a stream; else does nothing.

        Raises: DataError when not all of them can be read. The earlier ones can still be taken.
        """
        ...

    def validation(self, num_batches: int) -> list[Any]:
        """Validation batches, the same for every worker and seed."""
        ...

    def state(self) -> dict[str, Any]:
        """The data's part of a checkpoint, as plain values: positions of streams, and the fingerprint of files."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state. Raises DataError if it belongs to other data."""
        ...


class Corpus(Batches, Protocol):
    """Open text."""

    vocab_size: int
    tokenizer: Tokenizer

    def samples(self, worker: int, step: int) -> list[int]:
        """The numbers of the windows in a worker's batch: a repeated window has the same number."""
        ...


def open_corpus(
    config: DataConfig, workers: int, seed: int, *, scored: bool = False, patience_s: float = 0.0
) -> Corpus:
    """Opens the data of a run; the Python standard library as bytes takes a tenth of a second.

    Args:
        scored: of files, all text is for validation.
        patience_s: how long to retry a stream that breaks off.
    Raises: DataError when text is missing, empty, unreadable or too short; ConfigError when a package is missing, and for a
        batch larger than this machine's memory.
    """
    must_fit_memory(config)
    tokenizer = load_tokenizer(config.tokenizer)
    if config.streamed:
        return StreamCorpus(config, tokenizer, workers, seed, patience_s)
    return FileCorpus(config, tokenizer, workers, seed, scored=scored)


def text_fingerprint(corpus: Batches) -> str:
    """The hash by which workers check that they have the same text; empty for a stream, which has not been read yet."""
    return str(corpus.state().get("fingerprint", ""))
