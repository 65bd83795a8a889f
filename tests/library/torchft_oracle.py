"""DiLoCo of torchft, with its real Manager and lighthouse, and that of Gossamer, on the same FSDP2 shards: one process of either.

    SITE=0 torchrun --nproc-per-node 2 torchft_oracle.py torchft HOST:PORT OUT      and the same with SITE=1; or gossamer

Two sites of two shards each train three rounds of four steps of AdamW on data of their own; the first process of each site saves
the whole parameters as OUT.SITE.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LOCAL_STEPS, ROUNDS, WIDTH = 4, 3, 16


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, site: int, after_step: Callable[[], object]) -> None:
    """The local phases; `after_step` is called after each inner step."""
    for step in range(LOCAL_STEPS * ROUNDS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + site))
        (model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def by_torchft(model: nn.Module, optimizer: torch.optim.Optimizer, site: int, address: str) -> None:
    """torchft's own loop: its optimizer hooks exchange after every fourth step."""
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    timeout, first = timedelta(seconds=30), site == dist.get_rank() == 0
    house = LighthouseServer(bind=address, min_replicas=2, join_timeout_ms=10_000) if first else None
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"site{site}",
        lighthouse_addr=f"http://{address}",
        timeout=timeout,
        hostname="127.0.0.1",
    )
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=LOCAL_STEPS):
        train(model, optimizer, site, lambda: None)
    assert manager.current_step() == ROUNDS and manager.num_participants() == 2
    del house


def by_gossamer(model: nn.Module, optimizer: torch.optim.Optimizer, site: int, address: str) -> None:
    """The same with `gossamer.Outer`."""
    import gossamer

    with gossamer.Outer(
        model, "diloco", local_steps=LOCAL_STEPS, site=(site, 2), join=address, timeout_s=30.0
    ) as outer:
        train(model, optimizer, site, outer.step)


def main() -> None:
    """Trains as one process of a site."""
    whose, address, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    site = int(os.environ["SITE"])
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    {"torchft": by_torchft, "gossamer": by_gossamer}[whose](model, optimizer, site, address)
    found = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(found, f"{out}.{site}")
    dist.barrier()
    os._exit(0)  # threads of torchft's server outlive the end of Python


if __name__ == "__main__":
    main()
