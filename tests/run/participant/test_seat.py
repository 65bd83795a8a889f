"""Workers that start without a launcher: each process gets its rank and the address of worker 0's store, and no more."""

from pathlib import Path

import pytest

from commands import Command, free_port
from gossamer.cli import main
from gossamer.run.asynchronous import train_asynchronous
from gossamer.run.config.run_file import dump
from gossamer.run.elastic import train_elastic
from tiny import single as tiny

pytestmark = pytest.mark.usefixtures("forks")

KINDS = {"in rounds": {}, "elastic": {"run__elastic": True}, "without waiting": {"run__wait": False}}


def start(folder: Path, **overrides: object) -> list[Command]:
    """Three workers by the variables that srun and mpirun scripts set."""
    (folder / "run.toml").write_text(dump(tiny(run__timeout_s=60.0, **overrides)))
    port = str(free_port())
    return [
        Command(
            "train", folder / "run.toml", "--out", folder / "out", RANK=str(rank), WORLD_SIZE="3",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_three_workers_that_start_without_a_launcher_all_train_to_the_end(tmp_path: Path, kind: str) -> None:
    ends = [worker.finish() for worker in start(tmp_path, **KINDS[kind])]
    assert [code for code, _ in ends] == [0, 0, 0], ends


@pytest.mark.parametrize(("kind", "driver"), [("elastic", train_elastic), ("without waiting", train_asynchronous)])
def test_resume_auto_reaches_the_start_of_a_run_whose_workers_may_come_and_go(tmp_path, monkeypatch, kind, driver):
    (tmp_path / "run.toml").write_text(dump(tiny(**KINDS[kind])))
    asked = list[object]()
    monkeypatch.setattr(driver, "take_part", lambda *args, join, resume: asked.append(resume))
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--resume", "auto"]) == 0
    assert asked == ["auto"], "as True it would refuse to begin a run that has no checkpoint yet"
