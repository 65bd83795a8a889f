"""The options that say which of the processes of several machines this one is; they need no launcher but what starts it."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.cli.help_columns import OPTIONS
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from gossamer.transport.processes.local import Among

PORT = 29400
"""Where worker 0 listens unless another port is given."""


@Parameter(name="*", group=OPTIONS["Several machines"])
@dataclass(frozen=True, kw_only=True)
class Machines:
    """The place of this process among those of all machines."""

    rank: int | None = None
    """number of this process among those of all machines, from 0; with --local that of the first one here"""
    of: int | None = None
    """number of all processes"""
    address: Annotated[str | None, Parameter(metavar="HOST")] = None
    """the machine of process 0, as the others reach it; HOST:PORT for another port than 29400"""

    def entered(self) -> "Among | None":
        """Puts the place into the environment, in place of what another launcher may have left there; None without one.

        Raises: ConfigError for options that do not fit each other.
        """
        rank, of, address = self.rank, self.of, self.address
        if rank is None and of is None and address is None:
            return None
        if rank is None or of is None or address is None:
            given = {"--rank": rank, "--of": of, "--address": address}
            raise ConfigError(
                f"{' '.join(f'{name} {value}' for name, value in given.items() if value is not None)} was given without "
                f"{' and '.join(name for name, value in given.items() if value is None)}; a process among those of several "
                "machines needs --rank I --of N --address HOST"
            )
        if not 0 <= rank < of:
            raise ConfigError(f"--rank is {rank}; with --of {of} it must be between 0 and {of - 1}")
        host, port = _host_and_port(address)
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(of), "MASTER_ADDR": host, "MASTER_PORT": str(port)})
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        from gossamer.transport.processes.local import Among

        return Among(rank, of, host, port)


ONE_MACHINE = Machines()


def _host_and_port(address: str) -> tuple[str, int]:
    """Host and port of process 0.

    >>> [_host_and_port(text) for text in ("s1", "10.0.0.1:4000", "::1", "[::1]:4000")]
    [('s1', 29400), ('10.0.0.1', 4000), ('::1', 29400), ('::1', 4000)]
    """
    from gossamer.transport.sockets.addresses import is_wildcard, shown, split

    # Colons within an address of IPv6 are no ports, unless it is in brackets.
    port_given = address.count(":") == 1 or (address.startswith("[") and not address.endswith("]"))
    try:
        host, port = split(address if port_given else shown(address.strip("[]"), PORT))
    except ValueError:
        raise ConfigError(f"--address got '{address}'; give HOST or HOST:PORT, such as 10.0.0.1:{PORT}") from None
    if is_wildcard(host):
        raise ConfigError(
            f"--address got '{address}', which is no address that another machine can dial; give that of process 0's machine, "
            "where it listens, to all processes"
        )
    return host, port
