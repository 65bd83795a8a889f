"""Three lines of Gossamer in a plain PyTorch loop around a `transformers` model.

    torchrun --nproc-per-node 4 examples/own_loop.py --steps 60

Every process trains its own replica on its own text, and every 10 steps it gossips with one random peer. Without torchrun a
single process runs, and Gossamer acts as an outer momentum around AdamW.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import gossamer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    # A plain training script: a model, an optimizer and data.
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[rank::world]
    text = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(rank)

    outer = gossamer.Outer(model, gossamer.gasloc(), local_steps=10)  # 1
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - 129, (8,), generator=draw)
        batch = torch.stack([text[s : s + 128] for s in starts.tolist()]).long()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()  # 2
        if step % 20 == 0:
            print(f"worker {rank} of {world}, step {step}: loss {loss.item():.3f}")
    outer.close()  # 3
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
