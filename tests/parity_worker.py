"""One worker process of the parity suite: trains every case it is given, one after the other.

    run_local(5, train_cases, ["cases.json"])

`cases.json` lists run folders, run documents and whether to resume. The cases of each number of workers run in one process group;
a process whose number is too large for the rest ends early. Cases with [peers] exchange over encrypted connections instead.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import parse
from gossamer.run.synchronous.train import train_member
from gossamer.transport.keys import keys_for
from gossamer.transport.processes.launch import join, leave
from gossamer.transport.processes.member import Member
from tiny import DEVICE

TIMEOUT_S = 60


def train_cases(argv: Sequence[str]) -> int:
    """Trains the cases in this file, and returns the exit code."""
    cases = sorted(json.loads(Path(argv[0]).read_text()), key=lambda case: -case[1]["workers"])
    first = join(cases[0][1]["workers"], backend="gloo", device=DEVICE, threads=1, timeout_s=TIMEOUT_S)
    rank = first.rank
    for n, some in groupby(cases, key=lambda case: case[1]["workers"]):
        if n < first.workers:
            leave()
            if rank >= n:
                return 0
            store = PrefixStore(f"workers/{n}", first.store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=TIMEOUT_S))
        for folder, document, resume in some:
            member = Member.at(rank, n, first.device, PrefixStore(folder, first.store))
            config = resolve(parse(document), real=True)
            keys = keys_for(config.peers, config.workers)
            train_member(config, Path(folder), member, keys, resume=resume)
    leave()
    return 0
