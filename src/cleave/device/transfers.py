"""Bytes moved today by all devices of this user, so that a restart does not forget a daily limit.

A file a day, to which every process appends what it moved: none overwrites what others counted. Those of earlier days
are removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path

_NAME = "transferred-%s.txt"
_FEWEST_BYTES = 1_000_000
"""Bytes that are worth a line; fewer wait until the process ends, or are lost if it is killed."""


class Transfers:
    def __init__(self, directory: Path, today: Callable[[], date] = date.today) -> None:
        self._directory, self._today = directory, today
        self._day: date = today()
        self._unwritten_bytes = 0
        self._read_bytes, self._read_to = 0, 0

    def add(self, moved_bytes: int) -> None:
        self._unwritten_bytes += moved_bytes

    def today_bytes(self) -> int | None:
        """Return what was moved since midnight; None if the file cannot be used."""
        try:
            self._turn_page()
            if self._unwritten_bytes >= _FEWEST_BYTES:
                self.flush()
            self._read()
        except (OSError, ValueError):
            return None
        return self._read_bytes + self._unwritten_bytes

    def flush(self) -> None:
        """Write down what was not yet; raise OSError if that is impossible."""
        if not self._unwritten_bytes:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, b"%d\n" % self._unwritten_bytes)  # short enough to be one piece
        finally:
            os.close(handle)
        self._unwritten_bytes = 0

    @property
    def _file(self) -> Path:
        return self._directory / (_NAME % self._day.isoformat())

    def _turn_page(self) -> None:
        day = self._today()
        if day != self._day:
            self._day, self._read_bytes, self._read_to, self._unwritten_bytes = day, 0, 0, 0
        if self._read_to == 0:
            for file in self._directory.glob(_NAME % "*"):
                if file != self._file:
                    with suppress(OSError):
                        file.unlink()

    def _read(self) -> None:
        """Add up the lines that came since the last time."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read_to)
                lines = file.read()
        except FileNotFoundError:
            return
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read_bytes += sum(map(int, whole.split()))
        self._read_to += len(whole)
