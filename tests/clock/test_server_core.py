"""The decisions of a server, without clock, sockets or training: the same for virtual time, real processes and replays."""

import math

import pytest
import torch

from gossamer.asynchronous import Slack, cgad, decoupled_diloco
from gossamer.clock import Update
from gossamer.clock.phases import Budget
from gossamer.clock.server_core import CloseWindow, Push, Send, ServerCore
from gossamer.errors import CheckpointError
from gossamer.layout import Layout, Leaf

LAYOUT = Layout((Leaf("a", (2,), 0, 2), Leaf("b", (1,), 2, 3)), 3)
SPANS = ((0, 2), (2, 3))


def core(rule, workers=3, *, steps=math.inf, until_s=-math.inf, spans=((0, 3),)):
    return ServerCore(
        rule, torch.zeros(3), LAYOUT, spans, [2] * workers, budget=Budget(steps), expected_until_s=until_s
    )


def push(server, worker, now_s, fragment=0, **options):
    a, b = server.spans[fragment]
    return server.push(worker, server.counted(worker, fragment, torch.ones(b - a), 10), now_s, **options)


def kinds(actions):
    """Updates by their workers, and sends by worker and whether it may continue."""
    return [
        action.workers
        if isinstance(action, Update)
        else (action.worker, action.go)
        if isinstance(action, Send)
        else action
        for action in actions
    ]


def test_a_push_without_a_window_is_absorbed_and_answered_at_once():
    server = core(cgad())
    assert [action.starts.keys() for action in server.join(0)] == [{0}]
    update, reply = push(server, 0, 1.5)
    assert update == Update(1.5, 0, (0,), (0,))
    assert (reply.worker, reply.go, reply.phases, reply.absorbed_steps) == (0, True, 1, 2)
    assert torch.equal(reply.starts[0].x, server.model()) and reply.starts[0].updates == 1


def test_what_a_worker_has_done_is_counted_from_what_it_was_sent():
    server = core(cgad(), spans=SPANS)
    server.join(0)
    push(server, 0, 1.0, fragment=0)
    counted = server.counted(0, 1, torch.ones(1), 10)  # the second phase since it was sent fragment 1
    assert (counted.updates, counted.steps, counted.tokens) == (0, 4, 40)
    assert server.expected_push(0) == (1, 1) and server.expected_push(1) is None


def test_a_window_closes_a_grace_period_after_its_quorum():
    server = core(decoupled_diloco(quorum=2, grace_s=0.5))
    for worker in range(3):
        server.join(worker)
    assert push(server, 2, 1.0) == []
    assert push(server, 0, 2.0) == [CloseWindow(0, 2.5)] and server.next_closing_s == 2.5
    assert server.tick(2.4) == []
    assert push(server, 1, 2.45) == []
    assert kinds(server.tick(2.5)) == [(0, 1, 2), (0, True), (1, True), (2, True)]
    assert server.tick(2.5) == [] and server.next_closing_s == math.inf


def test_an_adaptive_window_closes_when_the_first_of_its_workers_would_begin_to_wait():
    server, ahead = core(decoupled_diloco(quorum=2, share=0.5)), Slack(overlap_steps=4, step_s=1.0, sync_s=0.5)
    for worker in range(3):
        server.join(worker)
    assert push(server, 2, 1.0, slack=ahead) == []
    slack_s = 4 * 1.0 - (1.5 + 0.5)  # worker 2 has waited for the quorum
    assert push(server, 0, 2.5, slack=ahead) == [CloseWindow(0, 2.5 + 0.5 * slack_s)]
    waits = core(decoupled_diloco(quorum=2))
    for worker in range(3):
        waits.join(worker)
    assert push(waits, 2, 1.0) == []
    assert push(waits, 0, 2.0) == [CloseWindow(0, 2.0)]  # real workers wait for their replies


def test_a_tick_closes_one_window_so_that_a_driver_sees_the_model_after_each_update():
    server = core(decoupled_diloco(), spans=SPANS)
    for worker in (0, 1):
        server.join(worker)
    push(server, 0, 1.0, fragment=0)
    server.push(1, Push(1, torch.ones(1), 0, 10, 2), 1.0)
    assert [kinds(server.tick(1.0)) for _ in range(3)] == [[(0,), (0, True)], [(1,), (1, True)], []]


def test_fewer_present_workers_need_a_smaller_quorum_and_a_worker_that_left_gets_no_reply():
    server = core(decoupled_diloco(quorum=3, grace_s=1.0))
    for worker in range(3):
        server.join(worker)
    push(server, 0, 1.0)
    push(server, 1, 1.0)
    assert server.leave(1, 2.0) == [CloseWindow(0, 3.0)]
    assert kinds(server.tick(3.0)) == [(0, 1), (0, True)]
    assert kinds(push(server, 2, 4.0, reply=False)) == []
    assert server.leave(2, 4.0) == [CloseWindow(0, 5.0)]
    assert server.tick(4.9) == [] and kinds(server.tick(5.0)) == [(2,)]


def test_a_worker_that_is_expected_counts_for_the_quorum_until_it_is_late():
    server = core(decoupled_diloco(quorum=3), until_s=10.0)
    server.join(0)
    push(server, 0, 1.0)
    assert server.tick(9.9) == []
    assert kinds(server.tick(10.0)) == [CloseWindow(0, 10.0), (0,), (0, True)]


def test_a_window_whose_workers_cannot_push_any_more_closes():
    server = core(decoupled_diloco(quorum=2), spans=SPANS)
    for worker in (0, 1):
        server.join(worker)
    push(server, 0, 1.0, fragment=0)
    assert server.tick(1.0) == []
    server.push(1, Push(1, torch.ones(1), 0, 10, 2), 2.0)
    assert kinds(server.tick(2.0)) == [(0,), (0, True)]  # neither fragment could ever have two


def test_the_steps_of_a_phase_that_was_lost_are_taken_by_others_and_then_the_run_is_over():
    server = core(cgad(), 2, steps=4)
    assert [kinds(server.join(worker)) for worker in (0, 1)] == [[(0, True)], [(1, True)]]
    server.leave(1, 1.0)
    assert kinds(push(server, 0, 2.0)) == [(0,), (0, True)] and not server.is_finished
    assert kinds(push(server, 0, 3.0)) == [(0,), (0, False)] and server.is_finished
    assert server.absorbed_steps == 4


def test_a_server_continues_from_its_checkpoint():
    rule = decoupled_diloco()
    server, again = core(rule, spans=SPANS), core(rule, spans=SPANS)
    server.join(0)
    push(server, 0, 1.0)
    server.tick(1.0)
    again.restore({**server.state(), "time_s": 1.0})
    assert torch.equal(again.model(), server.model()) and again.absorbed_steps == 2
    assert (again.joins(0), again.seen(0), again.is_present(0), again.state()["updates"]) == (1, False, False, [1, 0])
    (reply,) = again.join(0)
    assert (reply.phases, {p: start.updates for p, start in reply.starts.items()}) == (1, {0: 1, 1: 0})


@pytest.mark.parametrize(
    "change",
    [{"outer": []}, {"updates": [1]}, {"phases": ["x", 0, 0]}, {"steps": -1}, {"time_s": -1.0}, {"joins": None}],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change):
    server = core(cgad(), spans=SPANS)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        core(cgad(), spans=SPANS).restore({**server.state(), "time_s": 0.0, **change})
