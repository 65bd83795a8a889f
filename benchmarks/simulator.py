"""The simulator against a bare loop over the same models, in tokens per second and peak memory.

    python benchmarks/simulator.py [--size 1m] [--workers 8] [--steps 30]
    python benchmarks/simulator.py --own [--at-once]
    python benchmarks/simulator.py --size 0.2m --layers 2 --sequences 4 --seq-len 64 --batched 8 [--optimizer spectral_muon]

The bare loop trains the same n models one after the other on one thread, with the same batches, optimizer and clipping, and
never exchanges. Ratio = simulator / (cores x bare loop). Each side runs in its own process, the two alternate, and the ratio is
that of the medians; memory is the peak of the process minus its memory after imports. With `--own` the simulator is given model,
data and loss as functions of a user's. With `--at-once` as many bare loops as cores run beside each other, and the ratio is to
their sum: so other work on the machine slows both sides. With `--batched` a third side trains so
many replicas as one computation (`run.batched`), and a fourth compiles it too, with products in bf16 (`inner.compile`,
`inner.autocast`), which runs once before, so that all is compiled.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each side imports what it measures
    from gossamer.run.config.run_file import RunConfig


def config_of(args: argparse.Namespace) -> "RunConfig":
    from gossamer.run.config.run_file import parse

    return parse(
        {
            "workers": args.workers,
            "rule": {"name": "gasloc"},
            "topology": {"name": "random"},
            "model": {"size": args.size} | ({"layers": args.layers} if args.layers else {}),
            "data": {"batch_size": args.sequences, "seq_len": args.seq_len},
            "inner": {"clip": 1.0, "optimizer": args.optimizer}
            | ({"autocast": "bf16", "compile": True} if args.side == "compiled" else {}),
            "run": {
                "steps": args.steps,
                "local_steps": args.steps // 3,
                "eval_every": 0,
                "eval_batches": 1,
                "checkpoint_every": 0,
                "device": "cpu",
                "batched": args.batched if args.side in ("batched", "compiled") else 1,
            },
            "record": {"tensorboard": False, "export": False},
        }
    )


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def simulated(config: "RunConfig", own: bool) -> float:
    """Tokens per second of the rounds of a simulation, without its setup and its end."""
    from gossamer.data.corpus import open_corpus
    from gossamer.models.llama import build_model, loss
    from gossamer.models.sizes import ModelConfig
    from gossamer.run.simulated.simulate import simulate

    with tempfile.TemporaryDirectory() as folder:
        if not own:
            return simulate(config, Path(folder) / "run").tokens_per_s
        corpus = open_corpus(config.data, config.workers, config.seed)
        functions = {
            "model": lambda: build_model(config.model, corpus.vocab_size, config.data.seq_len, 0),
            "data": lambda worker, step: corpus.batch(worker, step),
            "validation": lambda k: corpus.batch(0, k),
            "loss": lambda model, batch: loss(model, batch),
        }
        plain = replace(config, model=ModelConfig())  # the function has the model
        return simulate(plain, Path(folder) / "run", **functions).tokens_per_s


def bare(config: "RunConfig") -> float:
    """Tokens per second of a loop that trains the n models in turn on one thread."""
    import torch

    from gossamer.data.corpus import open_corpus
    from gossamer.models.llama import build_model, loss
    from gossamer.optimizers.inner import build_optimizer, clip_gradients

    torch.set_num_threads(1)
    corpus = open_corpus(config.data, config.workers, config.seed)
    models = [
        build_model(config.model, corpus.vocab_size, config.data.seq_len, 0).train() for _ in range(config.workers)
    ]
    optimizers = [build_optimizer(config.inner, model) for model in models]
    began = time.perf_counter()
    for first in range(0, config.run.steps, config.length.full_steps):  # worker by worker, a local phase at a time
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for step in range(first, first + config.length.full_steps):
                optimizer.zero_grad()
                value = loss(model, corpus.batch(worker, step))
                value.backward()
                value.item()
                clip_gradients(model.parameters(), 1.0)
                optimizer.step()
    return config.run.steps * config.workers * config.length.step_tokens / (time.perf_counter() - began)


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1m")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sequences", type=int, default=8, help="of a batch")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batched", type=int, default=1)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--own", action="store_true", help="model, data and loss as functions of a user's")
    parser.add_argument("--at-once", action="store_true", help="a bare loop on each core")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=["simulated", "batched", "compiled", "bare"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        import gossamer.run.simulated.simulate

        assert gossamer.run.simulated.simulate
        config, before = config_of(args), peak_bytes()
        of = bare if args.side == "bare" else functools.partial(simulated, own=args.own)
        if args.side == "compiled":
            of(config)
        rate = of(config)
        print(json.dumps([rate, peak_bytes() - before]))
        return

    found: dict[str, list[tuple[float, int]]] = {"simulated": [], "bare": []}
    if args.batched > 1:
        found |= {"batched": [], "compiled": []}
    cores = len(os.sched_getaffinity(0))
    for _ in range(args.repeats):
        for side, results in found.items():
            words, env = (
                [sys.executable, __file__, *sys.argv[1:], "--side", side],
                {**os.environ, "OMP_NUM_THREADS": "1"},
            )
            loops = cores if args.at_once and side == "bare" else 1
            runs = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) for _ in range(loops)]
            rates, peaks = zip(*(json.loads(run.communicate()[0].splitlines()[-1]) for run in runs), strict=True)
            results.append((statistics.fmean(rates), max(peaks)))
    rate = {side: statistics.median(r for r, _ in results) for side, results in found.items()}
    memory = {side: statistics.median(m for _, m in results) for side, results in found.items()}
    print(f"bare loop, one thread   {rate['bare']:>9,.0f} tok/s  {memory['bare'] / 1e6:>7.0f} MB")
    print(f"simulator, {cores} cores      {rate['simulated']:>9,.0f} tok/s  {memory['simulated'] / 1e6:>7.0f} MB")
    what, aim = ("simulator of own functions", 0.85) if args.own else ("simulator", 0.95)
    if args.at_once:
        ratio = rate["simulated"] / rate["bare"] / cores
        print(f"{what}, {args.sequences * args.seq_len} tokens a step / {cores} loops at once = {ratio:.2f}")
        return
    print(f"{what} / (cores x loop) = {rate['simulated'] / rate['bare'] / cores:.2f}   (aim {aim})")
    print(f"memory / loop              = {memory['simulated'] / memory['bare']:.2f}   (aim at most 2)")
    if args.batched > 1:
        print(f"batched / simulator        = {rate['batched'] / rate['simulated']:.2f}")
        print(f"compiled in bf16 / simulator = {rate['compiled'] / rate['simulated']:.2f}   (aim 3)")


if __name__ == "__main__":
    main()
