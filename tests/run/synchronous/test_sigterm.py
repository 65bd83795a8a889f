"""Signals to stop: all workers of a run save after one and the same round, and the run continues from it to the same bits."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomli_w
import torch

from commands import Command, Work, free_port, must_have_stages_in_processes, run, until
from gossamer import stop_signals
from gossamer.cli import main
from gossamer.record import checkpoint
from gossamer.run.bookkeeping.journal import Journal
from gossamer.run.config.run_file import digest, dump
from gossamer.run.simulated.simulate import simulate
from gossamer.transport.processes import stopping
from gossamer.transport.processes.local import run_local
from tiny import document, tiny

pytestmark = pytest.mark.usefixtures("forks")

ROUNDS = 40
CASES = {
    "gossip": {},
    "a mean of all": {"rule__name": "diloco", "topology__name": "complete"},
    "messages in flight": {"schedule__overlap_steps": 1},
    "stages": {"workers": 2, "pipeline__stages": 2, "data__accumulate": 2, "model__layers": 2},
}


def train_but_stop_one(argv: Sequence[str]) -> int:
    """`gossamer train`, of which one process is asked to stop in round 3; the others look so often that none is far ahead."""
    stopping.LOOK_S = 0.02

    def log(self: Journal, worker: object, round: int, report: object, real=Journal.log) -> None:
        real(self, worker, round, report)
        if round == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "1":
        Journal.log = log
    return main(argv)


def saved(folder: Path) -> list[int]:
    """The rounds of all checkpoints of a run."""
    return sorted({int(path.name.removeprefix("round-")) for path in (folder / "checkpoints").glob("**/round-*")})


def scored(folder: Path) -> dict[str, object]:
    """What `gossamer evaluate` finds after the last round, but for where it has put the model."""
    code, output = run("evaluate", folder, "--json")
    assert code == 0, output
    return {key: value for key, value in json.loads(output.splitlines()[-1]).items() if key not in ("folder", "model")}


@pytest.mark.sampled(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES)
def test_a_run_of_which_one_process_gets_sigterm_saves_a_round_of_all_and_resumes_to_the_same_bits(
    tmp_path: Path, case: str
) -> None:
    config = tiny(**{"run__steps": 2 * ROUNDS, "run__checkpoint_every": ROUNDS, "run__eval_every": 0, **CASES[case]})
    if config.pipeline.stages != 1:
        must_have_stages_in_processes()
    (tmp_path / "run.toml").write_text(dump(config))
    folder, errors = tmp_path / "real", io.StringIO()
    words = ["train", str(tmp_path / "run.toml"), "--out", str(folder)]
    with contextlib.redirect_stderr(errors):
        code = run_local(config.workers, train_but_stop_one, words, parts=config.pipeline.stages)
    assert code == 130, errors.getvalue()
    [stopped] = saved(folder)
    assert 3 < stopped < ROUNDS
    assert f"stopped after round {stopped} of {ROUNDS}, and saved; resume with --resume {folder}" in errors.getvalue()
    assert "Traceback" not in errors.getvalue()
    code, output = run("train", "--resume", folder, "--local", config.workers)
    assert code == 0, output
    assert saved(folder)[-1] == ROUNDS
    simulate(config, tmp_path / "whole")
    assert scored(folder) == scored(tmp_path / "whole")
    if config.pipeline.stages == 1:
        for w in range(config.workers):
            ends = [
                checkpoint.load(one / "checkpoints", ROUNDS, w, digest(config))["x"]
                for one in (folder, tmp_path / "whole")
            ]
            assert torch.equal(*ends)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("launcher", [True, False])
def test_sigterm_ends_processes_of_a_run_with_130_under_every_launcher(tmp_path: Path, launcher: bool) -> None:
    config = tiny(run__steps=100_000, run__checkpoint_every=50_000, run__eval_every=0)
    (tmp_path / "run.toml").write_text(dump(config))
    folder = tmp_path / "real"
    words = ("train", tmp_path / "run.toml", "--out", folder)
    port = free_port()
    started = (
        [Command(*words, "--local", config.workers)]
        if launcher
        else [
            Command(*words, "--rank", i, "--of", config.workers, "--address", f"127.0.0.1:{port}")
            for i in range(config.workers)
        ]
    )
    asked = started[-1]  # of three workers the last: worker 0 has their store
    wait_for_a_round(folder)
    os.kill(asked.pid, signal.SIGTERM)
    ends = [one.finish() for one in started]
    assert [code for code, _ in ends] == [130] * len(started), ends
    assert len(saved(folder)) == 1, ends
    assert all("resume with --resume" in output and "Traceback" not in output for _, output in ends), ends


def wait_for_a_round(folder: Path) -> None:
    """Until each worker has recorded one."""
    for _ in range(2000):
        logs = [path.read_text() for path in folder.glob("metrics-*.jsonl")]
        if len(logs) == 3 and all('"train"' in log for log in logs):
            return
        time.sleep(0.05)
    raise AssertionError(f"they do not train: {[*folder.glob('*')]}")


def simulate_but_stop(argv: Sequence[str]) -> int:
    """`gossamer simulate`, which is asked to stop in its fifth round."""

    def end_round(self: Journal, finished: int, real=Journal.end_round, **behind: object) -> None:
        real(self, finished, **behind)
        if finished == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    Journal.end_round = end_round
    return main(argv)


@pytest.mark.full
@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", ["in rounds", "over virtual time"])
def test_a_simulation_that_gets_sigterm_saves_after_its_round_and_resumes_to_the_same_bits(
    tmp_path: Path, kind: str
) -> None:
    timed = {"run__wait": False, "network": {"clock": {"step_s": 1.0, "uplink_bps": 1e6, "downlink_bps": 1e6}}}
    more = timed if kind == "over virtual time" else {}
    config = tiny(run__steps=40, run__checkpoint_every=20, run__eval_every=0, **more)
    (tmp_path / "run.toml").write_text(dump(config))
    words = ("simulate", tmp_path / "run.toml", "--out", tmp_path / "real")
    code, output = Command(*words, work=simulate_but_stop).finish()
    assert code == 130 and "stopped after round 5 of 20, and saved; resume with --resume" in output, output
    assert saved(tmp_path / "real") == [5]
    code, output = run("simulate", "--resume", tmp_path / "real")
    assert code == 0, output
    simulate(config, tmp_path / "whole")
    assert scored(tmp_path / "real") == scored(tmp_path / "whole")


PTY = """
import os, pty, select, signal, sys, time
from pathlib import Path
from gossamer import stop_signals
from gossamer.cli import main
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which is ignored where the tests were started by nohup
pid, terminal = pty.fork()
if pid == 0:
    code = main(sys.argv[3:])
    os._exit(code)  # as the shutdown of Python would be part of the test otherwise
seen, folder, logs = b"", Path(sys.argv[1]), int(sys.argv[2])
while sum('"train"' in path.read_text() for path in folder.glob("metrics*.jsonl")) < logs:  # each worker trains
    if select.select([terminal], [], [], 0.05)[0]:
        seen += os.read(terminal, 65536)
os.close(terminal)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.sampled(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("verb", ["train", "simulate"])
def test_a_run_whose_terminal_is_closed_saves_and_can_be_resumed(tmp_path: Path, verb: str) -> None:
    config = tiny(run__steps=100_000, run__checkpoint_every=50_000, run__eval_every=0)
    (tmp_path / "run.toml").write_text(dump(config))
    folder = tmp_path / "real"
    local = ["--local", str(config.workers)] if verb == "train" else []
    words = [verb, str(tmp_path / "run.toml"), "--out", str(folder), *local]
    logs = config.workers if verb == "train" else 1
    done = subprocess.run([sys.executable, "-c", PTY, str(folder), str(logs), *words], capture_output=True, text=True)
    assert done.stdout.split() == ["130"] and saved(folder), (done.stderr, sorted(folder.rglob("*")))
    [stopped] = saved(folder)
    owners = {path.name for path in (folder / "checkpoints" / f"round-{stopped:06}").glob("*.json")}
    assert owners == {f"worker-{i:03}.json" for i in range(config.workers)}


ECHO = """
import os, pty, signal
from gossamer.record.progress import echo
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as where a write fails before the signal has come
terminal, end = pty.openpty()
os.dup2(end, 1)
os.close(end)
os.close(terminal)
echo("a line", flush=True)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
try:
    echo("a line", flush=True)
except OSError:
    os._exit(7)
"""


def test_a_line_for_a_terminal_that_is_gone_is_dropped_and_any_other_failed_write_is_not() -> None:
    assert subprocess.run([sys.executable, "-c", ECHO], timeout=60).returncode == 7


def interrupt_often(argv: Sequence[str]) -> int:
    """`gossamer simulate`, which gets six Ctrl-C within one wish in its fifth round and while it saves."""
    stop_signals.ONE_WISH_S = 60.0  # a busy machine may take longer than a second for all six

    def end_round(self: Journal, finished: int, real=Journal.end_round, **behind: object) -> None:
        real(self, finished, **behind)
        if finished == 5:
            threading.Thread(target=often, daemon=True).start()
            time.sleep(0.1)

    def often() -> None:
        for _ in range(6):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    Journal.end_round = end_round
    return main(argv)


def interrupt_twice(argv: Sequence[str]) -> int:
    """`gossamer simulate`, which gets Ctrl-C in its fifth round, and once more 1.2 s later, before that is over."""

    def log(self: Journal, worker: object, round: int, report: object, real=Journal.log) -> None:
        real(self, worker, round, report)
        if round == 4:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.2)
            os.kill(os.getpid(), signal.SIGINT)

    Journal.log = log
    return main(argv)


def ignore_a_hangup(argv: Sequence[str]) -> int:
    """`nohup gossamer simulate`, whose terminal is closed in its fifth round."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def end_round(self: Journal, finished: int, real=Journal.end_round, **behind: object) -> None:
        real(self, finished, **behind)
        if finished == 5:
            os.kill(os.getpid(), signal.SIGHUP)

    Journal.end_round = end_round
    return main(argv)


@pytest.mark.timeout(100)
def test_ctrl_c_many_times_within_a_moment_is_one_wish_and_a_second_one_later_ends_at_once(tmp_path: Path) -> None:
    config = tiny(run__steps=40, run__checkpoint_every=20, run__eval_every=0)
    (tmp_path / "run.toml").write_text(dump(config))

    def start(work: Work) -> Command:
        return Command("simulate", tmp_path / "run.toml", "--out", tmp_path / work.__name__, work=work)

    often, twice, ignored = (start(work) for work in (interrupt_often, interrupt_twice, ignore_a_hangup))
    code, output = often.finish()
    assert code == 130 and "stopped after round 5 of 20, and saved; resume with --resume" in output, output
    assert "Traceback" not in output and "asked to stop after this round" in output
    assert saved(tmp_path / "interrupt_often") == [5]
    code, output = twice.finish()
    assert code == 130 and "Traceback" not in output and saved(tmp_path / "interrupt_twice") == [], output
    code, output = ignored.finish()
    assert code == 0 and saved(tmp_path / "ignore_a_hangup")[-1] == 20, output


def compare_but_stop(argv: Sequence[str]) -> int:
    """`gossamer compare`, which gets Ctrl-C in the fifth round of its second run."""
    runs = list[Path]()

    def end_round(self: Journal, finished: int, real=Journal.end_round, **behind: object) -> None:
        real(self, finished, **behind)
        runs.extend({self.record.path} - {*runs})
        if finished == 5 and len(runs) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    Journal.end_round = end_round
    return main(argv)


@pytest.mark.parametrize("after_s", [1.0, 2.5])
def test_ctrl_c_for_all_processes_while_they_start_ends_them_without_a_traceback(
    tmp_path: Path, after_s: float
) -> None:
    """As a terminal sends it; the fork server imports in these seconds."""
    (tmp_path / "run.toml").write_text(dump(tiny(workers=2, run__steps=100_000)))
    words = [sys.executable, "-m", "gossamer", "train", "run.toml", "--local", "2", "--out", "out"]
    started = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    # Before it has its handlers, Python itself would print a traceback.
    catches = lambda: int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{started.pid}/status").read_text())[1], 16)  # type: ignore[index]  # noqa: E731
    until(lambda: bool(catches() >> signal.SIGTERM - 1 & 1))
    time.sleep(after_s)
    os.killpg(started.pid, signal.SIGINT)
    try:
        output, _ = started.communicate(timeout=100)
    finally:
        started.kill()
    # `python -m` ends itself with SIGINT where the interrupt came while text was executed, as dataclasses do on import.
    assert started.returncode in (130, -signal.SIGINT) and "Traceback" not in output, output


@pytest.mark.sampled(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_comparison_that_gets_ctrl_c_saves_the_runs_in_progress_and_continues_them_to_the_same_bits(
    tmp_path: Path, jobs: int
) -> None:
    steps = 40 if jobs == 1 else 200
    config = {**document(run__steps=steps, run__checkpoint_every=steps // 2, run__eval_every=0)}
    variants = [{"label": name, "rule": {"name": name}} for name in ("gossip", "gasloc")]
    file, out = tmp_path / "two.toml", tmp_path / "runs"
    file.write_text(tomli_w.dumps({**config, "variant": variants}))
    words = ("compare", file, "--out", out, "--jobs", jobs)
    if jobs == 1:
        code, output = Command(*words, work=compare_but_stop).finish()
    else:
        started = Command(*words)
        while not all(list(out.glob(f"{name}/metrics.jsonl")) for name in ("gossip", "gasloc")):
            time.sleep(0.05)
        os.kill(started.pid, signal.SIGINT)
        code, output = started.finish()
    assert (
        code == 130 and "the same command with --resume keeps the finished runs and continues the others" in output
    ), output
    assert "Traceback" not in output
    stopped = saved(out / "gasloc")
    assert stopped and stopped[-1] < steps // 2
    code, output = run(*words, "--resume")
    assert code == 0, output
    lines = [json.loads(line) for line in (out / "gasloc" / "metrics.jsonl").read_text().splitlines()]
    assert [one["round"] for one in lines if one["kind"] == "train" and one["worker"] == 0] == [*range(steps // 2)]
    whole = simulate(out / "gasloc" / "run.toml", tmp_path / "whole")
    ended = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()]
    (found,) = (one["row"]["loss"] for one in ended if one["method"] == "gasloc")
    assert found == whole.loss
