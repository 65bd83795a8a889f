"""Runs in rounds with [peers]: machines start together over encrypted connections, and what ends one worker ends all."""

import base64
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Command, free_port, run
from gossamer.errors import ConfigError, PairingError, RefusedError
from gossamer.record import checkpoint
from gossamer.record.addresses import read_addresses
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import RunConfig, digest, dump
from gossamer.run.simulated.simulate import simulate
from gossamer.transport.keys import Keys, Peer, certificate_of, new_key
from gossamer.transport.sockets.handshake import dial
from tiny import tiny

pytestmark = [pytest.mark.usefixtures("forks"), pytest.mark.timeout(200)]
N, EVERY = 3, 2


def listed(key: Path, workers: int) -> dict[str, object]:
    """What a run file says of the owner of a key."""
    return {"certificate": base64.b64encode(certificate_of(key)).decode(), "workers": workers}


class Machines:
    """Three processes on loopback: two of the key of one machine, and one of another's."""

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, free_port()
        self.keys = {name: new_key(name, root / f"{name}.pem") for name in ("berlin", "paris", "stranger")}
        self.peers = {"berlin": listed(self.keys["berlin"], 2), "paris": listed(self.keys["paris"], 1)}
        self.config = tiny(
            workers=N,
            peers=self.peers,
            run__steps=48,
            topology__name="ring",
            run__checkpoint_every=2 * EVERY,
            run__timeout_s=30.0,
        )
        (root / "run.toml").write_text(dump(self.config))
        self.commands: list[Command] = []

    def folder(self, worker: int) -> Path:
        """Each has its own disk."""
        return self.root / f"out{worker}"

    def start(self, worker: int, *words: object) -> Command:
        where = ("--join" if worker else "--listen", f"127.0.0.1:{self.port}")
        key = str(self.keys["paris" if worker == 2 else "berlin"])
        self.commands.append(Command("train", *words, *where, GOSSAMER_KEY=key, OMP_NUM_THREADS="1"))
        return self.commands[-1]

    def start_all(self, *words: object, resumed: bool = False) -> list[Command]:
        """All three: in new folders, so slowly that a test can act amid the run, or from their folders."""
        self.port = free_port()
        if resumed:
            return [self.start(w, "--resume", self.folder(w), *words) for w in range(N)]
        new = (self.root / "run.toml", "--set", "run.pace_s=0.4", "--out")
        return [self.start(w, *new, self.folder(w)) for w in range(N)]

    def saved(self, worker: int) -> list[int]:
        """The rounds of its checkpoints."""
        return [int(path.name.removeprefix("round-")) for path in self.folder(worker).glob("checkpoints/round-*")]

    def until_saved(self, round: int) -> None:
        """Waits until all have a checkpoint of this round or a later one."""
        deadline = time.monotonic() + 120.0
        while not all(max(self.saved(w), default=0) >= round for w in range(N)):
            assert time.monotonic() < deadline, ["".join(one._output) for one in self.commands]
            time.sleep(0.05)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    pytest.importorskip("cryptography")
    made = Machines(tmp_path)
    yield made
    for one in made.commands:
        one.kill()


def test_machines_with_keys_start_stop_and_die_together_and_resume_to_the_bits_of_the_simulation(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = machines.start_all()
    machines.until_saved(EVERY)
    # Each worker says how far all are, though the folder of each has its own lines alone.
    monkeypatch.setenv("GOSSAMER_KEY", str(machines.keys["berlin"]))
    monkeypatch.setattr("gossamer.report.reading.status.PATIENCE_S", 60.0)  # all answer, on a busy machine late
    _, output = run("status", machines.folder(0), "--json")
    status = json.loads(output.splitlines()[-1])
    assert status["answered"] == [0] and [one["standing"] for one in status["workers"]] == ["alive"] * N, status
    assert all(one["round"] > 0 for one in status["workers"]), status
    # Neither the store nor a worker talks to a key that is not listed.
    everyone = {**machines.peers, "stranger": listed(machines.keys["stranger"], 1)}
    stranger = Keys(machines.keys["stranger"], {name: Peer(**one) for name, one in everyone.items()}, N + 1)  # type: ignore[arg-type]
    for address in (f"127.0.0.1:{machines.port}", read_addresses(machines.folder(1))[0].address):
        with pytest.raises(RefusedError, match="refused the key of this machine"):
            dial(address, b"", run=0, me=N, timeout_s=5.0, keys=stranger).close()
    os.kill(started[2].pid, signal.SIGTERM)
    ends = [one.finish() for one in started]
    assert [code for code, _ in ends] == [130] * N, ends
    [stopped] = {max(machines.saved(w)) for w in range(N)}
    assert f"stopped after round {stopped} of {machines.config.length.rounds}, and saved" in ends[2][1], ends

    running = machines.start_all(resumed=True)
    machines.until_saved(stopped + EVERY)
    running[2].kill()
    ends = [one.finish() for one in running]
    assert [code for code, _ in ends] == [2, 2, -signal.SIGKILL], ends
    assert all("worker 2 closed its connection in round" in output for _, output in ends[:2]), ends

    ends = [one.finish() for one in machines.start_all("--set", "run.pace_s=0.0", resumed=True)]
    assert [code for code, _ in ends] == [0] * N, ends
    simulate(machines.config, machines.root / "simulated")
    for worker in range(N):
        ours, theirs = (
            checkpoint.load(folder / "checkpoints", machines.config.length.rounds, worker, digest(machines.config))["x"]
            for folder in (machines.folder(worker), machines.root / "simulated")
        )
        assert torch.equal(ours, theirs)


def test_a_key_joins_as_its_own_workers_alone_and_a_run_that_waits_in_vain_names_the_missing_workers(
    machines: Machines,
) -> None:
    words = (machines.root / "run.toml", "--set", "run.timeout_s=4.0", "--out")
    for worker, place in ((0, 0), (1, 1), (3, 1)):  # the key has two workers, and is in the run three times
        machines.start(place, *words, machines.folder(worker))
    ends = [one.finish() for one in machines.commands]
    assert [code for code, _ in ends] == [2] * N, ends
    assert "worker 2 did not come within 4 s, and the run needs 3" in ends[0][1], ends
    assert any("worker 0, 1, which this machine's key may be, is in the run already" in output for _, output in ends), (
        ends
    )


@pytest.mark.parametrize("elastic", [False, True])
def test_workers_that_are_numbered_over_machines_meet_behind_their_keys(machines: Machines, elastic: bool) -> None:
    file, of_two = machines.root / "run.toml", {**machines.peers, "berlin": listed(machines.keys["berlin"], 1)}
    file.write_text(dump(tiny(workers=2, peers=of_two, run__steps=8, run__timeout_s=30.0, run__elastic=elastic)))
    address, words = f"127.0.0.1:{machines.port}", ("train", file, "--of", 2, "--out")
    for rank, key in enumerate(("berlin", "paris")):
        place = (machines.folder(rank), "--rank", rank, "--address", address)
        machines.commands.append(Command(*words, *place, GOSSAMER_KEY=str(machines.keys[key]), OMP_NUM_THREADS="1"))
    stranger = {"GOSSAMER_KEY": str(machines.keys["paris"]), "OMP_NUM_THREADS": "1"}
    code, output = Command(*words, machines.folder(2), "--rank", 0, "--address", address, **stranger).finish()  # type: ignore[arg-type]
    assert code == 2 and "with the workers 1, and this process is worker 0" in output, output
    ends = [one.finish() for one in machines.commands]
    assert [code for code, _ in ends] == [0, 0], ends
    assert not any("not encrypted" in output or "no secret" in output for _, output in ends), ends


def refusal(config: RunConfig) -> str:
    with pytest.raises((PairingError, ConfigError)) as error:
        resolve(config, real=True)
    return str(error.value)


def test_what_goes_over_a_process_group_is_refused_by_name_with_keys(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    peers = {"here": listed(new_key("here", tmp_path / "key.pem"), N)}
    staged: dict[str, Any] = {"pipeline__stages": 2, "data__accumulate": 2, "model__layers": 2}
    cases: Sequence[tuple[dict[str, Any], str]] = (
        (
            {"run__reduction": "all_reduce", "rule__name": "local_sgd", "topology__name": "complete"},
            "reduction is 'all_reduce'",
        ),
        (staged, "the run has [peers] and pipeline.stages is 2"),
        ({"run__shards": 2}, "the run has [peers] and run.shards is 2"),
    )
    for changes, sentence in cases:
        assert sentence in refusal(tiny(workers=N, peers=peers, **changes)), changes
    key = {"GOSSAMER_KEY": str(tmp_path / "key.pem")}
    (tmp_path / "run.toml").write_text(dump(tiny(workers=N, peers=peers, run__backend="nccl")))
    launched = {"RANK": "0", "WORLD_SIZE": str(N), "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "1", **key}
    code, output = Command("train", tmp_path / "run.toml", **launched).finish()
    assert code == 2 and "run.backend is 'nccl', which cannot encrypt" in output
    (tmp_path / "run.toml").write_text(dump(tiny(workers=N, peers=peers)))
    code, output = Command("train", tmp_path / "run.toml", **launched, TORCHELASTIC_USE_AGENT_STORE="True").finish()
    assert code == 2 and "(torchrun) has a store at MASTER_ADDR = '192.0.2.7' that cannot encrypt" in output, output
    (tmp_path / "run.toml").write_text(dump(tiny(workers=N)))
    for option in ("--listen", "--join"):
        code, output = run("train", tmp_path / "run.toml", option, "127.0.0.1:9")
        assert code == 2 and "has neither [peers] nor run.elastic = true, so nobody can join it" in output
