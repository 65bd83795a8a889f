"""What each peer of `benchmarks/peers.py` does: the same DiLoCo of the same GPT on the same batches, as one process runs it.

    python benchmarks/peers_sides.py SIDE RANK PORT ROUNDS      # prints one JSON line for each process that trained

Nothing of Gossamer is imported but by its own two sides, so that the others run in environments without it.
"""

import faulthandler
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from typing import Any

WORKERS, LOCAL_STEPS, SEQUENCES, LENGTH = 4, 10, 8, 128
VOCABULARY, WIDTH, LAYERS, HEADS = 256, 128, 4, 4
LR, OUTER_LR, MOMENTUM = 1e-3, 0.7, 0.9
LIMIT_S = 300.0
"""When a run is given up."""


class Clock:
    """When each round began, by the first batch that was asked for, in seconds of wall-clock and of this process's processors."""

    def __init__(self) -> None:
        self.marks: dict[int, tuple[float, float]] = {}

    def asked(self, step: int) -> None:
        """Notes that the batch of an inner step was asked for."""
        if step % LOCAL_STEPS == 0:
            self.marks.setdefault(step // LOCAL_STEPS, (time.perf_counter(), time.process_time()))

    def say(self, sync_s: float | None, *packages: str) -> None:
        """Prints what was found, in one write, as processes share the output."""
        versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
        found = {"marks": [self.marks[r] for r in sorted(self.marks)], "ended": time.perf_counter(), "sync_s": sync_s}
        sys.stdout.write(json.dumps(found | {"versions": versions}) + "\n")
        sys.stdout.flush()


def torch_parts(clock: Clock) -> tuple[Callable[[], Any], Callable[[int, int], Any], Callable[[Any, Any], Any]]:
    """The model, the batches and the loss, in torch."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.between, self.up, self.down = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.Linear(4 * WIDTH, WIDTH),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks, self.last = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.last(self.blocks(self.tokens(tokens) + self.places.weight)) @ self.tokens.weight.T

    def batch(worker: int, step: int) -> torch.Tensor:
        clock.asked(step)
        seeded = torch.Generator().manual_seed(100_000 * worker + step)
        return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=seeded)

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return GPT, batch, loss


def simulated(rounds: int) -> None:
    """`gossamer.simulate` of functions of a user's: all workers in one process."""
    import torch

    import gossamer

    clock = Clock()
    model, batch, loss = torch_parts(clock)
    with tempfile.TemporaryDirectory() as folder:
        gossamer.simulate(
            model=model,
            data=batch,
            loss=loss,
            optimizer=lambda p: torch.optim.AdamW(p, LR),
            method="diloco",
            validation=lambda k: batch(0, 1),
            workers=WORKERS,
            local_steps=LOCAL_STEPS,
            rounds=rounds,
            out=folder + "/run",
            settings={
                "run.eval_every": 0,
                "run.eval_batches": 1,
                "run.checkpoint_every": 0,
                "record.tensorboard": False,
                "record.export": False,
                "run.device": "cpu",
            },
        )
    clock.say(None, "torch", "gossamer")


def bare(rounds: int) -> None:
    """One thread trains the workers in turn, and they never exchange."""
    import torch

    torch.set_num_threads(1)
    clock = Clock()
    model, batch, loss = torch_parts(clock)
    models = [model() for _ in range(WORKERS)]
    optimizers = [torch.optim.AdamW(one.parameters(), LR) for one in models]
    for round in range(rounds):
        for worker, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for step in range(round * LOCAL_STEPS, (round + 1) * LOCAL_STEPS):
                loss(one, batch(worker, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    clock.say(None, "torch")


def of_nodes(rounds: int, port: int) -> None:
    """The design of EXO Gym: torch's multiprocessing starts a process for each node, and rank 0 does the outer step for all."""
    import torch.multiprocessing as mp

    mp.spawn(processes, ("exo_design", port, rounds), nprocs=WORKERS)  # pyright: ignore[reportPrivateImportUsage]


def processes(rank: int, side: str, port: int, rounds: int) -> None:
    """One of four processes, each with a worker."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = Clock()
    built, batch, loss = torch_parts(clock)
    # torch's own timeout of half an hour would be longer than a run, so that a lost message looked like a slow one.
    meets, patience = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meets, rank=rank, world_size=WORKERS, timeout=patience)
    model: Any = built()
    inner: Any = torch.optim.AdamW(model.parameters(), LR)
    used, trained = ["torch"], model
    after: Callable[[], object] = lambda: None  # noqa: E731
    end: Callable[[], object] = lambda: None  # noqa: E731
    if side == "outer":
        import gossamer

        outer = gossamer.Outer(model, "diloco", local_steps=LOCAL_STEPS)
        after, end, used = outer.step, outer.close, ["torch", "gossamer"]
    elif side == "exo_design":
        after = _outer_step_at_rank_0(model, rank)
    elif side == "torchft":
        used = ["torch", "torchft"]
        _torchft(model, inner, rank, port)
    elif side == "post_local_sgd":
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        inner = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=LOCAL_STEPS, warmup_steps=LOCAL_STEPS - 1))
    elif side == "ddp":
        trained = torch.nn.parallel.DistributedDataParallel(model)

    def step_s(step: int, whole: bool) -> float:
        """Trains an inner step, and gives its seconds: the whole of it, or those after backward, when all are that far."""
        began = time.perf_counter()
        loss(trained, batch(rank, step)).backward()
        if not whole:
            if (step + 1) % LOCAL_STEPS == 0:
                dist.barrier()
            began = time.perf_counter()
        inner.step()
        after()
        took_s = time.perf_counter() - began
        inner.zero_grad()
        return took_s

    ddp = side == "ddp"
    took = [step_s(step, whole=ddp) for step in range(rounds * LOCAL_STEPS)]
    clock.asked(rounds * LOCAL_STEPS)
    ends = [s for step, s in enumerate(took) if (step + 1) % LOCAL_STEPS == 0]
    rest = [s for step, s in enumerate(took) if (step + 1) % LOCAL_STEPS and step >= LOCAL_STEPS]
    if ddp:
        with trained.no_sync():
            ends, rest = rest, [step_s(1, whole=True) for _ in range(2 * LOCAL_STEPS)]
    clock.say(statistics.median(ends[2:]) - statistics.median(rest), *used)
    end()
    dist.barrier()
    if side == "torchft":
        os._exit(0)  # threads of its server outlive the end of Python
    dist.destroy_process_group()  # else its threads run while Python ends


def _outer_step_at_rank_0(model: Any, rank: int) -> Callable[[], None]:
    import torch
    import torch.distributed as dist

    start = [p.detach().clone() for p in model.parameters()]
    outer = torch.optim.SGD(start, OUTER_LR, momentum=MOMENTUM, nesterov=True)
    steps = 0

    @torch.no_grad()
    def after() -> None:
        nonlocal steps
        steps += 1
        if steps % LOCAL_STEPS:
            return
        for p in model.parameters():
            dist.all_reduce(p)
            p /= WORKERS
        if rank == 0:
            for s, p in zip(start, model.parameters(), strict=True):
                s.grad = s - p
            outer.step()
            for s, p in zip(start, model.parameters(), strict=True):
                p.copy_(s)
        for p in model.parameters():
            dist.broadcast(p, 0)

    return after


def _torchft(model: Any, inner: Any, rank: int, port: int) -> None:
    """Each process is a replica of one, and exchanges by the hooks that torchft puts on its optimizer."""
    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    timeout, address = timedelta(seconds=60), f"127.0.0.1:{port + 1}"
    house = LighthouseServer(bind=address, min_replicas=WORKERS, join_timeout_ms=10_000) if rank == 0 else None
    dist.barrier()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=WORKERS,
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"replica{rank}",
        lighthouse_addr=f"http://{address}",
        timeout=timeout,
        hostname="127.0.0.1",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    outer = torch.optim.SGD(model.parameters(), OUTER_LR, momentum=MOMENTUM, nesterov=True)
    DiLoCo(manager, [model], inner, outer, sync_every=LOCAL_STEPS).__enter__()
    model.kept = (house, store, manager)  # as long as the model


def vmapped(rounds: int) -> None:
    """JAX: a local phase of all workers is one `jit(vmap(scan))`, and the outer step another."""
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    import numpy as np
    import optax  # pyright: ignore[reportMissingImports]

    def dense(key: Any, rows: int, columns: int) -> dict[str, Any]:
        return {"w": jax.random.normal(key, (rows, columns)) * rows**-0.5, "b": jnp.zeros(columns)}

    def norm() -> dict[str, Any]:
        return {"w": jnp.ones(WIDTH), "b": jnp.zeros(WIDTH)}

    def built(key: Any) -> dict[str, Any]:
        blocks = []
        for own in jax.random.split(key, LAYERS):
            a, b, c, d = jax.random.split(own, 4)
            blocks.append(
                {
                    "before": norm(),
                    "qkv": dense(a, WIDTH, 3 * WIDTH),
                    "out": dense(b, WIDTH, WIDTH),
                    "between": norm(),
                    "up": dense(c, WIDTH, 4 * WIDTH),
                    "down": dense(d, 4 * WIDTH, WIDTH),
                }
            )
        tokens, places = jax.random.split(jax.random.fold_in(key, 1))
        return {
            "tokens": jax.random.normal(tokens, (VOCABULARY, WIDTH)),
            "blocks": blocks,
            "last": norm(),
            "places": jax.random.normal(places, (LENGTH, WIDTH)),
        }

    def apply(layer: dict[str, Any], x: Any) -> Any:
        return x @ layer["w"] + layer["b"]

    def normed(layer: dict[str, Any], x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * layer["w"] + layer["b"]

    def loss(model: dict[str, Any], tokens: Any) -> Any:
        given = tokens[:, :-1]
        x = model["tokens"][given] + model["places"]
        for block in model["blocks"]:
            q, k, v = jnp.split(
                apply(block["qkv"], normed(block["before"], x)).reshape(*given.shape, 3 * HEADS, -1), 3, 2
            )
            x = x + apply(block["out"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
            x = x + apply(block["down"], jax.nn.gelu(apply(block["up"], normed(block["between"], x))))
        logits = normed(model["last"], x) @ model["tokens"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    inner = optax.adamw(LR, weight_decay=0.01)
    outer = optax.sgd(OUTER_LR, momentum=MOMENTUM, nesterov=True)

    def phase(model: Any, state: Any, batches: Any) -> Any:
        def step(carry: Any, tokens: Any) -> Any:
            model, state = carry
            value, gradient = jax.value_and_grad(loss)(model, tokens)
            update, state = inner.update(gradient, state, model)
            return (optax.apply_updates(model, update), state), value

        (model, state), values = jax.lax.scan(step, (model, state), batches)
        return model, state, values

    @jax.jit
    def outer_step(start: Any, ends: Any, state: Any) -> Any:
        gradient = jax.tree.map(lambda s, e: s - e.mean(0), start, ends)
        update, state = outer.update(gradient, state)
        start = optax.apply_updates(start, update)
        return start, jax.tree.map(lambda s: jnp.broadcast_to(s, (WORKERS, *s.shape)), start), state

    train = jax.jit(jax.vmap(phase))
    start = built(jax.random.key(0))
    models = jax.tree.map(lambda s: jnp.broadcast_to(s, (WORKERS, *s.shape)), start)
    states, outer_state = jax.vmap(inner.init)(models), outer.init(start)
    clock, syncs = Clock(), []
    for round in range(rounds):
        clock.asked(round * LOCAL_STEPS)
        batches = np.stack(
            [
                np.stack(
                    [
                        np.random.default_rng(100_000 * worker + step).integers(
                            VOCABULARY, size=(SEQUENCES, LENGTH + 1), dtype=np.int32
                        )
                        for step in range(round * LOCAL_STEPS, (round + 1) * LOCAL_STEPS)
                    ]
                )
                for worker in range(WORKERS)
            ]
        )
        models, states, values = train(models, states, batches)
        jax.block_until_ready(models)
        began = time.perf_counter()
        start, models, outer_state = jax.block_until_ready(outer_step(start, models, outer_state))
        syncs.append(time.perf_counter() - began)
        assert np.isfinite(values).all()
    clock.asked(rounds * LOCAL_STEPS)
    clock.say(statistics.median(syncs[2:]), "jax", "optax")


def main() -> None:
    """Trains as one process of a side; one that takes too long shows where it stands before it is given up."""
    faulthandler.dump_traceback_later(0.9 * LIMIT_S)
    side, rank, port, rounds = sys.argv[1], *map(int, sys.argv[2:])
    match side:
        case "bare":
            bare(rounds)
        case "simulate":
            simulated(rounds)
        case "exo_design":
            of_nodes(rounds, port)
        case "jax":
            vmapped(rounds)
        case _:
            processes(rank, side, port, rounds)


if __name__ == "__main__":
    main()
