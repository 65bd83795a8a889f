"""Where the workers of an elastic run listen: `address-003.json` is what the process in slot 3 has written.

A file outlives its process, so an address is only where to ask, not a sign that a process listens there.
"""

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from gossamer.record.whole_files import atomic_write, make_folder, worker_suffix


class Address(NamedTuple):
    """The address of one slot."""

    slot: int
    address: str
    """`host:port`."""
    run: int
    """A 64-bit digest that all workers of the run share."""


def write_address(folder: Path, address: Address) -> None:
    """Writes the address of this process. Raises: DiskError."""
    make_folder(folder)
    content = {"address": address.address, "run": f"{address.run:016x}", "pid": os.getpid()}
    atomic_write(folder / f"address{worker_suffix(address.slot)}.json", json.dumps(content).encode())


def read_addresses(folder: Path) -> list[Address]:
    """The addresses in a run folder, those of the newest files first; a file without a valid address is skipped.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_address(folder, Address(3, "127.0.0.1:4000", 7))
    >>> read_addresses(folder)
    [Address(slot=3, address='127.0.0.1:4000', run=7)]
    """
    dated: list[tuple[float, Address]] = []
    for path in folder.glob("address-*.json"):
        try:
            match json.loads(path.read_bytes()[:1000]), path.stem.removeprefix("address-"):
                case {"address": str(address), "run": str(run)}, slot if _is_sound(address, run, slot):
                    dated.append((path.stat().st_mtime, Address(int(slot), address, int(run, 16))))
        except (OSError, ValueError, RecursionError):
            continue
    return [address for _, address in sorted(dated, reverse=True)]


def _is_sound(address: str, run: str, slot: str) -> bool:
    host, _, port = address.rpartition(":")
    forms = ((r"[!-~]{1,90}", host), (r"[0-9]{1,5}", port), (r"[0-9a-f]{16}", run), (r"[0-9]{1,9}", slot))
    host.encode("idna")  # as dialling does, which would not raise an OSError; a ValueError here too
    return all(re.fullmatch(form, text) for form, text in forms) and 0 < int(port) < 1 << 16
