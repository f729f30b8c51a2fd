"""The volunteer's terms: what must hold on a machine while it computes, and how much of it may be used.

Pure: terms and what was observed go in, an objection or none comes out. What a term needs and nobody could observe is
an objection: unknown means do not compute. Names are BOINC's, where BOINC has one. `conditions.py` observes,
`volunteer.py` obeys, and `web/terms.mjs` is the same for browsers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from cleave.config import Range

_MB = 1_000_000
_COOLER_C = 5.0
"""Degrees below its limit at which a machine that got too hot continues: else it would come and go all the time."""

Share = Annotated[float, Range(0, 1, above=True)]
Hour = Annotated[float, Range(0, 24)]
Limit = Annotated[float, Range(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a volunteer allows; by default everything."""

    run_on_batteries: bool = True
    """Whether to compute without external power."""
    run_if_user_active: bool = True
    """Whether to compute while somebody uses this machine."""
    idle_time_to_run: Annotated[float, Range(0, above=True)] = 3.0
    """Minutes without input until nobody uses it."""
    start_hour: Hour = 0.0
    """Hour of the day, by the local clock, from which on to compute; 22.5 is half past ten at night."""
    end_hour: Hour = 0.0
    """Hour of the day at which to stop; the same as `start_hour` means all day."""
    cpu_usage_limit: Annotated[float, Range(1, 100)] = 100.0
    """Percent of the time in which the lent threads compute; they rest between pieces of work."""
    ram_max_used_busy_frac: Share = 1.0
    """Share of this machine's memory to use at most, the program included, while somebody uses the machine."""
    ram_max_used_idle_frac: Share = 1.0
    """The same while nobody does."""
    max_bytes_sec_down: Limit = 0.0
    """Bytes per second to receive at most; 0: no limit."""
    max_bytes_sec_up: Limit = 0.0
    """Bytes per second to send at most; 0: no limit."""
    daily_xfer_limit_mb: Limit = 0.0
    """Megabytes (of 1,000,000 bytes) to send and receive a day, from midnight to midnight; 0: no limit."""
    max_temperature: Annotated[float, Range(0, 150)] = 0.0
    """Degrees Celsius of the hottest sensor above which to stop; 0: no limit."""

    @property
    def limits(self) -> dict[str, float]:
        """Terms that do not have their default, by name; none allow everything."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} = {str(value).lower()}" for name, value in self.limits.items()) or "none"

    @property
    def depends_on_user(self) -> bool:
        return not self.run_if_user_active or self.ram_max_used_busy_frac != self.ram_max_used_idle_frac


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The last input of a user that one probe saw."""

    probe: str
    idle_s: float
    sees_all: bool
    """Whether there can be no input that it does not see; else its silence says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """The hottest sensor."""

    sensor: str
    celsius: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What was observed of a machine; None where nobody can tell."""

    hour: float
    """Time of day by the local clock, from 0 up to 24."""
    on_batteries: bool | None = None
    signs: Sequence[Sign] = ()
    """What the probes for input say, those without an answer left out."""
    heat: Heat | None = None
    moved_bytes: int | None = None
    """Sent and received today."""

    @property
    def last_sign(self) -> Sign | None:
        """The newest input."""
        return min(self.signs, key=lambda sign: sign.idle_s, default=None)


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a machine must not compute now."""

    term: str
    text: str
    """One sentence for the volunteer; a server is told only the term."""


def objection(terms: Terms, now: Conditions, *, is_computing: bool = True) -> Objection | None:
    """Return what forbids to compute; None if nothing does. A machine that stopped because it was hot has to cool."""
    if not terms.run_on_batteries and now.on_batteries is not False:
        seen = "it runs on them now" if now.on_batteries else "nobody can tell whether it does"
        return Objection("run_on_batteries", f"this machine must not compute on batteries, and {seen}")
    if not _is_within(terms.start_hour, terms.end_hour, now.hour):
        hours = f"{_clock(terms.start_hour)} to {_clock(terms.end_hour)}"
        return Objection("start_hour", f"this machine may compute from {hours}, and it is {_clock(now.hour)}")
    if not terms.run_if_user_active and is_in_use(terms, now) is not False:
        return Objection(
            "run_if_user_active",
            f"this machine may compute after {terms.idle_time_to_run:g} minutes without input, and {_told(now)}",
        )
    limit_c = terms.max_temperature - (0.0 if is_computing else _COOLER_C)
    if terms.max_temperature and (now.heat is None or now.heat.celsius > limit_c):
        seen = f"{now.heat.sensor} has {now.heat.celsius:.0f}" if now.heat else "no sensor can be read"
        return Objection("max_temperature", f"this machine may compute up to {limit_c:g} degrees Celsius, and {seen}")
    most = terms.daily_xfer_limit_mb
    if most and (now.moved_bytes is None or now.moved_bytes >= most * _MB):
        seen = "nobody can tell how many" if now.moved_bytes is None else f"{now.moved_bytes / _MB:,.1f} MB"
        return Objection("daily_xfer_limit_mb", f"this machine may move {most:,.6g} MB a day, and moved {seen} today")
    return None


def is_in_use(terms: Terms, now: Conditions) -> bool | None:
    """Whether somebody uses this machine; None if no probe that sees all input says that nobody does."""
    last = now.last_sign
    if last is not None and last.idle_s < 60 * terms.idle_time_to_run:
        return True
    return False if any(sign.sees_all for sign in now.signs) else None


def memory_share(terms: Terms, now: Conditions) -> float:
    """Share of this machine's memory to use at most: the smaller one if nobody can tell whether it is in use."""
    match is_in_use(terms, now):
        case True:
            return terms.ram_max_used_busy_frac
        case False:
            return terms.ram_max_used_idle_frac
        case None:
            return min(terms.ram_max_used_busy_frac, terms.ram_max_used_idle_frac)


def _is_within(start_hour: float, end_hour: float, hour: float) -> bool:
    if start_hour < end_hour:
        return start_hour <= hour < end_hour
    return start_hour == end_hour or hour >= start_hour or hour < end_hour  # across midnight


def _clock(hour: float) -> str:
    minutes = int(hour * 60)
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _told(now: Conditions) -> str:
    """What the probes say, for people."""
    last = now.last_sign
    if last is None:
        return "no probe can tell when the last input was"
    age = f"{last.idle_s:.0f} seconds" if last.idle_s < 120 else f"{last.idle_s / 60:.0f} minutes"
    seen = f"{last.probe} had input {age} ago"
    return seen if any(sign.sees_all for sign in now.signs) else f"{seen}, but no probe sees all input of this machine"
