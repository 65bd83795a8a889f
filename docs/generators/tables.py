"""The pages of topologies, of codecs and of boundaries: a table on top, then one section for each."""

import math
from collections.abc import Iterator
from itertools import chain, groupby

import torch

from generators import drawing
from generators.methods_table import boundary_rows
from generators.prose import about, escaped, options_table, table
from gossamer.boundaries import BOUNDARIES
from gossamer.codecs import CODECS, make_codec
from gossamer.errors import ConfigError
from gossamer.models.bottleneck import BOTTLENECKS
from gossamer.rounds.stability import largest_stable_gamma, stability
from gossamer.rules import gasloc
from gossamer.settings.options import summary
from gossamer.topologies import TOPOLOGIES, Topology, make_topology
from gossamer.topologies.mixing import Consensus
from gossamer.tree import leaves

_WORKERS = 8
_ELEMENTS = 1 << 20
_TOPOLOGIES = """# Topologies

A topology says who sends to whom in which round, and with what weights. It is a pure function of the seed, the round and the
workers alive, so every worker computes the same one without communication. Name it in a run file, with its options:

```toml
topology = { name = "random", peers = 2 }
```

`gossamer topology NAME` prints the graph, the spectral gap and the largest stable momentum. In Python,
`gossamer.Outer(model, rule, topology="ring")`, or one with options from `gossamer.topologies`.

The numbers are for 8 workers. **Messages** are those that a worker sends in a round, on average. **Disagreement** is what one
round of gossip leaves of it, in the long run; some sequences reach the exact mean. The **largest
momentum** is that of GASLoC (form "post", gossip step 1) up to which the disagreement stays bounded. GASLoC's default momentum
**loses consensus** for the numbers of workers in the last column, of those from 2 to 32; `gossamer check` warns of it.
"""
_CODECS = """# Codecs

A codec says how a message is compressed. Name it in a run file, with its options:

```toml
codec = {{ name = "int8", block = 1024 }}
```

Every codec takes `back = NAME`, for rules that take a mean over everyone: what the sums travel back in. Lossy codecs belong on
differences, such as pseudo-gradients. On whole parameters the error is a share of the parameters themselves, so a pairing with
too large an error is refused, and a smaller one warns ([decision 22](adr/0022-what-a-lossy-codec-may-carry.md)).

Bits and errors are measured here, on {elements:,} Gaussian numbers in fp32. The error is relative to the norm.
"""
_BOUNDARIES = """# Boundaries

A boundary says what crosses the cuts of a replica in stages ([how-to](how-to/pipelines.md)). Name a codec for each direction in a
run file, with its options:

```toml
[pipeline]
stages = 2
forward = "tahquant"                        # activations
backward = { name = "intk", bits = 6 }      # their gradients
```

Codecs act outside of autograd: the next stage trains on what arrives, and its gradient goes back as that of what was sent.
[`resbm`](#resbm) and [`subspace`](#subspace) are models with few numbers of a token at their cuts, in both directions; their keys
are explained with the [run file](reference/run-file.md).

Bits are those of the longest payload for 8 sequences of 128 tokens with 768 channels, with width 8 where that is an option.
Errors are measured on Gaussian numbers, of which a subspace keeps little; they are relative to the norm.
"""
_NARROW = """Part of the model, cut or not:

```toml
[model]
bottleneck = {{ name = "{name}", {keys} }}
```
"""


def pages() -> Iterator[tuple[str, str]]:
    """The path and the Markdown of each page."""
    yield "topologies.md", _topologies()
    yield "codecs.md", _codecs()
    yield "boundaries.md", _boundaries()


def _topologies() -> str:
    made = {name: make_topology(name, _WORKERS, seed=0) for name in TOPOLOGIES}
    rows, sections = [], []
    for name, topology in made.items():
        sent = [len(topology.mixing(t).sends_to(i)) for t in range(12) for i in range(_WORKERS)]
        link = f"[`{name}`](#{name})"
        rows.append((link, escaped(summary(TOPOLOGIES[name])), f"{sum(sent) / len(sent):.3g}", *_mixing(topology)))
        picture = f'<div class="graphs">{drawing.rounds(topology, _WORKERS)}</div>'
        text = about(TOPOLOGIES[name], labels=("Cost", "Source", "Differs", "Raises", "Fails when"))
        sections.append(f"## {name}\n\n{picture}\n\n{text}\n{options_table(TOPOLOGIES[name])}")
    head = (
        "topology",
        "what it does",
        "messages per round",
        "disagreement per round",
        "largest momentum",
        "loses consensus",
    )
    return "\n".join([_TOPOLOGIES, table(head, rows), *sections])


def _mixing(topology: Topology) -> tuple[str, str, str]:
    """How the disagreement shrinks under plain gossip, and with which momentum and sizes that of GASLoC does."""
    if not topology.doubly_stochastic:
        return "for push rules", "for push rules", "for push rules"
    radius = stability(Consensus(1.0, 0.0, "post"), topology).radius
    gamma = largest_stable_gamma(1.0, "post", topology)
    exact = topology.exact_rounds
    left = f"× {radius:.3f}" if not exact else f"exact after {exact} round{'s' * (exact > 1)}"
    largest = "any" if gamma >= 1 else "none" if math.isnan(gamma) else f"{gamma:.3f}"
    return left, largest, _ranges([n for n in range(2, 33) if _loses_consensus(topology.name, n)])


def _loses_consensus(name: str, n: int) -> bool:
    """Whether GASLoC with its defaults is unstable on the topology of n workers, where there is one."""
    try:
        topology = make_topology(name, n, seed=0)
    except ConfigError:
        return False
    consensus = gasloc().consensus
    assert consensus is not None
    return not stability(consensus, topology).stable


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers, three and more neighbours as their ends."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    shown = ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run) for run in runs)
    return ", ".join(chain.from_iterable(shown)) or "none"


def _codecs() -> str:
    x = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0))
    rows, sections = [], []
    for name, factory in CODECS.items():
        codec = make_codec(name)
        payload = codec.encode(x, 1)
        bits = 8 * sum(leaf.numel() * leaf.element_size() for leaf in leaves(payload)) / x.numel()
        error = float((codec.decode(payload, x) - x).norm() / x.norm())
        shown = f"{100 * error:.2g} %" if error else "none"
        rows.append((f"[`{name}`](#{name})", escaped(summary(factory)), f"{bits:.4g}", shown))
        text = about(factory, labels=("Cost", "Source", "Differs", "Fails when"))
        sections.append(f"## {name}\n\n{text}\n{options_table(factory)}")
    head = ("codec", "what it does", "bits per element", "error")
    return "\n".join([_CODECS.format(elements=_ELEMENTS), table(head, rows), *sections])


def _boundaries() -> str:
    x = torch.randn(8, 128, 768, generator=torch.Generator().manual_seed(0))
    rows, sections = [], []
    for row in boundary_rows():
        name, what, set_as, bits, *_ = row
        shown = ""  # of a model, which computes with what crosses
        if name in BOUNDARIES:
            codec = BOUNDARIES[name]()
            error = float((codec.decode(codec.encode(x), x) - x).norm() / x.norm())
            shown = f"{100 * error:.2g} %" if error else "none"
        rows.append((f"[`{name}`](#{name})", escaped(what), set_as, bits, shown))
        sections.append(f"## {name}\n\n{_boundary(name)}")
    head = ("boundary", "what it does", "set as", "bits per element", "error")
    return "\n".join([_BOUNDARIES, table(head, rows), *sections])


def _boundary(name: str) -> str:
    """What a boundary says of itself, and how it is set."""
    labels = ("Cost", "Source", "Differs", "Fails when")
    if name in BOUNDARIES:
        return f"{about(BOUNDARIES[name], labels=labels)}\n{options_table(BOUNDARIES[name])}"
    made, keys = BOTTLENECKS[name]
    values = {"width": "width = 8", "cuts": "cuts = [2]", "kind": 'kind = "linear"', "free_layers": "free_layers = 1"}
    return f"{about(made, labels=labels)}\n{_NARROW.format(name=name, keys=', '.join(values[key] for key in keys))}"
