"""A real worker whose messages are not finite: the others decline them, name it, and train on."""

import json
import os
from pathlib import Path

import pytest
import torch

from commands import run
from gossamer.cli import main
from gossamer.record.folder import read_metrics
from gossamer.run.asynchronous.message_form import MessageForm
from gossamer.run.config.run_file import dump
from gossamer.run.simulated.rounds import Rounds
from gossamer.testing.attacks import Attacker
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.processes.group import GroupTransport
from gossamer.transport.processes.local import run_local
from tiny import single

BAD = 1
DRIVERS = {
    "in rounds": {},
    "elastic": {"run__elastic": True},
    "without waiting": {"rule__name": "gossip", "run__wait": False, "run__steps": 32},
}


def train_but_send_nan(argv: list[str]) -> int:
    """`gossamer train`, in which every message of worker 1 is NaN, in rounds from round 2 on."""
    if os.environ["RANK"] == str(BAD):
        for kind in (ElasticTransport, GroupTransport):

            def post(self, ticket, peer, frames, real=kind.post):
                real(self, ticket, peer, [torch.nan * frame for frame in frames] if ticket.round >= 2 else frames)

            kind.post = post

        def pack(self, message, number, fragment=0, real=MessageForm.pack):
            decoded, packed = real(self, message, number, fragment)
            return decoded, packed.view(torch.float32).mul(torch.nan).view(torch.uint8)

        MessageForm.pack = pack
    return main(argv)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("forks")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_others_train_to_the_end_and_the_record_and_status_name_who_sent_nan(
    driver: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = single(**{"run__timeout_s": 60.0, "run__steps": 16, "run__eval_every": 0, **DRIVERS[driver]})
    (tmp_path / "run.toml").write_text(dump(config))
    words = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]
    code = run_local(3, train_but_send_nan, words)
    said = str(capfd.readouterr())
    assert code == 0, said
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    if driver != "without waiting":
        assert {line["worker"] for line in lines if line["round"] == 7} >= {0, 2}
    told = {worker for line in lines for worker in line.get("declined", {}) if line["worker"] != BAD}
    assert told == {str(BAD)}, (lines, said)
    assert f"declined what worker {BAD} sent" in said or f"worker {BAD} sent" in said, said
    code, output = run("status", tmp_path / "run", "--json")
    declined = [worker["declined"] for worker in json.loads(output)["workers"]]
    assert code == 0 and declined[BAD] > 0 and declined[0] == declined[2] == 0, output


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
