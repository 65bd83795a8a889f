"""A process that is asked to leave says when it will, saves what it has at once, and ends on the second signal."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from commands import Command, free_port, until
from gossamer import stop_signals
from gossamer.run.config.run_file import dump
from gossamer.stop_signals import Asked, leaving
from tiny import single as tiny

pytestmark = pytest.mark.usefixtures("forks")

SLOW = {
    "workers": 1,
    "run__local_steps": {"0": 2, "2": 30},
    "run__steps": 62,
    "run__checkpoint_every": 100,
    "run__eval_every": 0,
}
"""Three rounds; with a pause in each step, the phases after the first take longer than all that is done to the worker in one."""
KINDS = {
    "elastic": {"run__elastic": True},
    "without waiting": {"run__wait": False, "run__local_steps": 10, "run__steps": 30},  # whose phases are equally long
}


def begun(folder: Path, **overrides: object) -> Command:
    """A worker that no launcher has started, in its second local phase."""
    (folder / "run.toml").write_text(dump(tiny(**{**SLOW, "run__pace_s": 0.8, **overrides})))
    where = ("--rank", 0, "--of", 1, "--address", f"127.0.0.1:{free_port()}")
    worker = Command("train", folder / "run.toml", "--out", folder / "out", *where)
    metrics = folder / "out" / "metrics-000.jsonl"
    until(lambda: metrics.is_file() and '"train"' in metrics.read_text(), worker)
    time.sleep(1.0)  # some steps of it are over
    return worker


def saved(folder: Path) -> list[int]:
    """The rounds of its checkpoints."""
    return sorted({int(path.name.removeprefix("round-")) for path in folder.glob("out/checkpoints/**/round-*")})


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_worker_that_is_asked_twice_ends_amid_its_phase_with_the_state_of_its_last_exchange(
    tmp_path: Path, kind: dict[str, object]
) -> None:
    worker = begun(tmp_path, **kind)
    assert saved(tmp_path) == []
    os.kill(worker.pid, signal.SIGTERM)
    line = next(line for line in worker.lines() if "is asked to leave" in line)
    assert "worker 0 is asked to leave after its round, whose local phase takes about " in line, line
    assert "stop once more to end it at once" in line
    until(lambda: saved(tmp_path) == [1], worker)  # at once: what kills it after a grace asks nobody
    time.sleep(stop_signals.ONE_WISH_S + 0.1)
    os.kill(worker.pid, signal.SIGINT)
    code, output = worker.finish()
    assert code == 130 and "Traceback" not in output, output
    assert "worker 0 has ended amid round 2; its state after round 1 is saved" in output, output
    where = ("--rank", 0, "--of", 1, "--address", f"127.0.0.1:{free_port()}")
    code, output = Command("train", "--resume", tmp_path / "out", "--set", "run.pace_s=0", *where).finish()
    assert code == 0, output
    assert "settings change after round 1" in output and saved(tmp_path) == [1, 3], output


@pytest.mark.timeout(100)
def test_a_worker_in_rounds_says_when_it_will_stop_and_ends_at_once_when_it_is_asked_twice(tmp_path: Path) -> None:
    worker = begun(tmp_path)
    os.kill(worker.pid, signal.SIGTERM)
    assert next(line for line in worker.lines() if "worker 0 is asked to leave after its round, whose" in line)
    time.sleep(stop_signals.ONE_WISH_S + 0.1)
    os.kill(worker.pid, signal.SIGTERM)
    code, output = worker.finish()
    assert code == 130 and "gossamer: stopped" in output and "Traceback" not in output, output


def test_signals_that_come_together_are_one_wish_and_later_ones_are_another(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked("worker 3 is asked to leave after its round")
    began = threading.Event()
    asked.saves = began.set
    handle = stop_signals._handler(asked.signalled)
    for _ in range(3):
        handle(signal.SIGTERM, None)
    assert asked.is_set() and began.wait(10)
    sentence = "gossamer: worker 3 is asked to leave after its round; stop once more to end it at once\n"
    assert capfd.readouterr().err == sentence
    monkeypatch.setattr(stop_signals, "_asked_s", time.monotonic() - 2 * stop_signals.ONE_WISH_S)
    with pytest.raises(KeyboardInterrupt):
        asked.signalled()
    asked.over = True
    asked.signalled()


def test_a_process_that_does_not_train_yet_ends_at_once_and_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with leaving() as asked:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            asked.at_once = True
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)
