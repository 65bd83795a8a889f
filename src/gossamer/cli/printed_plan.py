"""What `gossamer plan` prints: its recommendation, its candidates, and what the choice depends on."""

import math
from typing import TYPE_CHECKING

from gossamer.cli.tables import print_sentence, print_table
from gossamer.record.progress import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gossamer.cli.plan_options import PlanOptions
    from gossamer.run.planning.candidates import Priced
    from gossamer.run.planning.choice import Candidate, Pick
    from gossamer.run.planning.plan import RunPlan
    from gossamer.run.planning.planned_stages import ShardPlan, StagePlan

_SPARE = ("computing", "loss (nats)", "tokens", "codec there, back", "local steps")
"""Columns of a plan that a narrow terminal leaves out, the first of them first."""
_HELD_BYTES, _LARGE_BYTES = 16, 8e9
"""Bytes of a parameter in fp32 with its gradient and both moments of AdamW, and those of a replica that many devices lack."""
_SLOWER = 1.05
"""Above so many times the hours of DDP, the recommendation says whose hours it has, as `gossamer train` sends after the step."""


def print_plan(
    made: "RunPlan", parts: "StagePlan | ShardPlan | None", priced: "Priced", choice: "Pick", options: "PlanOptions"
) -> None:
    """Prints how a replica is divided, the candidates, and which is taken."""
    from gossamer.report.table import digits_text
    from gossamer.run.planning.candidates import USUAL, chosen_from
    from gossamer.run.planning.choice import PLAN_HEADINGS, leading, notes_on, plan_rows
    from gossamer.run.planning.plan import choosable
    from gossamer.run.planning.planned_stages import StagePlan
    from gossamer.run.planning.teams import sites_apart

    shown = [*made.candidates, *priced.candidates]
    stages = parts.chosen.stages if isinstance(parts, StagePlan) else 1
    print_sentence(_recommendation(choice, shown, asked=options.method is not None, stages=stages))
    _print_memory(made, parts, choice, options)
    print_sentence(_what_is_trained(made, choice, options))
    if made.network.step_of is None and options.step_s is None and options.peak_flops is None:
        print_sentence(
            "seconds of an inner step are those of the network file, which names no model: they are the same with any --model"
        )
    asked = [one for one in shown if one.method == choice.best.method]
    usually = chosen_from(made, priced)
    rivals = choosable(usually if options.method is None else asked, made.options)
    if not options.all:
        shown = leading(choice, shown)
    missing = print_table(PLAN_HEADINGS, plan_rows(choice, shown), text=2, bold=shown.index(choice.best), spare=_SPARE)
    if missing:
        print_sentence(f"a wider terminal, or a file, has also: {', '.join(missing)}")
    print_sentence(_basis(choice))
    for sentence in notes_on(choice, shown):
        print_sentence(sentence)
    if not (options.boundary or made.network.stages) and (why := sites_apart(made.network)):
        print_sentence(why)
    parallel = next((one for one in shown if one.collective and not one.left_out), None)
    if parallel is not None:
        print_sentence(_as_ddp(choice, parallel))
    for name, why in priced.unpriced.items():
        if options.all or (name == USUAL and made.workers > 1):
            print_sentence(f"no price: {name}: {why}")
    _print_choice(made, choice, usually, rivals)
    if options.loss is not None:
        by, hours = "law" if options.law is not None else "anchor", hours_to_loss(made, choice, options)
        when = "not foretold" if hours is None else f"after about {digits_text(hours)} h"
        echo(f"loss {options.loss:g} by the {by}: {when if hours != math.inf else 'never'}", flush=True)


def _print_memory(
    made: "RunPlan", parts: "StagePlan | ShardPlan | None", choice: "Pick", options: "PlanOptions"
) -> None:
    """Prints what a replica takes, as far as it is known, and how it is divided."""
    from gossamer.run.planning.planned_stages import ShardPlan, StagePlan

    if isinstance(parts, StagePlan):
        _print_cut(parts)
    elif isinstance(parts, ShardPlan):
        print_sentence(
            f"a replica takes {parts.replica_bytes / 1e9:.4g} GB without activations, more than a machine has; the "
            f"{parts.shards} of a site hold it in shards of {parts.replica_bytes / parts.shards / 1e9:.4g} GB (FSDP2), so the "
            "workers are sites; --boundary dense cuts it into stages instead"
        )
    elif options.memory_bytes is not None:
        echo(f"a replica fits a process of {options.memory_bytes / 1e9:.4g} GB, without activations")
    elif (held := _HELD_BYTES * made.parameters) >= _LARGE_BYTES:
        site = f" (in shards of {held / choice.best.site / 1e9:.4g} GB)" if choice.best.site > 1 else ""
        print_sentence(
            f"a replica takes about {held / 1e9:.4g} GB{site} for weights, gradients and AdamW, and more for outer state and "
            "activations; --memory-bytes cuts one that does not fit"
        )


def _print_cut(cut: "StagePlan") -> None:
    """Prints the ways to cut a replica, and which is taken."""
    from gossamer.report.table import digits_text
    from gossamer.run.planning.planned_stages import SPEED_LEFT

    chosen = cut.chosen
    echo(
        f"a replica takes {cut.replica_bytes / 1e9:.4g} GB without activations; in {chosen.stages} stages, cut before the layers "
        f"{', '.join(map(str, chosen.cuts))}, a process takes {chosen.stage_bytes / 1e9:.4g} GB at most"
    )
    rows = list[tuple[str, ...]]()
    for one in cut.tried:
        speed = digits_text(one.step_s), f"{one.unhindered:.1%}", f"{one.computing:.1%}"
        rows.append((f"{one.forward}, {one.backward} back", str(one.micro_batches), *speed))
    headings = ("boundary codec", "micro-batches", "s/step", "speed left", "computing")
    print_table(headings, rows, bold=cut.tried.index(chosen))
    for name, why in cut.refused.items():
        echo(f"refused: {name}: {why}")
    some = f"whose links leave {SPEED_LEFT:.0%} of the speed"
    why = f"the mildest {some}" if chosen.unhindered >= SPEED_LEFT else f"the fastest, as there is none {some}"
    echo(f"boundary codec: {chosen.forward} ({why})")
    echo(f"its stages compute for {chosen.computing:.1%} of an inner step and wait for each other in the rest")
    links, n = cut.made.network.stages, cut.made.workers
    speed = "" if links and links.speeds else ", each as fast as the one that takes step_s for a whole replica"
    print_sentence(
        f"a worker is then {chosen.stages} machines and not one, {n * chosen.stages} in all{speed}; the hours are of that many"
    )
    if links is None:
        print_sentence("what crosses between stages takes no time here, as the network file has no [stages]")
    if chosen.unhindered < SPEED_LEFT and cut.made.model.bottleneck is None:
        echo("fewer bytes cross in another model, which is narrow at its cuts: model.bottleneck 'resbm' or 'subspace'")
    echo()


def _what_is_trained(made: "RunPlan", choice: "Pick", options: "PlanOptions") -> str:
    """The model, the workers and the tokens of a plan, with its hours."""
    from gossamer.report.table import digits_text

    settings = made.options
    default = settings.tokens is None and settings.hours is None
    return (
        f"{options.model or made.model.size} with a vocabulary of {settings.vocab_size:,} (--vocab): {made.parameters:,} "
        f"parameters, {made.workers} worker{'s' * (made.workers > 1)} with inner steps of {settings.batch_size:,} x "
        f"{settings.seq_len:,} tokens, {choice.tokens:.4g} tokens{', 20 a parameter (--tokens or --hours)' if default else ''}; "
        f"loss in {digits_text(choice.hours)} h"
    )


def hours_to_loss(made: "RunPlan", choice: "Pick", options: "PlanOptions") -> float | None:
    """Hours until the choice reaches the loss asked for; infinite where a law excludes it, None where it is unknown."""
    penalty, law = choice.best.penalty(choice.scale), made.options.law
    if options.loss is None or penalty is None:
        return None
    if law is None:
        return choice.hours_to_loss(choice.best)
    return choice.hours_of(choice.best) * law.times_as_many(options.loss, penalty.nats)


def _recommendation(choice: "Pick", candidates: "Sequence[Candidate]", *, asked: bool, stages: int) -> str:
    """The choice, with its hours and tokens, compared with one machine alone, one site alone and data parallelism.

    Args: `stages` of a worker, which needs as many machines.
    """
    from gossamer.report.table import digits_text
    from gossamer.run.planning.choice import ALONE, SITE_ALONE

    best = choice.best
    fewest = min(best.local_steps)
    steps = "" if best.full_steps == 1 else f" with {best.full_steps:,} local steps"
    if fewest < best.full_steps:
        steps = f" with {fewest:,} to {best.full_steps:,} local steps"
    beside = list[str]()
    for words, some in (
        ("one machine alone", [one for one in candidates if one.method == ALONE]),
        ("one site alone", [one for one in candidates if one.method == SITE_ALONE]),
        ("data parallelism", [one for one in candidates if one.method == "data parallel" and not one.left_out]),
    ):
        if some and best not in some:
            other = min(some, key=lambda one: one.seconds_per_token)
            faster = other.seconds_per_token / best.seconds_per_token
            times, how = (faster, "as fast as") if faster >= 1 else (1 / faster, "the hours of")
            beside.append(
                f"{times:,.{1 if times < 9.95 else 0}f} times {how} {words} ({digits_text(choice.hours_of(other))} h)"
            )
    head = f"{'asked for:' if asked else 'take'} {best.method}{steps}{team_in_words(best)}{_codecs(best)}"
    if stages > 1:
        head += f", on {stages} machines a worker ({stages * len(best.local_steps)} in all)"
    if best.unhidden_round_s is not None and best.unhidden_round_s > _SLOWER * best.round_s:
        head += ", as DDP runs it"
    return f"{head}: {digits_text(choice.hours)} h for {choice.tokens:.3g} tokens" + "".join(
        f", {words}" for words in beside
    )


def _codecs(candidate: "Candidate") -> str:
    """The codec of each direction, in words."""
    from gossamer.run.planning.choice import ALONE, format_codecs

    there, _, back = format_codecs(candidate).partition(", ")
    if candidate.method == ALONE:
        return ""
    return f", {there} there and {back} back" if back and back != there else f", {there}"


def team_in_words(candidate: "Candidate") -> str:
    """The participants, in words."""
    from gossamer.run.planning.choice import SITE_ALONE

    n, gone = len(candidate.local_steps) + len(candidate.left_out), {*candidate.left_out}
    if candidate.site > 1:
        return f" between {n} sites of {candidate.site} workers, each of which trains as one"
    staying = [i for i in range(n) if i not in gone]
    if not gone:
        return ("", " on both workers", f" on all {n} workers")[min(n, 3) - 1]
    if len(staying) == 1:
        return f" (worker {staying[0]})"
    if len(gone) < len(staying) and candidate.method != SITE_ALONE:
        return f" without {candidate.dropped}"
    return f" on workers {', '.join(map(str, staying))}" if len(staying) <= 8 else f" on {len(staying)} of {n} workers"


def _as_ddp(choice: "Pick", candidate: "Candidate") -> str:
    """How data parallelism is priced, and its time with the messages as Gossamer sends them."""
    from gossamer.report.table import digits_text
    from gossamer.run.planning.plan import BACKWARD

    assert candidate.unhidden_round_s is not None
    ways = {"owners": "through owners of chunks", "ring": "along a ring", "tree": "along a tree"}
    hours = choice.hours_of(candidate) * candidate.unhidden_round_s / candidate.round_s
    return (
        f"data parallelism as DDP runs it: all-reduce {ways[candidate.collective]}, of which backward hides up to "
        f"{BACKWARD:.0%} of a step; gossamer train sends after the step, in {digits_text(hours)} h"
    )


def _basis(choice: "Pick") -> str:
    """The source of the losses."""
    from gossamer.network.estimates.wall_clock import FITTED_PARAMETERS
    from gossamer.run.planning.expected_loss import TOKENS_PER_PARAMETER
    from gossamer.run.planning.measured_losses import MEASURED_PARAMETERS, MEASURED_WORKERS

    unit = "nats a byte" if choice.scale.vocab_size <= 256 else "nats a token"
    measured = (
        f"{MEASURED_PARAMETERS:,} parameters, {MEASURED_WORKERS} workers, {TOKENS_PER_PARAMETER} tokens a parameter and four "
        "times as many"
    )
    line = (
        f"loss: {unit} above data parallelism after all tokens, expected; ±: half of the 95 % interval of a difference; "
        f"measured with {measured}"
    )
    if not choice.scale.outside or choice.scale.workers == 1:
        return line
    small = choice.scale.log_fraction_to(FITTED_PARAMETERS[0]) < 1
    return (
        f"{line}. {' and '.join(choice.scale.outside)} are outside of that: how methods differ there is not "
        f"known, and the lowest expectation is taken. DiLoCo's gap is "
        f"{'between the measured one and ' if small else ''}that of arXiv 2503.09799"
    )


def _print_choice(
    made: "RunPlan", choice: "Pick", priced: "Sequence[Candidate]", rivals: "Sequence[Candidate]"
) -> None:
    """Prints what is taken, and what was near; `rivals` are those of the `priced` that could have been taken."""
    from gossamer.report.table import digits_text, spread_text
    from gossamer.run.planning.choice import doublings_that_help, hours_text, lower_without_some
    from gossamer.run.planning.planned_run_file import in_a_site

    best = choice.best
    left = f"dropping {best.dropped} (slowest): " if best.dropped and best.trained_as == best.method else ""
    steps = f"{best.full_steps:,} local step{'s' if best.full_steps > 1 else ''}"
    sends = f"{digits_text(best.round_bytes / 1e6)} MB and " if best.round_bytes else ""
    print_sentence(
        f"chosen: {left}{best.method}, {steps}{_codecs(best)}: {sends}{spread_text(best.round_s, best.spread_s)} s a round, "
        f"{hours_text(choice, best)} h"
    )
    if best.spread_s >= 0.001 * best.round_s:
        print_sentence(
            "± of hours and seconds: half of the 95 % interval of their mean over the rounds that were priced, as they depend on "
            "chance; gossamer check of the run file has its own, of fewer rounds"
        )
    if not choice.whole_round(best):
        print_sentence(
            f"no method ends a round in that time, and a run has one at least: {digits_text(best.round_s / 3600)} h; give more "
            "--tokens or --hours, or fewer --local-steps"
        )
    most = max(made.options.local_steps)
    if (doublings := doublings_that_help(choice, rivals, most)) is not None:
        print_sentence(
            f"more than {most:,} local steps, the most that were tried, are expected to end lower: --local-steps "
            f"{','.join(str(most << k) for k in range(doublings + 1))} tries them"
        )
    if best.fewer:
        print_sentence(
            f"{best.fewer} of {best.full_steps:,} local steps, so that nobody waits; what fewer steps learn counts less"
        )
    if best.site > 1:
        print_sentence(f"in a site, {best.site} workers train as one, {in_a_site(best, made.options)}")
    if best.left_out:
        gone = best.dropped if len(best.left_out) <= 8 else "the workers left out"
        print_sentence(
            f"text that only {gone} ha{'s' if len(best.left_out) == 1 else 've'} is lost; --keep-all plans with everybody"
        )
    if made.options.keep_all and (lower := lower_without_some(choice, priced)) is not None:
        why = "a plan in stages" if made.replica else "--keep-all"
        print_sentence(f"{lower.name} is expected to end lower, and is not taken, as {why} leaves nobody out")
    if choice.undecided:
        print_sentence(
            f"not told apart and within 0.02 nats: {choice.undecided_in_words}; the lowest expectation is taken, within 0.005 "
            "nats the fastest"
        )
    if made.workers > 1:
        print_sentence("another method is taken with --method NAME; --all shows every candidate")
