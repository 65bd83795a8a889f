"""A listed member that lies costs the others its own share, and neither their states nor their run."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import liars
from commands import Command, free_port, run
from gossamer.cli import main
from gossamer.record import checkpoint
from gossamer.record.logs.outcomes import read_outcomes
from gossamer.run.config.run_file import RunConfig, digest, dump
from gossamer.transport.processes.local import run_local
from tiny import single

NAMES = ("berlin", "paris", "rome")
ROUNDS = 12


class Machines:
    """Three machines with a key each; their workers join one after the other and share a run folder."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder, self.config, self.address = folder / "run", config, f"127.0.0.1:{free_port()}"
        self.file = folder / "run.toml"
        self.file.write_text(dump(config))
        self.keys = [folder / f"{name}.pem" for name in NAMES]
        self.commands = dict[int, Command]()

    def start(self, worker: int, work: Callable[[Sequence[str]], int]) -> None:
        words: list[object] = ["train", self.file, "--out", self.folder, "--key", self.keys[worker]]
        words += ["--local", 1, "--listen", self.address] if worker == 0 else ["--join", self.address]
        self.commands[worker] = Command(*words, work=work)

    def until(self, worker: int, holds: Callable[[str], bool], timeout_s: float = 90.0) -> None:
        """Waits until what a worker has printed so far `holds`."""
        deadline, command = time.monotonic() + timeout_s, self.commands[worker]
        while not holds("".join(command._output)):
            assert time.monotonic() < deadline and command._process.exitcode is None, command.finish(0)
            time.sleep(0.05)

    def until_closed(self, worker: int, round: int) -> None:
        """Waits until a worker has closed a round."""
        log = self.folder / f"outcomes-{worker:03}.jsonl"
        self.until(worker, lambda _: log.exists() and f'"event":"round","round":{round},' in log.read_text())

    def x(self, folder: Path, worker: int) -> torch.Tensor:
        return checkpoint.load(folder / "checkpoints", self.config.length.rounds, worker, digest(self.config))["x"]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machines]]:
    pytest.importorskip("cryptography")
    made = list[Machines]()

    def of(**settings: Any) -> Machines:
        peers = {}
        for name in NAMES:
            code, output = run("keys", "new", name, "--out", tmp_path / f"{name}.pem", "--json")
            assert code == 0, output
            peers[name] = {"certificate": json.loads(output)["keys"][0]["certificate"]}
        config = single(
            run__elastic=True,
            run__steps=2 * ROUNDS,
            run__eval_every=0,
            run__timeout_s=20,
            rule__name="diloco",
            topology__name="complete",
            peers=peers,
            **settings,
        )
        made.append(Machines(tmp_path, config))
        monkeypatch.setenv("GOSSAMER_KEY", str(made[-1].keys[0]))
        monkeypatch.setattr("gossamer.report.reading.status.PATIENCE_S", 60.0)  # all answer, on a busy machine late
        return made[-1]

    yield of
    for one in made:
        for command in one.commands.values():
            command.kill()
            command.finish(1)


def test_a_worker_that_claims_to_be_ahead_is_left_out_and_named_and_the_others_keep_their_states(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    some = machines()
    joined, lied, looked = (tmp_path / name for name in ("joined", "lied", "looked"))
    honest = partial(liars.held, {2: joined, liars.FROM_ROUND + 1: lied, ROUNDS - 1: looked})
    some.start(0, partial(honest, main))
    some.until(0, lambda printed: "listens on" in printed)
    some.start(1, partial(honest, main))
    some.start(2, partial(liars.ahead, lied))
    some.until(2, lambda printed: "joins at round" in printed)
    joined.touch()
    some.until(0, lambda printed: "worker 2 says that it is in round" in printed)
    code, shown = run("status", some.folder)
    assert code == 0 and "worker 2: ahead of the others" in shown, shown
    looked.touch()
    printed = {}
    for worker in range(2):
        code, printed[worker] = some.commands[worker].finish(120)
        # Before it lies it may give its state to one that was late; the last such state is that with which it enters its round.
        taken = [int(after) for after in re.findall(r"takes the state of worker 2 after round (\d+)", printed[worker])]
        assert code == 0 and all(after <= liars.FROM_ROUND for after in taken), printed[worker]
    assert "alone; worker 0 keeps its own state, and does not wait for it" in printed[0]
    (life,) = read_outcomes(some.folder)[0]  # another one would begin with another's state
    assert [one.round for one in life.rounds] == [*range(some.config.length.rounds)]
    assert {one.alive for one in life.rounds if one.round > liars.FROM_ROUND + 1} == {frozenset({0, 1})}
    # As in a run from which the liar was absent since: the log says so, and from it the bits follow.
    code, shown = run("simulate", "--replay", some.folder, "--out", tmp_path / "again")
    assert code == 0, shown
    for worker in range(2):
        assert torch.equal(some.x(some.folder, worker), some.x(tmp_path / "again", worker))


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("over", ["sockets", "a store"])
def test_a_clock_that_jumps_by_an_hour_changes_no_bit(over: str, tmp_path: Path) -> None:
    means = {"rule__name": "diloco", "topology__name": "complete", "run__elastic": True}
    config = single(workers=2, run__steps=16, run__eval_every=0, run__timeout_s=20, **means)
    (tmp_path / "run.toml").write_text(dump(config))
    words = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]
    if over == "sockets":
        assert run_local(2, liars.wrong_clock, words) == 0
    else:
        stored = [*words, "--store", str(tmp_path / "store")]
        for one in (Command(*stored), Command(*stored, work=liars.wrong_clock)):
            code, output = one.finish(120)
            assert code == 0, output
    code, shown = run("simulate", "--replay", tmp_path / "run", "--out", tmp_path / "again")
    assert code == 0, shown
    assert len(read_outcomes(tmp_path / "run")) == 2
    for worker in range(2):
        real, again = (
            checkpoint.load(tmp_path / name / "checkpoints", config.length.rounds, worker, digest(config))["x"]
            for name in ("run", "again")
        )
        assert torch.equal(real, again)


@pytest.mark.parametrize("liar", [liars.no_line, liars.bad_inner], ids=["no line", "bad inner"])
def test_a_newcomer_does_not_take_a_state_that_does_not_fit_and_asks_another(
    machines: Callable[..., Machines], liar: Callable[[Sequence[str]], int], tmp_path: Path
) -> None:
    some = machines()
    joined = tmp_path / "joined"
    held = partial(liars.held, {liars.FROM_ROUND + 2: joined})
    some.start(0, partial(liars.started_by, partial(held, liar)))
    some.until(0, lambda output: "listens on" in output)
    some.start(1, partial(held, main))
    some.until_closed(1, liars.FROM_ROUND + 1)
    some.start(2, main)
    some.until(2, lambda output: "joins at round" in output)
    joined.touch()
    code, output = 0, ""
    for worker in range(3):
        code, output = some.commands[worker].finish(120)
        assert code == 0 and "Traceback" not in output, output
    assert "worker 2 does not take the state that worker 0 gave: " in output, output
    assert "worker 2 takes the state of worker 1 after round" in output and "checkpoint" not in output.lower(), output
    assert "word alone" not in output, output  # both have the same parameters and outer state
    assert torch.equal(some.x(some.folder, 1), some.x(some.folder, 2))
