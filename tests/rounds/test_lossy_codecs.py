"""Workers that agree and stand still stay, under every rule, topology and codec that is allowed; the rest is refused."""

import pytest
import torch

from drifted_rounds import play
from gossamer.asynchronous import ad_psgd
from gossamer.codecs import bf16, both_ways, exact, fp4, int4, int8, randomk, topk
from gossamer.codecs.codec import relative_error
from gossamer.rounds.compatibility import lossy_codecs as coding
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import FITTING, warnings_of
from gossamer.rounds.compatibility.incompatibilities import combination_faults
from gossamer.rules import (
    RULES,
    anchored_gasloc,
    diloco,
    error_feedback,
    gasloc,
    gossip,
    local_sgd,
    noloco,
    restarted,
    sgp,
    sparseloco,
)
from gossamer.testing.drifted_workers import random_vectors
from gossamer.testing.numbers import changes_as_little_as_said, distance_moved, every_codec
from gossamer.topologies import TOPOLOGIES, complete, make_topology, random, random_push

START = random_vectors(1, 4096, seed=3, dtype=torch.float32)[0]
GRAPHS = [make_topology(name, 4) for name in TOPOLOGIES]


@pytest.mark.parametrize("name", RULES)
def test_workers_that_agree_and_stand_still_stay(name, request):
    """Under every rule, topology and codec that is allowed: to the rounding of fp32 where nothing is warned of, and in each
    exchange within the number of the warning where there is one.

    Without `--full`, through every codec on the topology that fits first, and on each other one through one, which come in turn:
    with the rules, too, so that each topology meets each codec.
    """
    rule, codecs, full = RULES[name](), every_codec(), request.config.getoption("--full")
    turn = [*RULES].index(name)
    pairs = [
        (topology, codec)
        for place, topology in enumerate(GRAPHS)
        for k, codec in enumerate(codecs)
        if full or topology.name == FITTING[rule.needs] or (turn + place - k) % len(codecs) == 0
    ]
    for topology, codec in pairs:
        facts = Combination(rule=rule, topology=topology, codec=codec)
        changes_as_little_as_said(facts)
        if not combination_faults(facts):
            share, sentence = coding.change(facts), coding.lossy_warning(facts) or ""
            assert ("whole parameters" in sentence) == (
                share is not None and share > coding.measured_error_limit(facts)
            )
            assert not sentence or share is None or f"up to {share:.2%} of their norm" in sentence


@pytest.mark.parametrize("rule", [gossip(), gasloc(), noloco(), restarted(gasloc())], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    "codec", [int8(), int8(rounding="stochastic"), bf16()], ids=lambda codec: f"{codec.name}-{codec.draws}"
)
def test_the_number_of_the_warning_holds_for_workers_that_nearly_agree_and_is_not_far_off(rule, codec):
    facts = Combination(rule=rule, topology=random(4), codec=codec)
    apart = [START + 0.01 * noise for noise in random_vectors(4, START.numel(), dtype=torch.float32)]
    share = coding.change(facts)
    assert share is not None and share / 4 < distance_moved(facts, apart) <= share


def test_gossip_in_rounds_with_as_fine_a_codec_as_was_trained_is_not_warned_of_and_with_a_coarser_one_is():
    for codec, warned in ((bf16(), False), (int8(), False), (int8(rounding="stochastic"), True)):
        facts = Combination(rule=gasloc(lr=0.7, momentum=0.7), topology=random(8), codec=codec)
        assert bool(warnings_of(facts)) == warned and coding.change(facts) is not None
    assert warnings_of(Combination(rule=local_sgd(), topology=complete(8), codec=bf16())), (
        "which takes the decoded mean"
    )


REFUSED = {
    "gasloc with drawn fp4": (gasloc(), random(8), fp4(rounding="stochastic"), "'anchored_gasloc' on topology 'pga'"),
    "gasloc with randomk": (gasloc(), random(8), randomk(), "'choco'"),
    "gossip with topk": (gossip(), random(8), topk(), "'choco'"),
    "local SGD with topk": (local_sgd(), complete(8), topk(), "'diloco'"),
    "local SGD, whose small steps int8 loses": (local_sgd(), complete(8), int8(), "'diloco'"),
    "a lossy way back": (local_sgd(), complete(8), both_ways(exact(), int4()), "'diloco'"),
    "pushed mass with int8": (sgp(), random_push(8), int8(), "'anchored_gasloc'"),
    "pushed mass with bf16": (sgp(), random_push(8), bf16(), "remove [codec]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_codec_that_destroys_the_model_is_refused_with_a_way_out(name):
    rule, topology, codec, way = REFUSED[name]
    (sentence,) = combination_faults(Combination(rule=rule, topology=topology, codec=codec))
    assert way in sentence
    assert not combination_faults(Combination(rule=rule, topology=topology))


def test_pairs_send_whole_parameters_and_servers_receive_differences():
    pair, server = (
        Combination(kind="pair", pair=ad_psgd(), topology=complete(4)),
        Combination(kind="server", server="heloco"),
    )
    assert "'ad_psgd' sends whole parameters" in combination_faults(pair._replace(codec=topk()))[0]
    assert "use a [server]" in warnings_of(pair._replace(codec=int8()))[0]
    assert (
        not combination_faults(server._replace(codec=topk())) and coding.change(server._replace(codec=topk())) is None
    )


def test_a_small_drift_survives_a_mean_of_parameters_only_in_a_fine_codec():
    """Local SGD takes the decoded mean in place of the parameters, so what is smaller than the codec's step is lost."""
    drift = 2e-3 * random_vectors(1, START.numel(), seed=9, dtype=torch.float32)[0]

    def progress(codec):
        xs, _ = play(local_sgd(), complete(4), [START] * 4, 8, lambda i, t, x: drift, codec=codec)
        return float((xs[0] - START) @ drift / (8 * drift @ drift))

    assert relative_error(int8()) > coding.LIMIT_OF_MEANS and progress(int8()) < 0.2
    assert relative_error(bf16()) < coding.LIMIT_OF_MEANS and progress(bf16()) > 0.8


def test_sparse_codecs_under_rules_that_lose_the_rest_are_warned_of():
    sparse = Combination(topology=complete(4), codec=topk())
    assert "error_feedback" in warnings_of(sparse._replace(rule=diloco()))[0]
    assert "'choco'" in warnings_of(sparse._replace(rule=anchored_gasloc()))[0]
    for rule in (sparseloco(), error_feedback(diloco())):
        assert not warnings_of(sparse._replace(rule=rule))
