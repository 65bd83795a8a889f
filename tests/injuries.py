"""Injuries of run folders, and what every verb does then: `make injuries` tries a thousand, and writes docs/results/injuries.md.

A seed draws a kind of run, a file of its folder and what happens to it. Each verb then works on a copy of its own. As the injury
is known, so is what must hold: no traceback; a sentence that names the file (or worker and round), or else what the verb says and
does without the injury; every other file as it was, unless the run went on; and then the bits of the run that nobody injured.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import logging
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from commands import run
from gossamer.record import checkpoint
from gossamer.record.origin import origin
from gossamer.run.config.resolve import settings_of
from gossamer.run.config.run_file import RunConfig, dump
from gossamer.run.simulated.simulate import simulate
from tiny import single

ROOT = Path(__file__).parents[1]
WORDS = {
    "truncated": ("cut short", "TOML", "JSON", "missing", "is needed"),
    "zeroed": ("cut short", "changed", "TOML", "JSON"),
    "missing": ("missing", "cannot be read", "has no checkpoint", "no run.toml", "No such file"),
    "swapped": ("worker", "changed"),
    "of another round": ("round", "changed", "bytes"),
    "of another run": ("digest", "changed", "of another run", "bytes", "but needs"),
    "unreadable": ("cannot be read", "Too many levels", "no run.toml"),
    "garbled": ("JSON", "UTF-8", "record", "changed"),
    "of another worker": ("worker", "contradict", "slot", "belongs"),
}
"""What may happen to a file, with words of which a sentence about it must have one."""
OF_CHECKPOINTS = ("truncated", "zeroed", "missing", "swapped", "of another round", "of another run", "unreadable")
READERS = ("evaluate", "audit", "report", "status", "replay")
GOING_ON = ("resume", "resume auto")
SMALL = {
    "workers": 2,
    "topology__name": "complete",
    "model__hidden_size": 16,
    "model__intermediate_size": 32,
    "run__steps": 12,
    "run__eval_every": 0,
    "run__checkpoint_every": 4,
    "run__timeout_s": 20.0,
    "inner__schedule": "constant",
}
REAL: dict[str, dict[str, Any]] = {
    "rounds": {"record__hash": True},
    "elastic": {"run__elastic": True, "record__hash": True},
    "asynchronous": {"run__wait": False},
    "served": {"server__name": "heloco"},
}
SIMULATED: dict[str, dict[str, Any]] = {
    "simulated": {"record__hash": True},
    "simulated server": {"server__name": "heloco"},
    "simulated without waiting": {"run__wait": False},
}
BRANCHED = " with a branch"
"""Of kinds of run whose settings changed on the way."""
KINDS = (*REAL, *SIMULATED)
ALL_KINDS = (*KINDS, *(kind + BRANCHED for kind in KINDS))
LOGS_OF_EVENTS = ("events", "order", "outcomes", "arrivals")
OF_LOGS = ("zeroed", "unreadable", "garbled")
"""What happens to logs. What is cut from the end of one is what a killed writer has not written."""


class Injury(NamedTuple):
    """What happens to which file."""

    seed: int
    run: str
    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.seed}: {self.run}, {self.file} {self.what}"


class Outcome(NamedTuple):
    """What a verb did."""

    code: int
    said: str
    files: dict[str, str]
    bits: str
    """Of the last checkpoints."""


def plain(kind: str) -> str:
    """A kind of run, with or without a branch."""
    return kind.removesuffix(BRANCHED)


def config_of(kind: str, seed: int = 0) -> RunConfig:
    """The run file of a kind of run; after its branch, if it has one."""
    if kind != plain(kind):
        before = config_of(plain(kind), seed)
        return replace(before, inner=replace(before.inner, lr=before.inner.lr / 2))
    given = {**SMALL, **REAL.get(kind, {}), **SIMULATED.get(kind, {}), "seed": seed}
    if "server__name" in given:
        del given["topology__name"]
    if kind.startswith("simulated "):
        links = {"step_s": 0.1, "uplink_bps": 1e8, "downlink_bps": 1e8}
        return single(**given, network={"clock": links}, data__max_bytes=300_000)
    return single(**given)


class Folders:
    """The folders that are injured, made once; and what each verb does with one that is sound."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calm: dict[tuple[str, str], Outcome] = {}

    def sound(self, kind: str) -> Path:
        """A run of this kind: a real one that has ended, a simulated one that was stopped two rounds before its end."""
        there = self.folder / kind / "k"
        if not there.exists():
            config = config_of(kind)
            there.parent.mkdir(parents=True, exist_ok=True)
            (there.parent / "run.toml").write_text(dump(config))
            if kind != plain(kind):
                self._branch(kind, config, there)
            elif kind in REAL:
                code, output = run("train", there.parent / "run.toml", "--local", 2, "--out", there, "--quiet")
                assert code == 0, output
            else:
                simulate(config, there, until=config.length.rounds - 1)
        return there

    def _branch(self, kind: str, config: RunConfig, there: Path) -> None:
        """Continues from an older round of a sound run, with other settings."""
        shutil.copytree(self.sound(plain(kind)), there)
        newest = max(there.glob("checkpoints/round-*"))
        shutil.rmtree(newest)
        if plain(kind) in REAL:
            lr = f"inner.lr={config.inner.lr}"
            code, output = run("train", "--resume", there, "--local", 2, "--set", lr, "--quiet")
            assert code == 0, output
        else:
            simulate(config, there, resume=True, until=config.length.rounds - 1)
        assert (there / "branches.json").exists()

    def other(self, kind: str) -> Path:
        """The checkpoints of another run of the same shape, simulated."""
        there = self.folder / plain(kind) / "other"
        if not there.exists():
            config = config_of(plain(kind) if plain(kind) in SIMULATED else "simulated", seed=1)
            simulate(config, there)
        return there

    def whole(self, kind: str) -> str:
        """The bits of the run that nobody interrupts or injures."""
        if kind != plain(kind):
            return self.calm(kind, "resume").bits
        there = self.folder / kind / "whole"
        if not there.exists():
            simulate(config_of(kind), there)
        return bits(there, kind)

    def calm(self, kind: str, verb: str) -> Outcome:
        """What a verb does with a sound folder."""
        if (kind, verb) not in self._calm:
            self._calm[kind, verb] = self.tried(kind, verb, lambda k: None)
        return self._calm[kind, verb]

    def tried(self, kind: str, verb: str, hurt: Callable[[Path], None]) -> Outcome:
        """What a verb does with a copy that is hurt first."""
        sound = self.sound(kind)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            k = Path(scratch) / "k"
            shutil.copytree(sound, k, symlinks=True)
            hurt(k)
            local = ["--local", 2] if plain(kind) in REAL else []
            trains = "train" if plain(kind) in REAL else "simulate"
            words = {
                "resume": [trains, "--resume", k, *local, "--quiet"],
                "resume auto": [trains, sound.parent / "run.toml", "--out", k, "--resume", "auto", *local, "--quiet"],
                "evaluate": ["evaluate", k],
                "audit": ["audit", k],
                "report": ["report", k, "--out", Path(scratch) / "page.html"],
                "status": ["status", k, "--json"],
                "replay": [
                    "simulate",
                    sound.parent / "run.toml",
                    "--replay",
                    k,
                    "--out",
                    Path(scratch) / "again",
                    "--quiet",
                ],
            }[verb]
            handler = _Kept()
            logging.getLogger("gossamer").addHandler(handler)
            try:
                code, output = run(*words)
            finally:
                logging.getLogger("gossamer").removeHandler(handler)
            output = "\n".join(dict.fromkeys([*output.splitlines(), *handler.lines])).replace(scratch, "")
            return Outcome(code, output, contents(k), bits(k, kind))


class _Kept(logging.Handler):
    """Keeps the warnings of this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def contents(folder: Path) -> dict[str, str]:
    """A hash of each file, but for those of locks, which say who was there last."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.name.startswith(".lock"):
                found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def bits(folder: Path, kind: str) -> str:
    """A hash of the parameters after the last round, where their checkpoints are sound; empty otherwise."""
    config = settings_of(config_of(kind))
    found = hashlib.sha256()
    for owner in config.owners:
        try:
            state = checkpoint.load(folder / "checkpoints", config.rounds, owner, config.digest)
        except Exception:
            return ""
        found.update(state["x"].numpy().tobytes() if "x" in state else b"")
    return found.hexdigest()


def drawn(folders: Folders, seed: int, kinds: Sequence[str] = KINDS) -> Injury:
    """The injury of a seed: half of them hurt a checkpoint, the others run.toml, the record of branches or a log."""
    draw = random.Random(seed)
    kind = kinds[seed % len(kinds)]
    every = contents(folders.sound(kind))
    files = [name for name in every if name.startswith("checkpoints/")]
    newest = max(name.split("/")[1] for name in files)
    if draw.random() < 0.5:
        file = draw.choice([name for name in files if newest in name] if draw.random() < 0.8 else files)
        return Injury(seed, kind, file, draw.choice(OF_CHECKPOINTS))
    logs = sorted(name for name in every if name.endswith(".jsonl") and name not in files)
    of_events = [name for name in logs if name.startswith(LOGS_OF_EVENTS)]
    if "branches.json" in every and draw.random() < 0.5:
        return Injury(seed, kind, "branches.json", draw.choice([*OF_LOGS, "truncated"]))
    if of_events and draw.random() < 0.5:
        file = draw.choice(of_events)
        others = [name for name in of_events if name != file and name.partition("-")[0] == file.partition("-")[0]]
        return Injury(seed, kind, file, draw.choice([*OF_LOGS, *["of another worker"] * bool(others)]))
    file = draw.choice(["run.toml", *logs])
    return Injury(seed, kind, file, draw.choice([*OF_LOGS, *["truncated"] * (file == "run.toml")]))


def injure(injury: Injury, k: Path, other: Path) -> None:
    """Hurts the file in a copy of the folder."""
    path, draw = k / injury.file, random.Random(injury.seed)
    suffix = path.suffix
    match injury.what:
        case "truncated":
            path.write_bytes(path.read_bytes()[: draw.randrange(100)])
        case "zeroed":
            path.write_bytes(bytes(len(path.read_bytes())))
        case "missing":
            path.unlink()
        case "unreadable":  # a permission would not stop root
            path.unlink()
            path.symlink_to(path.name)
        case "garbled":  # within the file: nothing that a killed writer leaves
            lines = path.read_bytes().splitlines(keepends=True) or [b""]
            place = draw.randrange(max(1, len(lines) - 1))
            lines[place] = lines[place][: len(lines[place]) // 2] + b"\xff" + lines[place][len(lines[place]) // 2 :]
            path.write_bytes(b"".join(lines))
        case "of another worker":
            others = [one for one in path.parent.glob(f"{path.name.partition('-')[0]}-*{suffix}") if one != path]
            path.write_bytes(sorted(others)[0].read_bytes())
        case "swapped":
            peer = next((one for one in sorted(path.parent.glob(f"*{suffix}")) if one != path), None)
            mine = path.read_bytes()
            path.write_bytes(peer.read_bytes() if peer is not None else mine[::-1])
            if peer is not None:
                peer.write_bytes(mine)
        case "of another round":
            rounds = [one for one in sorted(path.parent.parent.glob(f"round-*/{path.name}")) if one != path]
            path.write_bytes(rounds[0].read_bytes() if rounds else path.read_bytes()[::-1])
        case _:
            name = path.name if (other / "checkpoints").glob(f"*/{path.name}") else "worker-000" + suffix
            found = sorted((other / "checkpoints").glob(f"*/{name}")) or sorted(
                (other / "checkpoints").glob(f"*/*{suffix}")
            )
            path.write_bytes(found[-1].read_bytes())


def problems(folders: Folders, injury: Injury, verb: str) -> Iterator[str]:
    """What is wrong with what a verb does after an injury."""
    other = folders.other(injury.run) if injury.what == "of another run" else Path()
    before: dict[str, str] = {}

    def hurt(k: Path) -> None:
        injure(injury, k, other)
        before.update(contents(k))

    calm, found = folders.calm(injury.run, verb), folders.tried(injury.run, verb, hurt)
    if "Traceback" in found.said:
        yield "a traceback"
    named = _names(injury, found.said)
    what = found.bits == calm.bits if verb in GOING_ON else _figures(found.said) == _figures(calm.said)
    same = found.code == calm.code and what
    if not named and not same:
        yield f"no sentence names it, and it ends with {found.code}, calm {calm.code}"
    if named and not any(word in found.said for word in WORDS[injury.what]):
        yield "the sentence does not say what is wrong"
    went_on = verb in GOING_ON and found.code == 0
    changed = {name for name in before if name != injury.file and found.files.get(name) != before[name]}
    evaluated = ("model/", "metrics-evaluated", "sample.txt") if verb == "evaluate" else ()
    allowed = {name for name in changed if name.startswith(evaluated)}
    if not went_on and changed - allowed:
        yield f"sound files changed: {sorted(changed)[:3]}"
    if went_on and plain(injury.run) in ("rounds", "elastic", *SIMULATED) and found.bits != folders.whole(injury.run):
        yield "it went on to other bits"


def _names(injury: Injury, output: str) -> bool:
    """Whether a sentence names the injured file, or its worker and round."""
    path = Path(injury.file)
    places = [path.name, f"{path.parent.name}/{path.name}"]
    match = re.search(r"round-0*(\d+)/worker-0*(\d+)", injury.file)
    if injury.what == "swapped" and match:  # either of the two
        places += [f"worker-{one:03}{path.suffix}" for one in range(4)]
    if match and any(place in output for place in places):
        return True
    return (
        (f"worker {match[2]}" in output and f"round {match[1]}" in output)
        if match
        else any(place in output for place in places)
    )


def _figures(output: str) -> list[str]:
    """The numbers of what a reader prints, without seconds and ages."""
    lines = [line for line in output.splitlines() if "busy" not in line and not line.startswith(("report:", "table:"))]
    plain = (re.sub(r'"age_s": [\d.e-]+|/\S+', "", line) for line in lines)
    return [" ".join(line.split()) for line in plain]


def verbs_of(injury: Injury, *, all_of_them: bool) -> tuple[str, ...]:
    """All verbs; where processes would be started for each, only the readers unless all are asked for."""
    return (*GOING_ON, *READERS) if all_of_them or plain(injury.run) in SIMULATED else READERS


class Trial(NamedTuple):
    """The result of one injury: a line of the outcomes, from which a stopped run continues."""

    seed: int
    run: str
    file: str
    what: str
    verbs: int
    wrong: list[str]
    commit: str = ""
    """Of the code; empty for those from before it was written down."""


def tried_before(path: Path) -> list[Trial]:
    """Those of an earlier call."""
    return [Trial(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    """Tries injuries and writes the page of what came out."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--count", type=int, default=1000)
    words.add_argument("--minutes", type=float, default=600.0)
    words.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "injuries.md")
    words.add_argument("--outcome", type=Path, help="a file of what came out so far, with which a call continues")
    given = words.parse_args()
    logging.getLogger("gossamer").setLevel(logging.WARNING)
    began, outcome = time.monotonic(), given.outcome or ROOT / "docs" / "results" / "house" / "injuries.jsonl"
    trials = tried_before(outcome)
    done = {one.seed for one in trials}
    with tempfile.TemporaryDirectory() as scratch, outcome.open("a") as file:
        folders = Folders(Path(scratch))
        for seed in sorted({*range(given.count)} - done):
            if time.monotonic() - began > 60 * given.minutes:
                break
            injury = drawn(folders, seed, ALL_KINDS)
            verbs, wrong = verbs_of(injury, all_of_them=True), list[str]()
            for verb in verbs:
                for problem in problems(folders, injury, verb):
                    wrong.append(f"{injury}: {verb}: {problem}")
                    print(wrong[-1], file=sys.stderr, flush=True)
            trials.append(Trial(*injury, len(verbs), wrong, origin("", None)["commit"]))
            file.write(json.dumps(trials[-1]._asdict()) + "\n")
            file.flush()
    given.page.write_text(page(trials) + "\n")
    return any(one.wrong for one in trials)


def page(trials: Sequence[Trial]) -> str:
    """The outcome as Markdown."""
    wrong = [problem for one in trials for problem in one.wrong]
    verbs = ", ".join((*GOING_ON, *READERS))
    at = sorted({one.commit for one in trials} - {""})
    head = (
        f"`make injuries` has hurt a file of a run folder {len(trials)} times and let each verb ({verbs}) work on a copy: "
        f"{sum(one.verbs for one in trials)} trials, of which {len(wrong)} went wrong. Half of the injuries hurt a checkpoint, "
        "the others run.toml, the record of branches or a log, of which those of events are hurt most. A trial goes wrong if "
        "there is a traceback; if no sentence names the file (or worker and round) and what is wrong with it, although the verb "
        "does anything else than without the injury; if any other file changes while a run does not resume; or if a run that "
        "resumes, and whose bits are determined, has other bits than one that nobody injured."
        + (f" At commit {', '.join(at)}." if at else "")
    )
    groups = ("checkpoints", "run.toml", "branches.json", "logs of events", "other logs")
    counted = collections.Counter((one.run, _group(one.file)) for one in trials)
    lines = ["# Injured run folders", "", head, "", "| kind of run | " + " | ".join(groups) + " |"]
    lines.append("| --- |" + " ---: |" * len(groups))
    lines += [f"| {kind} | " + " | ".join(str(counted[kind, one]) for one in groups) + " |" for kind in ALL_KINDS]
    return "\n".join([*lines, *(["", "What went wrong:", "", *(f"- {one}" for one in wrong)] if wrong else [])])


def _group(file: str) -> str:
    if file.startswith("checkpoints/"):
        return "checkpoints"
    if file.endswith(".jsonl"):
        return "logs of events" if file.startswith(LOGS_OF_EVENTS) else "other logs"
    return file


if __name__ == "__main__":
    sys.exit(main())
