"""Measured profiles of the connected devices, as rows of one array, for the planner's snapshots.

A snapshot of 8,192 devices takes a fraction of a millisecond: rows are checked when devices join and only copied after
that. The table remembers the last snapshot, so that it can tell, device by device, when a rate has moved far enough
that plans should change.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import compress
from typing import NamedTuple

import numpy as np

from cleave.core.fleet.profiles import MEASURED, Profiles

_ROWS = 64  # initial capacity
_MOVED, _LATENCY_MOVED = 1.3, 3.0  # factors of change at which plans should change


class Measured(NamedTuple):
    """A device's profile as measured: the columns of the table."""

    flops_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    memory_bytes: float
    task_s: float = 0.0
    byte_s: float = 0.0


assert Measured._fields == MEASURED
_FAR = Measured(_MOVED, _MOVED, _MOVED, _LATENCY_MOVED, _MOVED, _LATENCY_MOVED, _LATENCY_MOVED)

_SMALL = Measured(0.0, 0.0, 0.0, 0.0, 0.0, 5e-3, 0.0)
"""Changes below these do not matter."""


class ProfileTable:
    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        self._values = np.empty((_ROWS, len(Measured._fields)))
        self._is_proven = np.zeros(_ROWS, dtype=np.bool_)
        """Whether a device's work was measured, not only its claims."""
        self._shown = np.empty((0, len(Measured._fields)))
        """Rows as of the last snapshot; NaN for devices it left out."""

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str, measured: Measured) -> None:
        """Add a device; FleetError if its name or its profile is invalid."""
        columns = np.array(measured)[:, np.newaxis]
        Profiles(names=(name,), **dict(zip(MEASURED, columns, strict=True)))  # checks them
        row = len(self._names)
        if row == len(self._values):
            self._values = np.concatenate([self._values, np.empty_like(self._values)])
            self._is_proven = np.concatenate([self._is_proven, np.zeros_like(self._is_proven)])
        self._names.append(name)
        self._rows[name] = row
        self._values[row], self._is_proven[row] = measured, False

    def prove(self, name: str) -> None:
        """Note that a device's work was measured."""
        self._is_proven[self._rows[name]] = True

    def fastest(self) -> float | None:
        """FLOP/s of the fastest device whose work was measured; None if there is none."""
        count = len(self._names)
        rates = self._values[:count, 0][self._is_proven[:count]]
        return float(rates.max()) if rates.size else None

    def update(self, name: str, measured: Measured) -> None:
        self._values[self._rows[name]] = measured

    def remove(self, name: str) -> None:
        """Remove a device; the last row takes its place."""
        row, last = self._rows.pop(name), self._names.pop()
        if last != name:
            self._names[row] = last
            self._rows[last] = row
            self._values[row] = self._values[len(self._names)]
            self._is_proven[row] = self._is_proven[len(self._names)]

    def snapshot(self, without: AbstractSet[str]) -> Profiles:
        """Profiles of all devices except some; of all of them if that leaves none."""
        names, values = self._names, self._values[: len(self._names)].copy()
        self._shown = values
        left_out = [row for name in without if (row := self._rows.get(name)) is not None]
        if 0 < len(left_out) < len(names):
            is_shown = np.ones(len(names), dtype=np.bool_)
            is_shown[left_out] = False
            names, values = compress(names, is_shown.tolist()), np.delete(values, left_out, axis=0)
            self._shown[left_out] = np.nan
        return Profiles.prechecked(tuple(names), np.ascontiguousarray(values.T))

    def has_moved(self, name: str) -> bool:
        """Whether a device has moved far enough from the last snapshot that plans should change.

        Valid only while no device has been added or removed since.
        """
        row = self._rows[name]
        rows: tuple[list[float], list[float]] = (self._values[row].tolist(), self._shown[row].tolist())
        return any(
            now > far * shown + least or shown > far * now + least
            for now, shown, far, least in zip(*rows, _FAR, _SMALL, strict=True)
        )
