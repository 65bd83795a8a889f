"""One worker process of the parity suite: trains every case it is given, one after the other, in one process group.

    run_local(4, train_cases, ["cases.json"])

`cases.json` maps a run folder to a run document.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.run.config import parse
from gossamer.run.train import train_member
from gossamer.transport.launch import join, leave


def train_cases(argv: Sequence[str]) -> int:
    cases = json.loads(Path(argv[0]).read_text())
    member = join(4, backend="gloo", device="cpu", threads=1, timeout_s=60)
    for folder, document in cases.items():
        train_member(parse(document), Path(folder), member._replace(store=PrefixStore(folder, member.store)))
    leave()
    return 0
