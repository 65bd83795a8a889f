"""Sampling of text from a model."""

import torch

from gossamer import rng
from gossamer.data.tokenizer import Tokenizer
from gossamer.errors import ConfigError
from gossamer.models.llama import Llama


@torch.no_grad()
def sample(
    model: Llama, tokenizer: Tokenizer, prompt: str, num_tokens: int, seed: int, temperature: float = 0.8
) -> str:
    """The prompt and up to `num_tokens` tokens that the model continues it with, until it ends the document.

    Each token is drawn from `softmax(logits / temperature)`; equal arguments give equal text on one machine. Once the
    text exceeds the context length, the model continues from the last half of it.

    Raises: ConfigError when the temperature is not above zero, or the prompt is empty.
    Cost: one pass over at most the trained length per token; nothing is cached.
    """
    if not temperature > 0:
        raise ConfigError(f"the sampling temperature is {temperature} but must be above 0; 0.8 is a good start")
    begun, text = len(tokenizer.before), [*tokenizer.before, *map(int, tokenizer.encode([prompt])[0])]
    if len(text) == begun:
        raise ConfigError(f"the prompt {prompt!r} has 0 tokens; give at least one to continue")
    generator = rng.torch_rng(seed, "sample")
    longest, device = model.seq_len, next(model.parameters()).device
    start = 0 if len(text) <= longest else len(text) - max(1, longest // 2)
    for _ in range(num_tokens):
        if len(text) - start > longest:
            start = len(text) - max(1, longest // 2)
        logits = model(torch.tensor([text[start:]], device=device))[0, -1]
        weights = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        token = int(torch.multinomial(weights, 1, generator=generator))
        if token == tokenizer.end:
            break
        text.append(token)
    return tokenizer.decode(text[begun:])
