"""Faults of checkpoints: each kind is told apart by what is there, in words and over the wire."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gossamer.record import checkpoint
from gossamer.record.fault import Fault, FaultKind, decode_fault
from gossamer.record.lineage import Lineage, odd_field, state_is_of

OF = state_is_of(
    "gasloc", {"lr": 0.7}, topology="'ring' ()", workers=4, codec="'int8' ()", schedule="s", local_steps="6"
)
LINE = Lineage("0123abcd", of=OF)
STATE = {"x": torch.ones(2), "steps_taken": 30}


def files(folder: Path, worker: int = 2, round: int = 5) -> tuple[Path, Path]:
    stem = folder / f"round-{round:06d}" / f"worker-{worker:03}"
    return stem.with_suffix(".json"), stem.with_suffix(".safetensors")


def truncate(folder: Path) -> None:
    files(folder)[0].write_bytes(files(folder)[0].read_bytes()[:100])


def misplace(folder: Path) -> None:
    checkpoint.save(folder, 5, 3, STATE, digest=LINE)
    for mine, theirs in zip(files(folder), files(folder, 3), strict=True):
        theirs.replace(mine)


def of_another_version(folder: Path) -> None:
    content = json.loads(files(folder)[0].read_bytes())
    del content["manifest_sha256"]
    files(folder)[0].write_bytes(checkpoint._sealed({**content, "format": "gossamer checkpoint 9"}))


def loop(folder: Path) -> None:
    files(folder)[0].unlink()
    files(folder)[0].symlink_to(files(folder)[0].name)


CASES: dict[str, tuple[Callable[[Path], object], FaultKind, str]] = {
    "no manifest": (lambda k: files(k)[0].unlink(), FaultKind.UNFINISHED, "worker-002.json' is missing, as if"),
    "no tensors": (lambda k: files(k)[1].unlink(), FaultKind.DAMAGED, "worker-002.safetensors' cannot be read"),
    "cut short": (truncate, FaultKind.DAMAGED, "worker-002.json' is cut short"),
    "cannot be read": (loop, FaultKind.DAMAGED, "worker-002.json' cannot be read"),
    "another worker": (misplace, FaultKind.MISPLACED, "worker-002.json' has worker 3 but needs 2"),
    "another version": (of_another_version, FaultKind.FOREIGN, "has format 'gossamer checkpoint 9' but needs"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_a_checkpoint_has_a_kind_a_clause_and_a_form_for_the_wire(case: str, tmp_path: Path) -> None:
    hurt, kind, clause = CASES[case]
    checkpoint.save(tmp_path, 5, 2, STATE, digest=LINE)
    hurt(tmp_path)
    found = checkpoint.generation_faults(tmp_path, 2, LINE)[5]
    assert found is not None and found.kind == kind and clause in found.why and "; " not in found.why, found
    assert checkpoint.fault(tmp_path, 5, 2, LINE) == found, "reading all of it says the same"
    assert decode_fault(json.loads(json.dumps(found.encoded))) == found


def test_nothing_there_is_no_fault_of_a_generation(tmp_path: Path) -> None:
    assert checkpoint.generation_faults(tmp_path, 2, LINE) == {}
    found = checkpoint.fault(tmp_path, 5, 2, LINE)
    assert found is not None and found.kind == FaultKind.ABSENT


@pytest.mark.parametrize(
    "value", [3, "damaged", ["damaged"], ["odd", "file"], ["damaged", 3], ["damaged", "a", "b"], [None, ""]]
)
def test_what_no_worker_says_of_a_checkpoint_is_not_taken(value: object) -> None:
    assert decode_fault(value) is None


@pytest.mark.parametrize("field", [key for key in OF if key != "rule option lr"])
def test_a_checkpoint_of_something_else_is_refused_with_the_field_that_differs(field: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 5, 2, STATE, digest=LINE)
    mine = LINE._replace(of={**OF, field: "another"})
    for line in (mine, mine._replace(digest="ffff")):
        found = checkpoint.fault(tmp_path, 5, 2, line)
        assert found is not None and found.kind == FaultKind.FOREIGN
        assert f"worker-002.json' has {field} {OF[field]} but needs another" in found.why
    assert checkpoint.fault(tmp_path, 5, 2, LINE._replace(of={**OF, "rule option lr": "0.1"})) is None


def test_a_checkpoint_names_its_step_and_one_of_the_first_format_is_loaded_as_it_says_less(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 5, 2, STATE, digest=LINE)
    content = json.loads(files(tmp_path)[0].read_bytes())
    assert (content["format"], content["step"], content["of"]) == ("gossamer checkpoint 2", 30, OF)
    assert checkpoint.says_what_it_is_of(tmp_path, 5, 2)
    for key in ("manifest_sha256", "step", "of"):
        del content[key]
    files(tmp_path)[0].write_bytes(checkpoint._sealed({**content, "format": "gossamer checkpoint 1"}))
    assert checkpoint.load(tmp_path, 5, 2, LINE)["steps_taken"] == 30
    assert not checkpoint.says_what_it_is_of(tmp_path, 5, 2)
    assert checkpoint.fault(tmp_path, 5, 2, LINE._replace(digest="ffff")) == Fault(
        FaultKind.FOREIGN, f"checkpoint file '{files(tmp_path)[0]}' has digest '0123abcd' but needs 'ffff'"
    )


def test_what_is_put_aside_twice_replaces_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, 5, 2, {"steps_taken": step}, digest=LINE)
        checkpoint.rewind(tmp_path, 4, 2, aside=True)
    aside = tmp_path / "aside" / "round-000005"
    steps = {path.name: json.loads(path.read_bytes())["step"] for path in aside.glob("*.json*")}
    assert steps == {"worker-002.json": 1, "worker-002.json.2": 2, "worker-002.json.3": 3}


def test_the_first_difference_of_two_states_is_named() -> None:
    assert odd_field(OF, OF) is None
    assert odd_field({**OF, "more": "1"}, OF) == ("more", "1", "none")
    assert odd_field({}, OF) == ("rule", "none", "gasloc")
