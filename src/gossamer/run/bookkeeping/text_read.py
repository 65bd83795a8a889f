"""What was read of the text of a run: a line for each source when it begins, and `text.json` in its folder."""

import json

from gossamer.data.corpus import Batches, text_fingerprint
from gossamer.record.folder import RunFolder
from gossamer.record.progress import say

__all__ = ["TEXT_FILE", "tell_text"]

TEXT_FILE = "text.json"


def tell_text(record: RunFolder, data: Batches) -> None:
    """Says what was read of files, once for all workers, and writes it down; nothing where that stands there already.

    The file has the hash of all tokens, and of each source its files, bytes, documents and tokens, and the endings of files
    that were left out.
    """
    if not data.read or record.worker not in (None, 0):
        return
    facts = {"fingerprint": text_fingerprint(data), "sources": [one._asdict() for one in data.read]}
    text, path = f"{json.dumps(facts, indent=2)}\n", record.path / TEXT_FILE
    if path.exists() and path.read_bytes() == text.encode():
        return
    for one in data.read:
        say(one.in_words())
    record.write_text(TEXT_FILE, text)
