"""What a worker of a loop of one's own says of its connections."""

import logging
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gossamer
from commands import Command, free_port, in_forks
from gossamer.transport.secret import warn_of_plain
from gossamer.transport.sockets.addresses import own_address, shown

MACHINES = {"plain launcher": "1", "one machine": "2", "plain group": None, "plain sites": None}
"""The processes on each machine, as its launcher says, of two workers at an address that others reach."""


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def made(**options: Any) -> None:
    """Makes a worker, and closes it at once."""
    gossamer.Outer(torch.nn.Linear(2, 1), "diloco", local_steps=1, timeout_s=60.0, **options).close()


def make_workers(kind: str, rank: int, host: str, port: int, other: int) -> None:
    """Makes two workers in turn in this process, as the kind says."""
    if kind == "plain group":
        where = f"tcp://{shown(host, port)}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    elif kind != "plain sites":
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        os.environ["LOCAL_WORLD_SIZE"] = str(MACHINES[kind])
    for to in (port, other):
        site = {"site": (rank, 2), "join": shown(host, to)} if kind == "plain sites" else {}
        made(**site)


def two(argv: list[str]) -> int:
    host, spare, *ports = argv
    return max(
        in_forks(2, lambda rank, kind=kind, port=int(port): one_of_two(kind, rank, host, port, int(spare)))
        for kind, port in zip(MACHINES, ports, strict=True)
    )


def one_of_two(kind: str, rank: int, host: str, port: int, other: int) -> None:
    records = Said()
    logging.getLogger("gossamer").addHandler(records)
    warn_of_plain.cache_clear()
    make_workers(kind, rank, host, port, other)
    plain = [line for line in records.lines if "is not encrypted" in line]
    assert len(plain) == kind.startswith("plain"), (kind, records.lines)
    if plain:
        between = "between sites" if kind == "plain sites" else "of gossamer.Outer"
        assert plain[0].startswith(f"traffic {between} is not encrypted: parameters and settings cross the network in")
        assert "peers='peers.toml' (gossamer keys)" in plain[0]


def test_workers_that_others_reach_say_once_that_their_traffic_is_plain() -> None:
    try:
        host = own_address()
    except OSError:
        pytest.skip("this machine has no address but loopback")
    ports = [free_port() for _ in ("spare", *MACHINES)]
    secret = "known to the workers of this test only"
    code, output = Command(host, *ports, work=two, GOSSAMER_SECRET=secret).finish()
    assert code == 0, output
