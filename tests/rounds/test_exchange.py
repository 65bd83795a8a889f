"""The round itself: one pass or many chunks, compiled or not, through owners or directly, always the same bits."""

import ast
import functools
import re
from pathlib import Path

import pytest
import torch

import gossamer
from drifted_rounds import drive, play, serially
from gossamer.codecs import CODECS, Codec, bf16, both_ways, exact, fp4, int8, make_codec, randomk, topk
from gossamer.errors import ConfigError, PairingError
from gossamer.record.logs.trace import Entry, from_entries
from gossamer.rounds.compatibility import incompatibilities
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.exchange import begin, initial_state
from gossamer.rounds.kernel import PLAIN, Kernel, compiled, outer_update
from gossamer.rounds.loop import Membership, OuterLoop
from gossamer.rounds.schedule import Schedule
from gossamer.rounds.setup import Part, Setup
from gossamer.rounds.together import Sizes, Together
from gossamer.rules import (
    RULES,
    Context,
    cocktail,
    diloco,
    error_feedback,
    fedopt,
    gasloc,
    gossip,
    jacobi,
    local_sgd,
    noloco,
    omr,
    sgp,
    sparta,
    weighted,
)
from gossamer.settings.over_time import timetable_of
from gossamer.testing.drifted_workers import flat_layout as layout
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology
from gossamer.topologies.mixing import from_edges, mean, pull
from gossamer.transport.contract import IncompleteError, Ticket
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import leaves

ODD = 2 * PLAIN.chunk + 17


UPDATES = {
    **{name: factory() for name, factory in RULES.items()},
    "gasloc-published": gasloc(1.0, 0.5, form="published"),
    "gasloc-heavy_ball": gasloc(optimizer="heavy_ball"),
    "diloco-error_feedback": error_feedback(diloco(), 0.9),
    "fedopt-yogi": fedopt(optimizer="yogi"),
    "omr-every-2": omr(every=2),
    "sparta-thirds": sparta(3),
    "cocktail-exact": cocktail("exact"),
    "jacobi-every-2": jacobi(every=2),
    "gasloc-weighted": weighted(gasloc()),
}


COMPILED = (
    "gasloc-weighted",
    "fedopt-yogi",
    "choco",
)  # weights of its own; roots and signs of a mean; copies of others


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", UPDATES)
def test_plain_chunked_and_compiled_updates_are_equal_to_the_last_bit(name, request):
    """Without `--full` some are compiled: that others use no operation that compiled code rounds otherwise, a promise checks."""
    rule = UPDATES[name]
    # Two peers give weights of 1/3, at which fused products show: for 1/2 they never do.
    topology = make_topology({"everyone": "complete", "tree": "chain"}.get(rule.needs, "ring"), 3)
    start = random_vectors(3, ODD, dtype=torch.float32)
    drift = functools.cache(random_drift(ODD, dtype=torch.float32))
    steps = [7, 3, 5] if name == "gasloc-weighted" else 1
    expected, _ = play(rule, topology, start, 3, lambda i, t, x: drift(i, t, None), steps=steps)
    others = {"small chunks": Kernel(outer_update, 1000), "whole": Kernel(outer_update, ODD)}
    if name in COMPILED or request.config.getoption("--full"):
        others["compiled"] = compiled()
    for other, kernel in others.items():
        got, _ = play(rule, topology, start, 3, lambda i, t, x: drift(i, t, None), steps=steps, kernel=kernel)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), other


def test_beside_a_cpu_an_update_is_made_in_one_piece():
    assert PLAIN.chunk_on(torch.device("cpu")) == PLAIN.chunk < 10**9 < PLAIN.chunk_on(torch.device("cuda"))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_mean_through_chunk_owners_equals_the_mean_of_whole_messages_to_the_last_bit(n):
    xs = random_vectors(n, 101, dtype=torch.float32)
    row = make_topology("complete", n).mixing(0).rows[0]
    expected = mean(xs[0], dict(enumerate(xs)), 0, row)
    got, _ = play(RULES["local_sgd"](), make_topology("complete", n), xs, 1)
    assert all(torch.equal(x, expected) for x in got)


CUT = [name for name, codec in CODECS.items() if codec().blockwise and not codec().exact]


@pytest.mark.parametrize(("name", "n"), [(name, (2, 3, 5)[place % 3]) for place, name in enumerate(CUT)])
def test_a_lossy_mean_whose_sums_come_back_exactly_equals_that_of_whole_payloads_to_the_last_bit(name, n):
    size = 3 * (CODECS[name]().blockwise or 1) + 1013  # owners of unequal chunks, and of none
    start, drift = random_vectors(1, size, dtype=torch.float32) * n, random_drift(size, dtype=torch.float32)
    for rule in (error_feedback(diloco(), 0.9), local_sgd()):
        expected, _ = play(rule, make_topology("complete", n), start, 2, drift, codec=CODECS[name]())
        got, _ = play(rule, make_topology("complete", n), start, 2, drift, codec=make_codec(name, back="exact"))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_each_chunk_of_a_lossy_mean_is_encoded_there_and_its_sum_back():
    n, size = 4, 4096
    xs, drift = random_vectors(1, size, dtype=torch.float32) * n, random_drift(size, dtype=torch.float32)
    there, back = int8(), bf16()
    got, _ = play(diloco(1.0, 0.0), make_topology("complete", n), xs, 1, drift, codec=both_ways(there, back))
    moved = [-drift(i, 0, x) for i, x in enumerate(xs)]
    decoded = [there.decode(there.encode(m, 0), m) for m in ((xs[i] - (xs[i] - m)) for i, m in enumerate(moved))]
    received = mean(decoded[0], dict(enumerate(decoded)), 0, make_topology("complete", n).mixing(0).rows[0])
    assert all(torch.equal(x, xs[0] - received.bfloat16().float()) for x in got)


BOTH_WAYS = [both_ways(c, b) for c in (fp4(), randomk(4), topk(8, 64)) for b in (fp4(), topk(8, 64))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", range(len(BOTH_WAYS)))
def test_whatever_is_lost_on_both_ways_all_workers_hear_the_same(place, request):
    """Two of four rules with each pair of codecs, in turn; `--full` takes all."""
    rules = [(diloco(), 3), (fedopt(), 1500), (error_feedback(diloco(), 0.9), 1500), (weighted(diloco()), 3)]
    chosen = rules if request.config.getoption("--full") else [rules[place % 4], rules[(place + 1) % 4]]
    for rule, size in chosen:
        xs, drift = random_vectors(1, size, dtype=torch.float32) * 5, random_drift(size, dtype=torch.float32)
        got, _ = play(rule, make_topology("complete", 5), xs, 4, drift, codec=BOTH_WAYS[place])
        assert all(torch.equal(got[0], x) for x in got) and got[0].isfinite().all() and not torch.equal(got[0], xs[0])


@pytest.mark.parametrize(
    "codec", [exact(), both_ways(exact(), bf16()), both_ways(int8(), exact()), both_ways(topk(8, 64), int8())]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [diloco(), local_sgd()], ids=lambda rule: rule.name)
def test_a_mean_of_half_precision_comes_back_in_what_it_was_taken_in(codec, dtype, rule):
    xs, drift = random_vectors(1, 1000, dtype=dtype) * 3, random_drift(1000, dtype=dtype)
    got, _ = play(rule, make_topology("complete", 3), xs, 2, drift, codec=codec)
    assert got[0].dtype == dtype and all(torch.equal(got[0], x) for x in got) and not torch.equal(got[0], xs[0])
    wide = [x.float() for x in xs]
    plain, _ = play(rule, make_topology("complete", 3), wide, 2, lambda i, t, x: drift(i, t, x).float(), codec=codec)
    assert (codec.contraction or 0.0) < 0.9 or float((got[0].float() - plain[0]).norm() / plain[0].norm()) < 0.02


def test_a_rule_whose_numbers_change_is_not_compiled_and_computes_the_same():
    start, drift = random_vectors(4, 3000, dtype=torch.float32), random_drift(3000, dtype=torch.float32)
    rule, ring = jacobi(every=8), make_topology("ring", 4)
    expected, _ = play(rule, ring, start, 20, drift)
    got, _ = play(rule, ring, start, 20, drift, kernel=compiled())
    assert not rule.compiles and all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_a_way_back_without_a_mean_over_everyone_is_refused():
    codec = both_ways(int8(), int8())
    for rule, topology in [(gasloc(), "random"), (gasloc(), "complete"), (noloco(), "random"), (sgp(), "random_push")]:
        with pytest.raises(
            PairingError, match=f"the second leg of a mean over all workers, and rule '{rule.name}' takes no such mean"
        ):
            incompatibilities.check(Combination(rule=rule, topology=make_topology(topology, 4), codec=codec))
    with pytest.raises(ConfigError, match="only one return leg"):
        make_codec("int8", back={"name": "int8", "back": "int8"})


def test_peers_are_summed_in_ascending_order_and_another_order_gives_other_bits():
    xs = random_vectors(8, 4001, dtype=torch.float32)
    row = make_topology("complete", 8).mixing(0).rows[0]
    forward = mean(xs[0], dict(enumerate(xs)), 0, row)
    backward = mean(xs[0], dict(enumerate(xs)), 0, tuple(reversed(row)))
    assert not torch.equal(forward, backward)
    torch.testing.assert_close(forward, backward)


def test_sums_of_half_precision_messages_are_taken_in_fp32():
    ones = torch.ones(3, dtype=torch.bfloat16)
    small = dict.fromkeys(range(1, 9), ones * 2 ** (-9))
    row = ((0, 1.0), *((j, 1.0) for j in range(1, 9)))
    assert mean(ones, small, 0, row)[0].item() == 1 + 8 * 2**-9
    assert pull(ones, {1: ones * 3}, 0, ((0, 0.5), (1, 0.5))).dtype == torch.float32


CARRIED = [(name, exact()) for name in RULES] + [("diloco", both_ways(fp4(), bf16())), ("fedopt", fp4())]


@pytest.mark.parametrize(("name", "codec"), CARRIED, ids=[f"{n}-{c.name}" for n, c in CARRIED])
def test_what_the_trace_says_was_sent_is_what_the_transport_carried(name, codec):
    n, numel, rule = 5, 1030, RULES[name]()
    fitting = {
        "everyone": ("complete", {}),
        "static": ("ring", {}),
        "tree": ("star", {}),
        "push": ("random_push", {"peers": 2}),
    }
    chosen, options = fitting.get(rule.needs, ("random", {"peers": 2}))
    topology = make_topology(chosen, n, **options)
    network, carried = MemoryNetwork(n), {}

    def count(i, transport):
        post = transport.post

        def counting(ticket, peer, frames):
            key = (i, peer)
            carried[key] = carried.get(key, 0) + sum(f.numel() * f.element_size() for f in frames)
            post(ticket, peer, frames)

        return type(
            "Counting", (), {"__getattr__": lambda self, a: counting if a == "post" else getattr(transport, a)}
        )()

    xs = random_vectors(n, numel, dtype=torch.float32)
    mixing = topology.mixing(0)
    exchanges, transports = [], []
    for i, x in enumerate(xs):
        ctx = Context(i, n, 0, 1, mixing.weight(i), layout(numel))
        part = Part(x, initial_state(rule, mixing, x, ctx), ctx.layout)
        transports.append(count(i, network.transport(i)))
        exchanges.append(begin(Setup(rule, codec, transports[i], part, seed=0), mixing, ctx))
    operations = drive(exchanges, serially)
    trace = from_entries(Entry(0, i, 1, 0.0, (operation,)) for i, operation in enumerate(operations))
    _, _, source, target, _, size, _ = trace.listed().messages
    assert dict(zip(zip(source.tolist(), target.tolist(), strict=True), size.tolist(), strict=True)) == carried
    assert [operation.received_bytes for operation in operations] == [
        sum(size for (_, peer), size in carried.items() if peer == i) for i in range(n)
    ]
    if rule.averages and codec.exact:  # 2 (n-1)/n messages, to within the rounding of chunks to whole elements
        sent = sum(size for (i, _), size in carried.items() if i == 0)
        assert sent == pytest.approx(2 * (n - 1) / n * 4 * numel, rel=0.03)


def test_a_lossy_codec_keeps_the_mean_of_gossip_and_is_carried_to_everyone_for_a_mean():
    halving = Codec(lambda x, key: x.bfloat16(), lambda payload, like: payload.to(like.dtype))
    start = random_vectors(5, 31)
    xs, _ = play(gasloc(), make_topology("random", 5), start, 20, codec=halving)
    torch.testing.assert_close(sum(xs), sum(start), rtol=0, atol=1e-12)
    ys, _ = play(diloco(), make_topology("complete", 5), [start[0]] * 5, 4, random_drift(31), codec=halving)
    assert all(torch.equal(ys[0], y) for y in ys)


def test_state_is_updated_in_place_and_messages_survive_the_update_of_their_sender():
    topology = make_topology("complete", 4)
    mixing, network = topology.mixing(0), MemoryNetwork(4)
    xs = random_vectors(4, 11, dtype=torch.float32)
    before = [x.clone() for x in xs]
    rule = gasloc(lr=1.0, momentum=0.0)  # sends x itself
    contexts = [Context(i, 4, 0, 1, 0.25, layout(11)) for i in range(4)]
    parts = [Part(x, rule.init(x, ctx), ctx.layout) for x, ctx in zip(xs, contexts, strict=True)]
    transports = [network.transport(i) for i in range(4)]
    places = [leaf.data_ptr() for part in parts for leaf in leaves(part.s)]
    exchanges = [
        begin(Setup(rule, exact(), transports[i], part, seed=0), mixing, contexts[i]) for i, part in enumerate(parts)
    ]
    drive(exchanges, serially)
    for x, own in zip(xs, before, strict=True):
        torch.testing.assert_close(x, sum(before) / 4)
        assert not torch.equal(x, own)
    assert places == [leaf.data_ptr() for part in parts for leaf in leaves(part.s)]


@pytest.mark.parametrize("name", [name for name, rule in UPDATES.items() if rule.averages])
def test_a_mean_taken_once_for_all_workers_of_a_process_has_the_bits_and_bytes_of_one_through_chunk_owners(
    name: str,
) -> None:
    n, numel, rule = 5, 33, UPDATES[name]
    mixing = make_topology("complete", n).mixing(0)
    found = []
    for together in (None, Together(n)):
        network, xs, operations = MemoryNetwork(n), random_vectors(n, numel, dtype=torch.float32), []
        contexts = [Context(i, n, 0, 1, mixing.weight(i), layout(numel)) for i in range(n)]
        parts = [Part(x, initial_state(rule, mixing, x, ctx), ctx.layout) for x, ctx in zip(xs, contexts, strict=True)]
        for round in range(3):
            for x, drift in zip(xs, random_vectors(n, numel, dtype=torch.float32), strict=True):
                x += drift
            exchanges = [
                begin(
                    Setup(rule, exact(), network.transport(i), part, seed=0, together=together),
                    mixing,
                    contexts[i]._replace(round=round),
                )
                for i, part in enumerate(parts)
            ]
            operations += drive(exchanges, serially)
        assert together is None or not network.held
        found.append((xs, [leaf for part in parts for leaf in leaves(part.s)], operations))
    (xs, states, operations), (ys, others, more) = found
    assert operations == more
    assert all(map(torch.equal, [*xs, *states], [*ys, *others]))


def test_a_mean_is_taken_once_and_only_when_all_have_sent() -> None:
    together, ticket, taken = Together(2), Ticket(0), []

    def total(messages):
        taken.append(1)
        return messages[0] + messages[1]

    together.put(ticket, 0, torch.ones(2), lambda: Sizes((4, 4), (4, 4)))
    with pytest.raises(IncompleteError, match=r"lacks the messages of workers \[1\]"):
        together.take(ticket, total)
    together.put(ticket, 1, torch.ones(2), lambda: pytest.fail("the sizes are known"))
    assert together.take(ticket, total) is together.take(ticket, total) and taken == [1]


def test_a_directed_round_needs_no_answer_from_its_receivers():
    mixing = from_edges(3, [(1, 0, 0.5), (2, 1, 0.5)])
    assert [mixing.sends_to(i) for i in range(3)] == [(1,), (2,), ()]
    xs = [torch.full((4,), float(i)) for i in range(3)]
    network, rule = MemoryNetwork(3), RULES["gossip"]()
    transports = [network.transport(i) for i in range(3)]
    exchanges = [
        begin(
            Setup(rule, exact(), transports[i], Part(x, (), layout(4)), seed=0),
            mixing,
            Context(i, 3, 0, 1, 0.5, layout(4)),
        )
        for i, x in enumerate(xs)
    ]
    drive(exchanges, serially)
    assert [x[0].item() for x in xs] == [0.0, 0.5, 1.5]


CALLERS = {  # who calls which functions of rules and codecs; those that wrap another one, or analyse or test it, call it too
    ("rule", ("send", "combine", "recv")): (
        "rules",
        "rounds.exchange",
        "rounds.together",
        "rounds.kernel",
        "rounds.recursion",
        "testing.functions",
    ),
    ("codec", ("encode", "decode")): (
        "boundaries",
        "codecs",
        "run.worker.stages.in_one_process",
    ),  # that of what a linear boundary loses
}


def test_only_the_exchange_calls_rules_and_only_messages_go_through_codecs():
    source = Path(gossamer.__file__).parent
    found = {calls: set() for calls in CALLERS}
    for path in sorted(source.rglob("*.py")):
        text, module = path.read_text(), ".".join(path.relative_to(source).with_suffix("").parts)
        for (owner, functions), callers in CALLERS.items():
            if f"{owner}." in text and any(
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in functions
                and re.fullmatch(rf"(.*[._])?{owner}", ast.unparse(node.func.value))
                for node in ast.walk(ast.parse(text))
            ):
                name = next((allowed for allowed in callers if module.startswith(allowed)), module)
                found[owner, functions].add(name)
    assert found == {calls: set(callers) for calls, callers in CALLERS.items()}


def test_a_loop_asks_for_the_participants_of_a_round_that_it_announces_and_of_none_before():
    asked, network = [], MemoryNetwork(3)

    def participants(round: int, fragment: int) -> frozenset[int]:
        asked.append((round, fragment))
        return frozenset({0, 2})

    m = Method(gossip(), make_topology("complete", 3), exact(), Schedule(), PLAIN)
    xs = {i: torch.full((4,), float(i)) for i in (0, 2)}
    loops = [
        OuterLoop(
            m,
            network.transport(i),
            [(x, layout(4))],
            local_steps=1,
            timetable=timetable_of(((0, 1),)),
            seed=0,
            membership=Membership(participants),
        )
        for i, x in xs.items()
    ]
    assert asked == []
    for loop in loops:
        loop.begin_round(5)
        loop.announce(5, loop.stops(5)[0])
    for loop in loops:
        loop.post(5, loop.stops(5)[0])
    for loop in loops:
        loop.receive(5, loop.stops(5)[0])
    assert {*asked} == {(5, 0)} and loops[0].peers_in(5, frozenset({0, 2})) == (2,)
    assert xs[0].tolist() == xs[2].tolist() == [1.0] * 4
