"""Alignment and persistence of pseudo-gradients, against their definitions."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer.cli import main
from gossamer.errors import ConfigError
from gossamer.record.folder import read_metrics
from gossamer.report.table import summary_rows
from gossamer.run.config.resolve import resolve
from gossamer.run.simulated.simulate import simulate
from tiny import tiny

TARGETS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def pull(worker: int, step: int) -> Tensor:
    return TARGETS[worker]


class Point(nn.Module):
    """Two parameters, at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(1), torch.zeros(1)])

    def forward(self, target: Tensor) -> Tensor:
        return -(torch.cat([*self.layers]) * target).sum()  # its gradient is -target: every step moves by lr * target


def run_of(out: Path, **given: object) -> list[tuple[float, float | None]]:
    settings = {"record.alignment": True, "run.threads": 1}
    run = simulate(
        None,
        out,
        model=Point,
        data=pull,
        loss=lambda model, batch: model(batch),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        settings={**settings, **given.pop("settings", {})},
        **{"workers": 3, "local_steps": 4, "rounds": 3, **given},
    )  # type: ignore[arg-type]
    assert run.alignment["round"] == [*range(run.rounds)]
    return [*zip(run.alignment["alignment"], run.alignment["persistence"], strict=True)]


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("local_sgd", {}),
        ("gossip", {}),
        ("diloco", {"schedule.fragments": 2}),
        ("data_parallel", {"run.local_steps": 1}),
    ],
)
def test_alignment_is_the_square_of_the_mean_over_the_mean_square_and_persistence_a_cosine(
    tmp_path: Path, rule: str, settings: dict[str, object]
) -> None:
    steps = settings.get("run.local_steps", 4)
    found = run_of(tmp_path / "run", rule=rule, local_steps=steps, settings=settings)
    mean = TARGETS.mean(0)
    expected = float(mean.square().sum() / TARGETS.square().sum(1).mean())
    assert [alignment for alignment, _ in found] == pytest.approx([expected] * 3)
    assert found[0][1] is None and [cosine for _, cosine in found[1:]] == pytest.approx([1.0, 1.0])
    (row,) = summary_rows({"a": tmp_path / "run"}, {})
    assert (row["alignment"], row["persistence"]) == pytest.approx((expected, 1.0))


def test_the_record_of_alignment_changes_no_other_number(tmp_path: Path) -> None:
    lines = {}
    for measured in (False, True):
        simulate(tiny(record__alignment=measured), tmp_path / str(measured))
        lines[measured] = [line for line in read_metrics(tmp_path / str(measured)) if line["kind"] != "alignment"]
    assert lines[True] == lines[False]
    words = ["report", str(tmp_path / "True"), "--out", str(tmp_path / "report.html")]
    assert main(words) == 0 and '"alignment":[' in (tmp_path / "report.html").read_text()


def test_alignment_of_an_asynchronous_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"record\.alignment is true and the run is asynchronous \(server\)"):
        tiny(server="heloco", record__alignment=True)


def test_real_workers_say_that_they_record_no_alignment_and_what_does() -> None:
    wanted = tiny(record__alignment=True)
    (sentence,) = resolve(wanted, real=True).warnings
    assert "record.alignment is true" in sentence and "run gossamer simulate on the same file" in sentence
    assert not resolve(wanted).warnings and not resolve(tiny(), real=True).warnings
