"""Files that survive a killed process, a power failure or a full disk.

`write_whole` replaces a small file atomically: readers see the old text or the new one. `AppendedFile` grows record by
record and waits while the disk is full. Knows no formats; event logs, settings, keys and curves are written through it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from io import FileIO
from pathlib import Path
from typing import Final

_LOG: Final = logging.getLogger(__name__)
MAX_WAITING: Final = 100_000  # records, of a few hundred bytes each


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open directories, and does not need this
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file atomically; on failure the previous content stays."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(data)
        sync(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


class AppendedFile:
    """Append complete records in order and never raise: what a full disk rejects now is written later.

    A process that dies in the middle of a record leaves it torn. If every record ends with `end`, the next process to
    open the file terminates the torn one first, so that it does not corrupt the next.
    """

    def __init__(self, path: Path, *, end: bytes = b"", max_waiting: int = MAX_WAITING) -> None:
        self._path, self._end, self._max_waiting = path, end, max_waiting
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self._failing = False
        self.dropped = 0
        """Records discarded so far because too many were waiting, oldest first."""
        self._write_waiting()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def write(self, record: bytes) -> None:
        self._waiting.append(record)
        self._write_waiting()
        if len(self._waiting) > self._max_waiting:
            del self._waiting[1]  # the first may be partly written
            self.dropped += 1

    def close(self) -> None:
        self._write_waiting()
        if self._file is not None:
            self._file.close()

    def _write_waiting(self) -> None:
        try:
            if self._file is None:
                self._open()
            while self._waiting:
                self._write_first()
        except OSError as fault:
            if not self._failing:
                cause = fault.strerror or fault
                _LOG.error(
                    "cannot write %s: %s; make room there; until then records are kept in memory", self._path, cause
                )
            self._failing = True
        else:
            self._failing = False

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        if self._end and not _ends_with(self._path, self._end):
            self._waiting.appendleft(self._end)

    def _write_first(self) -> None:
        """Write the first record; a nearly full disk may take only part of it, and the rest stays first."""
        assert self._file is not None
        written = self._file.write(self._waiting[0])
        rest = self._waiting.popleft()[written:]
        if rest:
            self._waiting.appendleft(rest)


def _ends_with(path: Path, end: bytes) -> bool:
    """Whether a file ends with `end`, or is empty."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(end)))
        return size == 0 or file.read() == end
