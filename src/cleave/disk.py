"""Files that survive a killed process, a power failure or a full disk, and files that strangers wrote.

`write_whole` replaces a small file atomically: readers see the old text or the new one. `AppendedFile` grows record by
record; its writers wait for no full or hung disk. Neither writes through a link. `open_regular` and `read_whole` read
files that may come from anyone: no pipe or device makes them wait, and no size fills the memory. Knows no formats;
event logs, settings, keys and curves are written through it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections import deque
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Final

from cleave.sink import Sink

_LOG: Final = logging.getLogger(__name__)
MAX_WAITING: Final = 100_000  # records, of a few hundred bytes each
_WRITE_S: Final = 0.1
_CLOSE_S: Final = 5.0
_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)  # Windows has neither
_NO_WAIT: Final = getattr(os, "O_NONBLOCK", 0)
_OWN_PIPES: Final = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading; raise OSError for anything else.

    A named pipe would wait for a writer, and a device may be endless. What the shell hands over, as with `<(command)`,
    is a pipe too, and is read.
    """
    if str(path).startswith(_OWN_PIPES):
        return path.open("rb")
    more = _NO_WAIT | (0 if follow_links else _NO_FOLLOW)
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | more))  # noqa: SIM115
    except ValueError:  # Python's own check
        raise OSError(errno.EINVAL, "a name cannot contain NUL", repr(str(path))) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_whole(path: Path, most_bytes: int, *, follow_links: bool = True) -> bytes:
    """Read a regular file; raise OSError if it has more than `most_bytes`."""
    with open_regular(path, follow_links=follow_links) as file:
        is_larger = os.fstat(file.fileno()).st_size > most_bytes
        data = b"" if is_larger else file.read(most_bytes + 1)
    if is_larger or len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return data


def remove(path: Path) -> None:
    """Remove a file, or a directory with everything in it; of a link, only the link itself."""
    if path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except RecursionError:
            raise OSError(errno.ELOOP, "its directories are nested too deeply", str(path)) from None
    else:
        path.unlink(missing_ok=True)


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
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            file.write(data)
        sync(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


class AppendedFile:
    """Append complete records in order, and never raise: what a full disk rejects now is written later.

    A thread of its own writes. `write` returns as soon as the system has the record, so a killed process loses none;
    but it waits at most _WRITE_S for a disk that does not answer, and not at all until that disk has caught up.

    A process that dies in the middle of a record leaves it torn. If every record ends with `end`, the next process to
    open the file terminates the torn one first, so that it does not corrupt the next.
    """

    def __init__(self, path: Path, *, end: bytes = b"", max_waiting: int = MAX_WAITING) -> None:
        self._path, self._end, self._max_waiting = path, end, max_waiting
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self._failing = False
        self._rejected = 0
        self._sink = Sink(self._take, name=f"write {path.name}", room=max_waiting)
        self.write(b"")  # opens the file

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._sink.waiting

    @property
    def dropped(self) -> int:
        """Records discarded so far because too many were waiting, oldest first."""
        return self._rejected + self._sink.dropped

    def write(self, record: bytes) -> None:
        is_behind = self._sink.waiting > 0
        self._sink.put(record)
        if not is_behind:
            self._sink.drain(_WRITE_S)

    def close(self) -> None:
        self._sink.put(b"")  # tries once more
        if self._sink.drain(_CLOSE_S) and self._file is not None:
            self._file.close()

    def _take(self, record: bytes) -> None:
        if record:
            self._waiting.append(record)
        self._write_waiting()
        if len(self._waiting) > self._max_waiting:
            del self._waiting[1]  # the first may be partly written
            self._rejected += 1

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
        if self._path.is_symlink() or self._path.is_fifo():
            # In a directory from a stranger it may lead anywhere, such as to a file that a shell executes.
            raise OSError(errno.EINVAL, "it is a link or a pipe")
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
