"""Settings of a run as a whole, split among its workers: a global batch, and a length in tokens."""

from bisect import bisect_right
from collections.abc import Callable

from gossamer.data.settings import DataConfig
from gossamer.data.tokenizer import vocabulary
from gossamer.errors import ConfigError
from gossamer.models.sizes import ModelConfig, parameter_count


def each_batch(data: DataConfig, workers: int) -> int:
    """The sequences of one worker in a pass, where all workers together take `data.global_batch` in an inner step.

    Raises: ConfigError when it cannot be split equally.
    """
    whole, parts = data.global_batch or 0, workers * data.accumulate
    if whole % parts:
        passes = "" if data.accumulate == 1 else f" in {data.accumulate} passes each"
        fewer = whole // parts * parts
        raise ConfigError(
            f"data.global_batch is {whole}, which {workers} workers{passes} cannot split equally; set it to "
            f"{f'{fewer} or ' if fewer else ''}{fewer + parts}"
        )
    return whole // parts


def tokens_for(tokens_per_parameter: float, model: ModelConfig, data: DataConfig) -> int:
    """The tokens of a run with so many for each parameter of its model.

    Raises: ConfigError for a model or a tokenizer whose size is not known from the run file; DataError for a spoilt tokenizer.
    """
    words = None if model.own or data.own else vocabulary(data.tokenizer)
    if words is None:
        raise ConfigError(
            f"run.tokens_per_parameter is {tokens_per_parameter:g}, but with model.size '{model.size}' and data.tokenizer "
            f"'{data.tokenizer}' the number of parameters is not known in advance; set run.tokens"
        )
    return round(tokens_per_parameter * parameter_count(model, words))


def rounds_for(tokens: int, tokens_before: Callable[[int], int]) -> int:
    """The whole rounds that a number of tokens pays for, by those of all workers before a round. Raises ConfigError if it is
    not one."""
    if tokens < (first := tokens_before(1)):
        raise ConfigError(
            f"the run has {tokens:,} tokens and a round of all workers takes {first:,}; raise run.tokens, or lower "
            "run.local_steps"
        )
    return bisect_right(range(tokens + 1), tokens, key=tokens_before) - 1
