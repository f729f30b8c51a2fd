"""Which term of a prediction was wrong: the one whose measured value, put in place of the assumed one, costs most time.

Everything else stays as assumed, so that the answer is one cause and not a list. Terms are first compared over all
devices at once, as many may be wrong in the same way, and then device by device. Pure: the caller judges a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Floats, Profiles

_EXPLAINS = 1.15
"""Time with the measured term over time without, from which on a term explains something."""
_MOSTLY = 0.7
"""Share of a term's effect that one device must have to be named alone."""
_JUDGED_DEVICES = 16
"""Fleets up to this size are judged device by device; of larger ones, the device that is off most is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a prediction rests on besides the plan."""

    profiles: Profiles
    server: Server


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of profiles, and how to say that it was wrong."""

    column: str
    says: str
    unit: float


_COLUMNS = (
    _Column("flops_per_s", "{} computes at {:.3g} GFLOP/s, not {:.3g}", 1e-9),
    _Column("down_bytes_per_s", "the downlink of {} carries {:.3g} Mbit/s, not {:.3g}", 8e-6),
    _Column("up_bytes_per_s", "the uplink of {} carries {:.3g} Mbit/s, not {:.3g}", 8e-6),
    _Column("latency_s", "a round trip to {} takes {:.3g} ms, not {:.3g}", 1e3),
    _Column("task_s", "a task takes {} {:.3g} ms besides its arithmetic, not {:.3g}", 1e3),
)

Judge = Callable[[Terms], float | None]
"""Seconds of the plan under some terms; None if they cannot be told."""


def wrong_term(assumed: Terms, measured: Terms, judge: Judge) -> str:
    """Say in a sentence which assumed term made a plan look faster than it was; empty if none explains it."""
    if not set(assumed.profiles.names) <= set(measured.profiles.names):
        return ""
    order = [measured.profiles.names.index(name) for name in assumed.profiles.names]
    measured = replace(measured, profiles=measured.profiles.take(np.array(order)))
    base_s = judge(assumed)
    if base_s is None:
        return ""
    best_s, best = base_s * _EXPLAINS, ""
    for column in _COLUMNS:
        seconds = judge(_with(assumed, column, measured))
        if seconds is not None and seconds > best_s:
            best_s, best = seconds, _said(assumed, measured, column, judge, base_s, seconds)
    seconds = judge(replace(assumed, server=measured.server))
    if seconds is not None and seconds > best_s:
        best_s, best = seconds, _said_of_server(assumed.server, measured.server)
    capacity = measured.profiles.common_medium_bytes_per_s
    if capacity < assumed.profiles.common_medium_bytes_per_s:
        ours = measured.profiles
        on_medium = replace(assumed.profiles, medium=ours.medium, medium_bytes_per_s=ours.medium_bytes_per_s)
        seconds = judge(replace(assumed, profiles=on_medium))
        if seconds is not None and seconds > best_s:
            best = f"all devices share a medium of {capacity * 8e-6:.3g} Mbit/s"
    return best


def _with(assumed: Terms, column: _Column, measured: Terms, only: int | None = None) -> Terms:
    """The assumed terms with one measured column, of all devices or of one."""
    values = _values(measured, column)
    if only is not None:
        values, value = _values(assumed, column).copy(), values[only]
        values[only] = value
    return replace(assumed, profiles=replace(assumed.profiles, **{column.column: values}))


def _values(terms: Terms, column: _Column) -> Floats:
    return getattr(terms.profiles, column.column)


def _said(assumed: Terms, measured: Terms, column: _Column, judge: Judge, base_s: float, all_s: float) -> str:
    """Name the device that explains most of what a column explains; if none does, the one that is off most."""
    before, after = _values(assumed, column), _values(measured, column)
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.nan_to_num(np.abs(np.log(after / before)), posinf=np.abs(after - before).max())
    worst, others = int(off.argmax()), len(off) - 1
    if len(off) <= _JUDGED_DEVICES:
        alone_s = [judge(_with(assumed, column, measured, only)) or -inf for only in range(len(off))]
        worst = int(np.argmax(alone_s))
        if alone_s[worst] - base_s >= _MOSTLY * (all_s - base_s):
            others = 0
    told = column.says.format(
        assumed.profiles.names[worst], float(after[worst]) * column.unit, float(before[worst]) * column.unit
    )
    return told + (f", and {others} other devices are off as well" if others else "")


def _said_of_server(assumed: Server, measured: Server) -> str:
    if measured.task_s > assumed.task_s:
        return f"a task costs the server {measured.task_s * 1e3:.3g} ms, not {assumed.task_s * 1e3:.3g}"
    return "the server's own link carries less than assumed"
