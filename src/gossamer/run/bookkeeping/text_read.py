"""What was read of the text of a run: a line for each source when it begins, and `text.json` in its folder."""

import json
import logging

from gossamer.data.corpus import Batches, text_fingerprint
from gossamer.data.settings import MANY_PASSES, passes_over, passes_warning
from gossamer.record.folder import RunFolder
from gossamer.record.progress import say
from gossamer.run.config.resolved import RunSettings

__all__ = ["TEXT_FILE", "tell_text"]

TEXT_FILE = "text.json"
log = logging.getLogger("gossamer")


def tell_text(record: RunFolder, config: RunSettings, data: Batches) -> None:
    """Says what was read of files, once for all workers, and writes it down; nothing where that stands there already.

    The file has the hash of all tokens, and of each source its files, bytes, documents and tokens, those that are not for
    validation, and the endings of files that were left out. Warns of a text that is repeated many times.
    """
    if not data.read or record.worker not in (None, 0):
        return
    facts = {"fingerprint": text_fingerprint(data), "sources": [one._asdict() for one in data.read]}
    text, path = f"{json.dumps(facts, indent=2)}\n", record.path / TEXT_FILE
    if path.exists() and path.read_bytes() == text.encode():
        return
    for one in data.read:
        say(one.in_words())
    passes = passes_over(config.data.shards, [one.train_tokens for one in data.read], config.worker_tokens)
    if passes is not None and passes > MANY_PASSES:
        log.warning("%s", passes_warning(passes))
    record.write_text(TEXT_FILE, text)
