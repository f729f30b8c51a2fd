"""What happened in a number of batches, and the attendance of devices over time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Literal

from cleave.errors import InfeasibleError
from cleave.sim.churn import Stay

Method = Literal["engine", "timeline", "columns", "gemms"]


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """A device that joins or leaves."""

    at: float
    device: int
    joins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    method: Method
    batch_s: tuple[float, ...]
    """Seconds of each batch, in order."""
    ended_s: tuple[float, ...] = ()
    """When each batch ended; empty if each began with the end of the one before it."""
    changes: tuple[Change, ...] | None = None
    """Who came and went, in order; None if all devices were there throughout."""
    recovery_s: tuple[float, ...] = ()
    """What departures added to their batches, each."""
    departures: int = 0
    joins: int = 0
    replans: int = 0
    waited_s: float = 0.0
    """Between batches, until enough devices were there."""

    @property
    def mean_s(self) -> float:
        return sum(self.batch_s) / len(self.batch_s)

    @property
    def ends(self) -> tuple[float, ...]:
        """When each batch ended."""
        return self.ended_s or tuple(accumulate(self.batch_s))


class Attendance:
    """Who is there, from the stays of each device: a heap of changes, taken in order."""

    def __init__(self, names: Sequence[str], lives: Mapping[str, Iterator[Stay]]) -> None:
        self._lives = [lives[name] for name in names]
        self._changes: list[Change] = []
        self.present = [False] * len(names)
        self.history: list[Change] = []
        """All changes so far."""
        for device in range(len(names)):
            self._schedule(device)
        for _ in self.until(0.0):
            pass

    def until(self, now: float) -> Iterator[Change]:
        """Changes up to then, in order; `present` follows."""
        while self._changes and self._changes[0].at <= now:
            change = heapq.heappop(self._changes)
            self.present[change.device] = change.joins
            self.history.append(change)
            if not change.joins:
                self._schedule(change.device)
            yield change

    @property
    def soonest(self) -> float:
        """When the next change is; infinite if there is none."""
        return self._changes[0].at if self._changes else inf

    def next_at(self) -> float:
        """When the next change is; InfeasibleError if nothing changes any more."""
        if not self._changes:
            raise InfeasibleError("no further device joins, and those that are left cannot do a batch; add devices")
        return self._changes[0].at

    def _schedule(self, device: int) -> None:
        stay = next(self._lives[device], None)
        if stay is not None:
            heapq.heappush(self._changes, Change(max(stay[0], 0.0), device, True))
            if stay[1] < inf:
                heapq.heappush(self._changes, Change(stay[1], device, False))
