"""When emulated devices come and go: at a constant rate, by a daily cycle, or as a trace says. Pure, and seeded.

A device's life is a sequence of stays, each from and until so many seconds after the start. Every device draws from a
generator of its own, so that its stays do not depend on which others there are.
"""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from cleave.errors import FleetError

Stay = tuple[float, float]
"""Seconds since the start at which a device joins and leaves."""

AWAY_S = 600.0
"""Mean absence, unless another is asked for."""
_HEADER = ("device", "leave_s", "join_s")
_EVENING_H, _MORNING_H = 23.0, 7.0
_SPREAD_H = 1.0
_NIGHTS = 0.9
"""Probability that a device is idle and charging in a given night ..."""
_DAYS = 0.3
"""... and for a while in the following day."""
_DAY_STAY_H = 1.0


def constant(rng: random.Random, departures_per_hour: float, away_s: float) -> Iterator[Stay]:
    """Leave at a constant rate, and return after an exponential time of mean `away_s`."""
    joined_s = 0.0
    while departures_per_hour > 0:
        left_s = joined_s + rng.expovariate(departures_per_hour / 3600)
        yield joined_s, left_s
        joined_s = left_s + rng.expovariate(1 / away_s)
    yield joined_s, math.inf


def daily(rng: random.Random, day_s: float) -> Iterator[Stay]:
    """Be there while idle and charging: most nights, and on some days for about an hour; it starts at midnight."""
    hour_s = day_s / 24
    free_s = 0.0  # end of the last stay
    day = 0
    while True:
        midnight_s = day * day_s
        stays: list[Stay] = []
        if rng.random() < _NIGHTS:
            evening_h, morning_h = rng.gauss(_EVENING_H - 24, _SPREAD_H), rng.gauss(_MORNING_H, _SPREAD_H)
            stays.append((midnight_s + evening_h * hour_s, midnight_s + morning_h * hour_s))
        if rng.random() < _DAYS:
            begin_h = rng.uniform(_MORNING_H + 4 * _SPREAD_H, _EVENING_H - 6 * _SPREAD_H)
            length_h = min(rng.expovariate(1 / _DAY_STAY_H), 2 * _SPREAD_H)
            stays.append((midnight_s + begin_h * hour_s, midnight_s + (begin_h + length_h) * hour_s))
        for begin_s, end_s in stays:
            begin_s = max(begin_s, free_s)
            if end_s > begin_s:
                yield begin_s, end_s
                free_s = end_s
        day += 1


def traced(text: str, source: str, names: Iterable[str]) -> dict[str, list[Stay]]:
    """Read departures from a CSV with the columns device, leave_s and join_s; `source` names it in errors.

    Every device is there from the start; without `join_s` it never returns. Devices that are not mentioned stay.
    """
    departures = _departures(text, source, set(names))
    return {name: _stays(departures[name]) for name in names}


def of_each(
    names: Sequence[str], seed: int, draw: Callable[[random.Random], Iterator[Stay]]
) -> dict[str, Iterator[Stay]]:
    """Draw the stays of each device from its own generator."""
    return {name: draw(random.Random(f"{seed} {name}")) for name in names}


def _stays(departures: list[tuple[float, float]]) -> list[Stay]:
    stays: list[Stay] = []
    joined_s = 0.0
    for leave_s, join_s in departures:
        stays.append((joined_s, leave_s))
        joined_s = join_s
    if joined_s < math.inf:
        stays.append((joined_s, math.inf))
    return stays


def _departures(text: str, source: str, known: set[str]) -> defaultdict[str, list[tuple[float, float]]]:
    rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
    if not rows or tuple(cell.strip() for cell in rows[0]) != _HEADER:
        raise FleetError(f"expected {source} to begin with the line {','.join(_HEADER)}; add it")
    departures: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for line, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        if len(row) != len(_HEADER):
            raise FleetError(f"{source}, line {line}: expected {len(_HEADER)} cells, got {len(row)}; correct it")
        device, leave_s, join_s = row[0].strip(), _seconds(row[1]), _seconds(row[2] or "inf")
        if device not in known:
            raise FleetError(f"{source}, line {line}: expected a device of the fleet, got {device[:60]!r}; rename it")
        earliest_s = departures[device][-1][1] if departures[device] else 0.0
        if not earliest_s <= leave_s < join_s:
            raise FleetError(
                f"{source}, line {line}: expected {device} to leave at {earliest_s:g} s or later and to join after "
                f"that, got {row[1].strip()!r} and {row[2].strip()!r}; correct the seconds, in order"
            )
        departures[device].append((leave_s, join_s))
    return departures


def _seconds(cell: str) -> float:
    """Read a number of seconds; what is none compares as wrong."""
    try:
        return float(cell)
    except ValueError:
        return math.nan
