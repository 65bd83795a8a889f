"""The page of results that `chaos.py` writes from the lines of its trials."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

Line = Mapping[str, Any]

WHAT = {
    "kill": "four kills, one after the other, each with a newcomer",
    "leader": "slot 0, which leads a mean, killed three times, each with a newcomer",
    "three": "three workers killed inside one round, twice, three newcomers at once",
    "pause": "SIGSTOP for 0.4 and 0.8 timeouts, and of slot 0 for 2, then SIGCONT",
    "leave": "SIGTERM three times, each with a newcomer",
    "disk": "one worker with a full disk, one with a limit of the size of files; two newcomers",
    "partition": "the network cut in two for 1.5 to 2.5 timeouts, then healed",
    "stop": "all killed at random moments, up to ten times, each time followed by `--resume`",
    "mixed": "kills, stops and leaves in any order",
}
NAMES = {"gossip": "GASLoC", "mean": "DiLoCo"}


def page(
    lines: Sequence[Line], *, timeout_s: float, pace_s: float, local_steps: int, rounds: int, note: str = ""
) -> str:
    """The results file.

    Args: `note` says on what machine, if it matters; the seconds and steps are those of the trials.
    """
    sound = sum(not line["problems"] for line in lines)
    note += "\n" if note else ""
    deaths, silences = _pauses(lines, "kill", "leave"), _pauses(lines, "stop", "partition")
    joins, limit = _all(lines, "join_s"), f"{timeout_s:g} s"
    at = sorted({line["commit"] for line in lines if line.get("commit")})  # older lines have none
    code = f"The code was that of commit {', '.join(at)}.\n" if at else ""
    rows = [
        ("hangs: processes that outlived their deadline by 10 s", sum(line["hangs"] for line in lines), 0),
        (f"from a death ({len(deaths)}) to the next inner step of another worker: median, worst", _two(deaths), limit),
        (f"from SIGSTOP or a cut ({len(silences)}) to it, where nothing closes a connection", _two(silences), limit),
        ("from a ready process's connection to its first inner step: median, worst", _two(joins), "5 s"),
        ("newcomers whose first batch is on their donor's parameters, by hash", _hashes(lines), "all"),
        ("stops of everything that, resumed, end with the bits of a run without one", _bitwise(lines), "all"),
        (
            "trials whose workers' logs contradict each other",
            _with(lines, "counted the exchange", "different sets"),
            0,
        ),
        ("trials where inner steps whose result others held were taken again", _with(lines, "others held"), 0),
        ("trials where a process ended with a wrong code or a traceback", _with(lines, "ended with", "traceback"), 0),
    ]
    return f"""# Real faults in elastic runs

    python benchmarks/chaos.py

{len(lines)} trials, of which {sound} had no problem. In a trial {_sizes(lines)} workers train a tiny model as processes of one
machine for {rounds} rounds of {local_steps} inner steps, paced to {pace_s:g} s (`run.pace_s`); `run.timeout_s` is {timeout_s:g}.
What happens to them is drawn from the trial's seed. Newcomers are started by `gossamer train FILE --out RUN --join auto`.
{code}{note}
| | found | aim |
|---|---:|---:|
{chr(10).join(f"| {what} | {found} | {aim} |" for what, found, aim in rows)}

A pause is the longest wait between two local phases that began before the fault or within a timeout after it, counted from
the fault on; of each fault the worst worker counts. A worker that dies closes its connections, and the others notice at once. One
that is stopped or cut off closes none: those that wait for it give it the whole timeout, and what is above that is the exchange
without it. Where the network is cut and a rule needs everyone, the smaller part waits and is not counted. The deadline of a
process is a timeout after it last began or ended a local phase or a round.

After each trial the records are read: every process that was not killed must have ended with code 0 and without a traceback
(with a full disk: with another code and a sentence), the models of the last round must be finite, no two workers' logs of
outcomes may contradict each other unless one says that it is unsure, and no slot may take inner steps again whose result a
worker that lived on held.

## By kind

{_table(lines)}

## Problems

{_problems(lines)}
"""


def _table(lines: Sequence[Line]) -> str:
    rows = [
        "| trial | rule | trials | faults | newcomers | without a problem | pause: median, worst | joining: median, worst | "
        "seconds of a trial |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, what in WHAT.items():
        for method, name in NAMES.items():
            some = [line for line in lines if (line["kind"], line["method"]) == (kind, method)]
            if some:
                sound = sum(not line["problems"] for line in some)
                faults = sum(len(line.get("faults", [])) for line in some)
                rows.append(
                    f"| {what} | {name} | {len(some)} | {faults} | {len(_all(some, 'join_s'))} | "
                    f"{sound} | {_two(_all(some, 'pause_s'))} | {_two(_all(some, 'join_s'))} | "
                    f"{median(line['wall_s'] for line in some):.0f} |"
                )
    return "\n".join(rows)


def _problems(lines: Sequence[Line]) -> str:
    found = [
        f"* {line['kind']}, {NAMES[line['method']]}, {line['workers']} workers, seed {line['seed']}: "
        + "; ".join(line["problems"][:3])
        + (f"; and {len(line['problems']) - 3} more" if len(line["problems"]) > 3 else "")
        for line in lines
        if line["problems"]
    ]
    return "\n".join(found) or "None."


def _all(lines: Sequence[Line], name: str) -> list[float]:
    return [value for line in lines for value in line.get(name, [])]


def _pauses(lines: Sequence[Line], *whats: str) -> list[float]:
    """The pauses after these faults, each that of the worst worker."""
    pairs = [pair for line in lines for pair in zip(line.get("faults", []), line.get("pause_s", []), strict=False)]
    return [seconds for what, seconds in pairs if what in whats]


def _two(values: Sequence[float]) -> str:
    return f"{median(values):.2f} s, {max(values):.2f} s" if values else "none"


def _hashes(lines: Sequence[Line]) -> str:
    n = len(_all(lines, "join_s"))
    own = sum(line.get("own", 0) for line in lines)
    more = f"; {own} more went on with their own checkpoint" if own else ""
    return f"{sum(line.get('hashes', 0) for line in lines)} of {n - own}{more}"


def _bitwise(lines: Sequence[Line]) -> str:
    stopped = [(line["stops"], line["bitwise"]) for line in lines if "bitwise" in line]
    return f"{sum(stops for stops, same in stopped if same)} of {sum(stops for stops, _ in stopped)}"


def _with(lines: Sequence[Line], *words: str) -> int:
    holds: Callable[[str], bool] = lambda problem: any(word in problem for word in words)  # noqa: E731
    return sum(any(holds(problem) for problem in line["problems"]) for line in lines)


def _sizes(lines: Sequence[Line]) -> str:
    return " or ".join(str(n) for n in sorted({line["workers"] for line in lines}))
