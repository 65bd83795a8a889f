"""What every method sends, and how long a run of the leaderboard would take with it on each network; nothing is trained."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from generators.sources import ROOT
from gossamer.models.sizes import parameter_count
from gossamer.report.table import DASH, markdown_numbers
from gossamer.run.config.document import load_document, with_settings
from gossamer.run.config.recipes import recipes
from gossamer.run.config.run_file import RunConfig, parse
from gossamer.run.planning.check import examine_run

_FILE = "experiments/evidence/leaderboard.toml"
_SETTINGS: dict[str, dict[str, Any]] = {
    "gasloc_streaming": {"schedule.fragments": 2},
    "streaming_diloco": {"schedule.fragments": 2},
    "cocodc": {"schedule.fragments": 2},
    "gasloc_adaptive": {"run.adapt": "even"},
    "a_edit": {"run.adapt": "even"},
    "dilocox": {"rule.rank": 8},
    "dilocox_adaptive": {"rule.rank": 8},
}
"""What a model of two narrow layers asks of a method, beside its recipe."""
_VOCABULARY = 256
_MEGA, _MINUTE = 1e6, 60
_HEAD = """# What the methods send and take

    make results

Computed as `gossamer check` does it, without training: bytes are those of played rounds, and seconds are their replay on a
network. The run and the networks are the leaderboard's (`{file}`): {workers} workers, {parameters:,}
parameters, {steps:,} inner steps of {step_s:g} s, hence {minutes:.1f} minutes for who never waits, and {local_steps} local
steps where the method does not set others.

- Each method has the settings of its recipe on [the methods page](../methods.md). But as the model has two layers,
  {fragments} send two fragments, and as it is narrow,
  {rank} have rank 8.
- {notes}
- An asynchronous method takes the time until all workers together have taken their steps; fast workers take more of them.
- A method of one worker sends nothing, and has no network.

**There are no losses here, as none of these runs is tuned.** Methods with a link in the last column are compared at
[settings that the same budget has chosen for each](../evidence/leaderboard.md).

"""


class _Priced(NamedTuple):
    """One method: bytes per worker and round, and minutes of a run on each network; None where it has no network."""

    method: str
    local_steps: int
    sent_bytes: float
    rounds: int
    minutes: tuple[float | None, ...]
    notes: frozenset[str]


def prices_page() -> str:
    """The page. Cost: some seconds."""
    document = load_document(ROOT / _FILE)
    tuned = {row["method"] for row in document.pop("variant")}
    for key in ("tune", "name"):
        document.pop(key)
    del document["run"]["batched"]  # changes no byte and suits not every method
    found = [_priced(document, name) for name in recipes()]
    heads = [
        "method",
        "local steps",
        "MB per worker and round",
        "MB per worker in a run",
        *(f"minutes, {name}" for name in document["network"]),
        "loss, tuned",
    ]
    rows = [
        [
            f"`{one.method}`",
            str(one.local_steps),
            f"{one.sent_bytes / _MEGA:.3f}",
            f"{one.rounds * one.sent_bytes / _MEGA:.1f}",
            *(DASH if each is None else f"{each:.1f}" for each in one.minutes),
            "[leaderboard](../evidence/leaderboard.md)" if one.method in tuned else "",
        ]
        for one in found
    ]
    return _head(document, found) + markdown_numbers(heads, rows)


def _head(document: Mapping[str, Any], found: Sequence[_Priced]) -> str:
    base = parse(document)
    step_s = document["network"]["even"]["step_s"]
    said = dict.fromkeys(note for one in found for note in sorted(one.notes))
    return _HEAD.format(
        file=_FILE,
        workers=base.workers,
        parameters=parameter_count(base.model, _VOCABULARY),
        steps=base.run.steps,
        step_s=step_s,
        minutes=base.run.steps * step_s / _MINUTE,
        local_steps=base.length.full_steps,
        fragments=_listed(name for name, own in _SETTINGS.items() if "schedule.fragments" in own),
        rank=_listed(name for name, own in _SETTINGS.items() if "rule.rank" in own),
        notes="; ".join(f"{_listed(one.method for one in found if note in one.notes)} {note}" for note in said) + ".",
    )


def _listed(names: Iterable[str]) -> str:
    *first, last = [f"`{name}`" for name in names]
    return f"{', '.join(first)} and {last}" if first else last


def _priced(document: Mapping[str, Any], method: str) -> _Priced:
    names = [*document["network"]]
    runs = [_run_of(document, method, name) for name in names]
    if runs[0].kind == "rounds":  # of the others the seconds of one network decide what is computed
        runs = runs[:1]
    steps, rounds = runs[0].length.full_steps, runs[0].length.rounds
    if runs[0].workers == 1:
        return _Priced(method, steps, 0.0, rounds, (None,) * len(names), frozenset())
    examined = [examine_run(run) for run in runs]
    sent = examined[0].sent_bytes
    assert sent is not None  # as the vocabulary is known
    networks = [network for one in examined for network in one.networks]
    minutes = tuple(None if one.round_s is None else rounds * one.round_s / _MINUTE for one in networks)
    return _Priced(method, steps, sent, rounds, minutes, frozenset(one.note for one in networks if one.note))


def _run_of(document: Mapping[str, Any], method: str, network: str) -> RunConfig:
    settings = {"method": method, **_SETTINGS.get(method, {}), "events.network": network}
    return parse(with_settings(document, settings))
