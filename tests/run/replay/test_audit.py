"""Runs computed again: from logs of outcomes that a test wrote, and by an audit, which finds the worker that went wrong."""

import itertools
import json
import math
import shutil

import pytest
import torch
from test_server_processes import served

from gossamer.errors import ConfigError, DataError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.outcomes import Begun, Ended, ExchangeOutcome, OutcomeWriter, RoundOutcome
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest, dump
from gossamer.run.replay.audit import audit
from gossamer.run.replay.elastic import replay_elastic
from gossamer.run.simulated.keywords import run_and_parts
from gossamer.run.simulated.rounds import Rounds
from gossamer.run.simulated.simulate import simulate
from tiny import single, tiny

NOBODY = frozenset[int]()


def batch(worker, step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * worker + step))


def loss(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def small(*, every=0, **settings):
    """A run of a model of four parameters, and its own parts."""
    base = {
        "record": {"hash": True, "export": False},
        "run": {"threads": 1, "eval_every": 0, "checkpoint_every": every},
    }
    given = {"workers": 3, "rounds": 4, "local_steps": 1, "rule": "gasloc", **settings}
    return run_and_parts(base, {"model": lambda: torch.nn.Linear(3, 1), "data": batch, "loss": loss, **given})


def flipped(x, place, bit):
    x.view(torch.int32)[place] ^= 1 << bit


def recorded(folder, config, parts, *, worker, round, change, at="train"):
    """Records a run up to this round, at the end of whose local phase, or whose outer step, `change` spoils a worker."""
    rounds = Rounds(resolve(config, parts), folder)
    with rounds.opened():
        while rounds.finished <= round:
            if rounds.finished == round:
                _spoil(rounds.workers[worker].replica, at, change)
            rounds.advance()


def _spoil(replica, at, change):
    real = getattr(replica, at)

    def spoils(*args):
        result = real(*args)
        change(replica.x)
        return result

    setattr(replica, at, spoils)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(3))  # in each of which every worker, round and place comes up
def test_a_flipped_bit_is_reported_at_its_round_and_worker_wherever_it_flips(part, tmp_path):
    config, parts = small()
    cases = enumerate(itertools.product(range(3), range(3), range(4)))
    for k, (worker, round, place) in itertools.islice(cases, part, None, 3):
        bit = 7 * k % 30  # the highest of the exponent makes the loss infinite, and ends the run by itself
        folder = tmp_path / str(k)
        recorded(folder, config, parts, worker=worker, round=round, change=lambda x: flipped(x, place, bit))  # noqa: B023
        found = audit(folder, parts=parts)
        assert found.difference == (round, worker, "what it sent"), (k, found)


METHODS = {
    "a mean over all": {"rule": "diloco", "local_steps": 2},
    "fragments in flight": {"local_steps": 4, "settings": {"schedule.fragments": 2, "schedule.overlap_steps": 1}},
    "gradients": {"rule": "data_parallel"},
    "steps that change": {
        "rule": "diloco",
        "local_steps": {0: 2, 3: 3},
        "settings": {"run.synchronous_steps": 2, "rule.lr": {"0": 0.7, "4": 0.5}},
    },
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_an_honest_run_agrees_from_the_start_and_from_its_checkpoints_and_a_spoilt_one_does_not(method, tmp_path):
    config, parts = small(every=1, **method)
    recorded(tmp_path / "honest", config, parts, worker=0, round=3, change=lambda x: None)
    stops = 4 * config.schedule.fragments
    assert audit(tmp_path / "honest", parts=parts) == (0, 3, 0, 3 * stops, None)
    assert audit(tmp_path / "honest", parts=parts, rounds=(3, 3)) == (3, 3, 3, 3 * stops // 4, None)
    assert audit(tmp_path / "honest", parts=parts, rounds=(1, 2), worker=1).compared == stops // 2
    recorded(tmp_path / "spoilt", config, parts, worker=1, round=2, change=lambda x: flipped(x, 3, 20))
    assert audit(tmp_path / "spoilt", parts=parts).difference == (2, 1, "what it sent")
    assert audit(tmp_path / "spoilt", parts=parts, worker=0, rounds=(0, 1)).difference is None


def test_what_goes_wrong_after_the_last_message_is_noticed_in_the_checkpoint(tmp_path):
    config, parts = small(every=1)
    recorded(tmp_path, config, parts, worker=2, round=3, change=lambda x: x.fill_(0.5), at="recompute")
    assert audit(tmp_path, parts=parts).difference == (3, 2, "its checkpoint")


def test_a_record_that_lacks_a_hash_is_no_record_that_agrees(tmp_path, caplog):
    config, parts = small(every=2)
    recorded(tmp_path / "run", config, parts, worker=0, round=3, change=lambda x: None)
    lines = read_metrics(tmp_path / "run")
    forged = {"kind": "train", "round": 5_000_000, "worker": 1, "hashes": ["0"]}

    def audited(some, *, machines=True, **options):
        folder = shutil.copytree(tmp_path / "run", tmp_path / "copy", dirs_exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))
        if not machines:
            (folder / "machines.jsonl").unlink()
        return audit(folder, parts=parts, **options)

    def without(worker, rounds):
        return [one for one in lines if not (one.get("worker") == worker and one["round"] in rounds)]

    with pytest.raises(DataError, match="no hash of worker 1 in round 1"):
        audited(without(1, [1]))
    with pytest.raises(DataError, match="no hash of worker 1 in round 3"):  # its checkpoint is of later
        audited(without(1, [3]))
    with pytest.raises(DataError, match="two lines of worker 1 in round 5000000"):
        audited([*lines, forged, {**forged, "hashes": ["1"]}])
    with pytest.raises(DataError, match=r"rounds 0\.\.3 of workers 0\.\.2"):  # and is not trained so far
        audited([*lines, forged])
    with pytest.raises(DataError, match=r"machines\.jsonl' is missing"):
        audited(lines, machines=False)
    assert audited(without(1, [1]), worker=0).difference is None
    words = [{**one, "hashes": "ab"} if (one.get("worker"), one["round"]) == (1, 2) else one for one in lines]
    assert audited(words).difference == (2, 1, "what it sent")
    assert "no hash" not in caplog.text
    shutil.rmtree(
        tmp_path / "run" / "checkpoints"
    )  # it may have been killed before its hash, and nothing says otherwise
    shutil.rmtree(tmp_path / "copy")
    assert audited(without(1, [3])).compared == 11
    assert "worker 1 has recorded no hash of round 3" in caplog.text


@pytest.mark.parametrize("part", ["x", "outer", "inner", "the shape of x", "no x"])
def test_a_checkpoint_with_another_state_of_any_kind_is_noticed(part, tmp_path):
    config, parts = small(every=4, rule="diloco")
    recorded(tmp_path, config, parts, worker=0, round=3, change=lambda x: None)
    store, line = tmp_path / "checkpoints", resolve(config, parts).lineage
    state = checkpoint.load(store, 4, 2, line)
    changes = {
        "x": {"x": state["x"] + 1},
        "outer": {"outer": [one + 1 for one in state["outer"]]},
        "inner": {"inner": None},
        "the shape of x": {"x": state["x"][:-1].clone()},
        "no x": {"x": None},
    }
    checkpoint.save(store, 4, 2, {**state, **changes[part]}, digest=line)
    assert audit(tmp_path, parts=parts).difference == (3, 2, "its checkpoint")


def test_a_run_that_cannot_be_repeated_is_refused_with_the_reason(tmp_path):
    config, parts = small()
    recorded(tmp_path / "run", config, parts, worker=0, round=0, change=lambda x: None)
    machines = tmp_path / "run" / "machines.jsonl"
    line = json.loads(machines.read_text())

    def refusal(**options):
        with pytest.raises(ConfigError) as caught:
            audit(tmp_path / "run", parts=parts, **options)
        return str(caught.value)

    assert "rounds 0..0 of workers 0..2" in refusal(worker=3)
    assert "rounds 0..0 of workers 0..2" in refusal(rounds=(0, 1))
    for key, value in {"torch": "1.0", "processor": "an abacus"}.items():
        machines.write_text(json.dumps({**line, key: value}) + "\n")
        assert value in refusal() and "where it was computed" in refusal()
    machines.write_text(json.dumps(line) + "\n")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({**one, "hashes": None}) + "\n" for one in read_metrics(tmp_path / "run")))
    assert "record.hash=true" in refusal()
    reasons = {
        "run.adapt": tiny(run__adapt="link", network__link={"step_s": 1.0, "uplink_bps": 1e6, "downlink_bps": 1e6}),
        "--replay": served(server__name="heloco"),
        "run.batched": tiny(run__batched=3),
        "all_reduce": tiny(run__reduction="all_reduce", rule__name="diloco", topology__name="complete"),
        "asynchronous": tiny(run__wait=False, network__link={"step_s": 1.0, "uplink_bps": 1e6, "downlink_bps": 1e6}),
    }
    for reason, other in reasons.items():
        (tmp_path / "run" / "run.toml").write_text(dump(other))
        metrics.rename(metrics := tmp_path / "run" / "metrics-000.jsonl")
        assert reason in refusal()
    metrics.write_text("")
    for parts_of_a_worker in ({"pipeline__stages": 2}, {"run__shards": 2}):
        (tmp_path / "run" / "run.toml").write_text(dump(tiny(**parts_of_a_worker, data__accumulate=2)))
        assert "a part of a worker" in (why := refusal()) and "record.hash" not in why and "run.toml --out AGAIN" in why


def logged(folder, config, lives):
    """A run folder with a log of outcomes: for each slot its lines."""
    folder.mkdir()
    (folder / "run.toml").write_text(dump(config))
    for slot, lines in lives.items():
        with OutcomeWriter(folder, slot) as log:
            for line in lines:
                log.write(line)
    return folder


def lived(slot, rounds, *, missed=(), alive=None, steps=2, end=True):
    """The lines of a worker that was there from the start; `missed` are (round, peer)."""
    made = [
        RoundOutcome(r, alive, frozenset(peer for one, peer in missed if one == r), NOBODY, (r + 1) * steps)
        for r in range(rounds)
    ]
    return [Begun(0, 0, slot, 0, 0), *made, *([Ended(rounds, "finished")] if end else [])]


def final(folder, config, slot, round=4):
    return checkpoint.load(folder / "checkpoints", round, slot, digest(config))["x"]


@pytest.mark.full
@pytest.mark.parametrize(("rule", "topology"), [("gasloc", "ring"), ("diloco", "complete")])
def test_a_worker_that_was_killed_after_others_had_counted_its_message_has_sent_it_in_the_replay(
    rule, topology, tmp_path
):
    config = single(rule__name=rule, topology__name=topology, run__steps=8, run__eval_every=0)
    simulate(config, tmp_path / "calm")
    # Nobody misses worker 1 in the last round, and it has no line of it.
    lives = {0: lived(0, 4), 1: lived(1, 3, end=False), 2: lived(2, 4)}
    result = replay_elastic(resolve(config, real=True), tmp_path / "replay", logged(tmp_path / "log", config, lives))
    assert math.isfinite(result.loss)
    for slot in (0, 2):
        assert torch.equal(final(tmp_path / "replay", config, slot), final(tmp_path / "calm", config, slot))
    assert checkpoint.rounds(tmp_path / "replay" / "checkpoints", 1) == [1, 2, 3]
    if rule == "gasloc":
        lives[0] = lived(0, 4, missed=[(3, 1)])
        replay_elastic(resolve(config, real=True), tmp_path / "missed", logged(tmp_path / "other log", config, lives))
        assert torch.equal(final(tmp_path / "missed", config, 2), final(tmp_path / "calm", config, 2))
        assert not torch.equal(final(tmp_path / "missed", config, 0), final(tmp_path / "calm", config, 0))


SEVERAL = {
    "fragments": (
        {"topology__name": "ring", "schedule__fragments": 2},
        lambda r: [(r, 0), (r, 1)],
    ),
    "fragments in flight": (
        {"topology__name": "ring", "schedule__fragments": 2, "schedule__overlap_steps": 1},
        lambda r: [(r - 1, 1), (r, 0)] if r < 3 else [(2, 1), (3, 0), (3, 1)],
    ),
    "parameters mixed while they train": (
        {"rule__name": "fgd", "topology__name": "ring", "rule__mix_updates": "ring"},
        lambda r: [(r, 1), (r, 0)][: 1 + (r > 0)],
    ),
    "means of fragments": (
        {"rule__name": "diloco", "topology__name": "complete", "schedule__fragments": 2},
        lambda r: [(r, 0), (r, 1)],
    ),
}
"""Settings, and the exchanges that end in each of four rounds, by the round whose topology they follow and fragment."""


def lived_exchanges(slot, rounds, exchanges, *, killed_in=None, missed=frozenset()):
    """The lines of a worker; one that is killed has none of the last exchange of that round, nor of what follows.

    `missed` are (of, fragment, peer).
    """
    lines = [Begun(0, 0, slot, 0, 0)]
    for r in range(rounds):
        ended = [(of, p) for of, p in exchanges(r) if of >= 0]
        for of, p in ended[: -1 if r == killed_in else None]:
            lost = frozenset(peer for one, fragment, peer in missed if (one, fragment) == (of, p))
            lines.append(ExchangeOutcome(r, of, p, None, lost, NOBODY))
        if r == killed_in:
            return lines
        lines.append(RoundOutcome(r, None, NOBODY, NOBODY, 2 * (r + 1)))
    return [*lines, Ended(rounds, "finished")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("settings", "exchanges"), SEVERAL.values(), ids=SEVERAL.keys())
def test_a_replay_of_several_exchanges_a_round_has_the_bits_of_a_calm_run_where_those_that_live_missed_nothing(
    settings, exchanges, tmp_path
):
    config = tiny(model__layers=2, run__steps=8, run__eval_every=0, run__checkpoint_every=0, **settings)
    simulate(config, tmp_path / "calm")
    # Worker 1 is killed when the others have counted its last message, and before it has received theirs.
    lives = {slot: lived_exchanges(slot, 4, exchanges, killed_in=3 if slot == 1 else None) for slot in range(3)}
    replay_elastic(resolve(config, real=True), tmp_path / "replay", logged(tmp_path / "log", config, lives))
    for slot in (0, 2):
        assert torch.equal(final(tmp_path / "replay", config, slot), final(tmp_path / "calm", config, slot))
    if settings.get("rule__name") == "diloco":
        return
    # The exchange of round 2 is missed at both ends: the others continue, and these two keep its weight at home.
    of = 2, max(p for q, p in exchanges(2) if q == 2)
    lives = {
        slot: lived_exchanges(slot, 4, exchanges, missed={(*of, peer) for peer in {0, 1} - {slot}} if slot < 2 else ())
        for slot in range(3)
    }
    replay_elastic(resolve(config, real=True), tmp_path / "missed", logged(tmp_path / "other log", config, lives))
    assert not torch.equal(final(tmp_path / "missed", config, 0), final(tmp_path / "calm", config, 0))
    one_end = {**lives, 1: lived_exchanges(1, 4, exchanges)}
    with pytest.raises(DataError, match="worker 1 in round 2: it counted a message of worker 0"):
        replay_elastic(resolve(config, real=True), tmp_path / "a", logged(tmp_path / "one end", config, one_end))


def test_a_round_that_was_closed_twice_counts_as_the_others_closed_it(tmp_path):
    config = single(rule__name="diloco", topology__name="complete", run__steps=8, run__eval_every=0)
    two = frozenset({1, 2})
    closed = [RoundOutcome(r, two if r == 2 else None, NOBODY, NOBODY, 2 * r + 2) for r in range(4)]
    begun = [Begun(0, 0, slot, 0, 0) for slot in range(3)]
    went_on = {slot: [begun[slot], *closed] for slot in (1, 2)}
    # Worker 0 was cut off when it had closed round 2 over everyone, and took over another's state.
    first = [begun[0], *closed[:2], closed[2]._replace(alive=None)]
    log = logged(tmp_path / "log", config, {0: [*first, Begun(3, 3, 1, 6, 0), closed[3]], **went_on})
    replay_elastic(resolve(config, real=True), tmp_path / "replay", log)
    one, *others = (final(tmp_path / "replay", config, slot) for slot in range(3))
    assert torch.equal(one, others[0]) and torch.equal(one, others[1])
    with pytest.raises(DataError, match="it went on after a round that others had closed otherwise"):
        replay_elastic(
            resolve(config, real=True),
            tmp_path / "a",
            logged(tmp_path / "b", config, {0: [*first, closed[3]], **went_on}),
        )


def test_a_log_that_contradicts_itself_is_refused_in_a_sentence(tmp_path):
    config = single(topology__name="ring", run__steps=8)
    calm = {slot: lived(slot, 4) for slot in range(3)}
    early, late = lived(1, 2, end=False), [Begun(3, 2, 2, 4, 1), RoundOutcome(3, None, NOBODY, NOBODY, 6)]
    missed = {0: lived(0, 4, missed=[(2, 1)]), 2: lived(2, 4, missed=[(2, 1)])}
    forged = {
        "a message of one who had ended": ({**calm, 1: lived(1, 2)}, "counted a message of worker 1"),
        "a message of one who was never there": ({0: calm[0], 2: calm[2]}, "counted a message of worker 1"),
        "one end that missed it": ({**calm, 1: lived(1, 4, missed=[(1, 0)])}, "counted a message of worker 1"),
        "a miss of no peer": ({**calm, 1: lived(1, 4, missed=[(1, 1)])}, "who were no peers"),
        "two messages after a death": ({0: calm[0], 1: early, 2: calm[2]}, "counted a message of worker 1"),
        "other steps": ({**calm, 1: lived(1, 4, steps=1)}, "1 inner steps behind it"),
        "not alive itself": ({**calm, 1: lived(1, 4, alive=frozenset({0, 2}))}, "a worker is alive itself"),
        "too many rounds": ({**calm, 1: lived(1, 5)}, "the run has 4 rounds"),
        "too many slots": ({**calm, 3: lived(3, 4)}, "the run has 3 slots"),
        "a donor that was not so far": ({**missed, 1: [*early, late[0]._replace(after=3, donor=1)]}, "never had"),
        "a state of later": ({**missed, 1: [*early, late[0]._replace(after=4)]}, "a state after 4"),
    }
    for name, (lives, part) in forged.items():
        with pytest.raises(DataError, match=part):
            replay_elastic(
                resolve(config, real=True), tmp_path / f"replay of {name}", logged(tmp_path / name, config, lives)
            )
    sound = logged(tmp_path / "sound", config, {**missed, 1: [*early, *late]})
    replay_elastic(resolve(config, real=True), tmp_path / "replay", sound)
    assert len(read_metrics(tmp_path / "replay")) > 11
    with pytest.raises(ConfigError, match="replay it with its own"):
        replay_elastic(resolve(single(seed=1), real=True), tmp_path / "a", sound)
    for path in sound.glob("outcomes*"):
        path.unlink()
    with pytest.raises(ConfigError, match="no log of outcomes"):
        replay_elastic(resolve(config, real=True), tmp_path / "b", sound)


def rounds_of(rounds, before):
    """Rounds in which nothing was missed, of a process with so many inner steps behind it."""
    return [RoundOutcome(r, None, NOBODY, NOBODY, before + 2 * k) for k, r in enumerate(rounds, 1)]


def test_an_audit_follows_a_slot_that_was_taken_over_twice_from_every_snapshot(tmp_path, monkeypatch):
    config = single(
        topology__name="ring",
        run__steps=16,
        run__elastic=True,
        run__checkpoint_every=1,
        run__eval_every=0,
        record__hash=True,
    )
    others = {slot: lived(slot, 8, missed=[(2, 1), (5, 1)]) for slot in (0, 2)}
    first = [Begun(0, 0, 1, 0, 0), *rounds_of(range(2), 0)]
    second = [Begun(3, 3, 0, 4, 1), *rounds_of(range(3, 5), 4)]
    third = [Begun(6, 6, 2, 8, 2), *rounds_of(range(6, 8), 8), Ended(8, "finished")]
    monkeypatch.setattr("gossamer.run.replay.elastic.KEPT", 8)
    run = tmp_path / "run"
    replay_elastic(
        resolve(config, real=True), run, logged(tmp_path / "log", config, {**others, 1: [*first, *second, *third]})
    )
    assert audit(run, rounds=(0, 2)) == (0, 2, 0, 3 + 3 + 2, None)
    for snapshot, hashes in ((3, 14), (4, 11), (7, 3)):
        assert audit(run, rounds=(snapshot, None)) == (snapshot, 7, snapshot, hashes, None)
    for path in (run / "checkpoints").glob("round-00000[3-6]"):
        shutil.rmtree(path)  # what the third took over is gone too, and is computed
    assert audit(run, rounds=(6, 6)) == (6, 6, 2, 3, None)
    lines = read_metrics(run)
    for line in lines:
        if (line["round"], line.get("worker")) == (4, 1):
            line["hashes"] = [one[::-1] for one in line["hashes"]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert audit(run, rounds=(2, None)).difference == (4, 1, "what it sent")
