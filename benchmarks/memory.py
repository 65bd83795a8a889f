"""Extra memory of each rule: what one worker of a real run holds beyond parameters, gradients and inner state.

    python benchmarks/memory.py [--numel 20_000_000]

The benchmark counts the bytes of live tensors, in copies of the model (P), in a round of 4 workers: the outer state at rest,
and the peak between posting and the end of the exchange, for one of the workers. "Needs" is the minimum of the method:
its state, its message and the messages it receives, plus at most one fragment (here: one chunk).
"""

import argparse
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gossamer.codecs import exact
from gossamer.layout import Layout
from gossamer.rounds.exchange import Exchange, begin, finish_all, initial_state
from gossamer.rounds.setup import Part, Setup
from gossamer.rules import Context, Rule, diloco, gasloc, gossip, local_sgd, noloco
from gossamer.topologies import make_topology
from gossamer.topologies.mixing import mean
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import leaves

ROWS = {
    "gossip": gossip(),
    "gasloc": gasloc(),
    "gasloc eta=1": gasloc(lr=1.0),
    "noloco": noloco(),
    "local_sgd": local_sgd(),
    "diloco": diloco(),
}


def live_bytes() -> int:
    """Bytes of all distinct storages that live tensors hold."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and not t.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure(rule: Rule, numel: int) -> tuple[float, float]:
    """Copies of the model held by one worker: state at rest, and peak during an exchange beyond that."""
    n, size = 4, 4 * numel
    topology = make_topology("complete" if rule.needs == "everyone" else "random", n)
    mixing, network = topology.mixing(0), MemoryNetwork(n)
    xs = [torch.zeros(numel) for _ in range(n)]
    before = live_bytes()
    contexts = [Context(i, n, 0, 1, mixing.weight(i), Layout((), numel)) for i in range(n)]
    states = [initial_state(rule, mixing, x, ctx) for x, ctx in zip(xs, contexts, strict=True)]
    at_rest = (live_bytes() - before) / n
    before = live_bytes()
    transports = [network.transport(i) for i in range(n)]
    exchanges = []
    for i, (x, ctx) in enumerate(zip(xs, contexts, strict=True)):
        setup = Setup(rule, exact(), transports[i], Part(x, states[i], ctx.layout), seed=0)
        exchanges.append(begin(setup, mixing, ctx))
    peak = 0

    def watched(fn: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        nonlocal peak
        results = []
        for item in items:
            results.append(fn(item))
            peak = max(peak, live_bytes() - before)
        return results

    watched(Exchange.post, exchanges)
    finish_all(exchanges, watched)
    assert all(leaf.numel() == numel for s in states for leaf in leaves(s))
    return at_rest / size, peak / n / size


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=2_000_000)
    numel = parser.parse_args().numel
    print(f"{'rule':<14} {'state':>7} {'needs':>6} {'exchange':>9} {'needs':>6}   (copies of the model per worker)")
    for name, rule in ROWS.items():
        state, peak = measure(rule, numel)
        # In one process a received message is the sender's own tensor; a sum by owners adds one chunk per worker.
        needs = 1 + (1 / 4 if rule.combine is mean else 0)
        print(f"{name:<14} {state:>7.2f} {rule.state_copies:>6} {peak:>9.2f} {needs:>6.2f}")


if __name__ == "__main__":
    main()
