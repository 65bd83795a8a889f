"""Modes of runs and the features that each of them does not support: rows for the table.

Most rows are a mode, a feature and the reason; the others have a complete sentence.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from gossamer.codecs import Codec
from gossamer.rounds.compatibility.combination import Combination, Incompatibility
from gossamer.rounds.schedule import Schedule
from gossamer.rounds.updates import topology_of_updates
from gossamer.rules import Rule
from gossamer.settings.over_time import changes
from gossamer.settings.user_code import is_code

_INNER = ("adamw", "accum_adamw", "qh_adopt", "sgd")
"""The elementwise inner optimizers, which treat a shard like a whole tensor."""


class _Given(NamedTuple):
    """A mode or a feature: whether a run has it, and the setting that enables it, in words."""

    on: Callable[[Combination], bool]
    words: Callable[[Combination], str]
    off: str = ""
    """How to disable a feature."""


def _elastic(c: Combination) -> str:
    """The setting that makes a run elastic: `run.elastic` or `--store`, `Outer(elastic=True)` or `Outer(store=...)`."""
    library = c.driver == "library"
    return f"{'' if library else '--'}store is given" if c.store else f"{'' if library else 'run.'}elastic is true"


_FEATURES = {
    "asynchronous": _Given(
        lambda c: c.asynchronous,
        lambda c: f"{c.method_label} runs asynchronously ({c.kind})",
        "use a method in rounds such as 'gasloc', with run.wait = true",
    ),
    "elastic": _Given(lambda c: c.elastic, _elastic, "set it to false"),
    "adapt": _Given(lambda c: bool(c.adapt), lambda c: f"run.adapt is {c.adapt!r}", "set it to false"),
    "all-reduce": _Given(
        lambda c: c.reduction == "all_reduce",
        lambda c: f"{'' if c.driver == 'library' else 'run.'}reduction is 'all_reduce'",
        "set it to 'ordered'",
    ),
    "hashes": _Given(lambda c: c.hashes, lambda c: "record.hash is true", "set it to false"),
    "stages": _Given(lambda c: c.stages > 1, lambda c: f"pipeline.stages is {c.stages}", "set one of the two to 1"),
    "experts": _Given(
        lambda c: bool(c.holders),
        lambda c: "model.experts.holders leaves workers without some experts",
        "remove one of the two",
    ),
    "schedule": _Given(lambda c: not c.schedule.plain, lambda c: f"[schedule] is {c.schedule}", "remove it"),
    "chosen fragments": _Given(
        lambda c: c.schedule.sends > 0, lambda c: f"schedule.sends is {c.schedule.sends}", "remove schedule.sends"
    ),
    "moments": _Given(
        lambda c: bool(c.schedule.inner_every),
        lambda c: f"schedule.inner_every is {[*c.schedule.inner_every]}",
        "remove schedule.inner_every",
    ),
    "averaging": _Given(
        lambda c: c.averaging is not None, lambda c: f"inner.averaging is '{c.averaging}'", "remove inner.averaging"
    ),
    "gradients": _Given(
        lambda c: c.rule.site == "gradients",
        lambda c: f"rule '{c.rule.name}' acts on gradients in every inner step",
        "use a rule with a local phase such as 'diloco'",
    ),
    "rule that adapts": _Given(
        lambda c: c.rule.adapted is not None,
        lambda c: (
            f"rule '{c.rule.name}' with adapt_every = {c.rule.options.get('adapt_every')} decides on the local steps"
        ),
        "set adapt_every = 0",
    ),
    "whole tensors": _Given(
        lambda c: not c.rule.elementwise,
        lambda c: f"rule '{c.rule.name}' looks at whole tensors or at all of them",
        "use an elementwise rule such as 'gasloc' or 'diloco'",
    ),
    "an optimizer of yours": _Given(
        lambda c: is_code(c.optimizer),
        lambda c: f"inner.optimizer is '{c.optimizer}'",
        "use one of Gossamer's, such as 'adamw' or 'muon'",
    ),
    "real processes": _Given(lambda c: c.driver == "train", lambda c: "the run is one of gossamer train"),
}

_CHANGING = _Given(
    lambda c: c.timetable is not None,
    lambda c: "run.local_steps changes over the run",
)
_CHANGING_RULE = _Given(
    lambda c: c.rule.at is not None,
    lambda c: (
        f"{next(f'rule.{name}' for name, value in c.rule.options.items() if changes(value))} changes over the run"
    ),
)
_SYNCHRONOUS_START = _Given(
    lambda c: c.synchronous_steps > 0,
    lambda c: f"run.synchronous_steps is {c.synchronous_steps}",
)
_OUTER = _Given(lambda c: c.driver == "library", lambda c: "")
_ELASTIC = _Given(lambda c: c.elastic, _elastic)
_STAGES = _Given(lambda c: c.stages > 1, lambda c: f"pipeline.stages is {c.stages}")
_STAGE_PROCESSES = _STAGES._replace(on=lambda c: c.stages > 1 and c.driver == "train")
_SHARDS = _Given(lambda c: c.shards > 1, lambda c: f"each worker is a mesh of {c.shards} processes")
_OWN_SHARDS = _Given(lambda c: c.shards > 1 and c.driver == "train", lambda c: f"run.shards is {c.shards}")
_BATCHED = _Given(lambda c: c.batched > 1, lambda c: f"run.batched is {c.batched}")
_EXPERTS = _Given(
    lambda c: bool(c.holders),
    lambda c: f"each expert lies on {len(c.holders[-1])} of {len(c.holders[0])} workers (model.experts.holders)",
)

_KEYED = _Given(
    lambda c: c.peers and c.driver == "train" and c.kind == "rounds" and not c.elastic, lambda c: "the run has [peers]"
)

_OWN_SECONDS = "but each process of a worker would measure its own seconds"
_NO_WHOLE_WORKER = "but a hash is of a whole worker, which no process has"
_GONE = "but a worker of several processes is gone when one of them is"
_OF_ALL = "which follows from what all workers have received since the start; remove one of the two"


def _rows(name: str, mode: _Given, refused: Mapping[str, str]) -> Iterator[Incompatibility]:
    """The rows of a mode: for each feature the reason, and after a semicolon the remedy, if other than `off`."""
    for feature, why in refused.items():
        given = _FEATURES[feature]

        def fails(c: Combination, given: _Given = given) -> bool:
            return mode.on(c) and given.on(c)

        def sentence(c: Combination, given: _Given = given, why: str = why) -> str:
            both = " and ".join(filter(None, (mode.words(c), given.words(c))))
            return ", ".join(filter(None, (both, why))) + ("" if ";" in why else f"; {given.off}")

        yield Incompatibility(f"{name} and {feature}", fails, sentence)


def _mean_of_updates(c: Combination) -> bool:
    updates = topology_of_updates(c.rule, c.topology.n, seed=0)
    return updates is not None and (updates.everyone or not updates.symmetric)


def _casts(codec: Codec) -> bool:
    """Whether it decodes each number to the same bits, whatever is encoded with it."""
    return codec.exact or (codec.blockwise == 1 and not codec.draws)


def _of_fixed_peers(c: Combination) -> bool:
    """Whether the rule keeps state per peer or sums over fixed neighbours."""
    return c.rule.needs not in ("connected", "everyone") or c.rule.copies_per_peer > 0


def is_equal_after_rounds(rule: Rule) -> bool:
    """Whether vectors and outer state of all workers are equal after each round, for any set of participants."""
    return rule.averages and rule.identical and rule.unsent is None and rule.site == "parameters"


def mixes_by_pull(rule: Rule) -> bool:
    """Whether peers may read a worker's message from a store: it sends the same to all, and keeps no state for each peer."""
    alike = rule.needs == "connected" and not rule.copies_per_peer and not rule.sends_ahead
    return alike and rule.unsent is None and rule.site == "parameters"


def exchanges_once(rule: Rule, schedule: Schedule) -> bool:
    """Whether a round has one exchange, which ends with it."""
    several = schedule.fragments > 1 or schedule.inner_every or rule.mixes_updates
    return not (several or schedule.overlap_steps or rule.delay_rounds)


def store_obstacle(rule: Rule, codec: Codec, schedule: Schedule) -> str | None:
    """What keeps a method in rounds out of a store; None where it can use one."""
    if not (is_equal_after_rounds(rule) or mixes_by_pull(rule)):
        return f"after a round of rule '{rule.name}' its workers are not equal in all, and it is no plain gossip"
    if codec.back is not None:
        return f"codec '{codec.name}' encodes the sums of a mean too"
    if not exchanges_once(rule, schedule):
        return "a round has several exchanges, or one that does not end with it"
    return None if rule.adapted is None else "its local steps adapt"


def _unequal(c: Combination) -> list[tuple[int, ...]]:
    """The local steps of each stretch of rounds in which not all workers take as many."""
    return [one for one in c.all_local_steps if isinstance(one, tuple) and len({*one}) > 1]


def _late(c: Combination) -> bool:
    """Whether messages are in flight between two rounds."""
    return c.schedule.overlap_steps > 0 or c.rule.delay_rounds > 0


_GOSSIP_OR_MEAN = "use a rule that gossips on parameters such as 'gasloc', or a mean over everyone such as 'diloco'"

OUTER = tuple(
    _rows(
        "Outer",
        _OUTER,
        {
            "asynchronous": (
                "and Outer exchanges in rounds, for which workers wait; use gossamer simulate or gossamer train, or a method in "
                "rounds such as 'gasloc'"
            ),
            "gradients": (
                "between backward and the inner optimizer, where Outer has no access; use torch's DistributedDataParallel, or "
                "a rule on parameters such as 'diloco'"
            ),
            "moments": "but Outer has no access to the moments of your inner optimizer",
            "averaging": (
                "whose iterate and average are exchanged in place of the parameters, and Outer exchanges parameters; use "
                "gossamer train, or gossamer.GPA as the optimizer of one worker without Outer"
            ),
            "adapt": (
                "which changes the local steps between rounds, and Outer counts the same number in each; use gossamer train, or "
                "give each worker its own local_steps"
            ),
            "rule that adapts": "and Outer counts the same number in each round; set adapt_every = 0, or use gossamer train",
        },
    )
)
"""Conditions of `gossamer.Outer`, which cannot see the user's loop between two calls."""


def _stores(c: Combination) -> str:
    """The networks of a run file whose messages go through a store."""
    return " and ".join(
        f"network.{name}.store" for name, network in (c.networks or {}).items() if network.store is not None
    )


def _unpriced(c: Combination) -> str | None:
    """What a run has of which a store has no price; None for a run that is priced there."""
    return f"run.adapt is {c.adapt!r}" if c.adapt else store_obstacle(c.rule, c.codec, c.schedule)


MODES: tuple[Incompatibility, ...] = (
    *OUTER,
    *_rows(
        "elastic",
        _ELASTIC,
        {
            "asynchronous": "where nobody waits for a worker that is gone; remove run.elastic",
            "gradients": "",
            "adapt": "for which all workers publish their pace; remove one of the two",
            "all-reduce": "a barrier that ends with the first worker that dies",
            "chosen fragments": _OF_ALL,
            "rule that adapts": _OF_ALL,
        },
    ),
    *_rows(
        "pipeline",
        _STAGE_PROCESSES,
        {
            "adapt": _OWN_SECONDS,
            "all-reduce": "which sums over all processes, and each stage exchanges with the same stage of its peers",
            "an optimizer of yours": "which each process would make for its own layers alone",
            "hashes": _NO_WHOLE_WORKER,
        },
    ),
    *_rows(
        "pipeline",
        _STAGES,
        {
            "asynchronous": "but a pipeline exchanges in rounds",
            "elastic": _GONE,
            "whole tensors": "while each stage exchanges its own part",
            "chosen fragments": "but stages would choose fragments by what each of them sees",
            "moments": "but each stage keeps its own moments",
        },
    ),
    *_rows(
        "shards",
        _OWN_SHARDS,
        {
            "stages": "and a stage is one process",
            "asynchronous": "without rounds, in which its processes would meet",
            "elastic": f"{_GONE}; set it to false, or train sites that come and go with gossamer.Outer(site=..., elastic=True)",
            "adapt": _OWN_SECONDS,
            "hashes": _NO_WHOLE_WORKER,
            "gradients": "which FSDP2 keeps",
            "experts": "",
            "averaging": "whose averages are of whole workers",
            "moments": "for moments of whole workers",
        },
    ),
    *_rows(
        "shards",
        _SHARDS,
        {
            "all-reduce": "which overwrites one shard before its siblings know that theirs came too",
            "chosen fragments": "but processes would choose fragments by what each of them sees",
        },
    ),
    *_rows(
        "changing local steps",
        _CHANGING,
        {
            "asynchronous": "without rounds at whose begin they would change; give one number, or one per worker",
            "adapt": "which decides on them too; remove one of the two",
        },
    ),
    *_rows(
        "changing numbers of a rule",
        _CHANGING_RULE,
        {"asynchronous": "without rounds at whose begin it would change; give a number"},
    ),
    *_rows(
        "synchronous start",
        _SYNCHRONOUS_START,
        {
            "asynchronous": "without rounds, in which all would step together; set it to 0",
            "elastic": "while a mean of gradients needs all workers in every step; set one of the two to 0 or false",
            "adapt": "which decides on the local steps from the start; remove one of the two",
            "gradients": "as long as the run; remove run.synchronous_steps",
            "experts": "for which there is no mean of all gradients; set it to 0",
        },
    ),
    Incompatibility(
        "synchronous start and processes",
        lambda c: _SYNCHRONOUS_START.on(c) and (_OWN_SHARDS.on(c) or bool(c.lost)),
        lambda c: (
            f"{_SYNCHRONOUS_START.words(c)}, and {'pipeline.lost names stages' if c.lost else _OWN_SHARDS.words(c)}, which goes "
            "with no exchange of gradients; remove one of the two"
        ),
    ),
    Incompatibility(
        "synchronous start and several sends",
        lambda c: _SYNCHRONOUS_START.on(c) and (c.schedule.slots > 1 or bool(c.rule.mixes_updates)),
        lambda c: (
            f"{_SYNCHRONOUS_START.words(c)}, in each of which all send once; later rounds have {c.schedule.slots} parts "
            f"(schedule.fragments or sends) and rule.mix_updates = '{c.rule.mixes_updates or 'none'}', where a record has as "
            "many sends in every round; send once a round, or remove run.synchronous_steps"
        ),
    ),
    *_rows(
        "batched",
        _BATCHED,
        {
            "real processes": "where each process has its own replica; set run.batched to 1, or use gossamer simulate",
            "asynchronous": "so that replicas do not train at the same time; set run.batched to 1",
            "rule that adapts": "which replicas in one computation have in common; set run.batched to 1",
        },
    ),
    *_rows(
        "experts",
        _EXPERTS,
        {
            "asynchronous": "but an expert needs its own workers in every round",
            "elastic": "but an expert needs its own workers in every round",
            "schedule": "but experts are exchanged with all other parameters at the end of a round",
            "averaging": "but experts are exchanged as all other parameters are",
            "all-reduce": "which sums over all workers",
        },
    ),
    Incompatibility(
        "elastic sites and overlap",
        lambda c: c.driver == "library" and c.elastic and (_late(c) or c.schedule.sends > 0),
        lambda c: (
            f"{_elastic(c)}, and {c.method_label} has exchanges in flight between rounds or chooses fragments by them "
            f"(schedule.overlap_steps = {c.schedule.overlap_steps}, sends = {c.schedule.sends}), which a site that comes back "
            "does not have; use a schedule without, and a rule without delay such as 'gasloc', or sites of a fixed number"
        ),
    ),
    *_rows(
        "peers",
        _KEYED,
        {
            "all-reduce": "which a process group of torch computes, and none can encrypt; set it to 'ordered'",
            "stages": "whose processes exchange activations over gloo, which cannot encrypt; set it to 1, or remove [peers]",
        },
    ),
    Incompatibility(
        "peers and shards",
        lambda c: _KEYED.on(c) and _OWN_SHARDS.on(c),
        lambda c: (
            f"{_KEYED.words(c)} and {_OWN_SHARDS.words(c)}, whose processes exchange shards over a process group of torch, which "
            "cannot encrypt; set it to 1, or remove [peers]"
        ),
    ),
    Incompatibility(
        "elastic and rule",
        lambda c: c.elastic and _of_fixed_peers(c),
        lambda c: (
            f"{_elastic(c)}, and rule '{c.rule.name}' keeps something of each peer or sums over fixed neighbours, "
            f"which a worker that dies would spoil; {_GOSSIP_OR_MEAN}"
        ),
    ),
    Incompatibility(
        "store and exchange",
        lambda c: c.store and store_obstacle(c.rule, c.codec, c.schedule) is not None,
        lambda c: (
            f"{_elastic(c)}, and {store_obstacle(c.rule, c.codec, c.schedule)}, which a store does not carry; use a rule such as "
            "'diloco', 'local_sgd' or 'gasloc' with one exchange a round"
        ),
    ),
    Incompatibility(
        "network with a store",
        lambda c: c.kind == "rounds" and bool(_stores(c)) and _unpriced(c) is not None,
        lambda c: f"{_stores(c)} is given, and {_unpriced(c)}, which a store does not carry; remove one of the two",
    ),
    Incompatibility(
        "elastic and topology",
        lambda c: c.elastic and not c.topology.symmetric,
        lambda c: (
            f"{_elastic(c)}, and the weights of topology '{c.topology.name}' are not symmetric: both ends of an "
            "exchange that fails must keep the same weight; use a symmetric topology such as 'random'"
        ),
    ),
    Incompatibility(
        "elastic and overlap",
        lambda c: c.elastic and c.rule.needs == "everyone" and _late(c),
        lambda c: (
            f"{_elastic(c)}, and rule '{c.rule.name}' takes the mean of all while they train on: one is in flight "
            "where a newcomer takes a state over, which would differ from the others' for good; set schedule.overlap_steps = 0 "
            "and use a rule without delay such as 'diloco', or one that gossips such as 'gasloc'"
        ),
    ),
    Incompatibility(
        "elastic and delay",
        lambda c: c.elastic and c.rule.needs != "everyone" and c.rule.delay_rounds > 0 and not c.rule.sends_ahead,
        lambda c: (
            f"{_elastic(c)}, and rule '{c.rule.name}' receives in each round what was sent in the one before, which "
            "a newcomer cannot take over; use a rule without delay such as 'gasloc', or 'fgd', which sends when a round begins"
        ),
    ),
    Incompatibility(
        "elastic and mixed updates",
        lambda c: c.elastic and _mean_of_updates(c),
        lambda c: (
            f"{_elastic(c)}, and rule '{c.rule.name}' takes the mean of all updates in addition to its gossip; set "
            "rule.mix_updates to 'none' or to a topology of pairs such as 'random'"
        ),
    ),
    Incompatibility(
        "constant batch and deaths",
        lambda c: c.constant_batch and not c.elastic,
        lambda c: (
            f"data.constant_batch is true and run.elastic is {str(c.elastic).lower()}, so that a run ends when a worker "
            "dies and nobody can take its batches over; set run.elastic = true, or remove data.constant_batch"
        ),
    ),
    Incompatibility(
        "constant batch and rule",
        lambda c: c.constant_batch and c.elastic and not (c.rule.averages and c.rule.identical),
        lambda c: (
            f"data.constant_batch is true, and with {c.method_label} workers may disagree on who is dead, or differ in their "
            "parameters: two could train the same batches; use a rule that takes one mean of all such as 'diloco', or remove "
            "data.constant_batch"
        ),
    ),
    Incompatibility(
        "constant batch and error feedback",
        lambda c: c.constant_batch and c.rule.feeds_back,
        lambda c: (
            f"data.constant_batch is true, and rule '{c.rule.name}' sends the error of a message later, when its worker may "
            "count for more slots or fewer; use a rule without error feedback such as 'diloco', or remove data.constant_batch"
        ),
    ),
    Incompatibility(
        "constant batch and local steps",
        lambda c: c.constant_batch and bool(_unequal(c)),
        lambda c: (
            f"data.constant_batch is true and run.local_steps has {list(_unequal(c)[0])}, but all workers share the batches of "
            "one step; give one number of local steps"
        ),
    ),
    Incompatibility(
        "pipeline and codec",
        lambda c: c.stages > 1 and c.codec.back is not None and not (_casts(c.codec) and _casts(c.codec.back)),
        lambda c: (
            f"pipeline.stages is {c.stages}, and codec '{c.codec.name}' has a back leg, for chunks whose owners sum them, and "
            "chunks of a stage are others than those of a whole worker; use 'exact', 'bf16' or 'fp16' in each direction, or "
            "remove codec.back"
        ),
    ),
    Incompatibility(
        "scattered stages of some workers",
        lambda c: c.stages > 1 and c.driver == "train" and c.partly and (c.scattered or c.averaging is not None),
        lambda c: (
            f"pipeline.workers leaves some replicas whole, which send each of {c.stages} stages its tensors as a slice, and with "
            + (
                "pipeline.chunks or the cuts of model.bottleneck"
                if c.scattered
                else f"inner.averaging = '{c.averaging}'"
            )
            + " these do not follow each other; remove one of the two, or use gossamer simulate"
        ),
    ),
    Incompatibility(
        "lost stages and rule",
        lambda c: bool(c.lost) and (_of_fixed_peers(c) or c.rule.site == "gradients"),
        lambda c: (
            f"pipeline.lost names stages, and rule '{c.rule.name}' "
            + (
                "exchanges gradients in every inner step"
                if c.rule.site == "gradients"
                else "keeps something of each peer or sums over fixed neighbours"
            )
            + f", which a stage that resumes from what others have would spoil; {_GOSSIP_OR_MEAN}"
        ),
    ),
    Incompatibility(
        "lost stages and overlap",
        lambda c: bool(c.lost) and _late(c),
        lambda c: (
            f"pipeline.lost names stages, and with schedule.overlap_steps = {c.schedule.overlap_steps} and rule '{c.rule.name}' "
            "messages are in flight between two rounds, which are lost with a stage; set schedule.overlap_steps = 0 and use a "
            "rule without delay such as 'diloco' or 'gasloc'"
        ),
    ),
    Incompatibility(
        "lost stages and neighbours",
        lambda c: False in c.lost and c.topology.n > 1 and c.rule.identical,
        lambda c: (
            f"pipeline.lost has a stage that continues from its neighbours, and rule '{c.rule.name}' adds the same to equal "
            "parameters of all workers, so that this one would differ from the others for good; take source = 'peer'"
        ),
    ),
    Incompatibility(
        "lost stages and inner optimizer",
        lambda c: bool(c.lost) and (c.averaging is not None or is_code(c.optimizer)),
        lambda c: (
            f"pipeline.lost names stages, whose inner optimizer begins with empty moments, and with inner.optimizer = "
            f"'{c.optimizer}' and inner.averaging = {c.averaging!r} what it keeps would be missing; use one of Gossamer's, "
            "without an average"
        ),
    ),
    Incompatibility(
        "shards and rule",
        lambda c: c.shards > 1 and not (c.rule.elementwise or c.rule.sums_over_shards),
        lambda c: (
            f"{_SHARDS.words(c)}, and rule '{c.rule.name}' looks at whole tensors or at all of them, of which each process has "
            "its shard, for more than sums over them; use an elementwise rule such as 'gasloc' or 'diloco'"
        ),
    ),
    Incompatibility(
        "shards, fragments and layers",
        lambda c: c.shards > 1 and c.schedule.fragments > 1 and c.rule.by_layer,
        lambda c: (
            f"{_SHARDS.words(c)}, and rule '{c.rule.name}' looks at each layer of a fragment, of which a process may have "
            f"no number, and schedule.fragments is {c.schedule.fragments}; set it to 1, or use 'capped' in its place"
        ),
    ),
    Incompatibility(
        "shards and codec",
        lambda c: _OWN_SHARDS.on(c) and not (_casts(c.codec) and (c.codec.back is None or _casts(c.codec.back))),
        lambda c: (
            f"run.shards is {c.shards} and codec '{c.codec.name}'"
            + (f" with codec.back = '{c.codec.back.name}'" if c.codec.back else "")
            + " would cut or draw in each shard otherwise than in a whole worker, so that the simulation were no oracle; use "
            "'exact', 'bf16' or 'fp16' in each direction"
        ),
    ),
    Incompatibility(
        "shards and inner optimizer",
        lambda c: _OWN_SHARDS.on(c) and c.optimizer not in _INNER,
        lambda c: (
            f"run.shards is {c.shards} and inner.optimizer is '{c.optimizer}', which may look at whole tensors; use one of "
            f"{', '.join(_INNER)}"
        ),
    ),
    Incompatibility(
        "experts and rule",
        lambda c: (
            bool(c.holders)
            and c.kind == "rounds"
            and (_of_fixed_peers(c) or not c.rule.elementwise or c.rule.delay_rounds > 0 or bool(c.rule.mixes_updates))
        ),
        lambda c: (
            f"{_EXPERTS.words(c)}, and rule '{c.rule.name}' looks at whole tensors, at fixed peers, or at messages of another "
            "round; use a rule such as 'diloco', 'local_sgd' or 'gasloc'"
        ),
    ),
    Incompatibility(
        "adapt and a rule that adapts",
        lambda c: c.rule.adapted is not None and (bool(c.adapt) or c.weigh_steps),
        lambda c: (
            f"{_FEATURES['rule that adapts'].words(c)} of all workers, and {'run.adapt' if c.adapt else 'run.weigh_steps'} is "
            f"set, which {'decides on them too' if c.adapt else 'would scale what they trained back up'}; remove one of the two"
        ),
    ),
    Incompatibility(
        "chosen fragments and rule",
        lambda c: (
            c.schedule.sends > 0
            and (not c.rule.identical or c.rule.start is None or c.rule.delay_rounds > 0 or not c.topology.everyone)
        ),
        lambda c: (
            f"schedule.sends is {c.schedule.sends}, for which all workers must choose the same fragment, by how far its updates "
            f"have led, and {c.where} does not lead all of them to the same point in the same round; use one such as 'diloco', "
            "or remove schedule.sends"
        ),
    ),
    Incompatibility(
        "chosen fragments and overlap",
        lambda c: (
            c.schedule.sends > 0
            and c.fewest_steps is not None
            and c.schedule.overlap_steps >= c.schedule.fragments * max(1, c.fewest_steps // c.schedule.sends)
        ),
        lambda c: (
            f"schedule.overlap_steps is {c.schedule.overlap_steps}, so all {c.schedule.fragments} fragments may be in flight "
            f"when one of {c.schedule.sends} sends in {c.fewest_steps} inner steps is due; lower schedule.overlap_steps or "
            "schedule.sends"
        ),
    ),
)
"""Conditions of stages, shards, replicas in one computation, experts, elastic runs and `gossamer.Outer`."""
