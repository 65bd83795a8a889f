"""Rounds that are played without data: those that repeat are those that would be played."""

import pytest

from gossamer.errors import GossamerError
from gossamer.rounds.exchange import Exchange
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.recipes import recipes
from gossamer.run.config.resolve import resolve
from gossamer.run.config.resolved import InPairs, ResolvedRun, WithServer
from gossamer.run.config.run_file import parse
from gossamer.run.planning import traffic
from gossamer.run.planning.traffic import play_rounds

ROUNDS = 6


def run_of(method: str) -> ResolvedRun:
    length = {"steps": 6 * ROUNDS, "local_steps": 6}
    return resolve(parse({"method": method, "workers": 4, "model": {"size": "0.2m"}, "run": length}))


def test_rounds_that_repeat_have_the_messages_and_the_memory_of_those_that_are_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0
    for name in recipes():
        try:
            run = run_of(name)
        except GossamerError:  # it needs local steps or workers of its own
            continue
        if isinstance(run.method, WithServer | InPairs):
            continue
        layout = layout_for(run.model, 256)
        counts, entries = play_rounds(run, run.method, layout, ROUNDS)
        with monkeypatch.context() as patch:
            patch.setattr(traffic, "period_of", lambda run, m: 10**9)  # so that nothing repeats
            all_counts, all_entries = play_rounds(run, run.method, layout, ROUNDS)
        assert counts == all_counts and sorted(entries) == sorted(all_entries), name
        compared += 1
    assert compared > 40


@pytest.mark.parametrize(("method", "repeats"), [("streaming_diloco", True), ("gossip", False)])
def test_workers_with_the_same_peers_in_each_round_are_played_until_their_messages_repeat(
    method: str, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, played = run_of(method), list[int]()
    post = Exchange.post
    monkeypatch.setattr(Exchange, "post", lambda one: played.append(one.ctx.worker) or post(one))
    play_rounds(run, run.in_rounds, layout_for(run.model, 256), ROUNDS)
    each = [played.count(worker) for worker in range(4)]
    assert (max(each[1:]) < each[0] / 2) is repeats, each
