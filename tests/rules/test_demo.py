"""DeMo: momentum of which the largest frequencies are exchanged, and a step along the sign of their mean."""

import pytest
import torch

from drifted_rounds import play
from gossamer.codecs import topk, topk2bit
from gossamer.codecs.dct import coefficients, dct, from_coefficients
from gossamer.rules import data_parallel, demo, error_feedback
from gossamer.rules.contract import Context
from gossamer.testing.drifted_workers import flat_layout, random_drift, random_vectors
from gossamer.topologies import make_topology

P, N = 5000, 3  # one run of 4096, and a part of another
ALL = make_topology("complete", N)
ZEROS = [torch.zeros(P)] * N
close = torch.testing.assert_close


def gradient(worker, step, x):
    return random_drift(P, dtype=torch.float32)(worker, step, x)


def test_the_transform_is_orthonormal_and_its_inverse_brings_a_vector_back():
    matrix = dct(torch.device("cpu")).double()
    close(matrix @ matrix.T, torch.eye(64, dtype=torch.float64), atol=1e-6, rtol=0)
    x = random_vectors(1, P, dtype=torch.float32)[0]
    close(from_coefficients(coefficients(x), x), x, atol=1e-5, rtol=0)
    close(coefficients(x).norm(), x.norm())


@pytest.mark.parametrize("signs", [False, True])
def test_what_is_left_and_what_was_sent_are_the_momentum_and_the_decayed_rest_comes_with_the_next_gradient(signs):
    codec, before = topk(k=32), [torch.zeros(P)] * N
    for t in range(1, 4):
        _, states = play(demo(signs=signs), ALL, ZEROS, t, gradient, codec=codec)
        for i, s in enumerate(states):
            delta = 0.999 * before[i] + gradient(i, t - 1, before[i])
            q = coefficients(delta)
            close(s.unsent + from_coefficients(codec.decode(codec.encode(q, 0), q), delta), delta, atol=1e-5, rtol=0)
        before = [s.unsent.clone() for s in states]


def test_where_all_is_sent_it_is_the_sign_of_the_mean_gradient_without_momentum():
    xs, states = play(demo(), ALL, ZEROS, 3, gradient)
    mean = sum(gradient(i, 2, ZEROS[0]) for i in range(N)) / N
    sure = mean.abs() > 1e-5
    assert all(torch.equal(x[sure], mean.sign()[sure]) for x in xs)
    assert all(float(s.unsent.abs().max()) < 1e-5 for s in states)


def test_where_nothing_is_sent_nothing_moves_and_the_rest_is_the_momentum():
    rule, ctx = demo(0.9), Context(0, N, 0, 1, 1 / N, flat_layout(P), 1, True, (1, 2))
    s, momentum = rule.init(ZEROS[0], ctx), torch.zeros(P)
    for t in range(4):
        g = gradient(0, t, ZEROS[0])
        nothing = torch.zeros_like(rule.send(g, s, ctx))
        step, s = rule.recv(g, s, nothing, (nothing, nothing), ctx)
        momentum = 0.9 * momentum + g
        assert not step.any()
        close(s.unsent, momentum)


def test_the_mean_of_a_coefficient_is_over_the_workers_that_sent_it():
    rule, ctx, x = demo(), Context(0, N, 0, 1, 1 / N, flat_layout(4096), 1, True, (1, 2)), torch.zeros(4096)
    sent = [torch.zeros(4096) for _ in range(N)]
    sent[0][1], sent[1][1], sent[2][2] = 3.0, 1.0, 2.5  # 2 in place 1 from two workers, and more in place 2 from one
    step, _ = rule.recv(x, rule.init(x, ctx), sent[0], tuple(sent[1:]), ctx)
    wanted = torch.zeros(4096)
    wanted[1], wanted[2] = 2.0, 2.5
    assert torch.equal(step, from_coefficients(wanted, x).sign())
    of_signs, _ = demo(signs=True).recv(x, rule.init(x, ctx), sent[0], tuple(sent[1:]), ctx)
    assert torch.equal(of_signs, from_coefficients((wanted != 0.0).float(), x).sign()) and not torch.equal(
        step, of_signs
    )


def test_one_worker_steps_along_its_own_sign_and_the_order_of_several_does_not_matter():
    codec = topk(k=32)
    (x,), _ = play(demo(), make_topology("complete", 1), ZEROS[:1], 1, gradient, codec=codec)
    q = coefficients(gradient(0, 0, ZEROS[0]))
    assert torch.equal(x, from_coefficients(codec.decode(codec.encode(q, 0), q), x).sign())
    one, _ = play(demo(), ALL, ZEROS, 2, gradient, codec=codec)
    other, _ = play(demo(), ALL, ZEROS, 2, lambda i, t, x: gradient((i + 1) % N, t, x), codec=codec)
    assert float((one[0] == other[0]).float().mean()) > 0.999  # sums have another order, and their signs are these


def test_two_bits_a_coefficient_carry_the_signs_that_exact_ones_have():
    exact, kept = play(demo(signs=True), ALL, ZEROS, 3, gradient, codec=topk(k=32))
    coarse, left = play(demo(signs=True), ALL, ZEROS, 3, gradient, codec=topk2bit(k=32, tiles=False))
    assert all(torch.equal(a, b) for a, b in zip(exact, coarse, strict=True))
    assert all(torch.equal(a.unsent, b.unsent) for a, b in zip(kept, left, strict=True))


def test_gradients_fed_back_are_sent_whole_in_the_end_and_with_nothing_lost_are_data_parallelism():
    rule, codec = error_feedback(data_parallel()), topk(k=512)
    exact, _ = play(rule, ALL, ZEROS, 3, gradient)
    plain, _ = play(data_parallel(), ALL, ZEROS, 3, gradient)
    assert all(torch.equal(a, b) for a, b in zip(exact, plain, strict=True))
    sent, rounds = torch.zeros(P), 12

    def once(worker, step, x):
        return gradient(worker, 0, x) if step == 0 else torch.zeros(P)

    for t in range(1, rounds):
        xs, states = play(rule, ALL, ZEROS, t, once, codec=codec)
        sent = sent + xs[0]
    close(sent, sum(gradient(i, 0, sent) for i in range(N)) / N, atol=1e-5, rtol=0)
    assert all(not s.unsent.any() for s in states)
