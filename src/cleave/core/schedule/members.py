"""Who is in the fleet and what each can do, as measured all the time.

A rate is bytes (or operations) over the seconds they took, both fading, so that it follows a device that slows down
within some tens of results and is not moved by one odd one. The planner sees a snapshot (`Profiles`) of those who are
not late, which changes, with its number, only when a device comes, goes, lags or a rate has moved far enough to matter,
so that plans can be kept. What a device did and how far it is trusted outlives its connection.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from cleave.core.cost.gemm import Pace
from cleave.core.fleet.profiles import Profiles
from cleave.core.verify.trust import Trust

_FADE_BYTES = 32e6  # a link's memory: what counts half
_FADE_S = 1.0  # a processor's memory: compute seconds that count half
_MOVED, _LATENCY_MOVED = 1.3, 3.0
_LATENCY_FADE = 1.02
_MOST_PAST = 4096
_LONGEST_PAUSE_S = 300.0
STAND_IN = "this server"
"""The device that the server itself is, while no other is there."""
_MOST_BYTES_PER_S, _MOST_FLOPS_PER_S = 20e9, 1e16  # what arrived at once took some time all the same


class Rate:
    """Amount per second, from amounts and seconds that fade."""

    def __init__(self, first: float, memory: float, most: float) -> None:
        self._memory, self._most = memory, most
        self._amount = memory / 4
        self._seconds = memory / 4 / first

    @property
    def value(self) -> float:
        return self._amount / self._seconds

    def add(self, amount: float, seconds: float) -> None:
        """Learn from an amount that took some time; what a device cannot have measured teaches nothing."""
        if not (0 < amount < math.inf and 0 < seconds < math.inf):
            return
        keep = 0.5 ** (amount / self._memory)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + max(seconds, amount / self._most)

    def limit(self, most: float) -> None:
        self._amount = min(self._amount, most * self._seconds)

    def halve(self) -> None:
        """For a device that is late with no word of why; what it does from now on tells the truth."""
        self._amount /= 2


@dataclass(slots=True)
class Member:
    name: str
    kernel: str
    memory_bytes: int
    latency_s: float
    flops: Rate
    down: Rate
    up: Rate
    address: str = ""
    key: str | None = ""
    """By which of the run's tokens it joined; None: it is this server itself."""
    trust: Trust = field(default_factory=Trust)
    tasks: int = 0
    done_flops: float = 0.0
    """Of all results that were taken."""
    verified_flops: float = 0.0
    """Of those that were checked on arrival: products, not resident layers."""
    """Of results that were checked and found right: its credit."""
    wrong: int = 0
    """Results that were found wrong."""
    compute_s: float = 0.0
    """As it says itself."""
    down_bytes: int = 0
    up_bytes: int = 0
    failures: int = 0
    """Tasks in a row that it could not do."""
    refused: int = 0
    """Results in a row that nobody had asked it for."""
    bad_stays: int = 0
    """In a row, that ended by its own fault with nothing done."""
    has_helped: bool = False
    """Something it returned was right, in this stay."""
    not_before: float = 0.0
    """When such a device may join again."""
    is_late: bool = False
    idle_since: float = 0.0
    """When it last had something to do."""
    tasks_then: int = -1
    products_then: int = 0
    was_told_idle: bool = False
    moved_bytes: int = 0
    """What had moved over its link when it was last told to be at work."""
    probed_at: float | None = None
    """When the probe was sent whose answer is awaited."""

    def heard(self, round_trip_s: float) -> None:
        """A probe's answer, which may have waited behind other messages: the least counts, and slowly fades."""
        self.latency_s = min(round_trip_s, self.latency_s * _LATENCY_FADE)

    def start_no_faster_than(self, before: Member) -> None:
        """What work has shown counts more than a new probe, which a short burst may have flattered."""
        for ours, theirs in ((self.flops, before.flops), (self.down, before.down), (self.up, before.up)):
            ours.limit(theirs.value)

    @property
    def pace(self) -> Pace:
        return Pace(*self.rates, self.latency_s)

    @property
    def rates(self) -> tuple[float, float, float]:
        """FLOP/s, bytes/s down and up."""
        return self.flops.value, self.down.value, self.up.value

    def has_moved(self, seen: tuple[float, ...]) -> bool:
        """Whether it differs enough from what was seen that other plans are due."""
        now = (*self.rates, self.latency_s)
        far = (_MOVED, _MOVED, _MOVED, _LATENCY_MOVED)
        return any(not 1 / most < value / before < most for value, before, most in zip(now, seen, far, strict=True))


_OUTLIVES = ("tasks", "done_flops", "verified_flops", "wrong", "compute_s", "down_bytes", "up_bytes")
"""What of a member stays when it leaves and returns under its name."""


class Roster:
    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.past: dict[str, Member] = {}
        """Those who left, with what they did."""
        self.number = 0
        """Grows whenever the snapshot changes."""
        self._reserved: set[str] = set()
        self._snapshot: Profiles | None = None
        self._seen: dict[str, tuple[float, float, float, float]] = {}

    def add(
        self,
        *,
        name: str,
        kernel: str,
        memory_bytes: int,
        flops_per_s: float,
        latency_s: float,
        down_bytes_per_s: float,
        up_bytes_per_s: float,
        address: str = "",
        key: str | None = "",
    ) -> Member:
        member = Member(
            name=name,
            kernel=kernel,
            memory_bytes=memory_bytes,
            latency_s=latency_s,
            flops=Rate(flops_per_s, flops_per_s * _FADE_S, _MOST_FLOPS_PER_S),
            down=Rate(down_bytes_per_s, _FADE_BYTES, _MOST_BYTES_PER_S),
            up=Rate(up_bytes_per_s, _FADE_BYTES, _MOST_BYTES_PER_S),
            address=address,
            key=key,
        )
        before = self.past.pop(name, None)
        if before is not None:
            for kept in _OUTLIVES:
                setattr(member, kept, getattr(before, kept))
            if before.address == address:  # a name alone is anyone's
                member.trust, member.bad_stays = before.trust, before.bad_stays
                member.start_no_faster_than(before)
        self.members[name] = member
        self._changed()
        return member

    def remove(self, name: str) -> None:
        self.past[name] = self.members.pop(name)
        while len(self.past) > _MOST_PAST:  # the oldest without a fault, then the oldest
            innocent = (other for other, member in self.past.items() if not member.wrong)
            del self.past[next(innocent, next(iter(self.past)))]
        self._changed()

    def set_late(self, name: str, is_late: bool) -> None:
        member = self.members.get(name)
        if member is not None and member.is_late != is_late:
            member.is_late = is_late
            if is_late:
                for rate in (member.flops, member.down, member.up):
                    rate.halve()
            self._changed()

    def send_away(self, name: str, now: float) -> None:
        """A stay ended by the device's own fault, with nothing done: the next has to wait, each time twice as long."""
        member = self.members[name]
        member.bad_stays += 1
        member.not_before = now + min(2.0**member.bad_stays, _LONGEST_PAUSE_S)

    def pause_s(self, name: str, address: str, now: float) -> float:
        """How long a device of that name and address has to wait before it may join."""
        before = self.past.get(name)
        return max(0.0, before.not_before - now) if before is not None and before.address == address else 0.0

    def is_quarantined(self, name: str, address: str) -> bool:
        """Whether a device of that name came from that address before and is trusted no more."""
        before = self.past.get(name)
        return before is not None and before.address == address and before.trust.is_lost

    @contextmanager
    def reserved(self, name: str, *, own: bool = False) -> Generator[str]:
        """The name, or the name with a number behind it, kept from others until its device is added."""
        wanted = "".join(letter for letter in name if letter.isprintable())[:60].strip() or "device"
        taken = {*self.members, *self._reserved, *(() if own else ("server", STAND_IN))}
        numbered = (f"{wanted}-{i}" for i in range(2, len(taken) + 3))
        free = next(candidate for candidate in (wanted, *numbered) if candidate not in taken)
        self._reserved.add(free)
        try:
            yield free
        finally:
            self._reserved.discard(free)

    def profiles(self) -> Profiles | None:
        """The present snapshot; None while nobody is there. Where all are late, they are better than none."""
        if self._snapshot is None and self.members:
            members = [member for member in self.members.values() if not member.is_late] or [*self.members.values()]
            self._seen = {member.name: (*member.rates, member.latency_s) for member in members}
            self._snapshot = Profiles(
                names=tuple(member.name for member in members),
                flops_per_s=np.array([member.flops.value for member in members]),
                down_bytes_per_s=np.array([member.down.value for member in members]),
                up_bytes_per_s=np.array([member.up.value for member in members]),
                latency_s=np.array([member.latency_s for member in members]),
                memory_bytes=np.array([float(member.memory_bytes) for member in members]),
            )
        return self._snapshot

    def refresh(self) -> None:
        """Take a new snapshot if a rate has moved far since the last."""
        for member in self.members.values():
            seen = self._seen.get(member.name)
            if seen is not None and member.has_moved(seen):
                self._changed()
                return

    def _changed(self) -> None:
        self.number += 1
        self._snapshot = None
