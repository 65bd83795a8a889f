"""An outer loop that the environment asks for: one script, unchanged, trains with others under any method.

    GOSSAMER_OUTER=diloco:30@10.0.0.1:29600 GOSSAMER_SITE=0/2 torchrun --nproc-per-node 8 train.py

`GOSSAMER_OUTER` is METHOD[:H][@HOST:PORT]: a rule or a method of `gossamer list`, the local steps of a round, and the address
where sites meet. `GOSSAMER_SITE=I/N` says which site of how many this job is. `GOSSAMER_PEERS=FILE` lists the keys of the
sites, which are elastic then.
"""

import os
from collections.abc import Mapping

from gossamer.errors import ConfigError
from gossamer.integrations.place import SITE, site_of
from gossamer.library import OuterMethod, OuterOptions
from gossamer.library.parts import ASKED
from gossamer.rules import RULES, Rule
from gossamer.run.config.own_loop import method

OUTER, PEERS = "GOSSAMER_OUTER", "GOSSAMER_PEERS"


def rule_and_options(
    rule: str | Rule | OuterMethod | None, options: OuterOptions, environment: Mapping[str, str] = os.environ
) -> tuple[str | Rule | OuterMethod, OuterOptions]:
    """The parts of an outer loop: those that the script gives, or, where it gives no rule, those that the environment asks for.

    Raises: ConfigError where neither or both do, and for what has another form than METHOD[:H][@HOST:PORT].

    >>> rule_and_options(None, {"seed": 1}, {"GOSSAMER_OUTER": "diloco:30@10.0.0.1:29600", "GOSSAMER_SITE": "0/2"})
    ('diloco', {'seed': 1, 'local_steps': 30, 'site': (0, 2), 'join': '10.0.0.1:29600'})
    """
    asked = environment.get(OUTER)
    if rule is not None:
        if asked:
            raise ConfigError(
                f"{OUTER} is '{asked}', and the script gives a rule too; unset {OUTER}, or leave the rule out of the script"
            )
        return rule, options
    if not asked:
        raise ConfigError(f"no rule was given and {OUTER} is not set; give one, or set {OUTER}=METHOD[:H][@HOST:PORT]")
    if not (form := ASKED.fullmatch(asked)):
        raise ConfigError(f"{OUTER} is '{asked}'; set it to METHOD[:H][@HOST:PORT], such as diloco:30@10.0.0.1:29600")
    parsed = OuterOptions()
    if form["steps"]:
        parsed["local_steps"] = int(form["steps"])
    if form["join"] or SITE in environment:
        if not form["join"]:
            raise ConfigError(
                f"{SITE} is set and {OUTER} is '{asked}'; add the address of site 0 to it, as in {asked}@HOST:PORT"
            )
        parsed |= OuterOptions(site=site_of(environment.get(SITE)), join=form["join"])
    if PEERS in environment:
        parsed |= OuterOptions(peers=environment[PEERS], elastic=True)
    if both := options.keys() & parsed.keys():
        raise ConfigError(
            f"{OUTER} is '{asked}', and the script gives {', '.join(sorted(both))} too; leave it out of one of the two"
        )
    name = form["method"]
    return name if name in RULES else method(name), {**options, **parsed}
