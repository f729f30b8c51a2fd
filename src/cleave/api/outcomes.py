"""Outcomes of cells, kept on disk by their content: a cell, its fleet and model, and the code that computes it.

An entry carries a checksum and its own key. One that cannot be read, is torn, altered, of another cell or of the wrong
types is computed again and replaced; nothing is taken from it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from cleave.core.fleet.profiles import Profiles
from cleave.disk import read_whole, write_whole
from cleave.errors import InputError
from cleave.sim.cell import Cell, Ground, evaluate
from cleave.sim.setting import Outcome

_ROOT: Final = Path(__file__).parents[1]
_CODE: Final = ("core", "sim", "server", "protocol", "facts")
_NOT_CODE: Final = _ROOT / "sim" / "study"
"""Packages on which outcomes may depend, and the part of them that only asks for outcomes."""
_MOST_BYTES: Final = 1 << 20


class _Entry(msgspec.Struct, frozen=True):
    key: str
    checksum: str
    outcome: msgspec.Raw


def home() -> Path:
    """Directory of kept outcomes: $CLEAVE_HOME/outcomes, by default ~/.cleave/outcomes."""
    return Path(os.environ.get("CLEAVE_HOME") or Path.home() / ".cleave") / "outcomes"


class Kept:
    """Outcomes in a directory."""

    def __init__(self, directory: Path, ground: Ground) -> None:
        self._directory, self._ground = directory, ground
        self._common = f"{code_digest()} {_digest_of(ground.population)}"
        self.found = self.computed = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise InputError(f"cannot keep outcomes in {directory}: {fault.strerror}; set CLEAVE_HOME") from None

    def outcomes(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Yield each cell with its outcome, kept or computed; every one is kept before the next begins."""
        for cell in cells:
            outcome = self._read(cell)
            if outcome is None:
                outcome = evaluate(cell, self._ground)
                self._write(cell, outcome)
                self.computed += 1
            else:
                self.found += 1
            yield cell, outcome

    def path(self, cell: Cell) -> Path:
        return self._directory / f"{self._key(cell)}.json"

    def _key(self, cell: Cell) -> str:
        shape = self._ground.shapes[cell.model]
        return hashlib.sha256(f"{self._common} {shape!r} {asdict(cell)!r}".encode()).hexdigest()

    def _read(self, cell: Cell) -> Outcome | None:
        try:
            entry = msgspec.json.decode(read_whole(self.path(cell), _MOST_BYTES), type=_Entry)
            if (entry.key, entry.checksum) != (self._key(cell), _checksum(bytes(entry.outcome))):
                return None
            return msgspec.json.decode(entry.outcome, type=Outcome)
        except (OSError, msgspec.DecodeError):
            return None

    def _write(self, cell: Cell, outcome: Outcome) -> None:
        encoded = msgspec.json.encode(outcome, enc_hook=_plain)
        entry = _Entry(self._key(cell), _checksum(encoded), msgspec.Raw(encoded))
        try:
            write_whole(self.path(cell), msgspec.json.encode(entry))
        except OSError as fault:
            raise InputError(
                f"cannot write {self.path(cell)}: {fault.strerror}; make room there, or set CLEAVE_HOME"
            ) from None


@cache
def code_digest() -> str:
    """Digest of all files that outcomes may depend on, and of the version of numpy."""
    digest = hashlib.sha256(f"numpy {np.__version__}".encode())
    for package in _CODE:
        for path in sorted((_ROOT / package).rglob("*")):
            if path.suffix in (".py", ".csv") and _NOT_CODE not in path.parents:
                digest.update(f"{path.relative_to(_ROOT)} ".encode() + path.read_bytes())
    return digest.hexdigest()


def _digest_of(population: Profiles) -> str:
    digest = hashlib.sha256()
    for name in population.__slots__:
        column = getattr(population, name)
        digest.update(name.encode() + (column.tobytes() if isinstance(column, np.ndarray) else repr(column).encode()))
    return digest.hexdigest()


def _plain(number: object) -> object:
    """Convert a numpy number to a Python one."""
    if isinstance(number, Integral):
        return int(number)
    if isinstance(number, Real):
        return float(number)
    raise TypeError(f"expected a number, got {type(number).__name__}")


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
