"""Incremental reading of growing files: complete new lines, with detection of truncation and replacement."""

import os
import stat
from bisect import bisect_right
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

CHUNK = 1 << 18
"""Bytes read at a time."""
LONGEST = 1 << 26
"""Bytes of the longest line; a longer one is skipped."""
_SAMPLE = 128
_MOST_MARKS = 4096


class Marks:
    """The offsets of rounds in a file: at most 4096, so that memory is bounded for long runs.

    >>> marks = Marks()
    >>> for round in range(5): marks.add(round, 100 * round)
    >>> marks.before(3), marks.before(99)
    (300, 400)
    """

    def __init__(self) -> None:
        self._rounds: list[int] = []
        self._offsets: list[int] = []
        self._stride = 1

    def add(self, round: int, offset: int) -> None:
        """Records the offset of a line of this round; only the first of each round counts."""
        if self._rounds and round < self._rounds[-1] + self._stride:
            return
        self._rounds.append(round)
        self._offsets.append(offset)
        if len(self._rounds) > _MOST_MARKS:
            self._rounds, self._offsets = self._rounds[::2], self._offsets[::2]
            self._stride *= 2

    def before(self, round: int) -> int:
        """The offset from which to read the lines of a round; at least one was added."""
        place = bisect_right(self._rounds, round) - 1
        return self._offsets[max(place, 0)]


class Tail:
    """A file of lines that another process appends to.

    It keeps its read position, and the last bytes before it. If the file is shorter, replaced, or differs there,
    earlier reads are void: `rewound` is set, and reading restarts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.rewound = False
        self.modified_s = 0.0
        """Its modification time, Unix time."""
        self.size = 0
        self._file: tuple[int, int] | None = None
        self._sample = b""

    def read(self) -> Iterator[tuple[int, bytes]]:
        """The complete lines of the next chunk, each with its offset; a partial line is left for the next call.

        Raises: OSError when the file cannot be read, ValueError when it is no plain file.
        """
        with os.fdopen(open_record(self.path), "rb", buffering=0) as file:
            now = os.fstat(file.fileno())
            self.size, self.modified_s = now.st_size, now.st_mtime
            if self._changed(file, now):
                self.rewound = True
                return
            self._file = (now.st_dev, now.st_ino)
            if now.st_size == self.offset:
                return
            data = self._chunk(file)
        begin = self.offset
        self.offset += len(data)
        self._sample = (self._sample + data)[-_SAMPLE:]
        for line in data.splitlines(keepends=True):
            yield begin, line
            begin += len(line)

    @property
    def behind(self) -> int:
        """Unread bytes, including a partial last line."""
        return max(0, self.size - self.offset)

    def restart(self) -> None:
        """Begins again at the start of the file."""
        self.offset, self.rewound, self._file, self._sample = 0, False, None, b""

    def _changed(self, file: FileIO, now: os.stat_result) -> bool:
        if self._file is None:
            return False
        if (now.st_dev, now.st_ino) != self._file or now.st_size < self.offset:
            return True
        file.seek(self.offset - len(self._sample))
        return file.read(len(self._sample)) != self._sample

    def _chunk(self, file: FileIO) -> bytes:
        """Complete lines from the current position; empty while the first is incomplete."""
        size = CHUNK
        while True:
            file.seek(self.offset)
            data = file.read(size)
            end = data.rfind(b"\n") + 1
            if end or len(data) < size:
                return data[:end]
            if size >= LONGEST:  # longer than any valid line
                return data
            size *= 4


def open_record(path: Path) -> int:
    """Opens a file of a run to read; a link is not followed, as it may lead out of the folder.

    Raises: OSError, also for a link; ValueError when it is no plain file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no plain file")
    return descriptor
