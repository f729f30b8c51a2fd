"""The file of a volunteer's terms: read again whenever it changes, so that nobody has to restart a device.

Knows what a change of a file is, and neither what terms mean (`terms.py`) nor who obeys them (`volunteer.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Made = TypeVar("Made", covariant=True)

_Stamp = tuple[int, int, int] | None


class TermsFile(Generic[Made]):
    def __init__(self, path: Path, load: Callable[[], Made]) -> None:
        """`load` makes something of the file, which need not be there; it may raise InputError."""
        self._path, self._load = path, load
        self._seen: _Stamp = None

    @property
    def has_changed(self) -> bool:
        """Whether the file is another one than that of the last `read` that succeeded."""
        return self._stamp() != self._seen

    def read(self) -> Made:
        stamp = self._stamp()  # before reading, so that no change goes unnoticed
        made = self._load()
        self._seen = stamp
        return made

    def _stamp(self) -> _Stamp:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
