"""What is simulated is what runs: simulator and real processes, equal to the last bit, whole checkpoints included.

`make parity` runs every allowed pairing, on up to five workers; otherwise a cover on three and four, in which each rule comes up
with and without loss and with equal and unequal steps, each topology comes up, and so do every two properties of a run. Every
second case exchanges over gloo, and the others over encrypted connections, as with [peers].
"""

import base64
import contextlib
import functools
import itertools
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from gossamer import rng
from gossamer.errors import ConfigError, MissingPackageError, PairingError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import FITTING
from gossamer.rounds.compatibility.incompatibilities import check
from gossamer.rules import RULES, WRAPPERS, make_rule
from gossamer.run.config.document import with_settings
from gossamer.run.config.resolve import pairing_faults
from gossamer.run.config.run_file import digest, parse
from gossamer.run.simulated.simulate import simulate
from gossamer.topologies import TOPOLOGIES, make_topology
from gossamer.topologies.mixing import pull
from gossamer.transport.keys import KEY, certificate_of, new_key
from gossamer.transport.processes.local import run_local
from gossamer.tree import leaves
from parity_worker import train_cases
from tiny import DEVICE

SIZES, FEW, STOP = (5, 4, 3), (4, 3), 2
ROUNDS, FEWER = 4, 2  # of each run with `--full`, and of the cover, see `rounds_of`
pytestmark = pytest.mark.timeout(7200)  # all cases are trained for whichever test comes first
TINY = {  # the least that has heads, and a layer more where there are fragments: each layer costs as much time as all the rest
    "model": {"hidden_size": 16, "intermediate_size": 24, "layers": 1, "heads": 2, "kv_heads": 1},
    "data": {"source": str(Path(__file__)), "seq_len": 8, "batch_size": 2},
    "record": {"tensorboard": False, "export": False},
}
ONCE = {"device": DEVICE, "threads": 1, "eval_every": 0, "eval_batches": 1}
VARIANTS = {  # options beside the defaults that take another path through the update
    "gasloc": [
        {},
        {"form": "published", "momentum": 0.3},
        {"form": "drift"},
        {"lr": 1.0, "alpha": 0.5},
        {"optimizer": "heavy_ball", "momentum": 0.3},
    ],
    "dilocox": [{"rank": 2}, {"rank": 2, "form": "eager"}],
    "fgd": [{}, {"mix_updates": "random"}, {"mix_parameters": "global", "mix_updates": "complete"}],
    "diloco": [{}, {"optimizer": "heavy_ball"}, {"optimizer": "sgd"}],
    "demo": [{}, {"signs": True}],
}
STEPS = ("even", "uneven", "weighed")
PROPERTIES = {  # of every run, whatever its rule and topology; those written often are rare in the cover
    "codec": ("exact", "int8", "topk"),  # nothing lost, a quantizer, a sparsifier
    "steps": STEPS,
    "wrapper": (None, *WRAPPERS),
    "optimizer": ("adamw", "adamw", "sgd", "sgd", "muon", "accum_adamw", "qh_adopt"),
    "averaging": (None, None, "gpa", "schedule_free"),
    "clip": (None, 0.5),
    "autocast": (None, None, None, "bf16"),  # takes twice the time here
    "dropout": (0.0, 0.1),
    "resumed": (*7 * (False,), True),
}
SCHEDULES = {  # methods that are a rule and a schedule: rule, topology, codec, schedule, and options of the rule
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
    "streaming-sparseloco": ("sparseloco", "complete", "topk2bit", {"fragments": 2, "overlap_steps": 1}),
    "drawn-both-ways": ("fedopt", "complete", {"name": "randomk", "back": {"name": "topk2bit", "tiles": False}}, {}),
    "des-loc": ("local_sgd", "complete", "exact", {"inner_every": [2, 3]}),
    "cocodc": ("diloco", "complete", "exact", {"fragments": 2, "sends": 3, "overlap_steps": 1, "merge": "taylor"}),
    "dilocox-adaptive": ("dilocox", "complete", "exact", {}, {"rank": 6, "adapt_every": 1}),
    "asyncmesh": ("sparta", "complete", "exact", {"overlap_steps": 4}, {"one_in": 3, "disjoint": True}),
    "cocodc-int8": ("diloco", "complete", "int8", {"fragments": 2, "sends": 2, "overlap_steps": 2, "merge": "taylor"}),
    "dilocox-adaptive-int4": ("dilocox", "complete", "int4", {}, {"rank": 6, "adapt_every": 1}),
}
MET_WITHIN = {  # what each does is done in another: with `--full` both are trained
    "streaming-diloco": "streaming-diloco-exact",
    "diloco-both-ways": "streaming-diloco-both-ways",
    "cocodc": "cocodc-int8",
    "dilocox-adaptive": "dilocox-adaptive-int4",
}
MIXTURES = {  # experts that some workers hold: workers, rule, topology, codec, experts, and whether it is resumed
    "fomoe": (4, "diloco", "complete", {"name": "exact"}, {"count": 4, "holders": 2}, True),
    "fomoe-both-ways": (4, "diloco", "complete", {"name": "int8", "back": "bf16"}, {"count": 4, "holders": 3}, False),
    "fomoe-gossip": (4, "gasloc", "random", {"name": "int8"}, {"count": 4, "holders": 3}, False),
}


def allowed(rule, topology, n):
    """Whether this rule runs on this topology of n workers."""
    try:
        check(Combination(workers=n, rule=rule, topology=make_topology(topology, n)))
    except (ConfigError, PairingError):
        return False
    return True


def pairings(numbers):
    """Every allowed (rule, options, topology), with those of these numbers of workers that it is allowed for."""
    for name, factory in RULES.items():
        for options in VARIANTS.get(name, [{}]):
            for topology in TOPOLOGIES:
                if sizes := [n for n in numbers if allowed(factory(**options), topology, n)]:
                    yield name, options, topology, sizes


@functools.cache
def fitting(rule, options):
    """The wrappers that this rule may have with these options, and none."""
    wrappers = [None]
    for name in WRAPPERS:
        with contextlib.suppress(ConfigError):
            make_rule(rule, **dict(options), **{name: {}})
            wrappers.append(name)
    return tuple(wrappers)


@functools.cache
def on_gradients(rule):
    """Whether this rule exchanges gradients, after every inner step."""
    return RULES[rule]().site == "gradients"


def document(n, rule, options, topology, drawn, steps=2, **tables):
    """A run document with these properties."""
    layers = tables.get("schedule", {}).get("fragments", 1)
    wrapper, uneven = drawn["wrapper"], [steps, max(1, steps // 2), steps, steps - 1, steps][:n]
    return {
        "workers": n,
        "rule": {"name": rule, **options, **({wrapper: {}} if wrapper else {})},
        "topology": {"name": topology},
        "codec": {"name": drawn["codec"]},
        **TINY,
        "model": {**TINY["model"], "layers": layers, "dropout": drawn["dropout"]},
        "inner": {key: drawn[key] for key in ("optimizer", "averaging", "clip", "autocast") if drawn[key] is not None},
        "run": {
            "steps": ROUNDS * steps,
            "local_steps": steps if drawn["steps"] == "even" else uneven,
            "weigh_steps": drawn["steps"] == "weighed",
            "checkpoint_every": STOP * steps if drawn["resumed"] else 0,
            **ONCE,
        },
        **tables,
    }


def drawn_properties(rule, options, place):
    """Properties of one case, all different from place to place."""
    kinds = {**PROPERTIES, "wrapper": fitting(rule, tuple(options.items()))}
    if on_gradients(rule):
        kinds["steps"] = ("even",)
    return {key: kind[rng.key(0, place, key) % len(kind)] for key, kind in kinds.items()}


def every(draws, numbers):
    """Every allowed pairing of rule, topology, codec and steps, by a readable name, so many times with other properties each."""
    cases, place = {}, 0
    for rule, options, topology, sizes in pairings(numbers):
        gradients = on_gradients(rule)
        kinds = ([False] if gradients else [False, True]), PROPERTIES["codec"], range(draws)
        for uneven, codec, _ in itertools.product(*kinds):
            place += 1
            steps = STEPS[1 + rng.key(0, place, "uneven") % 2] if uneven else "even"
            drawn = {**drawn_properties(rule, options, place), "steps": steps, "codec": codec}
            n = sizes[rng.key(0, place) % len(sizes)]
            name = "-".join(map(str, [rule, *options.values(), topology, codec, steps, n, place]))
            cases[name] = document(n, rule, options, topology, drawn, 1 if gradients else 2), drawn
    return cases


def possible(made, case):
    """The same case, without its wrapper or its averaging if it cannot work with them; None if it cannot work at all."""
    for simpler in ((), ("wrapper",), ("averaging",), ("wrapper", "averaging")):
        if any(case[key] is None for key in simpler):
            continue  # it has been tried
        rest = {**case, **dict.fromkeys(simpler)}
        rule = {key: value for key, value in made["rule"].items() if rest["wrapper"] or key not in WRAPPERS}
        inner = {key: value for key, value in made["inner"].items() if rest["averaging"] or key != "averaging"}
        simple = {**made, "rule": rule, "inner": inner}
        if not pairing_faults(parse(simple), real=True):
            return simple, rest
    return None


def covered(whole):
    """The fewest cases, greedily, in which all `marks` come up that come up at all; only those that are taken are tried."""
    left, cases, cover = {name: marks(*case) for name, case in whole.items()}, dict(whole), {}
    ranks = {name: cheap(*case) for name, case in whole.items()}
    tried, seen = set(), set()
    while left:
        name = max(left, key=lambda name: (len(left[name]), ranks[name]))
        if name not in tried:
            tried.add(name)
            if (case := possible(*cases[name])) is None:
                del left[name]
            else:
                cases[name], ranks[name], left[name] = case, cheap(*case), marks(*case) - seen
            continue
        cover[name], new = cases[name], left[name]
        seen |= new
        left = {other: rest for other, its in left.items() if (rest := its - new)}
    return cover


def cheap(made, case):
    """What is preferred among cases that add as much to a cover."""
    return (
        not case["resumed"],
        case["autocast"] is None,
        case["optimizer"] not in ("muon", "accum_adamw"),
        -made["workers"],
    )


def marks(made, case):
    """Each rule with its options, without and with loss, with equal and unequal steps; each topology; every two properties."""
    rule, topology, n = made["rule"]["name"], made["topology"]["name"], made["workers"]
    lossless, even = case["codec"] == "exact", case["steps"] == "even"
    own = {key: value for key, value in made["rule"].items() if key not in WRAPPERS}
    pairs = itertools.combinations(sorted({**case, "n": n}.items()), 2)
    return {
        str(own),
        topology,
        (rule, "codec", lossless),
        (rule, "steps", even),
        *pairs,
    }


def rounds_of(made, full):
    """The rounds of a case: in the cover two, as the state of one goes into the next, and one more where that is too few.

    A run that is stopped has one round left, and what is done every third round is done once.
    """
    often = make_rule(**made["rule"]).options
    more = made["run"]["checkpoint_every"] or often.get("every") or often.get("adapt_every")
    return ROUNDS if full else FEWER + bool(more)


def scheduled(full):
    """Fragments and overlap, with equal and unequal steps, and workers that are weighed by their steps."""
    cases, numbers = {}, SIZES if full else FEW
    for k, name in enumerate(SCHEDULES if full else [name for name in SCHEDULES if name not in MET_WITHIN]):
        rule, topology, codec, schedule, *more = SCHEDULES[name]
        options = more[0] if more else {}
        for steps in STEPS if full else [STEPS[k % 3]]:
            case = {**drawn_properties(rule, {}, k), "wrapper": None, "averaging": None, "steps": steps, "codec": ""}
            case["optimizer"] = "adamw"
            tables = {"codec": codec if isinstance(codec, dict) else {"name": codec}, "schedule": schedule}
            made = document(numbers[k % len(numbers)], rule, options, topology, case, 4, **tables)
            if not pairing_faults(parse(made), real=True):  # some decide on their steps themselves
                cases[f"{name}-{steps}"] = made, case
    return cases


def mixtures():
    """Workers with experts of their own, which they exchange with the other holders."""
    cases = {}
    for k, (name, (n, rule, topology, codec, experts, resumed)) in enumerate(MIXTURES.items()):
        plain = {"wrapper": None, "averaging": None, "codec": "", "optimizer": "adamw", "resumed": resumed}
        case = {**drawn_properties(rule, {}, k), **plain}
        made = document(n, rule, {}, topology, case, codec=codec)
        cases[name] = {**made, "model": {**made["model"], "experts": experts}}, case
    return cases


def key_of(folder):
    """What a run file lists of a new key in this folder; nothing where keys cannot be made here."""
    with contextlib.suppress(MissingPackageError):
        key = new_key("here", folder / "key.pem")
        return {"certificate": base64.b64encode(certificate_of(key)).decode()}
    return None


CHANGING = {  # runs whose settings change on their way
    "local steps of each worker in fragments": (
        "gasloc",
        {"run.local_steps": {"0": 2, "4": [6, 4, 6], "15": [3, 2, 3]}, "run.steps": 19, "schedule.fragments": 2}
        | {"model.layers": 2},
    ),
    "numbers of a rule that receives late": (
        "eager",
        {"rule.lr": {"0": 0.4, "2": 0.7, "9": 0.2}, "run.local_steps": {"0": 1, "3": 3}, "run.steps": 12}
        | {"rule.momentum": {"shape": "cosine", "from": 0.8, "to": 0.1}},
    ),
    "numbers of gossip that overlaps": (
        "gasloc",
        {"rule.momentum": {"0": 0.1, "5": 0.6}, "run.local_steps": {"0": 2, "4": 5}, "run.steps": 14}
        | {"schedule.overlap_steps": 2},
    ),
    "a synchronous start of means with momentum": (
        "diloco",
        {"run.synchronous_steps": 3, "run.local_steps": [4, 2, 4], "run.steps": 15, "inner.optimizer": "muon"},
    ),
    "a synchronous start of late gossip": (
        "gasloc",
        {"run.synchronous_steps": 2, "run.local_steps": 3, "run.steps": 11, "schedule.overlap_steps": 2},
    ),
}


def changing():
    """Those of `CHANGING`, which real processes continue with where the simulator has stopped."""
    cases = {}
    for k, (name, (rule, settings)) in enumerate(CHANGING.items()):
        plain = {"wrapper": None, "averaging": None, "codec": "exact", "optimizer": "adamw", "resumed": True}
        case = {**drawn_properties(rule, {}, k), **plain, "steps": "even", "autocast": None}
        made = document(3, rule, {}, FITTING[RULES[rule]().needs], case)
        cases[name] = with_settings(made, {**settings, "run.checkpoint_every": 1}), case
    return cases


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory, forks):
    """Every case, trained by real processes and by the simulator."""
    root, full = tmp_path_factory.mktemp("parity"), request.config.getoption("--full")
    all_of_them = {name: case for name, one in every(1, SIZES).items() if (case := possible(*one))} if full else {}
    cases = {**all_of_them, **covered(every(4, FEW)), **scheduled(full), **mixtures()}
    if not full:
        for name, (made, case) in cases.items():
            steps = made["run"]["steps"] * rounds_of(made, full) // ROUNDS
            cases[name] = {**made, "run": {**made["run"], "steps": steps}}, case
    cases |= changing()
    plan, listed = [], key_of(root)
    for place, (name, (made, case)) in enumerate(cases.items()):
        if case["resumed"]:  # what real processes continue from was written by the simulator
            simulate(parse(made), root / "real" / name, until=STOP)
        peers = {"here": {**listed, "workers": made["workers"]}} if listed and place % 2 else {}
        plan.append([str(root / "real" / name), {**made, "peers": peers}, case["resumed"]])
    (root / "cases.json").write_text(json.dumps(plan))
    with mock.patch.dict(os.environ, {KEY: str(root / "key.pem")}):
        code = run_local(max(made["workers"] for made, _ in cases.values()), train_cases, [str(root / "cases.json")])
    assert code == 0
    for name, (made, _) in cases.items():
        simulate(parse(made), root / "simulated" / name)
    return root, cases


def outcome(folder, config):
    """The last snapshots and all losses of a run."""
    workers = range(config.workers)
    states = [
        checkpoint.load(folder / "checkpoints", config.length.rounds, worker, digest(config)) for worker in workers
    ]
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    return states, {(line["worker"], line["round"]): line["loss"] for line in lines}


def differences(a, b, where="state"):
    """The places at which two nested states differ."""
    if type(a) is not type(b):
        return [where]
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [where]
    if isinstance(a, dict) and a.keys() == b.keys():
        return [place for key in a for place in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)) and len(a) == len(b):
        return [place for k, both in enumerate(zip(a, b, strict=True)) for place in differences(*both, f"{where}.{k}")]
    return [] if a == b else [where]


def test_simulator_and_processes_agree_to_the_last_bit(trained, request):
    root, cases = trained
    different, full = {}, request.config.getoption("--full")
    for name, (made, _) in cases.items():
        config = parse(made)
        real, real_losses = outcome(root / "real" / name, config)
        simulated, losses = outcome(root / "simulated" / name, config)
        assert len(losses) == config.workers * config.length.rounds and (
            config.length.rounds == rounds_of(made, full) or name in CHANGING
        )
        places = differences(real, simulated, "workers") + [at for at in losses if real_losses.get(at) != losses[at]]
        if places:
            different[name] = places[:5]
    print(f"{len(cases) - len(different)} of {len(cases)} pairings agree to the last bit")
    assert not different


def test_the_cover_meets_every_rule_and_topology_and_every_two_properties_of_a_run(trained, request):
    _, cases = trained
    made = [made for made, _ in cases.values()]
    assert {d["rule"]["name"] for d in made} == set(RULES)
    assert {d["topology"]["name"] for d in made} == set(TOPOLOGIES)
    met = {pair for case in cases.values() for pair in marks(*case)}
    kinds = {**PROPERTIES, "n": SIZES if request.config.getoption("--full") else FEW}
    for (one, values), (other, others) in itertools.combinations(sorted(kinds.items()), 2):
        assert not [(one, a, other, b) for a in values for b in others if ((one, a), (other, b)) not in met]


def test_changing_the_order_of_a_sum_is_noticed():
    """The suite can fail: the same messages combined in another order give other bits."""
    generator = torch.Generator().manual_seed(0)
    messages = {j: torch.randn(4001, generator=generator) for j in range(4)}
    row = make_topology("complete", 4).mixing(0).rows[0]
    forward, backward = pull(messages[0], messages, 0, row), pull(messages[0], messages, 0, row[::-1])
    assert not torch.equal(forward, backward) and len(leaves(forward)) == 1
