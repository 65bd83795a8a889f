"""What is simulated is what runs: simulator and four real gloo processes, equal to the last bit.

`make parity` runs every allowed pairing; otherwise a cover in which each rule, each topology, and equal as well as unequal
local steps come up.
"""

import contextlib
import itertools
import json

import pytest
import torch

from gossamer.errors import PairingError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.rounds.facts import Facts
from gossamer.rounds.pairing import check
from gossamer.rules import RULES
from gossamer.run.config import digest, parse
from gossamer.run.simulate import simulate
from gossamer.topologies import TOPOLOGIES, make_topology
from gossamer.topologies.mixing import pull
from gossamer.transport.local import run_local
from gossamer.tree import leaves
from parity_worker import train_cases

N, ROUNDS = 4, 5
pytestmark = [
    pytest.mark.timeout(1800),  # all cases are trained for whichever test comes first
    pytest.mark.xdist_group("parity"),  # and once
]
TINY = {  # the least that has layers, heads and fragments: most of the time is otherwise model building and validation
    "model": {"hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 2, "kv_heads": 1},
    "data": {"seq_len": 16, "batch_size": 2, "max_bytes": 200_000},
    "record": {"tensorboard": False, "export": False},
}
ONCE = {"threads": 1, "eval_every": 0, "eval_batches": 1}
VARIANTS = {  # options beside the defaults that take another path through the update
    "gasloc": [
        {},
        {"form": "published", "momentum": 0.3},
        {"lr": 1.0, "alpha": 0.5},
        {"optimizer": "heavy_ball", "momentum": 0.3},
    ],
    "diloco": [{}, {"optimizer": "heavy_ball"}, {"optimizer": "sgd"}],
}


CODEC_NAMES = ("exact", "int8", "topk")  # nothing lost, a quantizer, a sparsifier
SCHEDULES = {  # methods that are a rule and a schedule: rule, topology, codec, schedule, other settings
    "streaming-diloco": ("diloco", "complete", "fp4", {"fragments": 2, "overlap_steps": 1, "merge": 0.5}),
    "streaming-diloco-exact": ("diloco", "complete", "exact", {"fragments": 2, "overlap_steps": 3, "merge": 0.5}),
    "streaming-gasloc": ("gasloc", "random", "exact", {"fragments": 2, "pattern": "sequential", "overlap_steps": 2}),
    "overlapped-gossip": ("gossip", "ring", "int8", {"overlap_steps": 4}),
    "diloco-both-ways": ("diloco", "complete", {"name": "int8", "back": "bf16"}, {}),
    "streaming-diloco-both-ways": (
        "diloco",
        "complete",
        {"name": "fp4", "back": "fp4"},
        {"fragments": 2, "overlap_steps": 1},
    ),
    "drawn-both-ways": ("fedopt", "complete", {"name": "randomk", "back": {"name": "topk2bit"}}, {}),
    "des-loc": ("local_sgd", "complete", "exact", {"inner_every": [2, 3]}),
}


def pairings():
    """Every allowed (rule, options, topology)."""
    for name, factory in RULES.items():
        for options in VARIANTS.get(name, [{}]):
            for topology in TOPOLOGIES:
                with contextlib.suppress(PairingError):
                    check(Facts(rule=factory(**options), topology=make_topology(topology, N)))
                    yield name, options, topology


def cases(full):
    """Run documents by a readable name."""
    found = {}
    for k, (rule, options, topology) in enumerate(pairings()):
        gradients = RULES[rule]().site == "gradients"
        all_steps = [1] if gradients else [2, [2, 1, 2, 1]]
        for place, (steps, codec) in enumerate(itertools.product(all_steps, CODEC_NAMES)):
            if not full and (place + k) % 2:
                continue
            how = "uneven" if isinstance(steps, list) else "even"
            name = "-".join([rule, *map(str, options.values()), topology, codec, how])
            found[name] = {
                "workers": N,
                "rule": {"name": rule, **options},
                "topology": {"name": topology},
                "codec": {"name": codec},
                **TINY,
                "inner": {"optimizer": ["adamw", "muon", "sgd"][k % 3]},
                "run": {"steps": ROUNDS * (1 if gradients else 2), "local_steps": steps, **ONCE},
            }
    return {**(found if full else covered(found)), **scheduled()}


def covered(found):
    """Enough of the cases that every variant of a rule, every topology, each rule with each codec, and each with equal and with
    unequal steps come up."""
    cover, seen = {}, set()
    for name, document in found.items():
        rule = document["rule"]["name"]
        marks = {
            str(document["rule"]), document["topology"]["name"], (rule, document["codec"]["name"]),
            (rule, name.rpartition("-")[2]),
        }  # fmt: skip
        if not marks <= seen:
            seen |= marks
            cover[name] = document
    return cover


def scheduled():
    """Fragments and overlap, with equal and unequal steps, and workers that are weighed by their steps."""
    found = {}
    for name, (rule, topology, codec, schedule) in SCHEDULES.items():
        for steps in [4, [4, 2, 4, 3]]:
            found[f"{name}-{'uneven' if isinstance(steps, list) else 'even'}"] = {
                "workers": N,
                "rule": {"name": rule},
                "topology": {"name": topology},
                "codec": codec if isinstance(codec, dict) else {"name": codec},
                "schedule": schedule,
                **TINY,
                "run": {"steps": ROUNDS * 4, "local_steps": steps, **ONCE},
            }
    for name in ("streaming-gasloc-uneven", "overlapped-gossip-uneven"):
        found[f"{name}-weighed"] = {**found[name], "run": {**found[name]["run"], "weigh_steps": True}}
    return found


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory, forks):
    """Every case, trained by four processes and by the simulator."""
    root = tmp_path_factory.mktemp("parity")
    documents = cases(request.config.getoption("--full-parity"))
    plan = {str(root / "real" / name): document for name, document in documents.items()}
    (root / "cases.json").write_text(json.dumps(plan))
    code = run_local(N, train_cases, [str(root / "cases.json")])
    assert code == 0
    for name, document in documents.items():
        simulate(parse(document), root / "simulated" / name)
    return root, documents


def outcome(folder, config):
    """The last snapshots and all losses of a run."""
    states = [checkpoint.load(folder / "checkpoints", ROUNDS, worker, digest(config)) for worker in range(N)]
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    return states, {(line["worker"], line["round"]): line["loss"] for line in lines}


def test_simulator_and_processes_agree_to_the_last_bit(trained):
    root, documents = trained
    different = []
    for name, document in documents.items():
        config = parse(document)
        real, real_losses = outcome(root / "real" / name, config)
        simulated, losses = outcome(root / "simulated" / name, config)
        assert len(losses) == N * ROUNDS
        same = all(
            torch.equal(a["x"], b["x"]) and all(map(torch.equal, a["outer"], b["outer"]))
            for a, b in zip(real, simulated, strict=True)
        )
        inner = [flat_tensors([state["inner"] for state in states]) for states in (real, simulated)]
        same = same and len(inner[0]) == len(inner[1]) and all(map(torch.equal, *inner))
        if not same or real_losses != losses:
            different.append(name)
    print(f"{len(documents) - len(different)} of {len(documents)} pairings agree to the last bit")
    assert not different


def test_the_cover_meets_every_rule_and_every_topology(trained):
    _, documents = trained
    assert {d["rule"]["name"] for d in documents.values()} == set(RULES)
    assert {d["topology"]["name"] for d in documents.values()} == set(TOPOLOGIES)


def flat_tensors(value):
    """All tensors in nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in flat_tensors(part)]


def test_changing_the_order_of_a_sum_is_noticed():
    """The suite can fail: the same messages heard in another order give other bits."""
    generator = torch.Generator().manual_seed(0)
    messages = {j: torch.randn(4001, generator=generator) for j in range(N)}
    row = make_topology("complete", N).mixing(0).rows[0]
    forward, backward = pull(messages[0], messages, 0, row), pull(messages[0], messages, 0, row[::-1])
    assert not torch.equal(forward, backward) and len(leaves(forward)) == 1
