"""CocktailSGD around a shared copy: what is compressed twice is late, and never lost."""

import tomllib

import pytest
import torch

from drifted_rounds import play
from gossamer import rng
from gossamer.codecs import CODECS, int4, make_codec, topk
from gossamer.errors import ConfigError
from gossamer.rules import anchored_gasloc, cocktail, local_sgd
from gossamer.run.config.document import parse_overrides, with_settings
from gossamer.run.config.run_file import dump, parse
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology
from tiny import document

N, P = 5, 300
COMPLETE = make_topology("complete", N)
close = torch.testing.assert_close
each_codec = pytest.mark.parametrize("codec", [factory() for factory in CODECS.values()], ids=CODECS)
each_way_back = pytest.mark.parametrize("back", ["exact", "cocktail", {"name": "topk", "k": 3, "chunk": 30}], ids=str)


def equal_starts(dtype=torch.float64):
    return random_vectors(1, P, dtype=dtype) * N


def test_through_exact_codecs_it_is_the_mean_of_all_and_no_worker_is_off_by_a_bit():
    start, drift = equal_starts(torch.float32), random_drift(P, dtype=torch.float32)
    xs, states = play(cocktail(back="exact"), COMPLETE, start, 8, drift)
    ys, _ = play(local_sgd(), COMPLETE, start, 8, drift)
    for x, s in zip(xs, states, strict=True):
        assert torch.equal(x, s.shared) and not s.dropped.any()
        close(x, ys[0])


@pytest.mark.sampled(3)
@each_codec
def test_with_an_exact_way_back_it_is_gossip_of_all_around_an_anchor(codec):
    start, drift = equal_starts(), random_drift(P)
    xs, states = play(cocktail(back="exact"), COMPLETE, start, 4, drift, codec=codec)
    ys, anchors = play(anchored_gasloc(1.0, 0.0), COMPLETE, start, 4, drift, codec=codec)
    for x, s, y, anchor in zip(xs, states, ys, anchors, strict=True):
        close(x, y, rtol=0, atol=1e-6)
        close(s.shared, anchor.anchor, rtol=0, atol=1e-6)


@pytest.mark.sampled(9)
@each_way_back
@each_codec
def test_the_shared_copy_is_the_same_everywhere_to_the_last_bit_after_every_round(codec, back):
    rule, drift = cocktail(back), random_drift(P, dtype=torch.float32)
    xs, states = equal_starts(torch.float32), None
    for t in range(4):
        xs, states = play(rule, COMPLETE, xs, 1, drift, codec=codec, states=states, first=t)
        for s in states:
            assert torch.equal(s.shared, states[0].shared) and torch.equal(s.dropped, states[0].dropped)
    assert not torch.equal(states[0].shared, equal_starts(torch.float32)[0])


@each_way_back
@pytest.mark.parametrize("codec", [int4(), topk(k=2, chunk=20), make_codec("cocktail", one_in=3)], ids=lambda c: c.name)
def test_what_a_worker_did_not_tell_stays_with_it_and_what_was_dropped_on_the_way_back_comes_later(codec, back):
    rule, drift = cocktail(back), random_drift(P)
    xs, states = play(rule, COMPLETE, equal_starts(), 3, drift, codec=codec)  # until nothing is zero any more
    ends = [x + drift(i, 3, x) for i, x in enumerate(xs)]
    old, dropped = states[0].shared.clone(), states[0].dropped.clone()
    decoded = [codec.decode(codec.encode(end - old, rng.key(0, i, 3, 0, "codec")), end) for i, end in enumerate(ends)]
    xs, states = play(rule, COMPLETE, xs, 1, drift, codec=codec, states=states, first=3)
    moved = states[0].shared - old
    close(moved + states[0].dropped, sum(decoded) / N + dropped, rtol=0, atol=1e-12)
    for x, end, q in zip(xs, ends, decoded, strict=True):
        close(x, end - q + moved, rtol=0, atol=1e-12)


@pytest.mark.sampled(9)
@each_way_back
@each_codec
def test_nothing_is_lost_but_late_through_any_codecs(codec, back):
    start, drift, rounds = equal_starts(), random_drift(P), 6
    xs, states = play(cocktail(back), COMPLETE, start, rounds, drift, codec=codec)
    learned = sum(drift(i, t, start[0]) for i in range(N) for t in range(rounds))
    close(sum(xs) + N * states[0].dropped, sum(start) + learned, rtol=0, atol=1e-10)


@pytest.mark.sampled(9)
@each_way_back
@each_codec
def test_workers_that_stand_still_stay_to_the_last_bit_through_any_codecs(codec, back):
    start = equal_starts(torch.float32)
    xs, _ = play(cocktail(back), COMPLETE, start, 3, codec=codec)
    assert all(torch.equal(x, start[0]) for x in xs)


def test_the_way_back_draws_again_in_every_round_so_that_all_elements_get_through():
    start, drift = equal_starts(), random_drift(P)
    rule = cocktail({"name": "randomk", "one_in": 4})
    xs, states = play(rule, COMPLETE, start, 1, drift)
    assert 0 < int((states[0].dropped == 0).sum()) < P / 2
    xs, states = play(rule, COMPLETE, xs, 60, states=states, first=1)  # everyone stands still
    mean = start[0] + sum(drift(i, 0, start[0]) for i in range(N)) / N
    assert float((states[0].shared - mean).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("back", "sentence"),
    [
        ("topkk", "unknown codec 'topkk'; did you mean 'topk'"),
        (3, "rule 'cocktail' got back = 3, which must be a codec's name, or a table with its name and options"),
        ({"k": 3}, "allowed are a codec's name"),
        ({"name": "topk", "kk": 3}, "codec 'topk' got an unknown option 'kk'; did you mean 'k'"),
        ({"name": "topk", "k": 0}, "codec 'topk' got k = 0, which must be a whole number from 1"),
        ({"name": "exact", "k": 3}, "codec 'exact' got an unknown option 'k'; Allowed: back"),
    ],
)
def test_a_way_back_that_cannot_work_is_refused_in_a_sentence(back, sentence):
    with pytest.raises(ConfigError, match=sentence):
        cocktail(back=back)


def test_the_way_back_is_a_table_in_a_run_file():
    words = parse_overrides(["rule.name=cocktail", "rule.back.name=topk", "rule.back.k=128", "topology.name=complete"])
    config = parse(with_settings(document(), words))
    assert config.rule.options == {"back": {"name": "topk", "k": 128}}
    assert parse(tomllib.loads(dump(config))) == config
    assert cocktail(**config.rule.options).options == config.rule.options
