"""Which round counts: damaged checkpoints are never taken for none, in any kind of run, and going back is reported."""

import hashlib
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_resume import flip, parameters, same
from test_virtual import timed  # pyright: ignore[reportMissingImports]

from commands import run
from gossamer.cli import main
from gossamer.errors import CheckpointError, ConfigError, DataError
from gossamer.record import checkpoint
from gossamer.record.fault import Fault, FaultKind
from gossamer.record.folder import must_be_new, read_metrics
from gossamer.record.lineage import Lineage
from gossamer.record.logs.outcomes import Begun, OutcomeWriter, RoundOutcome
from gossamer.run.bookkeeping.evaluate import evaluate
from gossamer.run.bookkeeping.journal import saved_when_unreadable
from gossamer.run.bookkeeping.resume import resumed
from gossamer.run.bookkeeping.which_round import (
    ChosenRound,
    KeptRounds,
    Start,
    _none_counts,
    choose_round,
    ended,
    kept_by,
    newest_of_all,
    round_to_resume,
)
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import RunConfig, dump
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.stages.checkpoints import Store
from tiny import single, tiny

SIMULATED: dict[str, RunConfig] = {
    "rounds": single(run__steps=8, run__checkpoint_every=4),
    "stages": tiny(run__steps=8, run__checkpoint_every=4, pipeline__stages=2, model__layers=2, data__accumulate=2),
    "server": timed(server={"name": "heloco"}, run__steps=8, run__checkpoint_every=4),
    "no waiting": timed(run__wait=False, run__steps=8, run__checkpoint_every=4),
    "pairs": timed(pair={"name": "ad_psgd"}, run__steps=8, run__checkpoint_every=4),
}
REAL: dict[str, dict[str, Any]] = {
    "rounds": {},
    "elastic": {"run__elastic": True},
    "server": {"server__name": "heloco", "run__timeout_s": 4.0},
    "no waiting": {"run__wait": False},
    "pairs": {"pair__name": "ad_psgd", "topology__name": "complete"},
    "stages": {"pipeline__stages": 2, "model__layers": 2, "data__accumulate": 2},
}


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in ("report.html", "report.md")
        and not re.match("addresses|[.]lock", path.name)
    }


def truncate_tensors(folder: Path) -> None:
    for path in folder.glob("checkpoints/**/*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", SIMULATED)
@pytest.mark.parametrize("damage", ["tensors", "manifests of one", "all files of one"])
def test_a_simulation_whose_checkpoints_are_damaged_does_not_begin_again_over_them(
    kind: str, damage: str, tmp_path: Path
) -> None:
    config = SIMULATED[kind]
    simulate(config, tmp_path, until=7 // config.length.full_steps)
    owner = config.workers if kind == "server" else 0
    if damage == "tensors":
        truncate_tensors(tmp_path)
    for path in () if damage == "tensors" else tmp_path.glob(f"checkpoints/*/worker-{owner:03}.*"):
        if path.suffix == ".json" and damage == "manifests of one":
            path.write_bytes(path.read_bytes()[:100])
        elif damage == "all files of one":
            path.unlink()
    before = contents(tmp_path)
    for resume in ("auto", True):
        with pytest.raises(CheckpointError) as refused:
            simulate(config, tmp_path, resume=resume)
        sentence = str(refused.value)
        what = {"tensors": "is cut short: it has 100 of ", "manifests of one": "is cut short"}.get(
            damage, f"worker {owner} has no checkpoint of it"
        )
        assert what in sentence and ("round 2: " in sentence) and "another --out" in sentence, sentence
        if damage != "all files of one":
            assert f"worker-{owner:03}." in sentence
    assert contents(tmp_path) == before, "nothing was written over"


@pytest.mark.sampled(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", REAL)
def test_a_real_run_whose_checkpoints_are_damaged_does_not_begin_again_over_them(
    kind: str, tmp_path: Path, forks: None
) -> None:
    config = (tiny if kind == "stages" else single)(
        **{"workers": 2, "run__steps": 6, "run__timeout_s": 30.0, **REAL[kind]}
    )
    (tmp_path / "run.toml").write_text(dump(config))
    words = ["train", tmp_path / "run.toml", "--local", 2, "--out", tmp_path / "k"]
    assert run(*words)[0] == 0
    manifests = [json.loads(path.read_bytes()) for path in (tmp_path / "k").glob("checkpoints/**/*.json")]
    assert manifests and all(one["of"] == settings_of(config).lineage.of for one in manifests), (
        "each says what it is of"
    )
    truncate_tensors(tmp_path / "k")
    before = contents(tmp_path / "k")
    code, output = run(*words, "--resume", "auto")
    assert code == 2 and "is cut short: it has 100 of " in output and "Traceback" not in output, output
    assert contents(tmp_path / "k") == before


def test_a_round_that_is_skipped_is_put_aside_with_what_is_sound_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = single(run__steps=8)
    whole = simulate(config, tmp_path / "whole")
    folder = tmp_path / "run"
    simulate(config, folder, until=3)
    hurt = folder / "checkpoints" / "round-000003" / "worker-001.safetensors"
    flip(hurt)
    before = {path.name: path.read_bytes() for path in hurt.parent.iterdir()}
    assert simulate(config, folder, resume="auto").loss == whole.loss
    assert (
        f"round 3 is skipped: checkpoint file '{hurt}' has changed" in caplog.text and "round 2 counts" in caplog.text
    )
    aside = folder / "checkpoints" / "aside" / "round-000003"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before, (
        "what cannot be read today may be sound"
    )
    assert same(parameters(folder, config), parameters(tmp_path / "whole", config))


def test_a_round_of_which_a_worker_has_nothing_is_reported_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = single(run__steps=8)
    simulate(config, tmp_path, until=3)
    for path in tmp_path.glob("checkpoints/round-000003/worker-002.*"):
        path.unlink()
    simulate(config, tmp_path, resume=True)
    assert "round 3 is skipped: worker 2 has no checkpoint of it; round 2 counts" in caplog.text
    assert not (tmp_path / "checkpoints" / "aside").exists(), "nothing was damaged"
    caplog.clear()
    shutil.rmtree(tmp_path / "checkpoints" / "round-000004")
    with (tmp_path / "metrics.jsonl").open() as file:
        assert max(line["round"] for line in read_metrics(tmp_path)) == 3, file.name
    simulate(single(run__steps=12), tmp_path, resume=True)
    assert "skipped" not in caplog.text, "the record does not say that the last checkpoint was written"


@pytest.mark.parametrize("rule", ["diloco", "gasloc"])
def test_a_lacking_checkpoint_is_no_lack_where_all_workers_are_equal_after_a_round(
    rule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = {"topology__name": "complete"} if rule == "diloco" else {}
    simulate(single(run__steps=4, run__elastic=True, rule__name=rule, **topology), tmp_path)
    (lost,) = tmp_path.glob("checkpoints/round-000002/worker-001.json")
    whole = evaluate(tmp_path).result.loss
    capsys.readouterr()
    lost.unlink()
    found = evaluate(tmp_path)
    assert 1 not in found.workers and (found.result.loss == whole) == (rule == "diloco")
    equal = (
        "after round 2 all workers are equal, so the mean model is that of worker 0 alone" in capsys.readouterr().err
    )
    assert equal == (rule == "diloco") != ("has no checkpoint of worker 1" in caplog.text)


@pytest.mark.parametrize("recorded", [True, False], ids=["all took part", "not known"])
def test_an_evaluation_in_the_folder_of_one_machine_names_the_workers_whose_models_it_lacks(
    recorded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(single(workers=2, run__steps=4, run__elastic=True, rule__name="gasloc"), tmp_path)
    for place in tmp_path.glob("checkpoints/round-*/worker-001.*"):
        place.unlink()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics-000.jsonl").write_text("".join(line for line in lines if '"worker":1' not in line))
    (tmp_path / "metrics.jsonl").unlink()
    if recorded:
        with OutcomeWriter(tmp_path, 0) as log:
            log.write(Begun(0, 0, 0, 0, 0))
            for round in range(2):
                log.write(RoundOutcome(round, None, frozenset(), frozenset(), 2 * (round + 1)))
    assert evaluate(tmp_path).workers == (0,)
    others = "took part" if recorded else "may have taken part"
    assert f"is that of worker 0 alone, while others {others} in round 2; the checkpoints of worker 1" in caplog.text


@pytest.mark.parametrize(
    ("settings", "equal"),
    [
        ({"codec__name": "fp4", "codec__back": "bf16"}, True),
        ({"model__experts": {"count": 3, "active": 2}}, True),
        ({"model__experts": {"count": 3, "active": 2, "holders": 2}}, False),
        ({"rule__name": "gasloc"}, False),
    ],
)
def test_a_method_says_whether_its_workers_are_equal_after_a_round(
    settings: dict[str, Any], equal: bool, tmp_path: Path
) -> None:
    config = single(**{"run__steps": 4, "rule__name": "diloco", "topology__name": "complete", **settings})
    simulate(config, tmp_path)
    one, *others = parameters(tmp_path, config)
    assert all(same([one], [other]) for other in others) == equal == resolve(config).in_rounds.equal_after_rounds


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rounds", "server", "no waiting"])
def test_an_evaluation_goes_back_and_says_so_and_refuses_a_damaged_round_by_its_number(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = SIMULATED[kind]
    simulate(config, tmp_path)
    newest = config.length.rounds
    older = newest - 2
    for path in tmp_path.glob(f"checkpoints/round-{newest:06}/*.safetensors"):
        flip(path)
    with pytest.raises(CheckpointError, match=rf"round {newest} is damaged: .*has changed.*complete are: {older}"):
        evaluate(tmp_path, newest)
    assert evaluate(tmp_path).round == older
    assert f"round {newest} is skipped: " in caplog.text and f"round {older} counts" in caplog.text


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_not_reported_as_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = single(run__steps=6)
    simulate(config, tmp_path)
    before = parameters(tmp_path, config)
    flip(tmp_path / "checkpoints" / "round-000003" / "worker-000.safetensors")
    assert main(["simulate", "--resume", str(tmp_path), "--quiet"]) == 0
    assert "has ended" not in capsys.readouterr().err and "round 3 is skipped" in caplog.text
    assert same(parameters(tmp_path, config), before)


def test_a_new_run_is_refused_where_only_the_checkpoints_of_another_are_left(tmp_path: Path) -> None:
    config = single(run__steps=4)
    simulate(config, tmp_path)
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"already holds checkpoints/round-00000\d/worker-00\d"):
        simulate(config, tmp_path)


def test_auto_begins_again_where_a_worker_was_killed_while_it_saved_for_the_first_time(tmp_path: Path) -> None:
    config = single(run__steps=4)
    simulate(config, tmp_path, until=1)
    (tmp_path / "checkpoints" / "round-000001" / "worker-001.json").unlink()  # which is written last
    assert simulate(config, tmp_path, resume="auto").rounds == 2


def test_workers_of_a_run_without_a_common_round_continue_from_what_is_sound_by_what_is_to_be_added(
    tmp_path: Path, forks: None
) -> None:
    config = single(workers=2, run__steps=8, run__timeout_s=30.0)
    (tmp_path / "run.toml").write_text(dump(config))
    folder = tmp_path / "k"
    assert run("train", tmp_path / "run.toml", "--local", 2, "--out", folder)[0] == 0
    for path in folder.glob("checkpoints/*/worker-001.json"):
        path.write_bytes(b"\0" * 100)
    words = ["train", "--resume", folder, "--local", 2, "--set", "run.steps=12"]
    code, output = run(*words)
    how = "by adding --set run.elastic=true to the command that resumes the run"
    assert code == 2 and "only that of worker 0 after round 4 is" in output and how in output, output
    code, output = run(*words, "--set", "run.elastic=true")
    assert code == 0 and "worker 1 takes the state of worker 0 after round 4" in output, output


def test_the_folder_of_a_later_worker_says_whose_checkpoints_it_has_and_how_all_start_from_them(tmp_path: Path) -> None:
    config = single(workers=3, run__steps=4, run__elastic=True, rule__name="gasloc", topology__name="random")
    simulate(config, tmp_path)
    for place in tmp_path.glob("checkpoints/round-*/worker-00[02].*"):
        place.unlink()
    store, past = Store(resolve(config), tmp_path), resumed(resolve(config), tmp_path, True)
    assert past is not None
    choice = choose_round(kept_by(store, [0], past.lineage), round_to_resume, lambda _: {})
    with pytest.raises(
        CheckpointError, match="of worker 1 and none of what is started, worker 0; start it too, with --local 2"
    ):
        raise _none_counts(store, choice)


def test_the_choice_reads_what_is_picked_and_picks_again_without_what_is_spoilt() -> None:
    a, b = (Fault(FaultKind.DAMAGED, f"file '{name}' has changed") for name in "ab")
    kept = {i: KeptRounds({10: None, 20: None, 30: None if i else a}) for i in range(3)}
    read: list[int] = []

    def faults(round: int) -> dict[int, Fault | None]:
        read.append(round)
        return {2: b if round == 20 else None}

    assert choose_round(kept, newest_of_all, faults)[::2] == (10, {30: (a,), 20: (b,)})
    assert read == [20, 10]
    elastic = choose_round(kept, round_to_resume, lambda round: {})
    assert (elastic.round, [*elastic.skipped]) == (20, [30]), "the newest that all have, as they all took part"


def test_a_worker_that_only_took_over_the_state_of_a_round_says_nothing_about_its_participants(tmp_path: Path) -> None:
    config, nobody, both = settings_of(tiny(workers=4, run__elastic=True)), frozenset[int](), frozenset({0, 1})
    store = Store(config, tmp_path)
    for slot in range(4):
        with OutcomeWriter(tmp_path, slot) as log:
            log.write(Begun(0, 0, slot, 0, 0))
            for round in range(6 if slot < 2 else 2):
                log.write(RoundOutcome(round, both if round > 1 else None, nobody, nobody, 2 * (round + 1)))
            if slot == 2:  # which was left out of all later rounds, and worker 3 was killed
                log.write(Begun(6, 6, 0, 4, 0, "0" * 64))
        for round in (2, 6) if slot < 3 else (2,):
            checkpoint.save(store.path, round, slot, {"x": 1}, digest=config.digest)
    kept = kept_by(store, range(4), config.lineage)
    assert round_to_resume({slot: one.whole for slot, one in kept.items()}) == 6


def test_nothing_newer_goes_before_all_owners_are_restored(tmp_path: Path) -> None:
    config = settings_of(tiny())
    store, past = Store(config, tmp_path), resumed(config, tmp_path, True)
    for round, owner in itertools.product((2, 4), (0, 1)):
        checkpoint.save(store.path, round, owner, {"x": round}, digest=config.digest)
    start, restored = Start(store, past, ChosenRound(2, {}, {})), list[int]()

    def restore(owner: int, line: Lineage) -> None:
        if owner and len(restored) == 1:
            raise CheckpointError("it does not fit")
        restored.append(checkpoint.load(store.path, 2, owner, line)["x"])

    def left() -> list[list[int]]:
        return [checkpoint.rounds(store.path, owner, config.lineage) for owner in (0, 1)]

    with pytest.raises(CheckpointError, match="it does not fit"):
        start.go_on((0, 1), restore)
    assert (restored, left()) == ([2], [[2, 4], [2, 4]])
    restored.clear()
    assert start.go_on((1, 0), restore) == config.lineage
    assert (restored, left()) == ([2, 2], [[2], [2]])


def test_a_folder_in_a_command_to_copy_is_quoted_for_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    (folder / "metrics.jsonl").parent.mkdir()
    (folder / "metrics.jsonl").touch()
    with pytest.raises(ConfigError) as refused:
        must_be_new(folder, None)
    unreadable = saved_when_unreadable(DataError("the stream is gone"), folder, 3)
    assert all(f"'{folder}'" in sentence for sentence in (ended(folder, 3), ended(folder, 3, kept=False)))
    assert all(sentence.endswith(f"--resume '{folder}'") for sentence in (str(refused.value), unreadable))
