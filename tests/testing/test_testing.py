"""Tests of a user's rule can fail: every promise has a wrong rule that breaks it, and the sentence says what to do."""

import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import gossamer
from commands import Command
from gossamer.codecs import bf16
from gossamer.errors import ConfigError, PairingError
from gossamer.rules import (
    Context,
    Rule,
    anchored_gasloc,
    data_parallel,
    diloco,
    eager,
    easgd,
    gasloc,
    gossip,
    local_sgd,
    relaysum,
    restarted,
    sgp,
)
from gossamer.rules.contract import OuterSGD
from gossamer.testing import PROMISES, check_parity, check_rule, parity
from gossamer.testing.specification import fitting, keep
from gossamer.topologies.mixing import Consensus

PLAIN = gossip()._replace(name="wrong")
STATEFUL = gasloc()._replace(name="wrong")


def with_recv(recv: Any, **tags: Any):
    """Gossip, whose x after a round is `recv(x, combined, ctx)`."""
    return PLAIN._replace(recv=lambda x, s, own_decoded, combined, ctx: (recv(x, combined, ctx), s), **tags)


def with_state(init: Any, recv: Any = None):
    """Gossip with a state that nothing reads."""
    return PLAIN._replace(
        init=lambda x, ctx: init(x),
        recv=lambda x, s, own_decoded, combined, ctx: (x + combined, s if recv is None else recv(x, s)),
    )


def counts_its_calls():
    calls: list[int] = []

    def recv(x: Tensor, combined: Tensor, ctx: Context):
        calls.append(ctx.round)
        return x + combined / len(calls)

    return with_recv(recv)


def keeps_the_start_in_python():
    start = {}

    def send(x: Tensor, s: Any, ctx: Context):
        start[ctx.worker] = x.clone()
        return x

    def recv(x: Tensor, s: Any, own_decoded: Tensor, combined: Tensor, ctx: Context):
        return 0.5 * (x + start.get(ctx.worker, x)) + combined, s

    return PLAIN._replace(send=send, recv=recv)


def forgets_the_round():
    """Its step becomes shorter in each round, by what it counts outside of its state."""
    seen = {}

    def recv(x: Tensor, combined: Tensor, ctx: Context):
        seen.setdefault(ctx.worker, []).append(ctx.round)
        return x + combined / len(seen[ctx.worker])

    return with_recv(recv)


WRONG = {  # the promise, a rule that breaks it, and what the sentence says
    "a list as state": (
        "trees_keep_their_form_and_dtype",
        with_state(lambda x: ([x.clone()],)),
        r"init\(\) returned a list.*tuples",
    ),
    "a wider dtype": (
        "trees_keep_their_form_and_dtype",
        with_state(lambda x: (x.double(),)),
        r"torch.float64 for .* torch.float32",
    ),
    "a state that grows": (
        "trees_keep_their_form_and_dtype",
        with_state(lambda x: (x.clone(),), lambda x, s: (torch.cat([s[0], x]),)),
        r"recv\(\) returned a state of the form.*\(14,\).*init\(\) made.*\(7,\)",
    ),
    "parameters of another shape": (
        "trees_keep_their_form_and_dtype",
        with_recv(lambda x, c, ctx: (x + c)[None]),
        r"\(1, 7\).*like x",
    ),
    "a division by zero": (
        "trees_keep_their_form_and_dtype",
        with_recv(lambda x, c, ctx: x + c / 0.0),
        r"recv\(\) returned numbers that are not finite for finite ones",
    ),
    "an update that asks for a gradient": (
        "trees_keep_their_form_and_dtype",
        with_recv(lambda x, c, ctx: (x + c).requires_grad_()),
        r"recv\(\) returned a tensor that requires a gradient.*detached",
    ),
    "a message whose shape depends on numbers": (
        "trees_keep_their_form_and_dtype",
        PLAIN._replace(send=lambda x, s, ctx: x[x != 0]),
        r"message of the form \(0,\)",
    ),
    "a message that reads a number": (
        "trees_keep_their_form_and_dtype",
        PLAIN._replace(send=lambda x, s, ctx: x * (1.0 if x.sum().item() > 0 else 2.0)),
        "its code raised .*meta",
    ),
    "writes into x": (
        "arguments_are_never_written_into",
        with_recv(lambda x, c, ctx: x.add_(c)),
        r"recv\(\) wrote into 1 of the 3",
    ),
    "writes what was there": (
        "arguments_are_never_written_into",
        PLAIN._replace(send=lambda x, s, ctx: x.mul_(1.0)),
        r"send\(\) wrote into 1",
    ),
    "resets in place": (
        "arguments_are_never_written_into",
        STATEFUL._replace(reset=lambda x, s: (s.prev.copy_(x), s)[1]),
        r"reset\(\) wrote into",
    ),
    "a state that aliases x": (
        "the_state_owns_its_memory",
        with_state(lambda x: (x,)),
        r"with x, .* return x.clone\(\)",
    ),
    "a state that aliases itself": (
        "the_state_owns_its_memory",
        with_state(lambda x: (x.clone(),) * 2),
        "tensor 1 of the state.* with tensor 0",
    ),
    "one number for all": (
        "the_state_owns_its_memory",
        with_state(lambda x: (torch.zeros(1).expand(7),)),
        "with itself",
    ),
    "numbers of torch's generator": (
        "the_same_call_gives_the_same_bits",
        with_recv(lambda x, c, ctx: x + c * torch.rand(x.shape)),
        r"random generator.*torch_rng\(seed, ctx.worker",
    ),
    "numbers of Python's generator": (
        "the_same_call_gives_the_same_bits",
        with_recv(lambda x, c, ctx: x + c * random.random()),
        "random generator",
    ),
    "numbers of numpy's generator": (
        "the_same_call_gives_the_same_bits",
        with_recv(lambda x, c, ctx: x + c * np.random.rand()),
        "random generator",
    ),
    "a count of calls": (
        "the_same_call_gives_the_same_bits",
        counts_its_calls(),
        r"recv\(\) returned 1 of 1 tensors.*Python variables",
    ),
    "a start kept in Python": (
        "the_same_call_gives_the_same_bits",
        keeps_the_start_in_python(),
        r"after a call for worker 0 in round 1.*Python",
    ),
    "a copy more": (
        "as_many_copies_are_kept_as_the_tags_say",
        with_state(lambda x: (x.clone(),)),
        "holds 1 tensors.*the tags say 0",
    ),
    "a mean over elements": (
        "halves_updated_one_by_one_equal_the_whole_to_the_last_bit",
        with_recv(lambda x, c, ctx: x + c - c.mean()),
        "elements 0 to 3 of 7.*set elementwise = False",
    ),
    "a product that is fused": (
        "compiled_code_has_the_same_bits",
        with_recv(lambda x, c, ctx: torch.lerp(x, x + c, 0.5)),
        r"recv\(\) used lerp.*a \+ w \* b",
    ),
    "a factor of a sum": (
        "compiled_code_has_the_same_bits",
        with_recv(lambda x, c, ctx: x.add(c, alpha=0.5)),
        r"used add\(alpha=...\)",
    ),
    "a mean over elements in the exchange": (
        "chunks_and_shards_give_the_same_bits",
        with_recv(lambda x, c, ctx: x + c - c.mean()),
        r"workers \[0, 1, 2, 3\] of 4.*elementwise = False",
    ),
    "a division by a number of elements": (
        "vectors_of_one_element_work",
        with_recv(lambda x, c, ctx: x + c * (1 / (x.numel() - 1)), elementwise=False),
        "raised ZeroDivisionError",
    ),
    "a division by a spread": (
        "vectors_of_one_element_work",
        with_recv(lambda x, c, ctx: x + c / (x - x.mean()).norm(), elementwise=False),
        "with 1 parameters .* not finite",
    ),
    "decay": ("consensus_is_a_fixed_point", with_recv(lambda x, c, ctx: 0.999 * x + c), "moved by up to 0.0"),
    "gossip that claims to be identical": (
        "replicas_that_receive_from_everyone_stay_bitwise_equal",
        PLAIN._replace(identical=True),
        "set identical = False",
    ),
    "a start that nobody leaves": (
        "replicas_that_receive_from_everyone_stay_bitwise_equal",
        diloco()._replace(name="wrong", recv=lambda x, s, own_decoded, combined, ctx: (s.anchor + 0, s)),
        "left 3 workers",
    ),
    "relayed sums that claim to be identical": (
        "replicas_that_receive_from_everyone_stay_bitwise_equal",
        relaysum()._replace(identical=True),
        "needs = 'tree' rules that out",
    ),
    "what others did not decode": (
        "no_codec_moves_the_mean_of_a_rule_that_keeps_it",
        local_sgd()._replace(name="wrong", mean_preserving=True),
        "moved the mean of 4 workers by .*mean_preserving = False",
    ),
    "a pull that does not sum to zero": (
        "no_codec_moves_the_mean_of_a_rule_that_keeps_it",
        with_recv(lambda x, c, ctx: x + c * (1 + ctx.worker)),
        "moved the mean of 4 workers",
    ),
    "a step that is the same for all": (
        "no_codec_moves_the_mean_of_a_rule_that_keeps_it",
        with_recv(lambda x, c, ctx: x + c + 0.125),
        "stood still moved by 0.375 in 3 rounds",
    ),
    "half the declared step": (
        "disagreement_follows_the_declared_recursion",
        PLAIN._replace(consensus=Consensus(0.5, 0.0, "post")),
        "Consensus.*elsewhere than they are",
    ),
    "momentum at another site": (
        "disagreement_follows_the_declared_recursion",
        gasloc()._replace(consensus=Consensus(1.0, 0.7, "pre")),
        "correct the tag",
    ),
    "a limit that is another": (
        "one_worker_is_the_declared_limit",
        gasloc()._replace(single_worker_limit=OuterSGD(0.7, 0.7)),
        "one worker alone is",
    ),
    "no inner optimizer": (
        "one_worker_is_the_declared_limit",
        diloco()._replace(single_worker_limit="inner"),
        "single_worker_limit = 'inner'",
    ),
    "gradients that are scaled": (
        "one_worker_is_the_declared_limit",
        data_parallel()._replace(recv=lambda x, s, own, c, ctx: (2 * c, s)),
        "single_worker_limit = 'inner'",
    ),
    "a reset of nothing": (
        "after_a_reset_the_outer_optimizer_begins_afresh",
        gasloc()._replace(reset=lambda x, s: s),
        "new outer optimizer",
    ),
    "another tensor as start": (
        "the_declared_start_is_where_the_round_began",
        gasloc(form="published")._replace(start=lambda s: s.prev),
        "away from the parameters",
    ),
    "a start that is computed": (
        "the_declared_start_is_where_the_round_began",
        gasloc()._replace(start=lambda s: s.anchor + 0),
        "a new tensor",
    ),
    "a count that no state holds": (
        "saved_and_resumed_it_goes_on_with_the_same_bits",
        forgets_the_round(),
        "saved after 3 rounds and resumed",
    ),
    "half precision from another start": (
        "half_precision_follows_full_precision",
        gasloc(form="published")._replace(start=lambda s: s.prev),
        "spacings of bf16",
    ),
    "errors of a codec three times": (
        "allowed_codecs_change_equal_workers_as_little_as_said",
        with_recv(lambda x, c, ctx: x + 3 * c, consensus=None),
        "codec 'int8'.* at most",
    ),
}
BY_NAME = {promise.__name__: promise for promise in PROMISES}


@pytest.mark.parametrize("name", WRONG)
def test_the_error_about_a_wrong_rule_names_the_broken_promise_and_the_remedy(name: str):
    promise, rule, words = WRONG[name]
    sentence = rf"(?s)^rule '{rule.name}' breaks '{promise.replace('_', ' ')}': .*{words}"
    with pytest.raises(AssertionError, match=sentence):
        keep(BY_NAME[promise], rule, fitting(rule))


def test_every_promise_has_a_rule_that_breaks_it():
    assert {promise for promise, _, _ in WRONG.values()} == set(BY_NAME)


@pytest.mark.parametrize("name", ["decay", "a wider dtype", "half the declared step"])
def test_check_rule_names_the_first_promise_that_is_broken(name: str):
    promise, rule, words = WRONG[name]
    with pytest.raises(AssertionError, match=rf"(?s){promise.replace('_', ' ')}.*{words}"):
        check_rule(rule)


@pytest.mark.full
@pytest.mark.parametrize(
    "rule",
    [gasloc(alpha="auto"), gasloc(alpha=1.9), diloco(2.0, 0.9, "heavy_ball"), data_parallel(), restarted(gasloc())],
    ids=lambda rule: rule.name,
)
def test_a_rule_that_keeps_all_promises_passes(rule: Rule):
    """`test_rules` has every rule with its defaults."""
    check_rule(rule)


def test_it_is_checked_on_the_topology_that_is_given():
    check_rule(gasloc(), topology="ring", workers=3)
    check_rule(sgp(), topology=gossamer.topologies.random_push(5))
    with pytest.raises(PairingError, match="'local_sgd' needs every worker"):
        check_rule(local_sgd(), topology="ring")
    with pytest.raises(ConfigError, match="'wrong' has alpha = 'auto'"):
        check_rule(gasloc(alpha="auto")._replace(name="wrong"))


@pytest.mark.parametrize("check", [check_rule, check_parity])
def test_what_is_no_rule_is_refused_in_a_sentence(check: Callable[..., None]):
    with pytest.raises(ConfigError, match=r"'gasloc', which was not called; give a gossamer\.Rule"):
        check(gasloc)
    with pytest.raises(ConfigError, match="got a str; give"):
        check("gasloc")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("rule", "topology", "options"),
    [
        (gasloc(lr=0.5), "random", {}),
        (gossip(), "ring", {"codec": bf16(), "workers": 3}),
        (easgd(), "complete", {}),
        (eager(), "complete", {}),
        (data_parallel(), "complete", {"workers": 2}),
        (anchored_gasloc(), "pga", {"codec": "int8", "schedule": gossamer.Schedule(fragments=3, overlap_steps=2)}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_four_processes_and_the_simulator_agree_to_the_last_bit(rule: Rule, topology: Any, options: dict[str, Any]):
    check_parity(rule, topology, **options)


def counts_the_rounds_of_all_workers():
    calls = []

    def recv(x: Tensor, combined: Tensor, ctx: Context):
        calls.append(ctx.worker)
        return x + combined / len(calls)

    return with_recv(recv)


def in_one_worker(happens: Callable[[], object]):
    """A rule that does something in round 1 of worker 2."""

    def recv(x: Tensor, combined: Tensor, ctx: Context):
        if (ctx.worker, ctx.round) == (2, 1):
            happens()
        return x + combined

    return with_recv(recv)


def waits():
    time.sleep(600)


def fails():
    raise ValueError("a mistake in the user's code")


APART = {
    "random numbers": (with_recv(lambda x, c, ctx: x + c * torch.rand(x.shape)), {}, r"in round 0, \d+ of 1001"),
    "counts calls": (counts_the_rounds_of_all_workers(), {}, r"worker 1 \(parameters\) are up to .* apart"),
    "state": (
        STATEFUL._replace(reset=None, recv=lambda x, s, own, c, ctx: (x + c, s._replace(prev=x * os.getpid()))),
        {},
        r"\(tensor 1 of its outer state\)",
    ),
    "an error": (in_one_worker(fails), {}, "the process of worker 2 of 4; .*ValueError: a mistake in the user's code"),
    "the end of a process": (in_one_worker(lambda: os._exit(7)), {}, r"no result.*exit codes .*7"),
    "waiting": (
        in_one_worker(waits),
        {"timeout_s": 2.0},
        r"after 2 s at most .*None.*timeout_s.*worker 2 was here.* in waits",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", APART)
def test_a_rule_that_computes_something_else_in_processes_fails_with_place_and_reason_and_no_process_is_left(name: str):
    rule, options, words = APART[name]
    before = {*multiprocessing.active_children()}
    with pytest.raises(AssertionError, match=rf"(?s)rule 'wrong' on topology 'random'.*{words}"):
        check_parity(rule, **options)
    assert {*multiprocessing.active_children()} <= before


def test_all_processes_are_forked_before_the_store_serves_one(monkeypatch: pytest.MonkeyPatch):
    """A thread of the store that held a lock at a fork left it taken in the child, about once in 300 times on busy cores."""
    order: list[str] = []
    start, serve = ForkProcess.start, parity.served_store
    monkeypatch.setattr(ForkProcess, "start", lambda self: (order.append("forked"), start(self))[1])
    monkeypatch.setattr(parity, "served_store", lambda *given: (order.append("serves"), serve(*given))[1])
    check_parity(gossip(), rounds=1)
    assert order == ["forked"] * 4 + ["serves"]


def test_what_cannot_run_together_is_refused_before_any_process_starts():
    with pytest.raises(PairingError, match="'diloco' needs every worker"):
        check_parity(diloco(), "ring")


def test_where_a_process_cannot_be_forked_the_error_says_so(monkeypatch: pytest.MonkeyPatch):
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="in one of 1 already; call destroy_process_group"):
            check_parity(gossip())
    finally:
        dist.destroy_process_group()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"CUDA .*, which is in use here"):
        check_parity(gossip())
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"on darwin .*run it on Linux"):
        check_parity(gossip())


def train_and_check(words: list[str]):
    """A program of a user's, in a process of its own."""
    warnings.simplefilter("error")
    torch.set_num_threads(4)
    x = torch.randn(600, 600, requires_grad=True)
    (x @ x).square().mean().backward()
    check_parity(gasloc(), timeout_s=60)
    print("equal")
    return 0


@pytest.mark.full
def test_a_program_that_has_trained_on_several_threads_can_check_parity():
    assert Command(work=train_and_check).finish() == (0, "equal\n")
