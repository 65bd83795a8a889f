"""What the checks of `Outer` cost at every exchange, as a share of a round of 15 local steps of a model of 1M parameters.

    python benchmarks/checks.py

The share is measured in 20 rounds, one pair of numbers each; aim: a median of at most 1 %. Once, in the first round, all objects
of Python are looked at for a wrapper around the model; its seconds come last.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import gossamer
from gossamer.layout import keep_attached
from gossamer.library.guard import must_not_be_wrapped

WIDTH, WORDS, LOCAL_STEPS, ROUNDS = 128, 1024, 15, 20


class Block(nn.Module):
    """An attention layer and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.relu(self.up(self.norms[1](x))))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(5)), nn.Linear(WIDTH, WORDS, bias=False))
    outer = gossamer.Outer(model, "gasloc", local_steps=LOCAL_STEPS)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        tokens = torch.randint(WORDS, (8, 65))
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()

    def seconds(act: Callable[[], None], times: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(times):
            act()
        return time.perf_counter() - start

    def check() -> None:
        keep_attached(model, outer.layout, outer.x)

    seconds(step, LOCAL_STEPS)
    pairs = [(seconds(check), seconds(step, LOCAL_STEPS)) for _ in range(ROUNDS)]
    parameters = list(model.parameters())
    print(f"{sum(p.numel() for p in parameters)} parameters in {len(parameters)} tensors")
    round_s = statistics.median(took_s for _, took_s in pairs)
    print(f"check {1e6 * statistics.median(check_s for check_s, _ in pairs):.0f} µs, round {round_s:.3f} s")
    print(f"share {100 * statistics.median(check_s / round_s for check_s, round_s in pairs):.4f} %")
    print(f"one look for wrappers {seconds(lambda: must_not_be_wrapped(model, [0])):.3f} s")
    outer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
