"""Real runs as a user starts them: `gossamer train --local N`, workers that die or hang, and what is left afterwards."""

import contextlib
import io
import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_adapt import SMALL
from test_transport import LIMIT_S, a_store_of_its_own, stop_store
from torch.distributed import TCPStore

from commands import run, until
from gossamer.cli import main
from gossamer.data import streams
from gossamer.errors import DataError, PairingError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.seconds import read_seconds
from gossamer.record.logs.trace import read_trace
from gossamer.run.bookkeeping.evaluate import evaluate
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import digest, dump
from gossamer.run.simulated.simulate import simulate
from gossamer.run.synchronous.train import KEPT, _saver
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of
from gossamer.run.worker.worker import Worker
from gossamer.transport.memory import MemoryNetwork
from gossamer.transport.processes.board import Board
from gossamer.transport.processes.local import run_local
from gossamer.transport.processes.store import Entries
from gossamer.transport.processes.waiting import PeerWait
from tiny import DEVICE, single, tiny


def words_of(config, folder):
    """What trains this run with all its workers here."""
    (folder.parent / "run.toml").write_text(dump(config))
    return "train", folder.parent / "run.toml", "--out", folder, "--local", config.workers


def train_to_its_fate(argv):
    """`gossamer train`, in which worker 1 gets this signal right after it has saved this round.

    Only from then on does worker 0 wait for it as briefly as 2 s: they may start long after each other.
    """
    fate, round, *words = argv

    def save(store, finished, *state, real=checkpoint.save, **lineage):
        real(store, finished, *state, **lineage)
        if finished == int(round):
            (store.parent / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.Signals[fate])

    def wait(self, current, missing, real=PeerWait.wait):
        if fate == "SIGSTOP" and current >= int(round):
            self._timeout_s = 2.0
        real(self, current, missing)

    PeerWait.wait = wait
    if os.environ["RANK"] == "1":
        checkpoint.save = save
    return main(words)


def fated(config, folder, fate, round, **options):
    """The exit code and the errors of a run of which worker 1 dies or hangs after this round."""
    errors, words = io.StringIO(), [str(word) for word in words_of(config, folder)[:-2]]
    with contextlib.redirect_stderr(errors):
        code = run_local(config.workers, train_to_its_fate, [fate, str(round), *words], **options)
    return code, errors.getvalue()


def parameters(folder, config):
    return [
        checkpoint.load(folder / "checkpoints", config.length.rounds, w, digest(config))["x"]
        for w in range(config.workers)
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One real run that went well, and the simulation of it."""
    root = tmp_path_factory.mktemp("train")
    config = single(run__steps=8, run__timeout_s=60)
    code, output = run(*words_of(config, root / "real"))
    assert code == 0, output
    simulate(config, root / "simulated")
    return root, config, output


def test_a_real_run_leaves_what_its_simulation_leaves(finished):
    root, config, output = finished
    assert all(map(torch.equal, parameters(root / "real", config), parameters(root / "simulated", config)))
    own = {
        (line["worker"], line["round"]): line["loss"] for line in read_metrics(root / "real") if line["kind"] == "train"
    }
    simulated = {
        (line["worker"], line["round"]): line["loss"]
        for line in read_metrics(root / "simulated")
        if line["kind"] == "train"
    }
    assert own == simulated
    for ours, theirs in zip(read_trace(root / "real").messages, read_trace(root / "simulated").messages, strict=True):
        assert (ours == theirs).all()
    untrained = [line for line in read_metrics(root / "real") if line["kind"] == "validation" and line["round"] < 0]
    scored = [line for line in read_metrics(root / "simulated") if line["kind"] == "eval" and line["round"] < 0]
    assert [line["worker"] for line in untrained] == [*range(config.workers)]
    assert {line["loss"] for line in untrained} == {line["loss"] for line in scored}
    assert output.count("tiny: round 4 of 4  loss") == 1
    # A first round of some seconds has separate lines; a busy machine shows that validation beside the first round.
    assert "tiny: round 0 of 4  val" in output or "(round 0)" in output


def test_a_real_run_that_is_simulated_further_has_the_seconds_of_each_round_once(finished, tmp_path):
    root, config, _ = finished
    shutil.copytree(root / "real", tmp_path / "on")
    measured = read_seconds(tmp_path / "on")
    simulate(single(run__steps=12, run__timeout_s=60), tmp_path / "on", resume=True)
    seconds = read_seconds(tmp_path / "on")
    assert [(one.round, one.worker) for one in seconds] == [(r, w) for r in range(6) for w in range(config.workers)]
    assert seconds[: len(measured)] == measured
    for worker in range(config.workers):
        ends_s = [one.end_s for one in seconds if one.worker == worker]
        assert ends_s == sorted(ends_s)


def test_evaluate_forms_the_mean_model_that_the_simulator_scored(finished):
    root, config, _ = finished
    round, result, _ = evaluate(root / "real")
    scored = [line for line in read_metrics(root / "simulated") if line["kind"] == "eval"][-1]
    assert round == config.length.rounds
    assert (result.loss, list(result.worker_losses)) == (scored["loss"], scored["worker_losses"])
    # A GPU sums the squares of one worker otherwise than those of three in one tensor.
    disagreement = scored["disagreement"] if DEVICE == "cpu" else pytest.approx(scored["disagreement"], rel=1e-9)
    assert result.disagreement == disagreement
    assert (root / "real" / "model" / "config.json").exists()
    evaluate(root / "real")
    assert sum(line["kind"] == "eval" for line in read_metrics(root / "real")) == 1


def test_workers_that_resume_a_run_that_has_ended_say_so_once_and_leave_it_as_it_is(finished, capfd):
    root, config, _ = finished
    before = {path: path.read_bytes() for path in (root / "real").glob("*.jsonl")}
    assert run_local(config.workers, main, ["train", "--resume", str(root / "real")]) == 0
    assert (
        capfd.readouterr().err.count(f"the run has ended after {config.length.rounds} rounds; gossamer evaluate") == 1
    )
    assert {path: path.read_bytes() for path in (root / "real").glob("*.jsonl")} == before


@pytest.mark.full
@pytest.mark.timeout(900)  # a busy machine compiles for minutes
def test_compiled_workers_compute_what_their_compiled_simulation_computes(tmp_path):
    options = {"workers": 2, "inner__compile": True, "inner__autocast": "bf16", "run__steps": 4, "run__eval_every": 0}
    config = single(**options, run__timeout_s=300)
    code, output = run(*words_of(config, tmp_path / "real"))
    assert code == 0, output
    simulate(config, tmp_path / "simulated")
    pairs = zip(parameters(tmp_path / "real", config), parameters(tmp_path / "simulated", config), strict=True)
    assert all(torch.equal(*pair) if DEVICE == "cpu" else torch.allclose(*pair, rtol=0, atol=2e-3) for pair in pairs)
    plain = single(**{**options, "inner__compile": False})
    simulate(plain, tmp_path / "plain")
    for ours, theirs in zip(parameters(tmp_path / "real", config), parameters(tmp_path / "plain", plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)  # two steps of Adam at most
        assert not torch.equal(ours, theirs)


def test_all_reduce_as_an_option_agrees_within_rounding(tmp_path):
    options = {"rule__name": "diloco", "topology__name": "complete", "run__steps": 4, "run__timeout_s": 60}
    config = single(**options, run__reduction="all_reduce")
    code, output = run(*words_of(config, tmp_path / "reduced"))
    assert code == 0, output
    simulate(single(**options), tmp_path / "ordered")
    ours, theirs = parameters(tmp_path / "reduced", config), parameters(tmp_path / "ordered", single(**options))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(ours[0], x) for x in ours)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rule__name": "diloco", "topology__name": "complete", "codec": {"name": "int8"}},
        {"rule__name": "diloco", "topology__name": "complete", "codec": {"name": "exact", "back": "bf16"}},
    ],
)
def test_an_all_reduce_that_nothing_would_use_is_refused(options):
    with pytest.raises(PairingError, match="takes no mean that the backend can compute"):
        resolve(tiny(**options, run__reduction="all_reduce"))


def test_a_killed_worker_ends_the_others_with_its_name_and_the_run_resumes_to_the_same_bits(tmp_path):
    """With fragments in flight; `test_resume` kills a worker of a run without."""
    streaming = {"run__local_steps": 4, "schedule__fragments": 2, "schedule__overlap_steps": 3}
    config = tiny(run__steps=20, run__timeout_s=60, workers=3, model__layers=2, **streaming)
    began = time.monotonic()
    code, output = fated(config, tmp_path / "real", "SIGKILL", 3)
    assert time.monotonic() - began < 120  # no survivor waits for its timeout more than once
    assert code == 128 + signal.SIGKILL, output
    for survivor in (0, 2):
        printed = [line for line in output.splitlines() if line.startswith(f"[{survivor}] gossamer: ")]
        assert len(printed) == 1 and "worker 1" in printed[0] and "round" in printed[0], output
    assert "Traceback" not in output

    code, output = run("train", "--resume", tmp_path / "real", "--local", 3)
    assert code == 0, output
    simulate(config, tmp_path / "simulated")
    assert all(map(torch.equal, parameters(tmp_path / "real", config), parameters(tmp_path / "simulated", config)))


def test_a_worker_that_hangs_ends_the_others_within_the_timeout(tmp_path):
    config = single(run__steps=8, run__timeout_s=60, workers=2, topology__name="complete")
    code, output = fated(config, tmp_path / "real", "SIGSTOP", 1, grace_s=0.5)
    assert (
        time.time() - (tmp_path / "real" / "pid").stat().st_mtime < 2 + 40
    )  # the timeout, and what a busy machine needs
    printed = next(line for line in output.splitlines() if line.startswith("[0] gossamer: "))
    assert "worker 1 did not answer for 2 s in round" in printed
    assert code == 2  # the launcher ends the stopped worker
    assert not os.path.exists(f"/proc/{(tmp_path / 'real' / 'pid').read_text()}")


def train_in_own_folder(argv):
    os.chdir(Path(argv[0]) / os.environ["RANK"])
    return main(["train", "run.toml", "--out", f"{argv[0]}/run"])


def test_a_store_that_stands_still_bounds_the_checkpoints_and_one_that_continues_decides_again(tmp_path, caplog):
    config = tiny(workers=2, **{f"model__{name}": size for name, size in SMALL.items()})
    m = resolve(config, real=True).in_rounds
    replica = Replica(0, settings_of(config), task_of(settings_of(config)), torch.device("cpu"))
    worker = Worker(replica, m, MemoryNetwork(2).transport(0))

    def owned():
        return checkpoint.rounds(tmp_path / "checkpoints", 0, digest(config))

    with a_store_of_its_own() as (store, pid):
        board, other = (
            Board(Entries(TCPStore("127.0.0.1", store.port), b"s"), i, 2, patience_s=LIMIT_S) for i in range(2)
        )
        line = checkpoint.Lineage(digest(config))
        save = _saver(tmp_path / "checkpoints", line, worker, board, 0, lambda round: None)
        save(1)
        other.saved(1)
        save(2)
        stop_store(pid, board)
        for round in range(3, KEPT + 5):
            save(round)
        assert owned() == list(range(5, KEPT + 5))  # the newest ones, whatever the slowest has
        os.kill(pid, signal.SIGCONT)
        other.saved(KEPT + 4)
        until(lambda: board.saved(KEPT + 4) == KEPT + 4)
        save(KEPT + 5)
        assert owned() == [KEPT + 4, KEPT + 5]
    output = [record.getMessage() for record in caplog.records]
    assert [
        sum(words in line for line in output) for words in ("deletes checkpoints before", "does not answer worker")
    ] == [
        1,
        1,
    ]


DIFFERENT = {
    "run files": ((0, 1), ("text", "text"), "worker 1 has seed = 1 and worker 0 has 0: start"),
    "text under one name": ((0, 0), ("text", "next"), "worker 1 has the text of data.source = "),
}


@pytest.mark.parametrize(("seeds", "words", "key"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_workers_with_different_run_files_or_text_are_refused_at_the_start(seeds, words, key, tmp_path):
    for worker, (seed, word) in enumerate(zip(seeds, words, strict=True)):
        (tmp_path / f"{worker}").mkdir()
        (tmp_path / f"{worker}" / "text.txt").write_text(f"a line of {word}\n" * 1000)
        config = single(workers=2, seed=seed, data__source="text.txt", run__timeout_s=30)
        (tmp_path / f"{worker}" / "run.toml").write_text(dump(config))
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        assert run_local(2, train_in_own_folder, [str(tmp_path)]) == 2
    text = errors.getvalue()
    assert text.count("start all workers with the same run file") == text.count(f"gossamer: {key}") == 2, text
    assert "Traceback" not in text


def test_a_world_of_another_size_than_the_run_file_says_is_refused(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(dump(tiny(workers=3)))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, output = run("train", tmp_path / "run.toml")
    assert code == 2
    assert output.startswith("gossamer: WORLD_SIZE (--of) is 2 but the run file has workers = 3"), output
    assert output.count("\n") == 1


ROWS = 60


def unreadable_for(seconds: float, worker: int, from_row: int) -> None:
    """From now on the stream of a worker cannot be read beyond a row, for so long after that is first tried."""

    def opened(source, real=streams._open_stream):
        began, passes = [], real(source)

        def rows(stream, row):
            for one in iter(stream):
                if row >= from_row:
                    began.append(time.monotonic())
                    if began[-1] - began[0] < seconds:
                        raise ConnectionError("the hub hung up")
                row += 1
                yield one

        class Stream:
            def __init__(self, real):
                self.real, self.row = real, 0

            def state_dict(self):
                return self.real.state_dict()

            def load_state_dict(self, state):
                self.row = state["examples_iterable"]["examples_iterable"]["shard_example_idx"]
                self.real.load_state_dict(state)

            def __iter__(self):
                return rows(self.real, self.row)

        return lambda number, n: Stream(passes(number, n)) if number == worker and n > 1 else passes(number, n)

    streams._open_stream = opened


def train_with_a_hiccup(argv):
    """`gossamer train`, in which the stream of worker 1 cannot be read for 2 s."""
    unreadable_for(2.0, worker=1, from_row=20)
    return main(argv)


def train_without_a_hub(argv):
    """`gossamer train`, in which the stream of worker 1 cannot be read any more."""
    unreadable_for(math.inf, worker=1, from_row=8)
    return main(argv)


def streamed(tmp_path, **more):
    """A run of two workers on a stream of two files, of 40 rounds."""
    pytest.importorskip("datasets")
    (tmp_path / "texts").mkdir()
    for i in range(2):
        lines = [json.dumps({"text": f"{i} {k} " + "a worker reads its own part " * 3}) for k in range(ROWS)]
        (tmp_path / "texts" / f"{i}.jsonl").write_text("\n".join(lines))
    return single(
        workers=2,
        rule__name="diloco",
        topology__name="complete",
        data__source=f"hf:{tmp_path / 'texts'}",
        data__val_fraction=0.05,
        run__steps=80,
        run__checkpoint_every=40,
        run__eval_every=0,
        run__timeout_s=10.0,
        **more,
    )


@pytest.mark.full
@pytest.mark.timeout(280)
def test_a_stream_that_cannot_be_read_for_a_while_or_for_good_loses_nothing_of_two_workers(tmp_path):
    config, folder = streamed(tmp_path), tmp_path / "real"
    (tmp_path / "run.toml").write_text(dump(config))
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = run_local(2, train_without_a_hub, ["train", str(tmp_path / "run.toml"), "--out", str(folder)])
    output = errors.getvalue()
    assert code == 2 and "Traceback" not in output and "broke off (the hub hung up)" in output, output
    stopped = {int(path.name[6:]) for path in (folder / "checkpoints").glob("round-*")}
    assert len(stopped) == 1 and 0 < min(stopped) < 20
    assert output.count(f"after round {min(stopped)}") == 2 and output.count(f"--resume {folder}") == 2, output
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = run_local(2, train_with_a_hiccup, ["train", "--resume", str(folder)])
    output = errors.getvalue()
    assert code == 0 and output.count("hung up); it is opened again at its place for up to 5 s") == 1, output
    whole = simulate(config, tmp_path / "whole")
    for w in range(2):
        real = checkpoint.load(folder / "checkpoints", 40, w, digest(config))["x"]
        assert torch.equal(real, whole._engine.models()[w])


@pytest.mark.full
def test_a_simulation_whose_stream_cannot_be_read_saves_and_resumes_to_the_same_bits(tmp_path, monkeypatch):
    config = streamed(tmp_path, run__batched=1)
    whole = simulate(config, tmp_path / "whole")
    real = streams._open_stream
    unreadable_for(math.inf, worker=1, from_row=8)
    monkeypatch.setattr(streams, "FIRST_PAUSE_S", 0.01)
    slow = replace(config, run=replace(config.run, timeout_s=0.2))
    try:
        with pytest.raises(DataError, match=r"hung up.*; stopped after round (\d+), and saved; resume with --resume"):
            simulate(slow, tmp_path / "real")
    finally:
        streams._open_stream = real
    resumed = simulate(config, tmp_path / "real", resume=True)
    assert all(torch.equal(*two) for two in zip(resumed._engine.models(), whole._engine.models(), strict=True))
