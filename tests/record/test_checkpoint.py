"""Checkpoints: what is saved comes back to the bit, nothing damaged is believed, and no kill loses the last one."""

import functools
import hashlib
import json
import math
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dying_saver
from commands import Command
from gossamer.errors import CheckpointError
from gossamer.record import checkpoint
from gossamer.record.checkpoint import load, rewind, rounds, save
from gossamer.record.fault import FaultKind
from gossamer.record.tensor_file import TENSOR_TYPES, tensor_bytes, write_tensors

DIGEST = "0123abcd"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
keys = st.integers() | st.text(max_size=8)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of any dtype and bits (so NaNs with any payload), of 0 to 3 dimensions, contiguous or not."""
    dtype = draw(st.sampled_from(sorted(TENSOR_TYPES, key=str)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    numel = math.prod(shape)
    raw = draw(st.binary(min_size=numel * dtype.itemsize, max_size=numel * dtype.itemsize))
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = (flat % 2).bool() if dtype is torch.bool else flat.view(dtype)
    tensor = tensor.view(shape)
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


states = st.recursive(
    scalars | tensors(),
    lambda parts: (
        st.lists(parts, max_size=3) | st.lists(parts, max_size=3).map(tuple) | st.dictionaries(keys, parts, max_size=3)
    ),
    max_leaves=8,
)


def identical(a: Any, b: Any) -> bool:
    """Whether two states have the same types, keys in the same order, and bits."""
    if type(a) is not type(b):
        return False
    match a:
        case Tensor():
            same = a.dtype == b.dtype and a.shape == b.shape
            return same and torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))
        case dict():
            return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(identical(a[k], b[k]) for k in a)
        case list() | tuple():
            return len(a) == len(b) and all(map(identical, a, b))
        case float():
            return repr(a) == repr(b)
    return a == b


def files(folder: Path) -> set[str]:
    """Everything in a checkpoint folder, hidden files too."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@settings(max_examples=30, deadline=None)
@given(state=states)
def test_any_state_comes_back_with_its_types_order_and_bits(
    tmp_path_factory: pytest.TempPathFactory, state: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    save(folder, 0, 0, state, digest=DIGEST)
    assert identical(load(folder, 0, 0, DIGEST), state)


@settings(max_examples=50, deadline=None)
@given(parts=st.dictionaries(st.text(max_size=4), tensors().map(Tensor.contiguous), max_size=6))
def test_a_tensor_file_has_the_bytes_of_safetensors_and_its_size_and_hash_are_returned(
    tmp_path_factory: pytest.TempPathFactory, parts: dict[str, Tensor]
) -> None:
    path = tmp_path_factory.mktemp("file") / "tensors"
    returned = write_tensors(path, parts)
    written = path.read_bytes()
    assert written == tensor_bytes(parts) == safetensors.torch.save(parts)
    assert returned == (len(written), hashlib.sha256(written).hexdigest())


def test_views_of_one_memory_come_back_equal_and_apart(tmp_path: Path) -> None:
    x = torch.arange(12.0)
    state = {
        "x": x,
        "again": x,
        "row": x.view(3, 4)[1],
        "column": x.view(3, 4)[:, 1],
        "empty": x[:0],
        "parameter": nn.Parameter(x),
    }
    save(tmp_path, 1, 0, state, digest=DIGEST)
    back = load(tmp_path, 1, 0, DIGEST)
    assert identical({**back, "parameter": None}, {**state, "parameter": None})
    assert type(back["parameter"]) is Tensor and not back["parameter"].requires_grad
    back["x"].zero_()
    assert torch.equal(back["again"], torch.arange(12.0)), "a loaded tensor must own its memory"
    assert torch.equal(load(tmp_path, 1, 0, DIGEST)["x"], torch.arange(12.0)), "writing into it must not reach the file"


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_training_continues_bitwise_from_what_was_loaded(
    tmp_path: Path, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    options = {"lr": 0.01, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {"betas": (0.8, 0.95)})}

    def steps(model: nn.Module, inner: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            inner.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            inner.step()

    torch.manual_seed(3)
    model = nn.Linear(8, 8)
    inner = optimizer(model.parameters(), **options)
    steps(model, inner, 3)
    state = {"model": dict(model.state_dict()), "inner": inner.state_dict(), "rng": torch.get_rng_state()}
    save(tmp_path, 3, 0, state, digest=DIGEST)
    steps(model, inner, 3)

    resumed = nn.Linear(8, 8)
    inner = optimizer(resumed.parameters(), **options)
    back = load(tmp_path, 3, 0, DIGEST)
    resumed.load_state_dict(back["model"])
    inner.load_state_dict(back["inner"])
    torch.set_rng_state(back["rng"])
    steps(resumed, inner, 3)
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (object(), "a object"),
        (torch.zeros(2, dtype=torch.complex128), "torch.complex128"),
        (torch.zeros(2).to_sparse(), "torch.sparse_coo"),
        ({True: 1}, "a dict"),
        (torch.Size([2]), "a Size"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_with_its_place_and_kind(tmp_path: Path, part: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=r"state\.inner\.1, ") as caught:
        save(tmp_path, 1, 0, {"inner": [0, part]}, digest=DIGEST)
    assert named in str(caught.value)
    assert files(tmp_path) == set()


def test_a_manifest_has_a_largest_size_for_writer_and_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 0, "x" * 2000, digest=DIGEST)
    monkeypatch.setattr(checkpoint, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(CheckpointError, match="at most 1000"):
        save(tmp_path, 2, 0, "x" * 2000, digest=DIGEST)
    with pytest.raises(CheckpointError, match="1001 bytes"):
        load(tmp_path, 1, 0, DIGEST)
    assert not any("round-000002" in name or "tmp" in name for name in files(tmp_path))


def test_two_generations_of_each_worker_are_kept(tmp_path: Path) -> None:
    for round in (10, 20, 30, 40):
        for worker in range(2):
            if (round, worker) != (40, 1):
                save(tmp_path, round, worker, torch.tensor(round), digest=DIGEST)
    assert (rounds(tmp_path, 0), rounds(tmp_path, 1)) == ([30, 40], [20, 30])
    assert files(tmp_path) == {"round-000020", "round-000030", "round-000040"} | {
        f"round-0000{round}/worker-00{worker}.{kind}"
        for round, worker in [(20, 1), (30, 0), (30, 1), (40, 0)]
        for kind in ("json", "safetensors")
    }


def test_a_checkpoint_that_is_removed_during_its_write_is_reported_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "checkpoints"
    monkeypatch.setattr(
        checkpoint, "sync_folder", lambda folder: shutil.rmtree(store / "round-000002") if folder == store else None
    )
    with pytest.raises(CheckpointError, match=r"worker 3 at round 2 is not in .* any more as it was written there"):
        save(store, 2, 3, {"x": torch.ones(2)}, digest="d")


def test_a_worker_ahead_keeps_all_since_the_round_that_the_slowest_owns(tmp_path: Path) -> None:
    for round in (10, 20, 30, 40, 50):
        save(tmp_path, round, 0, round, digest=DIGEST, since=20)
    assert rounds(tmp_path, 0) == [20, 30, 40, 50]
    save(tmp_path, 60, 0, 60, digest=DIGEST, since=60)
    assert rounds(tmp_path, 0) == [50, 60], "two are kept even when the slowest is not behind"


def test_rounds_sort_as_numbers_beyond_six_digits(tmp_path: Path) -> None:
    for round in (999_999, 1_000_000):
        save(tmp_path, round, 1000, round, digest=DIGEST)
    assert rounds(tmp_path, 1000) == [999_999, 1_000_000]
    assert rounds(tmp_path, 100) == []
    assert load(tmp_path, 1_000_000, 1000, DIGEST) == 1_000_000


def test_generations_of_another_run_are_not_counted_and_do_not_crowd_out_ours(tmp_path: Path) -> None:
    for round in (200, 300):
        save(tmp_path, round, 0, round, digest="another")
    for round in (10, 20):
        save(tmp_path, round, 0, round, digest=DIGEST)
    assert rounds(tmp_path, 0, DIGEST) == [10, 20]
    assert rounds(tmp_path, 0) == [10, 20, 200, 300]


def test_rewinding_removes_the_generations_of_a_future_that_will_not_be(tmp_path: Path) -> None:
    for worker in (0, 1):
        for round in (10, 20):
            save(tmp_path, round, worker, round, digest=DIGEST)
    rewind(tmp_path, 10, 0)
    assert (rounds(tmp_path, 0), rounds(tmp_path, 1)) == ([10], [10, 20])
    rewind(tmp_path, 10, 1)
    assert "round-000020" not in files(tmp_path)


def test_what_a_killed_worker_had_begun_to_write_goes_when_it_starts_again(tmp_path: Path) -> None:
    begun = [tmp_path / f".worker-00{worker}.safetensors" for worker in range(2)]
    for path in begun:
        path.write_bytes(b"half")
    checkpoint.rewind(tmp_path, 0, 1)
    assert [path.exists() for path in begun] == [True, False], "the other worker may be writing its own"


@pytest.mark.parametrize("kind", ["a file", "a link that leads nowhere"])
def test_what_is_no_folder_in_the_place_of_a_round_is_damage_and_is_put_aside_when_a_run_goes_back(
    tmp_path: Path, kind: str
) -> None:
    for round in (4, 6):
        save(tmp_path, round, 0, {"x": torch.zeros(1)}, digest="d", keep=9)
    place = tmp_path / "round-000006"
    shutil.rmtree(place)
    place.write_text("x") if kind == "a file" else place.symlink_to(tmp_path / "gone" / "away")
    for worker in range(2):  # the second, which never had one, is named too
        found = checkpoint.generation_faults(tmp_path, worker)[6]
        assert found is not None and found.kind == FaultKind.DAMAGED
        assert "round-000006" in found.why
    with pytest.raises(CheckpointError, match="could not be written"):  # and not tried for ever
        save(tmp_path, 6, 0, {"x": torch.ones(1)}, digest="d")
    save(tmp_path, 8, 0, {"x": torch.ones(1)}, digest="d", keep=1)  # what is older is none of its business
    assert os.path.lexists(place) and rounds(tmp_path, 0) == [8]
    for worker in range(2):
        rewind(tmp_path, 4, worker)
    assert not os.path.lexists(place) and os.path.lexists(tmp_path / "aside" / "round-000006.no-folder")
    save(tmp_path, 6, 0, {"x": torch.ones(1)}, digest="d")
    assert rounds(tmp_path, 0) == [6]


def test_a_worker_can_save_although_one_ahead_of_it_removes_the_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = os.replace, []

    def replace(source: Path, target: Path) -> None:
        if not removed:
            removed.append(Path(target).parent)
            os.rmdir(removed[0])
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path, 1, 0, torch.ones(1), digest=DIGEST)
    assert removed == [tmp_path / "round-000001"]
    assert rounds(tmp_path, 0, DIGEST) == [1]


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_every_changed_byte_and_every_cut_is_noticed(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 5, 2, {"x": torch.arange(3.0), "lr": 0.1, "betas": (0.9, math.inf)}, digest=DIGEST)
    path = tmp_path / "round-000005" / f"worker-002.{kind}"
    whole = path.read_bytes()
    for place in range(len(whole)):
        for damaged in (whole[:place] + bytes([whole[place] ^ 32]) + whole[place + 1 :], whole[:place]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"worker-002.{kind}' (has changed|is cut short)"):
                load(tmp_path, 5, 2, DIGEST)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match=f"worker-002.{kind}"):
        load(tmp_path, 5, 2, DIGEST)
    assert rounds(tmp_path, 2) == [], "a file of the wrong size makes no complete generation"
    path.write_bytes(whole)
    assert rounds(tmp_path, 2) == [5]


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 5, 2, torch.ones(1), digest=DIGEST)
    (tmp_path / "round-000005" / f"worker-002.{kind}").unlink()
    with pytest.raises(
        CheckpointError, match=f"worker-002.{kind}' (cannot be read: No such file|is missing, as if it was lost)"
    ):
        load(tmp_path, 5, 2, DIGEST)
    assert rounds(tmp_path, 2) == []


def test_the_snapshot_of_another_run_worker_or_round_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5, 2, torch.ones(1), digest=DIGEST)
    with pytest.raises(CheckpointError, match="has digest '0123abcd' but needs 'ffff'"):
        load(tmp_path, 5, 2, "ffff")
    for round, worker, what in [(5, 3, "worker 2 but needs 3"), (6, 2, "round 5 but needs 6")]:
        target = tmp_path / f"round-{round:06d}"
        target.mkdir(exist_ok=True)
        for kind in ("json", "safetensors"):
            source = tmp_path / "round-000005" / f"worker-002.{kind}"
            (target / f"worker-{worker:03d}.{kind}").write_bytes(source.read_bytes())
        with pytest.raises(CheckpointError, match=f"has {what}"):
            load(tmp_path, round, worker, DIGEST)
        assert rounds(tmp_path, worker) == [r for r in [5] if worker == 2]


def forged(folder: Path, **changes: Any) -> None:
    """Replaces parts of the manifest of round 5, worker 2 and seals it again, as somebody with bad intent could."""
    path = folder / "round-000005" / "worker-002.json"
    content = json.loads(path.read_bytes())
    del content["manifest_sha256"]
    content = {name: part for name, part in {**content, **changes}.items() if part != "absent"}
    path.write_bytes(checkpoint._sealed(content))


@pytest.mark.parametrize(
    "state",
    [
        {"tensor": "1 nowhere"},
        {"tensor": 7},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"dict": 3},
        {"tuple": {}},
        {"float": "one"},
        {"call": "os.system"},
        {},
        functools.reduce(lambda inner, _: [inner], range(700), 0),
    ],
    ids=range(10),
)
def test_a_forged_state_is_an_error_and_nothing_else(tmp_path: Path, state: Any) -> None:
    save(tmp_path, 5, 2, torch.ones(1), digest=DIGEST)
    forged(tmp_path, state=state)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # as compilers do, in a process that also loads snapshots
    try:
        with pytest.raises(CheckpointError, match="does not hold what its manifest describes"):
            load(tmp_path, 5, 2, DIGEST)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "gossamer checkpoint 99"}, "has format 'gossamer checkpoint 99'"),
        ({"format": "absent"}, "is not a manifest .*'format' is needed"),
        ({"state": "absent"}, "is not a manifest .*'state' is needed"),
        ({"bytes": "many"}, "is not a manifest .*bytes is 'many' but must be a whole number"),
        ({"sha256": None}, "is not a manifest .*sha256 is None but must be text"),
    ],
)
def test_a_forged_manifest_is_an_error_and_nothing_else(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(tmp_path, 5, 2, torch.ones(1), digest=DIGEST)
    forged(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, 5, 2, DIGEST)


def test_a_forged_digest_is_quoted_in_part(tmp_path: Path) -> None:
    save(tmp_path, 5, 2, torch.ones(1), digest=DIGEST)
    forged(tmp_path, digest="a" * 100_000)
    with pytest.raises(CheckpointError, match=r"has digest 'a{59} but needs '0123abcd'"):
        load(tmp_path, 5, 2, DIGEST)


@pytest.mark.parametrize("text", [b"[]", b"", b"1", b'"state": ' + b"[" * 100_000])
def test_sealed_nonsense_is_an_error_and_nothing_else(tmp_path: Path, text: bytes) -> None:
    save(tmp_path, 5, 2, torch.ones(1), digest=DIGEST)
    (tmp_path / "round-000005" / "worker-002.json").write_bytes(checkpoint._seal(text) + text)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        load(tmp_path, 5, 2, DIGEST)
    assert rounds(tmp_path, 2) == []


def test_a_disk_that_refuses_leaves_the_generation_before_whole(tmp_path: Path) -> None:
    save(tmp_path, 1, 0, torch.ones(4), digest=DIGEST)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"round 2 could not be written .* then resume: that of round 1 is complete$"
        ):
            save(tmp_path, 2, 0, torch.ones(4096), digest=DIGEST)
        with pytest.raises(CheckpointError, match=r"then start again: there is no earlier one$"):
            save(tmp_path, 2, 1, torch.ones(4096), digest=DIGEST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert rounds(tmp_path, 0, DIGEST) == [1]
    assert files(tmp_path) == {"round-000001", "round-000001/worker-000.json", "round-000001/worker-000.safetensors"}


def test_a_folder_that_is_a_file_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "checkpoints", 1, 0, 1, digest=DIGEST)
    (tmp_path / "round-000001").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path, 1, 0, 1, digest=DIGEST)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders that killed processes left behind."""
    folder = tmp_path_factory.mktemp("killed")
    code, output = Command(folder, work=dying_saver.leave_folders).finish()
    assert code == 0, output
    return sorted(folder.iterdir())


def test_a_kill_at_any_time_leaves_a_whole_newest_generation(killed: list[Path]) -> None:
    met, shifts = set(), list[float]()
    for folder in killed:
        owned = rounds(folder, 0, dying_saver.DIGEST)
        assert owned, f"{folder.name} has no complete generation"
        for round in owned:
            back = load(folder, round, 0, dying_saver.DIGEST)
            shifts = [shift for shift in (0.0, 0.5) if identical(back, dying_saver.state(round, shift))]
            assert len(shifts) == 1, (folder.name, round)
        met.add((folder.name.split("-")[0], owned[-1], shifts[0]))
    assert {("call", 2, 0.0), ("call", 3, 0.0)} <= met, "kills must fall before and after the new one is complete"
    assert {("again", 3, 0.5), ("again", 2, 0.0), ("again", 3, 0.0)} <= met, (
        "and between the old and the new of a round"
    )
    assert "time" in {kind for kind, _, _ in met}


def test_what_a_kill_leaves_half_done_is_gone_after_the_next_saves(killed: list[Path], tmp_path: Path) -> None:
    for left in killed:
        folder = tmp_path / left.name
        shutil.copytree(left, folder)
        newest = rounds(folder, 0)[-1]
        for round in range(newest + 1, newest + 4):
            dying_saver.save(folder, round)
        stems = [f"round-{round:06d}" for round in (newest + 2, newest + 3)]
        expected = {f"{stem}/worker-000.{kind}" for stem in stems for kind in ("json", "safetensors")}
        assert files(folder) == {*stems} | expected, folder.name
