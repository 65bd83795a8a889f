"""The kind of fault of a checkpoint decides how a run continues, in every kind of run."""

import json
import shutil
from pathlib import Path

import pytest
from test_samples import KINDS, SAMPLES

from commands import run
from gossamer.errors import CheckpointError, PeerError
from gossamer.record import checkpoint
from gossamer.record.fault import FaultKind
from gossamer.run.bookkeeping.resume import history, lineage_of, resumed
from gossamer.run.bookkeeping.which_round import (
    Agreement,
    KeptRounds,
    Start,
    begin_or_resume,
    choose_round,
    decode_faults,
    decode_kept,
    encode_kept,
    kept_by,
    newest_of_all,
    newest_of_own,
)
from gossamer.run.config.resolve import resolve, settings_in
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.task import task_of
from tiny import tiny


def started(store: Store, kept: dict[int, KeptRounds]) -> Start:
    """The round at which a run starts or resumes from these checkpoints."""
    past = resumed(store.run, store.folder, "auto")
    task = task_of(resolve(tiny()))  # whose text is compared where a round counts
    return begin_or_resume(store, task, past, Agreement(kept, lambda round: {}))


FAULTS = {
    "nothing": FaultKind.ABSENT,
    "no manifest": FaultKind.UNFINISHED,
    "files of another worker": FaultKind.MISPLACED,
    "of another digest": FaultKind.FOREIGN,
    "of another codec": FaultKind.FOREIGN,
    "tensors cut short": FaultKind.DAMAGED,
}
"""What happens to the only checkpoint of an owner, with the kind that it is then."""


def hurt(folder: Path, fault: str, config: RunSettings) -> None:
    owner, store, line = config.owners[0], folder / "checkpoints", config.lineage
    stem = store / "round-000004" / f"worker-{owner:03}"
    manifest, tensors = stem.with_suffix(".json"), stem.with_suffix(".safetensors")
    state = checkpoint.load(store, 4, owner, line)
    match fault:
        case "nothing":
            manifest.unlink()
            tensors.unlink()
        case "no manifest":
            manifest.unlink()
        case "tensors cut short":
            tensors.write_bytes(tensors.read_bytes()[:-1])
        case "files of another worker":
            checkpoint.save(store, 4, 9, state, digest=line)
            for path in (manifest, tensors):
                path.with_stem("worker-009").replace(path)
        case "of another digest":
            checkpoint.save(store, 4, owner, state, digest=line._replace(digest="ffff"))
        case _:
            checkpoint.save(store, 4, owner, state, digest=line._replace(of={**line.of, "codec": "'int8' ()"}))


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the user that the runs name can be imported, by this process and by its children."""
    monkeypatch.syspath_prepend(str(SAMPLES))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_only_checkpoint_is_of_its_kind_here_and_for_the_others_and_nothing_begins_over_it(
    kind: str, fault: str, tmp_path: Path
) -> None:
    folder = tmp_path / "k"
    shutil.copytree(SAMPLES / "0.1.0" / kind, folder)
    config, past = settings_in(folder), history(settings_in(folder), folder)
    owner, store = config.owners[0], Store(config, folder)
    hurt(folder, fault, config)
    kept = kept_by(store, config.owners, lineage_of(config, folder), past.before)
    found = kept[owner].faults.get(4)
    if fault == "nothing":
        assert found is None and 4 not in kept[owner].faults
    else:
        assert found is not None and found.kind == FAULTS[fault] and f"worker-{owner:03}" in found.why
    theirs = decode_kept(owner, json.loads(json.dumps(encode_kept(kept[owner]))))
    assert (theirs.faults, theirs.due) == (kept[owner].faults, kept[owner].due)
    if not theirs.due and FAULTS[fault] in (
        FaultKind.ABSENT,
        FaultKind.UNFINISHED,
    ):  # it may have been stopped while it saved
        assert started(store, {owner: theirs}).round == 0
        return
    with pytest.raises(CheckpointError) as refused:
        started(store, {owner: theirs})
    assert ("another --out" in str(refused.value)) == (FAULTS[fault] != FaultKind.FOREIGN), "no run is to be given up"
    assert f"worker-{owner:03}" in str(refused.value) or fault == "nothing"
    assert (refused.value.kind == FaultKind.FOREIGN) == (FAULTS[fault] == FaultKind.FOREIGN)
    assert newest_of_own(store, owner, past.lineage, past.before).round == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["evaluate", "go on"])
def test_a_checkpoint_of_another_method_is_refused_by_the_field_that_differs(
    kind: str, verb: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "k"
    shutil.copytree(SAMPLES / "0.1.0" / kind, folder)
    config = settings_in(folder)
    for owner in config.owners:
        state = checkpoint.load(folder / "checkpoints", 4, owner, config.lineage)
        line = config.lineage._replace(of={**config.lineage.of, "local steps": "3"})
        checkpoint.save(folder / "checkpoints", 4, owner, state, digest=line)
    if verb == "evaluate":
        code, output = run("evaluate", folder, "--allow-code")
        assert code == 2, output
    else:
        kept = kept_by(Store(config, folder), config.owners, config.lineage)
        with pytest.raises(CheckpointError) as refused:
            started(Store(config, folder), kept)
        output = str(refused.value)
    assert "has local steps 3 but needs 2" in output, output
    assert "could not be compared" not in caplog.text


@pytest.mark.parametrize("kind", [*FaultKind])
def test_what_is_there_of_a_newer_round_is_put_aside_unless_it_is_nothing(kind: FaultKind) -> None:
    kept = {0: decode_kept(0, [0, [[4, None, None], [8, [kind, "why"], None]]])}
    choice = choose_round(kept, newest_of_all, lambda round: {})
    assert (choice.round, choice.damaged) == (4, kind != FaultKind.ABSENT)


@pytest.mark.parametrize("fault", ["damaged", ["odd", "why"], [], 3, {"kind": "damaged"}])
def test_a_worker_that_tells_no_kind_of_fault_is_refused_in_a_sentence(fault: object) -> None:
    with pytest.raises(PeerError, match="worker 1 does not say which checkpoints it has"):
        decode_kept(1, [0, [[8, fault, None]]])
    with pytest.raises(PeerError, match="worker 1 does not say what is wrong with its checkpoint"):
        decode_faults([None, fault])
