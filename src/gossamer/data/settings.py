"""What a run file says of its data."""

from dataclasses import dataclass
from typing import Literal

from gossamer.errors import ConfigError, choose

__all__ = ["DataConfig"]


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
