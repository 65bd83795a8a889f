"""From a run file to what runs, and the table of what cannot be combined: every row has a combination that meets it."""

import pytest
import torch
from test_virtual import UNEVEN, timed

from gossamer.asynchronous import a2cid2, dadao, dylu_steps
from gossamer.clock import Absence
from gossamer.codecs import both_ways, int8, topk, topk2bit
from gossamer.errors import ConfigError, PairingError
from gossamer.library import Outer
from gossamer.network.links import Network
from gossamer.network.store_time import StoreLink
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import FITTING, Method
from gossamer.rounds.compatibility.incompatibilities import INCOMPATIBILITIES, check, combination_faults
from gossamer.rounds.schedule import Schedule
from gossamer.rules import (
    RULES,
    data_parallel,
    diloco,
    dilocox,
    eager,
    easgd,
    fgd,
    gasloc,
    penalized,
    relaysum,
    sgp,
    sparseloco,
)
from gossamer.run.config.recipes import missing
from gossamer.run.config.resolve import resolve
from gossamer.run.config.resolve import run_faults as faults_of
from gossamer.run.config.resolved import InPairs, WithServer
from gossamer.settings.over_time import timetable_of
from gossamer.topologies import complete, exponential, make_topology, random, random_push, ring, tree
from tiny import TEXT, tiny

LINK = Network(uplink_bps=1e6, downlink_bps=1e6, step_s=1.0)
LATE = Network(uplink_bps=1e6, downlink_bps=1e6)
SERVER = Combination(kind="server", server="heloco", networks={"a": LINK})
PAIR = Combination(kind="pair", pair=a2cid2(), topology=complete(4), networks={"a": LINK})
GOSSIP = Combination(kind="no waiting", rule=gasloc(), topology=random(4), networks={"a": LINK})
EXPERTS = Combination(
    rule=diloco(), topology=complete(4), holders=(frozenset(range(4)), frozenset({0, 1}), frozenset({2, 3}))
)
FREE = Combination(topology=random_push(4), rule=sgp())

ONE_THEN_SIX = timetable_of(((0, 1), (6, 6)))

MEETS = {  # name of the row: what meets it, and what its sentence names
    "[server] with [rule]": (Combination(tables=frozenset({"server", "rule"})), ["[server]", "[rule]"]),
    "[server] with [pair]": (Combination(tables=frozenset({"server", "pair"})), ["[server]", "[pair]"]),
    "[server] with [topology]": (Combination(tables=frozenset({"server", "topology"})), ["[server]", "[topology]"]),
    "[pair] with [rule]": (Combination(tables=frozenset({"pair", "rule"})), ["[pair]", "[rule]"]),
    "workers of the topology": (Combination(topology=ring(5), workers=4), ["for 5 workers", "the run has 4"]),
    "everyone": (Combination(rule=diloco(), topology=random(4)), ["'diloco'", "'random'", "'complete'"]),
    "static": (Combination(rule=RULES["choco"](), topology=random(4)), ["'choco'", "'random'", "'ring'"]),
    "tree": (Combination(rule=relaysum(), topology=ring(4)), ["'relaysum'", "'ring'", "'tree'"]),
    "push": (Combination(rule=sgp(), topology=random(4)._replace(column_stochastic=False)), ["'sgp'", "'random_push'"]),
    "doubly stochastic": (Combination(rule=gasloc(), topology=random_push(4)), ["'gasloc'", "'random_push'", "'sgp'"]),
    "alpha": (Combination(rule=gasloc(alpha="auto"), topology=random(4)), ["alpha = 'auto'"]),
    "pushed mass and codec": (FREE._replace(codec=int8()), ["'sgp'", "'random_push'", "'int8'", "'anchored_gasloc'"]),
    "parameters and codec": (
        Combination(rule=gasloc(), topology=random(4), codec=topk()),
        ["'gasloc'", "'topk'", "'choco'"],
    ),
    "codec.back": (
        Combination(rule=gasloc(), topology=random(4), codec=both_ways(int8(), int8())),
        ["codec.back = 'int8'"],
    ),
    "codec.back and tiles": (
        Combination(rule=diloco(), topology=complete(4), codec=both_ways(int8(), topk2bit())),
        ["'int8'", "codec.back = 'topk2bit'", "tiles = false"],
    ),
    "gradients and local steps": (
        Combination(rule=data_parallel(), topology=complete(4), local_steps=2),
        ["run.local_steps is 2", "run.local_steps = 1"],
    ),
    "gradients and schedule": (
        Combination(rule=data_parallel(), topology=complete(4), schedule=Schedule(fragments=2)),
        ["[schedule]", "fragments=2"],
    ),
    "Outer and asynchronous": (GOSSIP._replace(driver="library"), ["'gasloc'", "in rounds"]),
    "shards and rule": (
        Combination(driver="library", rule=dilocox(), topology=complete(4), shards=2),
        ["a mesh of 2 processes", "'dilocox'", "'gasloc'"],
    ),
    "estimates and rule": (
        Combination(driver="train", rule=data_parallel(), topology=complete(4), optimizer="acco_adamw"),
        ["'acco_adamw'", "'data_parallel'", "rule 'acco'"],
    ),
    "shards, fragments and layers": (
        Combination(
            driver="library", rule=penalized(diloco()), topology=complete(4), shards=2, schedule=Schedule(fragments=2)
        ),
        ["a mesh of 2 processes", "'penalized_diloco'", "schedule.fragments is 2", "'capped'"],
    ),
    "shards and all-reduce": (
        Combination(driver="library", rule=diloco(), topology=complete(4), shards=2, reduction="all_reduce"),
        ["a mesh of 2 processes", "'all_reduce'", "'ordered'"],
    ),
    "shards and chosen fragments": (
        Combination(
            driver="library", rule=diloco(), topology=complete(4), shards=2, schedule=Schedule(fragments=2, sends=3)
        ),
        ["a mesh of 2 processes", "schedule.sends is 3"],
    ),
    **{
        f"shards and {name}": (
            Combination(**{"driver": "train", "shards": 2, "rule": gasloc(), "topology": random(4), **given}),
            ["run.shards is 2", said],
        )
        for name, given, said in (
            ("stages", {"stages": 2}, "pipeline.stages is 2"),
            ("asynchronous", {"kind": "no waiting"}, "without rounds"),
            ("elastic", {"elastic": True}, "run.elastic is true"),
            ("adapt", {"adapt": True, "local_steps": 4}, "run.adapt is True"),
            ("hashes", {"hashes": True}, "record.hash is true"),
            ("gradients", {"rule": RULES["data_parallel"](), "topology": complete(4)}, "'data_parallel'"),
            ("experts", {"holders": (frozenset({0, 1}),)}, "model.experts.holders"),
            ("codec", {"codec": int8()}, "'exact', 'bf16' or 'fp16'"),
            ("inner optimizer", {"optimizer": "muon"}, "'muon'"),
            ("averaging", {"averaging": "gpa"}, "'gpa'"),
            ("moments", {"schedule": Schedule(inner_every=(2, 3))}, "[2, 3]"),
        )
    },
    "Outer and averaging": (Combination(driver="library", averaging="gpa"), ["'gpa'", "gossamer.GPA"]),
    "Outer and adapt": (Combination(driver="library", adapt=True), ["run.adapt is True", "local_steps"]),
    "chosen fragments and rule": (
        Combination(rule=gasloc(), topology=random(4), schedule=Schedule(fragments=2, sends=3)),
        ["schedule.sends is 3", "'gasloc'", "'diloco'"],
    ),
    "chosen fragments and overlap": (
        Combination(
            rule=diloco(), topology=complete(4), local_steps=6, schedule=Schedule(fragments=2, sends=3, overlap_steps=4)
        ),
        ["schedule.overlap_steps is 4", "all 2 fragments"],
    ),
    "adapt and a rule that adapts": (
        Combination(rule=dilocox(adapt_every=2), topology=complete(4), weigh_steps=True),
        ["'dilocox' with adapt_every = 2", "run.weigh_steps"],
    ),
    "changing local steps and asynchronous": (
        Combination(kind="server", server="async_sgd", networks={}, local_steps=1, timetable=ONE_THEN_SIX),
        ["run.local_steps changes over the run", "asynchronously", "one per worker"],
    ),
    "changing local steps and adapt": (
        Combination(driver="train", rule=gasloc(), topology=random(4), adapt=True, timetable=ONE_THEN_SIX),
        ["run.local_steps changes over the run", "run.adapt"],
    ),
    "local steps that change and overlap": (
        Combination(
            rule=diloco(),
            topology=complete(4),
            timetable=timetable_of(((0, 4), (8, 12))),
            schedule=Schedule(fragments=2, overlap_steps=3),
        ),
        ["run.local_steps changes", "schedule.overlap_steps = 3", "schedule.fragments = 1"],
    ),
    "synchronous start and asynchronous": (
        Combination(kind="server", server="async_sgd", networks={}, synchronous_steps=3),
        ["run.synchronous_steps is 3", "asynchronously"],
    ),
    "synchronous start and elastic": (
        Combination(rule=gasloc(), topology=random(4), elastic=True, synchronous_steps=3),
        ["run.synchronous_steps is 3", "run.elastic is true", "all workers in every step"],
    ),
    "synchronous start and adapt": (
        Combination(driver="train", rule=gasloc(), topology=random(4), adapt=True, synchronous_steps=3),
        ["run.synchronous_steps is 3", "run.adapt"],
    ),
    "synchronous start and gradients": (
        Combination(rule=data_parallel(), topology=complete(3), synchronous_steps=3),
        ["run.synchronous_steps is 3", "'data_parallel'", "remove run.synchronous_steps"],
    ),
    "synchronous start and experts": (
        EXPERTS._replace(synchronous_steps=3),
        ["run.synchronous_steps is 3", "model.experts.holders"],
    ),
    "synchronous start and processes": (
        Combination(driver="train", rule=diloco(), topology=complete(4), shards=2, synchronous_steps=3),
        ["run.synchronous_steps is 3", "run.shards is 2"],
    ),
    "synchronous start and several sends": (
        Combination(rule=diloco(), topology=complete(4), schedule=Schedule(fragments=2), synchronous_steps=3),
        ["run.synchronous_steps is 3", "2 parts", "send once a round"],
    ),
    "Outer and rule that adapts": (
        Combination(driver="library", rule=dilocox(adapt_every=2), topology=complete(4)),
        ["'dilocox' with adapt_every = 2", "Outer"],
    ),
    "Outer and gradients": (
        Combination(driver="library", rule=data_parallel(), topology=complete(4)),
        ["'data_parallel'", "DistributedDataParallel"],
    ),
    "no waiting": (GOSSIP._replace(rule=easgd(), topology=complete(4)), ["'easgd'", "without waiting", "'gasloc'"]),
    "fragments and local steps": (
        Combination(schedule=Schedule(fragments=4), local_steps=3),
        ["schedule.fragments is 4", "3 inner steps"],
    ),
    "overlap and local steps": (
        Combination(schedule=Schedule(overlap_steps=4), local_steps=(3, 2)),
        ["schedule.overlap_steps is 4", "at most 3"],
    ),
    "delayed rule and overlap": (
        Combination(rule=eager(), topology=complete(4), schedule=Schedule(overlap_steps=1)),
        ["'eager'", "1 round late", "schedule.overlap_steps = 1"],
    ),
    "adapt and mixed updates": (
        Combination(rule=fgd(mix_updates="random"), topology=random(4), adapt=True),
        ["run.adapt", "'fgd'", "mix_updates = 'random'"],
    ),
    "averaging and fragments": (
        Combination(averaging="gpa", schedule=Schedule(fragments=2)),
        ["'gpa'", "schedule.fragments is 2"],
    ),
    "moments and inner optimizer": (
        Combination(optimizer="sgd", schedule=Schedule(inner_every=(1, 1))),
        ["inner.optimizer = 'sgd'", "schedule.inner_every"],
    ),
    "Outer and moments": (
        Combination(driver="library", schedule=Schedule(inner_every=(1, 2))),
        ["inner_every is [1, 2]", "your inner optimizer"],
    ),
    "all-reduce and overlap": (
        Combination(rule=diloco(), topology=complete(4), reduction="all_reduce", schedule=Schedule(overlap_steps=2)),
        ["'all_reduce'", "schedule.overlap_steps is 2"],
    ),
    "all-reduce and rule": (
        Combination(rule=diloco(), topology=complete(4), codec=topk(), reduction="all_reduce"),
        ["'all_reduce'", "'diloco'", "'topk'"],
    ),
    "pipeline and adapt": (
        Combination(stages=2, driver="train", adapt=True),
        ["pipeline.stages is 2", "run.adapt is True"],
    ),
    "pipeline and all-reduce": (
        Combination(stages=2, driver="train", reduction="all_reduce"),
        ["'all_reduce'", "'ordered'"],
    ),
    "pipeline and an optimizer of yours": (
        Combination(stages=2, driver="train", optimizer="mine:one"),
        ["'mine:one'", "'muon'"],
    ),
    "pipeline and hashes": (
        Combination(stages=2, driver="train", hashes=True),
        ["pipeline.stages is 2", "record.hash is true"],
    ),
    "lost stages and rule": (
        Combination(stages=3, lost=frozenset({True}), rule=data_parallel(), topology=complete(4)),
        ["'data_parallel'", "gradients in every inner step", "'diloco'"],
    ),
    "lost stages and overlap": (
        Combination(stages=3, lost=frozenset({True}), schedule=Schedule(overlap_steps=1), topology=random(4)),
        ["schedule.overlap_steps = 1", "set schedule.overlap_steps = 0"],
    ),
    "lost stages and neighbours": (
        Combination(stages=3, lost=frozenset({False}), rule=diloco(), topology=complete(4)),
        ["'diloco'", "differ from the others for good", "source = 'peer'"],
    ),
    "lost stages and inner optimizer": (
        Combination(stages=3, lost=frozenset({True}), averaging="gpa", topology=random(4)),
        ["inner.averaging = 'gpa'", "empty moments"],
    ),
    "pipeline and asynchronous": (GOSSIP._replace(stages=2), ["pipeline.stages is 2", "run.wait = true"]),
    "pipeline and elastic": (Combination(stages=2, elastic=True), ["pipeline.stages is 2", "run.elastic is true"]),
    "pipeline and whole tensors": (
        Combination(stages=2, rule=RULES["sparta"](), topology=random(4)),
        ["'sparta'", "'diloco'"],
    ),
    "pipeline and codec": (
        Combination(stages=2, rule=diloco(), topology=complete(4), codec=both_ways(int8(), int8())),
        ["'int8'", "codec.back"],
    ),
    "batched and real processes": (Combination(batched=8, driver="train"), ["run.batched is 8", "gossamer train"]),
    "batched and asynchronous": (GOSSIP._replace(batched=8), ["run.batched is 8", "'gasloc'", "no waiting"]),
    "batched and rule that adapts": (
        Combination(batched=8, rule=dilocox(adapt_every=2), topology=complete(4)),
        ["run.batched is 8", "'dilocox'"],
    ),
    "scattered stages of some workers": (
        Combination(stages=2, driver="train", partly=True, averaging="gpa"),
        ["pipeline.workers", "each of 2 stages", "inner.averaging = 'gpa'"],
    ),
    "pipeline and chosen fragments": (
        Combination(stages=2, schedule=Schedule(fragments=2, sends=3)),
        ["pipeline.stages is 2", "schedule.sends is 3"],
    ),
    "pipeline and moments": (
        Combination(stages=2, schedule=Schedule(inner_every=(2, 3))),
        ["pipeline.stages is 2", "schedule.inner_every is [2, 3]"],
    ),
    "elastic and chosen fragments": (
        Combination(
            elastic=True, rule=diloco(), topology=complete(4), schedule=Schedule(fragments=2, sends=2), local_steps=4
        ),
        ["run.elastic is true", "schedule.sends is 2"],
    ),
    "elastic and rule that adapts": (
        Combination(elastic=True, rule=dilocox(adapt_every=2), topology=complete(4)),
        ["run.elastic is true", "'dilocox' with adapt_every = 2"],
    ),
    "adapt and one local step": (
        Combination(adapt=True, local_steps=1, networks={"a": LINK}),
        ["run.local_steps is 1"],
    ),
    "adapt, weigh_steps and a delayed rule": (
        Combination(driver="train", rule=eager(), topology=complete(4), adapt=True, weigh_steps=True),
        ["run.adapt", "run.weigh_steps", "'eager'", "1 round late"],
    ),
    "adapt and an unknown network": (Combination(adapt="slaw", networks={"slow": LINK}), ["did you mean 'slow'"]),
    "adapt and several networks": (Combination(adapt=True, networks={"a": LINK, "b": LINK}), ["2 networks (a, b)"]),
    "adapt without seconds": (Combination(adapt=True, networks={"a": LATE}), ["step_s = None"]),
    "asynchronous with [schedule]": (SERVER._replace(schedule=Schedule(fragments=2)), ["[schedule]", "asynchronous"]),
    "asynchronous with inner.averaging": (PAIR._replace(averaging="gpa"), ["inner.averaging", "asynchronous"]),
    "asynchronous with run.adapt": (GOSSIP._replace(adapt=True), ["run.adapt", "asynchronous"]),
    "asynchronous with run.weigh_steps": (SERVER._replace(weigh_steps=True), ["run.weigh_steps", "asynchronous"]),
    "asynchronous with codec.back": (SERVER._replace(codec=both_ways(int8(), int8())), ["codec.back", "asynchronous"]),
    "server and meetings": (SERVER._replace(meetings=2.0), ["'heloco'", "events.meetings = 2.0"]),
    "server and waiting": (SERVER._replace(wait=False), ["'heloco'", "run.wait = false"]),
    "no waiting and meetings": (GOSSIP._replace(meetings=2.0), ["'gasloc'", "events.meetings = 2.0", "[pair]"]),
    "fragments without a server": (PAIR._replace(fragments=2), ["'a2cid2'", "events.fragments = 2"]),
    "overlap of one fragment": (SERVER._replace(overlap=True), ["events.overlap is True", "events.fragments = 1"]),
    "pair and phase": (
        PAIR._replace(pair=dadao(1.0, 2.0, 1.0), local_steps=3),
        ["'dadao'", "run.local_steps = 3", "'a2cid2'"],
    ),
    "pair and topology": (PAIR._replace(topology=random(4)), ["'a2cid2'", "'random'", "static"]),
    "clock": (SERVER._replace(networks={"a": LINK, "b": LINK}), ["2 networks (a, b)", "events.network"]),
    "unknown clock": (SERVER._replace(clock="b"), ["'b'", "Allowed: a"]),
    "dylu and local steps": (SERVER._replace(dylu=True, local_steps=(2, 1)), ["events.dylu", "[2, 1]"]),
    "elastic sites and overlap": (
        Combination(
            driver="library", elastic=True, rule=diloco(), topology=complete(3), schedule=Schedule(overlap_steps=2)
        ),
        ["elastic is true", "schedule.overlap_steps = 2", "'gasloc'"],
    ),
    "store and exchange": (
        Combination(driver="library", elastic=True, store=True, rule=sparseloco(), topology=complete(3)),
        ["store is given", "'sparseloco'", "one exchange a round"],
    ),
    "network with a store": (
        Combination(
            networks={"far": Network(uplink_bps=1e6, downlink_bps=1e6, store=StoreLink(latency_s=0.1))},
            rule=diloco(),
            topology=complete(2),
            schedule=Schedule(fragments=2),
        ),
        ["network.far.store is given", "several exchanges", "remove one"],
    ),
    "peers and all-reduce": (
        Combination(peers=True, driver="train", rule=diloco(), topology=complete(2), reduction="all_reduce"),
        ["[peers]", "run.reduction is 'all_reduce'", "none can encrypt", "'ordered'"],
    ),
    "peers and stages": (
        Combination(peers=True, driver="train", stages=2),
        ["[peers]", "pipeline.stages is 2", "gloo"],
    ),
    "peers and shards": (Combination(peers=True, driver="train", shards=2), ["[peers]", "run.shards is 2", "encrypt"]),
    "elastic and asynchronous": (PAIR._replace(elastic=True), ["run.elastic", "'a2cid2'", "(pair)"]),
    "elastic and rule": (
        Combination(elastic=True, rule=relaysum(), topology=tree(3)),
        ["run.elastic", "'relaysum'", "'gasloc'"],
    ),
    "elastic and gradients": (
        Combination(elastic=True, rule=data_parallel(), topology=complete(3)),
        ["'data_parallel'", "gradients"],
    ),
    "elastic and topology": (
        Combination(elastic=True, rule=gasloc(), topology=exponential(5)),
        ["'exponential'", "symmetric"],
    ),
    "elastic and overlap": (
        Combination(elastic=True, rule=diloco(), topology=complete(4), schedule=Schedule(overlap_steps=2)),
        ["'diloco'", "schedule.overlap_steps = 0", "'gasloc'"],
    ),
    "elastic and delay": (
        Combination(elastic=True, rule=eager()._replace(needs="connected"), topology=random(4)),
        ["'eager'", "take over", "'fgd'"],
    ),
    "elastic and mixed updates": (
        Combination(elastic=True, rule=fgd(mix_updates="complete"), topology=random(4)),
        ["'fgd'", "rule.mix_updates", "'random'"],
    ),
    "elastic and adapt": (
        Combination(elastic=True, rule=gasloc(), topology=random(4), adapt=True),
        ["run.adapt is True"],
    ),
    "elastic and all-reduce": (
        Combination(elastic=True, rule=diloco(), topology=complete(4), reduction="all_reduce"),
        ["run.reduction is 'all_reduce'", "'ordered'"],
    ),
    "experts and elastic": (EXPERTS._replace(elastic=True), ["2 of 4 workers", "run.elastic is true"]),
    "experts and asynchronous": (EXPERTS._replace(kind="no waiting"), ["2 of 4 workers", "runs asynchronously"]),
    "experts and schedule": (EXPERTS._replace(schedule=Schedule(fragments=2)), ["2 of 4 workers", "[schedule] is"]),
    "experts and rule": (EXPERTS._replace(rule=eager()), ["2 of 4 workers", "'eager'", "'diloco'"]),
    "experts and averaging": (EXPERTS._replace(averaging="gpa"), ["2 of 4 workers", "inner.averaging is 'gpa'"]),
    "experts and all-reduce": (EXPERTS._replace(reduction="all_reduce"), ["2 of 4 workers", "'ordered'"]),
    "changing numbers of a rule and asynchronous": (
        GOSSIP._replace(rule=gasloc(lr={"0": 0.4, "8": 0.2}), steps=16),
        ["rule.lr changes over the run", "no waiting", "give a number"],
    ),
    "constant batch and deaths": (
        Combination(constant_batch=True),
        ["data.constant_batch is true", "run.elastic = true"],
    ),
    "constant batch and rule": (
        Combination(constant_batch=True, elastic=True, rule=gasloc(), topology=random(4)),
        ["data.constant_batch is true", "'gasloc'", "'diloco'"],
    ),
    "constant batch and error feedback": (
        Combination(constant_batch=True, elastic=True, rule=sparseloco(), topology=complete(3)),
        ["data.constant_batch is true", "'sparseloco'", "'diloco'"],
    ),
    "constant batch and local steps": (
        Combination(constant_batch=True, elastic=True, rule=diloco(), topology=complete(2), local_steps=(4, 2)),
        ["data.constant_batch is true", "run.local_steps has [4, 2]"],
    ),
    "real processes and virtual time": (SERVER._replace(driver="train", absences=2), ["2 events.absences"]),
    "real processes and regions": (
        SERVER._replace(driver="train", server="halos", regions=True),
        ["server 'halos'", "gossamer simulate", "'delayed_nesterov'"],
    ),
}


def test_muon_says_that_it_trains_the_routers_of_experts() -> None:
    experts = {"model__experts": {"count": 4}, "workers": 4}
    (sentence,) = resolve(tiny(inner__optimizer="muon", **experts)).warnings
    assert sentence.startswith("inner.optimizer 'muon' trains the routers of model.experts too")
    assert not resolve(tiny(**experts)).warnings


def test_every_row_of_the_table_has_a_combination_here():
    assert set(MEETS) == {row.name for row in INCOMPATIBILITIES} and len(MEETS) == len(INCOMPATIBILITIES)


@pytest.mark.parametrize("name", MEETS)
def test_a_row_refuses_what_meets_it_in_one_sentence_that_names_what_was_given(name):
    facts, parts = MEETS[name]
    (row,) = [row for row in INCOMPATIBILITIES if row.name == name]
    assert row.fails(facts) and row.sentence(facts) in combination_faults(facts)
    assert all(part in row.sentence(facts) for part in parts), row.sentence(facts)
    assert "\n" not in row.sentence(facts)
    with pytest.raises(PairingError):
        check(facts)


def test_local_steps_that_change_are_refused_by_the_entry_at_fault():
    becomes_unequal, grows = timetable_of(((0, 4), (8, (4, 2)))), timetable_of(((0, 1), (5, 3)))
    shared = Combination(constant_batch=True, elastic=True, rule=diloco(), topology=complete(2), local_steps=4)
    (sentence,) = combination_faults(shared._replace(timetable=becomes_unequal))
    assert "run.local_steps has [4, 2], but all workers share" in sentence
    parallel = Combination(rule=data_parallel(), topology=complete(3), local_steps=1, timetable=grows)
    (sentence,) = combination_faults(parallel)
    assert "run.local_steps reaches 3; set run.local_steps = 1" in sentence


def test_unknown_facts_make_no_combination_invalid():
    for facts in (
        Combination(),
        SERVER,
        PAIR,
        GOSSIP,
        FREE,
        Combination(kind="server", server="cgad"),
        Combination(kind="no waiting"),
    ):
        assert combination_faults(facts) == []


def test_all_faults_of_a_run_are_reported_at_once_and_the_first_is_raised():
    config = tiny(
        rule__name="diloco",
        topology__name="ring",
        codec__name="int8",
        schedule__fragments=3,
        schedule__inner_every=[1, 1],
        inner__optimizer="sgd",
        run__adapt="slow",
    )
    found = faults_of(config)
    words = ("schedule.fragments is 3", "inner.optimizer = 'sgd'", "run.adapt is 'slow'", "'diloco' on topology 'ring'")
    assert [sum(word in sentence for sentence in found) for word in words] == [1, 1, 1, 1] and len(found) == 4
    with pytest.raises(PairingError) as caught:
        resolve(config)
    assert str(caught.value) == found[0]


def test_an_impossible_option_is_reported_with_the_pairings_that_are_known_without_it():
    found = faults_of(tiny(rule__lr=-1.0, schedule__fragments=3))
    assert len(found) == 2 and "lr" in found[0] and "schedule.fragments is 3" in found[1]


def test_each_kind_of_run_resolves_to_what_runs():
    rounds = resolve(tiny(rule__alpha="auto", run__weigh_steps=True))
    rule = rounds.in_rounds.rule
    assert rounds.network is None and rule.name == "weighted_gasloc"
    assert rule.options["alpha"] == pytest.approx(1, abs=0.5)
    served = resolve(timed(server__name="delayed_nesterov", events__dylu=True))
    assert isinstance(served.method, WithServer) and served.network_name == "clock"
    assert served.loop.local_steps == dylu_steps(tuple(UNEVEN["step_s"]), 2)
    pairs = resolve(timed(pair__name="a2cid2", topology__name="ring", events__meetings=2.0))
    assert isinstance(pairs.method, InPairs) and len(pairs.method.rates) == 3
    assert sum(pairs.method.rates.values()) * 2 / 3 == pytest.approx(2.0 / (2 * sum(UNEVEN["step_s"]) / 3))
    gossip = resolve(timed(run__wait=False, events__absences=[{"worker": 1, "leave_s": 0.5}]))
    assert isinstance(gossip.method, Method) and gossip.kind == "no waiting"
    assert gossip.absences == (Absence(0.5, 1, "leave"),)


def test_real_processes_need_no_declared_network_and_can_do_less():
    adapts = tiny(run__adapt=True)
    assert resolve(adapts, real=True).network is None
    with pytest.raises(ConfigError, match="0 networks"):
        resolve(adapts)
    served = timed(server__name="cgad", clockless=True)
    assert resolve(served, real=True).network is None
    with pytest.raises(PairingError, match=r"events.overlap = true, which exist in simulations only"):
        resolve(timed(server__name="cgad", events__overlap=True, events__fragments=2), real=True)
    with pytest.raises(ConfigError, match="'tiny' is asynchronous"):
        assert resolve(timed(server__name="cgad")).in_rounds


def test_an_unstable_rule_resolves_with_a_warning():
    warnings = resolve(tiny(workers=8, rule__momentum=0.9)).warnings
    assert len(warnings) == 1 and "predicted to lose consensus" in warnings[0]
    assert not resolve(tiny()).warnings


@pytest.mark.parametrize(
    ("settings", "real"),
    [({"run__batched": 3}, False), ({"run__adapt": True}, True), ({"run__reduction": "all_reduce"}, True)],
)
def test_hashes_that_no_audit_will_compare_are_warned_of_before_the_run(settings, real):
    means = {"rule__name": "diloco", "topology__name": "complete"}
    (warning,) = resolve(tiny(**means, **settings, record__hash=True), real=real).warnings
    assert "gossamer audit cannot compute" in warning and next(iter(settings)).replace("__", ".") in warning
    assert not resolve(tiny(**means, **settings), real=real).warnings


def test_every_rule_goes_with_its_default_topology():
    for name, factory in RULES.items():
        if missing(factory):
            continue
        rule = factory()
        assert not combination_faults(Combination(rule=rule, topology=make_topology(FITTING[rule.needs], 8))), name
        if rule.site == "parameters":
            assert Outer(torch.nn.Linear(2, 1), rule, local_steps=2).method.topology.name == FITTING[rule.needs]


def test_text_that_only_workers_with_few_local_steps_have_gives_a_warning():
    uneven = {"workers": 4, "run__local_steps": [8, 2, 1, 8], "run__steps": 16}
    both = {"data__source": [str(TEXT), str(TEXT.parent / "json")]}
    (sentence,) = resolve(tiny(**uneven, **both, data__shards=[0, 1, 1, 0])).warnings
    assert "/json' is only on workers that take 2 of 8 local steps" in sentence and "run.weigh_steps" in sentence
    for settings in ({}, {"data__shards": "contiguous"}, {**both, "data__shards": [0, 1, 1, 1]}):
        assert not resolve(tiny(**uneven, **settings)).warnings
    assert not resolve(tiny(**uneven, **both, data__shards=[0, 1, 1, 0], run__weigh_steps=True)).warnings


def test_workers_whose_figures_would_have_no_port_are_refused_before_they_start():
    config = tiny(record__prometheus_port=65533, workers=4)
    (sentence,) = faults_of(config, real=True)
    assert "worker 3 would serve at 65536" in sentence and "choose 65532 or lower" in sentence
    assert not faults_of(config) and not faults_of(tiny(record__prometheus_port=65532, workers=4), real=True)
    with pytest.raises(ConfigError, match="worker 3"):
        resolve(config, real=True)
