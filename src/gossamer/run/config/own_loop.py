"""A method by its name for a user's training loop."""

import logging
from collections.abc import Mapping
from typing import Any

from gossamer.asynchronous import PAIRS
from gossamer.codecs import make_codec
from gossamer.errors import PairingError
from gossamer.library import OuterMethod
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.modes import OUTER
from gossamer.rules import make_rule
from gossamer.run.config.document import flat, with_settings
from gossamer.run.config.recipes import recipe
from gossamer.run.config.run_file import parse

log = logging.getLogger("gossamer")

Table = str | Mapping[str, Any]
_HONOURED = ("rule.", "topology.", "codec.", "schedule.", "run.local_steps", "workers", "inner.")
"""The settings that an `OuterMethod` holds. A method that needs any other one is refused: without it, it is another method."""


def method(
    name: str,
    *,
    rule: Table | None = None,
    topology: Table | None = None,
    codec: Table | None = None,
    schedule: Mapping[str, Any] | None = None,
) -> OuterMethod:
    """What `Outer` needs of a method that `gossamer list` names: rule, topology, codec, schedule and local steps.

        outer = gossamer.Outer(model, gossamer.method("streaming_diloco"))
        outer = gossamer.Outer(model, gossamer.method("gasloc_2peer", rule={"lr": 0.6}), local_steps=50)

    Args:
        name: of a rule, or of a method that combines one with a topology, codec, schedule or inner optimizer.
        rule, topology, codec, schedule: settings in place of the method's own, as the tables of a run file have them. What is
            given to `Outer` itself replaces the whole part.
    Raises: ConfigError for an unknown name or setting; PairingError for a method that cannot run in your loop: an asynchronous
        one, one on gradients, and one that exchanges the state of the inner optimizer or changes the local steps.

    A method that was published with an inner optimizer has it in `inner`, and a warning names it, as the optimizer stays yours.

    >>> import gossamer
    >>> parts = gossamer.method("streaming_diloco", schedule={"overlap_steps": 5})
    >>> parts.rule.name, parts.topology, parts.codec.name, parts.schedule.fragments, parts.schedule.overlap_steps
    ('diloco', 'complete', 'fp4', 3, 5)
    >>> parts.inner is None, gossamer.method("muloco").inner.optimizer
    (True, 'spectral_muon')
    """
    settings = recipe(name).settings
    given = {"rule": rule, "topology": topology, "codec": codec, "schedule": schedule}
    config = parse(with_settings({}, {"method": name, **flat({k: v for k, v in given.items() if v is not None})}))
    made = make_rule(config.rule.name, **config.rule.options)
    facts = Combination(
        kind=config.kind,
        driver="library",
        rule=made,
        schedule=config.schedule,
        adapt=config.run.adapt,
        server=config.server.name if config.server else "",
        averaging=config.inner.averaging,
        pair=PAIRS[config.pair.name](**config.pair.options) if config.pair else None,
    )
    for row in OUTER:
        if row.fails(facts):
            raise PairingError(f"method '{name}' cannot run in your own loop: {row.sentence(facts)}")
    if config.length.timetable.changes:
        raise PairingError(
            f"method '{name}' got a table of run.local_steps, and a method has one number; give the table to "
            "gossamer.Outer(local_steps=...)"
        )
    if foreign := {key: value for key, value in settings.items() if not key.startswith(_HONOURED)}:
        words = ", ".join(f"{key} = {value!r}" for key, value in foreign.items())
        raise PairingError(
            f"method '{name}' cannot run in your own loop: it sets {words}, and your model and your loop stay as they are; "
            f"use gossamer simulate or gossamer train, or its rule alone, '{made.name}'"
        )
    words = ", ".join(
        f"{key.removeprefix('inner.')} = {value}" for key, value in settings.items() if key.startswith("inner.")
    )
    if words:
        log.warning("method '%s' was published with an inner optimizer (%s); yours should be like it", name, words)
    return OuterMethod(
        name,
        made,
        config.topology.name,
        config.topology.options,
        make_codec(config.codec.name, **config.codec.options),
        config.schedule,
        config.length.full_steps if "run.local_steps" in settings else None,
        settings.get("workers"),
        config.inner if words else None,
    )
