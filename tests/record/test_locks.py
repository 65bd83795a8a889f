"""One process at a time writes what a worker writes into a run folder."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest

from commands import Command, free_port, run
from gossamer.errors import ConfigError
from gossamer.record import locks
from gossamer.record.checkpoint import rounds
from gossamer.record.locks import locked, must_be_idle
from gossamer.run.config.run_file import dump
from gossamer.run.simulated.simulate import simulate
from tiny import single

RUNS = {
    "rounds": {},
    "elastic": {"run__elastic": True},
    "no waiting": {"run__wait": False},
    "server": {"server": {"name": "heloco"}},
}
TUNED = "[tune]\nlr = [1e-3, 2e-3]\nbudget_tokens = 100_000\nrungs = [1.0]\n"


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "ENDING_S", 0.1)


def test_a_second_process_is_refused_until_the_first_has_ended_and_others_are_not(tmp_path: Path) -> None:
    with locked(tmp_path, 3):
        words = f"is in progress, as process {os.getpid()} on .* trains in it; wait for its end, stop it first, or name"
        with pytest.raises(ConfigError, match=words), locked(tmp_path, 3):
            pass
        with pytest.raises(ConfigError, match=words):
            must_be_idle(tmp_path)
        with locked(tmp_path, 3, strict=False), locked(tmp_path, 2), locked(tmp_path, 3, part=1, parts=2):
            pass
    must_be_idle(tmp_path)
    with locked(tmp_path, 3):
        pass


def test_a_process_that_writes_for_all_workers_and_one_of_a_worker_refuse_each_other(tmp_path: Path) -> None:
    for first, second in ((3, None), (None, 3)):
        with (
            locked(tmp_path, first),
            pytest.raises(ConfigError, match=f"as process {os.getpid()} on"),
            locked(tmp_path, second),
        ):
            pass
    must_be_idle(tmp_path)


def test_a_full_disk_does_not_end_what_is_locked(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file may grow, as on a full disk
    try:
        with locked(tmp_path, 3), pytest.raises(ConfigError, match="is in progress"):
            must_be_idle(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_one_that_ends_before_it_has_written_anything_leaves_no_folder_behind(tmp_path: Path) -> None:
    def fails_after(*written: str) -> None:
        with locked(tmp_path / "run", None):
            for name in written:
                (tmp_path / "run" / name).touch()
            raise ConfigError("it cannot work")

    for written in ([], ["run.toml"]):
        with pytest.raises(ConfigError, match="it cannot work"):
            fails_after(*written)
        assert (tmp_path / "run").exists() == bool(written)


def test_where_the_file_system_has_no_locks_no_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path, 0), locked(tmp_path, 0):
        must_be_idle(tmp_path)


def test_a_lock_file_that_says_something_else_is_not_repeated(tmp_path: Path) -> None:
    with locked(tmp_path, None):
        (tmp_path / ".lock").write_text("\x1b[31mred")
        with pytest.raises(ConfigError, match="as another process trains in it"):
            must_be_idle(tmp_path)


def saves_after(round: int, folder: Path, owner: int) -> None:
    """Until a worker, or the server, has saved a later round."""
    for _ in range(1000):
        if (folder / "checkpoints").exists() and max(rounds(folder / "checkpoints", owner), default=0) > round:
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing is saved after round {round}: {[*folder.glob('checkpoints/*')]}")


@pytest.mark.sampled(2)
@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_in_progress_is_not_resumed_a_second_time_and_continues(kind: str, tmp_path: Path) -> None:
    more = {"run__steps": 100_000, "run__checkpoint_every": 4, "run__eval_every": 0, "run__timeout_s": 30.0}
    (tmp_path / "run.toml").write_text(dump(single(**more, **RUNS[kind])))
    folder = tmp_path / "real"
    first = Command("train", tmp_path / "run.toml", "--out", folder, "--local", 3)
    owner = 3 if kind == "server" else 1
    saves_after(0, folder, owner)
    for words in (["--resume", folder], [tmp_path / "run.toml", "--out", folder]):
        code, output = run("train", *words, "--local", 3)
        assert code == 2 and f"the run in '{folder}' is in progress, as process " in output, output
        assert len(output.splitlines()) == 1, output
    code, output = run("simulate", "--resume", folder)
    assert code == 2 and f"the run in '{folder}' is in progress, as process " in output, output
    saves_after(max(rounds(folder / "checkpoints", owner)) + 8, folder, owner)
    os.kill(first.pid, signal.SIGTERM)
    code, output = first.finish()
    assert code == 130 and "Traceback" not in output, output
    must_be_idle(folder)


def test_a_worker_on_its_own_machine_refuses_to_train_what_another_process_here_trains(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump(single(workers=1, run__elastic=True)))
    with locked(tmp_path / "real", 0):
        words = ("--rank", 0, "--of", 1, "--address", f"127.0.0.1:{free_port()}")
        code, output = Command("train", tmp_path / "run.toml", "--out", tmp_path / "real", *words).finish()
        assert code == 2 and f"as process {os.getpid()} on" in output, output
        code, output = run("simulate", tmp_path / "run.toml", "--out", tmp_path / "simulated")
        assert code == 0, output
    with locked(tmp_path / "simulated", None):
        code, output = run("simulate", "--resume", tmp_path / "simulated")
        assert code == 2 and f"as process {os.getpid()} on" in output, output


def test_a_replay_refuses_a_folder_that_another_process_writes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump(single()))
    with locked(tmp_path / "again", None):
        code, output = run("simulate", tmp_path / "run.toml", "--out", tmp_path / "again", "--replay", tmp_path)
        assert code == 2 and f"as process {os.getpid()} on" in output, output


@pytest.mark.parametrize(("verb", "more"), [("compare", ""), ("tune", TUNED)])
def test_an_experiment_under_way_is_not_begun_or_resumed_a_second_time(verb: str, more: str, tmp_path: Path) -> None:
    variant = '[[variant]]\nlabel = "GASLoC"\nrule.name = "gasloc"\n'
    (tmp_path / "some.toml").write_text(dump(single()) + variant + more)
    with locked(tmp_path / "some", None):
        for resume in ([], ["--resume"]):
            code, output = run(verb, tmp_path / "some.toml", "--out", tmp_path / "some", *resume)
            assert code == 2 and f"'{tmp_path / 'some'}' is in progress, as process {os.getpid()} on" in output, output


def test_a_simulation_under_way_is_not_resumed_from_python(tmp_path: Path) -> None:
    simulate(single(), tmp_path, until=1)
    with locked(tmp_path, None), pytest.raises(ConfigError, match="is in progress"):
        simulate(single(), tmp_path, resume=True)
    assert simulate(single(), tmp_path, resume=True).over


def test_a_simulation_in_python_does_not_continue_while_another_process_has_its_folder(tmp_path: Path) -> None:
    run_here = simulate(single(), tmp_path, until=1)
    with locked(tmp_path, None), pytest.raises(ConfigError, match="is in progress"):
        run_here.go_on()
    assert run_here.rounds == 1 and run_here.go_on().over
