"""The built-in model: Llama shapes from 0.2M to 1B parameters, in the form that `transformers` saves and opens.

Everything that knows of Llama is here; the rest of Gossamer trains any `nn.Module` with a loss.

Legend of shapes: B sequences, S tokens of a sequence, V vocabulary.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import rng
from gossamer.data.tokenizer import Tokenizer
from gossamer.errors import ConfigError
from gossamer.models.sizes import SIZES, ModelConfig, Shape, parameter_count

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

__all__ = ["SIZES", "ModelConfig", "Shape", "build_model", "export", "loss", "parameter_count", "sample"]


def build_model(config: ModelConfig, vocab_size: int, seq_len: int, seed: int) -> "LlamaForCausalLM":
    """A Llama on the CPU in fp32, initialised from the seed; equal arguments give bitwise equal parameters.

    The global random state is left as it was. Cost: importing `transformers` takes some 2 seconds the first time.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv_heads, intermediate = config.shape
    llama = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        max_position_embeddings=seq_len,
        tie_word_embeddings=config.tie_embeddings,
        attention_dropout=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]  # not declared, taken from **kwargs
    )
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed the accelerators too and leave them so.
        torch.default_generator.manual_seed(rng.key(seed, "model"))
        return LlamaForCausalLM(llama)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of each next token, in nats: `-1/(B S) Σ log softmax(logits)[target]`, with logits in fp32.

    Shapes: `batch` is int64 `[B, S + 1]`, the first S being inputs and the last S targets; the result is a scalar.
    """
    logits = model(input_ids=batch[:, :-1]).logits.float()  # [B, S, V]
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def export(model: "LlamaForCausalLM", folder: Path, tokenizer: Tokenizer) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` open.

    Bytes too are written as a tokenizer file. The model's parameters may be views of a flat buffer.

    Raises: OSError when the disk refuses.
    """
    from tokenizers import Tokenizer as Library
    from transformers import GenerationConfig, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.end).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Library.from_str(tokenizer.json())).save_pretrained(folder)


@torch.no_grad()
def sample(
    model: "LlamaForCausalLM", tokenizer: Tokenizer, prompt: str, num_tokens: int, seed: int, temperature: float = 0.8
) -> str:
    """The prompt and up to `num_tokens` tokens that the model continues it with, until it ends the document.

    Each token is drawn from `softmax(logits / temperature)`; equal arguments give equal text on one machine. Once the
    text outgrows the length that the model was trained on, its last half of that length is read anew.

    Raises: ConfigError when the temperature is not above zero, or nothing is there to continue.
    """
    from transformers import DynamicCache

    if not temperature > 0:
        raise ConfigError(f"the sampling temperature is {temperature} but must be above 0; 0.8 is a good start")
    text = [int(token) for token in tokenizer.encode([prompt])[0]]
    if not text:
        raise ConfigError(f"the prompt {prompt!r} has 0 tokens; give at least one to continue")
    generator = rng.torch_rng(seed, "sample")
    longest = model.config.max_position_embeddings
    device = next(model.parameters()).device
    cache: Any = None
    unread: list[int] = []
    seen = longest
    for _ in range(num_tokens):
        if seen + len(unread) >= longest:
            cache, seen, unread = DynamicCache(config=model.config), 0, text[-max(1, longest // 2) :]
        output = model(input_ids=torch.tensor([unread], device=device), past_key_values=cache, use_cache=True)
        seen += len(unread)
        weights = torch.softmax(output.logits[0, -1].float().cpu() / temperature, dim=-1)
        unread = [int(torch.multinomial(weights, 1, generator=generator))]
        if unread == [tokenizer.end]:
            break
        text += unread
    return tokenizer.decode(text)
