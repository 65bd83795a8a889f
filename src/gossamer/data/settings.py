"""The [data] settings of a run file."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import psutil
from pydantic import Field

from gossamer.errors import ConfigError
from gossamer.settings.fields import NEUTRAL, CodeName, Words
from gossamer.settings.options import Count, Number
from gossamer.settings.schema import settings
from gossamer.settings.user_code import is_code

_Text = Annotated[str, Field(min_length=1), Words("text: a path, 'stdlib' or 'hf:NAME'")]
_Shards = Annotated[
    Literal["iid", "contiguous"] | Annotated[tuple[Number, ...], Field(min_length=1)],
    Words("'iid', 'contiguous', or a list with the place of a source for every worker, counted from 0"),
]


MANY_PASSES = 4
"""The number of passes over a text that are worth nearly as much as new text (Muennighoff et al., arXiv 2305.16264)."""


def passes_over(shards: Any, text_tokens: Sequence[int], worker_tokens: Sequence[float]) -> float | None:
    """The number of passes over the text, for the worker that repeats its part most; None for an empty text.

    Args:
        shards: `DataConfig.shards`.
        text_tokens: the training tokens of each source.
        worker_tokens: those that each worker trains on.

    >>> passes_over("iid", [1000, 1000], [4000.0, 4000.0]), passes_over([0, 1], [1000, 2000], [4000.0, 4000.0])
    (4.0, 4.0)
    """
    if isinstance(shards, list | tuple):
        parts = [(tokens, text_tokens[place]) for tokens, place in zip(worker_tokens, shards, strict=True)]
    else:
        parts = [(sum(worker_tokens), sum(text_tokens))]
    return max(tokens / text for tokens, text in parts) if all(text > 0 for _, text in parts) else None


def passes_warning(passes: float | None, remedy: str = "give more of it in data.source, or lower run.steps") -> str:
    """A warning for this number of passes over the text, with what to do; empty for `MANY_PASSES` or fewer, and if unknown.

    >>> passes_warning(123_456)[:47], passes_warning(4.0)
    ('the text is trained on about 123,456 times; abo', '')
    """
    if passes is None or passes <= MANY_PASSES:
        return ""
    many = f"{passes:,.0f}" if passes >= 1000 else f"{passes:.4g}"
    return (
        f"the text is trained on about {many} times; above {MANY_PASSES} times, more text is worth much more than more "
        f"steps; {remedy}"
    )


@settings("data")
class DataConfig:
    """The training text and the shape of batches."""

    source: _Text | Annotated[tuple[_Text, ...], Field(min_length=1)] = "stdlib"
    """"stdlib" (the source of this machine's Python), files, folders or globs, a stream "hf:NAME[:CONFIG]", or
    "package.module:name": a function `batch(worker, step)` of yours, which must always return the same for the same numbers.
    `seq_len` and `batch_size` then only count its tokens. Files named *.bin hold tokens, as nanoGPT, llm.c and Megatron write
    them; `tokenizer` must be the one that they were made with."""
    options: Mapping[str, Any] | None = None
    """Keywords for your data set."""
    validation: CodeName | None = None
    """"package.module:name" of a function `validation(k)` that returns the k-th validation batch of your data set; None
    validates on what would come after the last inner step."""
    text_field: str = "text"
    """The field or column with the text, in jsonl, parquet and streams."""
    tokenizer: Annotated[str, Field(min_length=1), Words("the name of one; 'bytes' needs no file")] = "bytes"
    """"bytes", the path of a tokenizers JSON file or of a folder with a tokenizer.json, or a name on the Hub."""
    seq_len: Count = 128
    """Input tokens of a sequence."""
    batch_size: Count = 8
    """Sequences per worker in a forward and backward pass."""
    global_batch: Annotated[Count | None, NEUTRAL] = None
    """Sequences of all workers together in an inner step, in place of batch_size: each worker takes an equal part of them, in
    `accumulate` passes. So a sweep over workers keeps the tokens of a step."""
    accumulate: Count = 1
    """Passes per inner step, their gradients averaged."""
    constant_batch: bool = False
    """Whether the workers of an elastic run that takes means over everyone train on the batches of those that are dead too, so
    that the global batch of a step stays the same. While no worker is dead, results are bitwise the same."""
    windows: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """How many fixed windows of text each worker trains on, all of them in every epoch, reshuffled in each epoch; None
    draws every window at a new place.
    """
    shards: _Shards = "iid"
    """"iid": every worker draws from all training text; "contiguous": each only from its own n-th, in document order; a
    list: for every worker the place in `source`, counted from 0, of the only text that it draws from. All validate on the same
    text, a part of each source, so every process reads all of them; text that must not leave its site needs a function of
    yours as the source."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The part of the text that is kept for validation."""
    max_bytes: Count | None = None
    """The most bytes of UTF-8 text to read from files; the rest is not used."""
    cache: Annotated[str | None, NEUTRAL] = None
    """A folder that keeps tokenised files, which are then memory-mapped instead of held in memory."""

    shuffle_buffer: Count | None = None
    """How many documents of a stream a worker reads at a time and shuffles; None keeps their order. A resumed run
    continues in the same order: it reads these documents again.
    """
    prefetch: Annotated[Number, NEUTRAL] = 0
    """How many batches of a stream a thread reads and tokenises ahead, while the worker trains; results are bitwise the same."""

    def __post_init__(self) -> Iterator[str]:
        if self.global_batch is not None and self.batch_size != DataConfig.batch_size:
            yield (
                f"data.batch_size is {self.batch_size}, and data.global_batch = {self.global_batch} already determines it; "
                "remove data.batch_size"
            )
        if self.windows is not None and (self.own or self.streamed):
            yield (
                f"data.windows is {self.windows} and data.source is {self.source!r:.60}, but only text in files has fixed "
                "windows; remove data.windows"
            )
        for name in ("options", "validation"):
            if (value := getattr(self, name)) is not None and not self.own:
                yield (
                    f"data.{name} is {value!r:.60} and data.source is {self.source!r:.60}, but only a data set of your own has "
                    f"{name}; remove data.{name}"
                )
        if not self.streamed:
            for name, value in [("shuffle_buffer", self.shuffle_buffer), ("prefetch", self.prefetch or None)]:
                if value is not None:
                    yield (
                        f"data.{name} is {value} and data.source is {self.source!r:.60}, but only a stream ('hf:NAME') "
                        f"has it, as windows of files are drawn from all text; remove data.{name}"
                    )
        if self.streamed:
            if len(self.sources) > 1:
                yield (f"data.source is {self.source!r}, but a stream must be the only source; name one")
            for name, value in [("max_bytes", self.max_bytes), ("cache", self.cache)]:
                if value is not None:
                    yield (f"data.{name} is {value!r}, which works for files only; remove data.{name} for a stream")
        yield from self._bad_shards()

    def _bad_shards(self) -> Iterator[str]:
        """The reason why the source cannot be divided in this way, if any."""
        if self.shards != "iid" and (self.streamed or self.own):
            divides = "a stream divides its documents" if self.streamed else "a function divides its data"
            yield (f"data.shards is {self.shards!r:.60}, but {divides} among the workers itself; remove data.shards")
        if isinstance(self.shards, tuple) and max(self.shards) >= len(self.sources):
            yield (
                f"data.shards is {list(self.shards)!r:.60}, but the last place of data.source is {len(self.sources) - 1}; name "
                "a source of data.source for every worker"
            )

    @property
    def own(self) -> bool:
        """Whether the data set is a user's function."""
        return isinstance(self.source, str) and is_code(self.source)

    @property
    def streamed(self) -> bool:
        """Whether the text comes from the Hugging Face hub."""
        return any(source.startswith("hf:") for source in self.sources)

    @property
    def sources(self) -> tuple[str, ...]:
        """The source as a tuple."""
        return (self.source,) if isinstance(self.source, str) else self.source


def must_fit_memory(data: DataConfig, batches: int = 1) -> None:
    """Raises ConfigError where a batch, or `batches` of them for validation, exceeds this machine's memory."""
    here = psutil.virtual_memory().total
    each = 8 * data.batch_size * (data.seq_len + 1)
    if data.own or each * batches <= here:
        return
    use = f"a batch of {data.batch_size:,} sequences of {data.seq_len:,} tokens"
    remedy = "take a smaller data.batch_size, with more micro-batches in data.accumulate"
    if each <= here:
        use, remedy = f"validation on {batches:,} times {use}", "take a smaller run.eval_batches"
    raise ConfigError(
        f"{use} takes at least {each * batches / 1e9:,.3g} GB, and this machine has {here / 1e9:,.3g} GB; {remedy}"
    )
