"""A real worker whose messages are not finite: the others decline them, name it, and train on."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import run
from gossamer.cli import main
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.outcomes import read_outcomes
from gossamer.run.asynchronous.message_form import MessageForm
from gossamer.run.config.run_file import digest, dump
from gossamer.run.participant import state_transfer
from gossamer.run.simulated.rounds import Rounds
from gossamer.testing.attacks import Attacker
from gossamer.transport.elastic.newcomer import Offer
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.processes.group import GroupTransport
from gossamer.transport.processes.local import run_local
from tiny import single

BAD = 1
DRIVERS = {
    "in rounds": {},
    "elastic": {"run__elastic": True},
    "an elastic mean": {"run__elastic": True, "rule__name": "diloco", "topology__name": "complete"},
    "without waiting": {"rule__name": "gossip", "run__wait": False, "run__steps": 32},
}


def train_but_send_nan(argv: list[str]) -> int:
    """`gossamer train`, in which every message of worker 1 is NaN, in rounds from round 2 on, and it takes states slowly."""
    if os.environ["RANK"] == str(BAD):
        for kind in (ElasticTransport, GroupTransport):

            def post(self, ticket, peer, frames, real=kind.post):
                real(self, ticket, peer, [torch.nan * frame for frame in frames] if ticket.round >= 2 else frames)

            kind.post = post

        def pack(self, message, number, fragment=0, real=MessageForm.pack):
            decoded, packed = real(self, message, number, fragment)
            return decoded, packed.view(torch.float32).mul(torch.nan).view(torch.uint8)

        MessageForm.pack = pack

        def ask_late(*given: Any, real: Callable[..., Offer] = state_transfer.ask_for_state, **more: Any) -> Offer:
            time.sleep(0.3)  # the others may have closed their last round without it, and still give it their state
            return real(*given, **more)

        state_transfer.ask_for_state = ask_late
    return main(argv)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("forks")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_others_train_to_the_end_and_the_record_and_status_name_the_sender_of_nan(
    driver: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = single(**{"run__timeout_s": 60.0, "run__steps": 16, "run__eval_every": 0, **DRIVERS[driver]})
    (tmp_path / "run.toml").write_text(dump(config))
    words = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]
    code = run_local(3, train_but_send_nan, words)
    printed = str(capfd.readouterr())
    assert code == 0, printed
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    if driver != "without waiting":
        assert {line["worker"] for line in lines if line["round"] == 7} >= {0, 2}
    declined_senders = {worker for line in lines for worker in line.get("declined", {}) if line["worker"] != BAD}
    assert declined_senders == {str(BAD)}, (lines, printed)
    assert f"declined what worker {BAD} sent" in printed or f"worker {BAD} sent" in printed, printed
    if driver == "an elastic mean":
        assert f"says that what worker {BAD} sent is not finite or cannot be decoded" in printed, printed
        assert "the state of worker 1" not in printed, "it is left out, and never the one that the others follow"
        for worker in (0, 2):
            (life,) = read_outcomes(tmp_path / "run")[worker]
            assert [one.round for one in life.rounds] == [*range(8)]
            assert all((one.alive is None) == (one.round < 2) for one in life.rounds), life.rounds
        # As in a run from which it was absent in these rounds: the log says so, and from it the bits follow.
        code, shown = run("simulate", "--replay", tmp_path / "run", "--out", tmp_path / "again")
        assert code == 0, shown
        for worker in range(3):
            real, again = (
                checkpoint.load(tmp_path / name / "checkpoints", 8, worker, digest(config))["x"]
                for name in ("run", "again")
            )
            assert torch.equal(real, again)
    code, output = run("status", tmp_path / "run", "--json")
    declined = [worker["declined"] for worker in json.loads(output)["workers"]]
    assert code == 0 and declined[BAD] > 0 and declined[0] == declined[2] == 0, output


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("why", ["too few are left", "all diverge"])
def test_an_elastic_mean_ends_with_a_sentence_where_too_few_are_left_and_where_all_diverge(
    why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    diverges = {} if why == "too few are left" else {"inner__optimizer": "sgd", "inner__lr": 1e30}
    config = single(run__steps=16, run__eval_every=0, run__timeout_s=8.0, **DRIVERS["an elastic mean"], **diverges)
    (tmp_path / "run.toml").write_text(dump(config))
    work = train_but_send_nan if why == "too few are left" else main
    assert run_local(2, work, ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]) != 0
    output = str(capfd.readouterr())
    assert ("the others are too few to close the round; lower the learning rate" in output) == (not diverges), output
    assert "lower the learning rate or clip the gradients" in output and "Traceback" not in output, output


def test_a_simulated_run_declines_the_same_messages_as_a_real_one(
    tmp_path: Path, forks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = single(run__steps=16, run__eval_every=0, run__timeout_s=60.0, rule__clipped={})
    (tmp_path / "run.toml").write_text(dump(config))
    assert run_local(3, train_but_send_nan, ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "real")]) == 0
    make_workers = Rounds.__init__.__globals__["make_workers"]

    def with_a_bad_peer(config, task, m, like, transport, together=None):
        bad = lambda i: Attacker(transport(i), "nan", 2) if i == BAD else transport(i)  # noqa: E731
        return make_workers(config, task, m, like, bad, together)

    monkeypatch.setitem(Rounds.__init__.__globals__, "make_workers", with_a_bad_peer)
    assert run("simulate", tmp_path / "run.toml", "--out", tmp_path / "simulated")[0] == 0
    real, simulated = (
        {
            (line["round"], line["worker"]): (line["loss"], line.get("declined"), line.get("shortened"))
            for line in read_metrics(tmp_path / name)
            if line["kind"] == "train"
        }
        for name in ("real", "simulated")
    )
    assert real == simulated and any(declined for _, declined, _ in real.values())
