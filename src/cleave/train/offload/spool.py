# pyright: standard
"""Room for encoded matrices: in memory up to a budget, then in temporary files up to another.

A file takes matrices until it has `FILE_BYTES`, then the next one begins. It is deleted when all of its matrices are
freed. So what is freed roughly in the order in which it was stored takes little more room than what is left.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from io import RawIOBase
from typing import cast

import numpy as np

from cleave.core.cost.wire import WireFormat
from cleave.protocol.numbers import Encoded

FILE_BYTES = 256 << 20


class SpoolFullError(Exception):
    """There is no room for another matrix; the reason in words."""


@dataclass(slots=True, eq=False)
class _File:
    handle: RawIOBase
    """Unbuffered: bytes that found no room would be written again at the next seek, and fail it."""
    size: int = 0
    stored: int = 0
    """Matrices in it that are not freed."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """An encoded matrix, in memory or at a place in a file."""

    rows: int
    cols: int
    format: WireFormat
    size: int
    encoded: Encoded | None
    file: _File | None = None
    first: int = 0


class Spool:
    def __init__(self, *, memory_bytes: int, disk_bytes: float, file_bytes: int = FILE_BYTES) -> None:
        self._memory_bytes, self._disk_bytes, self._file_bytes = memory_bytes, disk_bytes, file_bytes
        self._in_memory = self._on_disk = 0
        self._files: list[_File] = []

    @property
    def bytes(self) -> int:
        return self._in_memory + self._on_disk

    def store(self, encoded: Encoded, rows: int, cols: int, format: WireFormat) -> Stored:
        """Keep an encoded matrix, which must not change; SpoolFullError if there is no room."""
        size = len(encoded)
        if self._in_memory + size <= self._memory_bytes:
            self._in_memory += size
            return Stored(rows, cols, format, size, encoded)
        if self._on_disk + size > self._disk_bytes:
            raise SpoolFullError(f"it has reached its limit of {self._disk_bytes / 1e9:.3g} GB")
        try:
            file = self._last_file()
            _write(file, encoded)
        except OSError as fault:
            for empty in [one for one in self._files if not one.stored]:
                self._close(empty)
            raise SpoolFullError(f"{fault.strerror or fault}") from fault
        found = Stored(rows, cols, format, size, None, file, file.size)
        file.size += size
        file.stored += 1
        self._on_disk += size
        return found

    def load(self, stored: Stored) -> Encoded:
        if stored.encoded is not None:
            return stored.encoded
        assert stored.file is not None, "it is in memory or in a file"
        return _read(stored.file, stored.first, stored.size)

    def free(self, stored: Stored) -> None:
        file = stored.file
        if file is None:
            self._in_memory -= stored.size
            return
        file.stored -= 1
        if not file.stored:
            self._close(file)

    def _close(self, file: _File) -> None:
        self._on_disk -= file.size
        self._files.remove(file)
        file.handle.close()

    def _last_file(self) -> _File:
        if not self._files or self._files[-1].size >= self._file_bytes:
            self._files.append(_File(cast("RawIOBase", tempfile.TemporaryFile(buffering=0))))  # noqa: SIM115
        return self._files[-1]


def _write(file: _File, encoded: Encoded) -> None:
    file.handle.seek(file.size)
    remaining = encoded.data
    while remaining:
        remaining = remaining[file.handle.write(remaining) or 0 :]


def _read(file: _File, first: int, size: int) -> Encoded:
    found = np.empty(size, dtype=np.uint8)
    file.handle.seek(first)
    remaining = found.data
    while remaining:
        count = file.handle.readinto(remaining)
        if not count:
            raise OSError(f"expected {len(remaining)} more bytes in a temporary file of the log, which was cut short")
        remaining = remaining[count:]
    return found
