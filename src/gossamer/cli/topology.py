"""`gossamer topology`: a graph and what gossip does on it."""

from typing import Annotated

from cyclopts import Parameter

from gossamer.cli.output import Json, print_json
from gossamer.collector import uncollected
from gossamer.errors import ConfigError
from gossamer.record.progress import echo


def command(
    name: str,
    /,
    *,
    workers: int = 8,
    momentum: float = 0.7,
    alpha: float = 1.0,
    round: int = 0,
    seed: int = 0,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", metavar="KEY=VALUE")] = (),
    json: Json = False,
) -> None:
    """Shows a topology: graph, spectral gap, chi, and the stability of gossip on it.

    Args:
        name: name of the topology, as gossamer list has it
        workers: number of workers (default: 8)
        momentum: outer momentum gamma (default: 0.7)
        alpha: gossip step (default: 1.0)
        round: the round to draw (default: 0)
        seed: seed of random topologies (default: 0)
        overrides: option of the topology, such as peers=2; may be repeated
    """
    from gossamer.cli.gossip_table import gossip_facts, gossip_table
    from gossamer.rounds.stability import outlook
    from gossamer.run.config.document import parse_overrides
    from gossamer.settings.options import row
    from gossamer.topologies import TOPOLOGIES
    from gossamer.topologies.draw import draw_round

    if round < 0:
        raise ConfigError(f"--round got {round}; give a round, from 0 on")
    options = parse_overrides([*overrides])
    topology = row("topology", TOPOLOGIES, name, options)(workers, seed=seed, **options)
    with uncollected():
        predicted = outlook(topology, alpha=alpha, gamma=momentum)
        drawn = draw_round(topology, round)
    if json:
        rows = [dict(row) for row in topology.mixing(round).rows]
        print_json(
            {
                "name": topology.name,
                "workers": topology.n,
                "round": round,
                "weights": rows,
                **gossip_facts(topology, predicted),
            }
        )
        return
    echo(drawn)
    echo()
    echo(gossip_table(topology, predicted))
