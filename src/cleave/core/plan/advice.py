"""What would make steps faster: more devices, or fewer. Asks the planner about fleets that are not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cleave.core.fleet.profiles import Profiles

_MORE = 2
_WORTH_TELLING = 0.02
"""Change of a step's time below which a prediction says nothing."""

Judge = Callable[[Profiles], float | None]
"""Predicted seconds of a step on a fleet; None if that fleet cannot do it."""


@dataclass(frozen=True, slots=True)
class Advice:
    text: str
    change: float
    """Of the time of a step: -0.2 is a fifth less."""


def advise(profiles: Profiles, judge: Judge) -> tuple[Advice, ...]:
    """Say what two more devices like one in the middle would change, and which devices slow down the others."""
    now_s = judge(profiles)
    if not now_s:
        return ()

    def compared(text: str, other: Profiles) -> list[Advice]:
        other_s = judge(other)
        change = 0.0 if other_s is None else other_s / now_s - 1
        return [Advice(text, change)] if change <= -_WORTH_TELLING else []

    names = profiles.names
    middle = int(np.argsort(profiles.flops_per_s)[len(names) // 2])
    copies = tuple(f"{names[middle]} (copy {number})" for number in range(1, _MORE + 1))
    more = profiles.take(np.array([*range(len(names)), *[middle] * _MORE]), (*names, *copies))
    found = compared(f"two more devices like {names[middle]}", more)
    for slow in _suspects(profiles) if len(names) > 1 else ():
        rest = profiles.take(np.delete(np.arange(len(names)), slow))
        found += compared(f"{names[slow]} slows the others; without it", rest)
    return tuple(found)


def _suspects(profiles: Profiles) -> list[int]:
    """The slowest device in each respect."""
    slowest = [
        np.argmin(profiles.flops_per_s),
        np.argmin(profiles.down_bytes_per_s),
        np.argmin(profiles.up_bytes_per_s),
        np.argmax(profiles.latency_s + profiles.task_s),
    ]
    return list(dict.fromkeys(map(int, slowest)))
