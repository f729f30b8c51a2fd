"""Connected and past devices, and their profiles as measured by their work.

A speed is an amount over the seconds it took, both decaying, so that it follows a device that slows down within a few
dozen results; `link_rate.py` has those of links. The planner reads a snapshot (`Profiles`) of the devices that are not
late. The snapshot, and with it the roster's number, changes only when a device joins, leaves, becomes late or
recovers, or when a rate has moved far enough to matter, so that plans can be kept. It is built on demand, and nothing
else visits all devices. A device's record and trust outlive its connection.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from cleave.core.cost.rates import Pace
from cleave.core.fleet.profiles import Profiles
from cleave.core.schedule.lateness import Elapsed
from cleave.core.schedule.link_rate import LinkRate
from cleave.core.schedule.names import Names
from cleave.core.schedule.pauses import Pauses
from cleave.core.schedule.profile_table import Measured, ProfileTable
from cleave.core.schedule.shared_links import SharedLink, Traffic, network_of
from cleave.core.verify.trust import Level, Trust

_FADE_S = 1.0  # seconds of compute after which a processor's past counts half
_FIRST_COUNTS = 1 / 16  # of a memory: a claim or a probe gives way to the first work
_LATENCY_FADE = 1.02
_MAX_PAST = 4096
_MAX_FLOPS_PER_S, _MIN_FLOPS_PER_S = 1e16, 1e3  # so that no plan divides by zero, whatever a device reports
_MAX_DROP = 4.0  # factor by which one measurement can lower a rate
_MAX_SHARE = 32.0  # measurements larger than this many memories are scaled down: one lie must not drown all that follow
_NEWCOMER_TIMES, _FIRST_FLOPS_PER_S = 4.0, 2.5e14
"""Most that is believed of a newcomer: a multiple of the fastest device at work, or of this if there is none."""
_FIT_FADE, _FIT_LEAST, _FIT_SPREAD, _FIT_SHARE = 0.98, 8.0, 0.05, 0.9
"""Weight of the past per result, results and spread of sizes that a fit needs, and most of a task that is fixed."""
_USUAL_TASK_S, _USUAL_SPREAD_S = 2e-3, 3e-3
_MOST_OPERATIONS, _MOST_TASK_S = 1e18, 1e5  # of a plausible task
_MOST_STALLS = 3
_LEAST_WORK = 0.1  # of a task's time that counts as work, whatever its fixed cost
_CLEARED_BY = 100  # tasks that make good for one stall
STAND_IN = "this server"
"""Name of the server's own device, which computes while no other is connected."""
_RESERVED = frozenset(("server", STAND_IN))


class Rate:
    """Amount per second, from decaying sums of amounts and seconds."""

    def __init__(self, first: float, memory: float, maximum: float, minimum: float = 1e-3) -> None:
        self._memory, self._maximum, self._minimum = memory, maximum, minimum
        self._amount = memory * _FIRST_COUNTS
        self._seconds = self._amount / first

    @property
    def value(self) -> float:
        return self._amount / self._seconds

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement; ignore implausible ones."""
        if not (0 < amount < math.inf and 0 < seconds < math.inf):
            return
        least = max(self._minimum, self.value / _MAX_DROP)
        seconds = min(max(seconds, amount / self._maximum), amount / self._minimum)
        scale = min(1.0, _MAX_SHARE * self._memory / amount)
        amount, seconds = amount * scale, seconds * scale
        usual = self.value * seconds  # so that a rate far too high fades as fast as one that is about right
        keep = 0.5 ** (max(amount, usual) / self._memory)
        self._amount = self._amount * keep + amount
        self._seconds = min(self._seconds * keep + seconds, self._amount / least)

    def limit(self, maximum: float) -> None:
        self._amount = min(self._amount, maximum * self._seconds)

    def halve(self) -> None:
        """Halve the expectation for a device that is late for an unknown reason; its next results correct the guess."""
        self._amount = max(self._amount / 2, self._minimum * self._seconds)


class FixedCost:
    """Seconds that a task takes whatever its size, from a line through what tasks of different sizes took.

    Decaying sums of a least-squares fit of seconds over operations; the usual until sizes differ enough. Where tasks of
    one size take now longer, now shorter, as on a processor with a quota, the line says little about a task without
    any operations: the fit then counts as much as its variance allows beside that of the usual.
    """

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = self._yy = 0.0
        self.task_s = _USUAL_TASK_S

    def add(self, operations: float, seconds: float) -> None:
        if not (0 < operations < _MOST_OPERATIONS and 0 < seconds < _MOST_TASK_S):
            return
        for name, new in (("_count", 1.0), ("_x", operations), ("_y", seconds)):
            setattr(self, name, getattr(self, name) * _FIT_FADE + new)
        self._xx = self._xx * _FIT_FADE + operations * operations
        self._xy = self._xy * _FIT_FADE + operations * seconds
        self._yy = self._yy * _FIT_FADE + seconds * seconds
        spread = self._count * self._xx - self._x * self._x
        if self._count < _FIT_LEAST or spread < _FIT_SPREAD * self._x * self._x:
            return
        fixed_s = (self._xx * self._y - self._x * self._xy) / spread
        slope = (self._count * self._xy - self._x * self._y) / spread
        left = max(self._yy - fixed_s * self._y - slope * self._xy, 0.0) / (self._count - 2)
        trust = _USUAL_SPREAD_S**2 / (_USUAL_SPREAD_S**2 + left * self._xx / spread)
        fixed_s = _USUAL_TASK_S + trust * (fixed_s - _USUAL_TASK_S)
        self.task_s = min(max(fixed_s, 0.0), _FIT_SHARE * self._y / self._count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The cost of one result on its device: amounts, and the seconds each took."""

    flops: float
    compute_s: float
    down_bytes: int
    """Bytes that tell the link's rate, which need not be all; the same below."""
    down_s: float
    up_bytes: int
    up_s: float
    payload_bytes: int = 0
    """Size of the result."""

    def bounded(self, elapsed: Elapsed, flops: float) -> Observation:
        """Replace reported seconds that the server's clock contradicts; `flops` is what the result should have taken.

        No duration is longer than was observed. A download that took longer began before any task did, as a newcomer's
        probe, so it cannot be judged and does not count. If the result is late, all of the time it took is accounted
        for, as compute or, for a result without any, as sending it: whatever the device claims, it was that slow.
        """
        compute_s, down_s = _within(self.compute_s, elapsed.longest_s), _within(self.down_s, elapsed.longest_s)
        down_bytes = self.down_bytes
        if not self.down_s <= elapsed.longest_s:
            down_bytes, down_s = 0, 0.0
        seen = replace(self, compute_s=compute_s, down_bytes=down_bytes, down_s=down_s)
        missing_s = elapsed.late_s - (compute_s + down_s + self.up_s)
        if missing_s <= 0:
            return seen
        if flops > 0:
            return replace(seen, flops=flops, compute_s=compute_s + missing_s)
        return replace(seen, up_s=self.up_s + missing_s)


def _within(reported_s: float, longest_s: float) -> float:
    return min(reported_s, longest_s) if reported_s > 0 else 0.0  # NaN is not above 0 either


@dataclass(slots=True)
class Member:
    name: str
    kernel: str
    memory_bytes: int
    latency_s: float
    flops: Rate
    down: LinkRate
    up: LinkRate
    fixed: FixedCost = field(default_factory=FixedCost)
    address: str = ""
    key: str | None = ""
    """Token of the run it joined with; None for the server's own device."""
    level: Level = "stranger"
    """Trust that comes with the token."""
    party: str = ""
    """Token, or address in a run without tokens, whose bad stays it shares; empty for the server's own devices."""
    trust: Trust = field(default_factory=Trust)
    tasks: int = 0
    done_flops: float = 0.0
    """FLOPs of all accepted results."""
    verified_flops: float = 0.0
    """FLOPs of results that were verified on arrival: products, not resident layers. The device's credit."""
    wrong: int = 0
    """Results found wrong."""
    compute_s: float = 0.0
    """Seconds of compute, as reported by the device within what was observed."""
    down_bytes: int = 0
    up_bytes: int = 0
    failures: int = 0
    """Consecutive failed tasks."""
    refused: int = 0
    """Consecutive results that were not asked for."""
    has_helped: bool = False
    """Whether the device returned a correct result during this connection."""
    is_measured: bool = False
    """Whether its speed is known from work during this connection, not only from its claims."""
    is_tried: bool = False
    """Whether it was given work only to measure it."""
    stalls: int = 0
    """Times that the others had to do without what the device owed; every _CLEARED_BY tasks clear one."""
    was_bad: bool = False
    """Whether the connection is to end because the device stalled or lied, however much it helped."""
    idle_reason: str = ""
    """Why the device has no work; empty while it has some."""
    tasks_before: int = 0
    """Tasks of earlier connections."""
    tasks_then: int = 0
    """Tasks at the last stall."""
    _tasks_when_late: int = -1

    def stalled(self) -> bool:
        """Count a stall; return whether it is one too many."""
        self.stalls = max(0, self.stalls - (self.tasks - self.tasks_then) // _CLEARED_BY) + 1
        self.tasks_then = self.tasks
        return self.stalls >= _MOST_STALLS

    def became_late(self) -> bool:
        """Note that the device is late; return whether it has finished nothing since it last was."""
        is_again, self._tasks_when_late = self._tasks_when_late == self.tasks, self.tasks
        return is_again

    def is_same(self, address: str, key: str | None) -> bool:
        """Whether this is the record of a device that joins under its name.

        Anyone may claim any name, and many share an address: the token must match, too, so that nobody can spoil
        another person's record. The address still counts, as many people may share one token.
        """
        return (self.address, self.key) == (address, key)

    def heard(self, round_trip_s: float) -> None:
        """Learn from a heartbeat's answer, which may have queued behind other messages: keep a decaying minimum."""
        self.latency_s = min(round_trip_s, self.latency_s * _LATENCY_FADE)

    def start_no_faster_than(self, before: Member) -> None:
        """Cap the rates of a new probe, which a short burst may have inflated, at those its earlier work showed."""
        self.flops.limit(before.flops.value)
        self.down.limit(before.down.value)
        self.up.limit(before.up.value)

    @property
    def pace(self) -> Pace:
        return Pace(*self.rates, self.latency_s, self.fixed.task_s)

    @property
    def rates(self) -> tuple[float, float, float]:
        """FLOP/s, bytes/s down and up."""
        return self.flops.value, self.down.value, self.up.value

    @property
    def measured(self) -> Measured:
        return Measured(*self.rates, self.latency_s, self.memory_bytes, self.fixed.task_s)


_OUTLIVES = ("tasks", "done_flops", "verified_flops", "wrong", "compute_s", "down_bytes", "up_bytes")
"""Fields that a member keeps when it leaves and rejoins under its name."""


class PastMembers(Mapping[str, Member]):
    """A bounded record of departed devices; those that returned wrong results are forgotten last."""

    def __init__(self, maximum: int = _MAX_PAST) -> None:
        self._maximum = maximum
        self._members: OrderedDict[str, Member] = OrderedDict()
        self._wrong: OrderedDict[str, Member] = OrderedDict()
        """Old records of devices that were found wrong, set aside when room had to be made."""

    def __getitem__(self, name: str) -> Member:
        return self._members[name] if name in self._members else self._wrong[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._wrong
        yield from self._members

    def __len__(self) -> int:
        return len(self._members) + len(self._wrong)

    def add(self, member: Member) -> None:
        """Record a departed device; amortized, forgetting one takes constant time."""
        self._members[member.name] = member
        while len(self) > self._maximum:
            if not self._members:
                self._wrong.popitem(last=False)
                continue
            name, oldest = self._members.popitem(last=False)
            if oldest.wrong:
                self._wrong[name] = oldest

    def pop(self, name: str) -> Member | None:
        return (self._members if name in self._members else self._wrong).pop(name, None)


class Roster:
    def __init__(self, late: AbstractSet[str] = frozenset()) -> None:
        """`late` is a live view of the late devices; the ledger decides which are."""
        self._late = late
        self.members: dict[str, Member] = {}
        self.past = PastMembers()
        self.number = 0
        """Grows whenever the snapshot changes."""
        self.traffic = Traffic()
        self._table = ProfileTable()
        self._snapshot: Profiles | None = None
        self._names = Names()
        self._reserved: set[str] = set()
        self._pauses = Pauses()
        self._held: set[tuple[str, str, str | None]] = set()

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
        level: Level = "stranger",
        party: str = "",
    ) -> Member:
        """Add a device with the rates it claims, as far as they are believed of a newcomer."""
        if flops_per_s < math.inf:
            flops_per_s = min(flops_per_s, _NEWCOMER_TIMES * (self._table.fastest() or _FIRST_FLOPS_PER_S))
        member = Member(
            name=name,
            kernel=kernel,
            memory_bytes=memory_bytes,
            latency_s=latency_s,
            flops=Rate(flops_per_s, flops_per_s * _FADE_S, _MAX_FLOPS_PER_S, _MIN_FLOPS_PER_S),
            down=LinkRate(down_bytes_per_s),
            up=LinkRate(up_bytes_per_s),
            address=address,
            key=key,
            level=level,
            party=party,
        )
        before = self.past.get(name)
        if before is not None:
            for kept in _OUTLIVES:
                setattr(member, kept, getattr(before, kept))
            if before.is_same(address, key):
                member.trust, member.stalls = before.trust, min(before.stalls, _MOST_STALLS - 1)
                member.start_no_faster_than(before)
        member.tasks_before = member.tasks_then = member.tasks
        self._table.add(name, member.measured)
        self.past.pop(name)
        self.members[name] = member
        self._changed()
        return member

    def remove(self, name: str) -> None:
        self.past.add(self.members.pop(name))
        self._table.remove(name)
        self._names.freed(name, self._is_taken)
        self._changed()

    def observe(self, name: str, seen: Observation, effort: float) -> None:
        """Learn from work what the probe could only guess; operations count `effort` times."""
        member = self.members[name]
        member.fixed.add(seen.flops * effort, seen.compute_s)
        member.flops.add(seen.flops * effort, max(seen.compute_s - member.fixed.task_s, seen.compute_s * _LEAST_WORK))
        member.down.add(seen.down_bytes, seen.down_s)
        member.up.add(seen.up_bytes, seen.up_s)
        member.up_bytes += seen.payload_bytes
        member.compute_s += seen.compute_s
        member.is_measured |= seen.flops > 0
        self._table.prove(name)
        self.measured(name)

    def measured(self, name: str) -> None:
        """Show a device's new rates and latency, just measured by work or a heartbeat, in the next snapshot."""
        self._table.update(name, self.members[name].measured)
        if self._snapshot is not None and self._table.has_moved(name):
            self._changed()

    def lateness_changed(self, name: str) -> None:
        """Drop a newly late device from the snapshot and halve its rates, or show a recovered one again."""
        member = self.members.get(name)
        if member is None:
            return
        if name in self._late:
            self.weaken(name)
        self._changed()

    def weaken(self, name: str) -> None:
        """Halve the speed of a device that stalled for an unknown reason: its next results correct the guess.

        Not the rates of its links: they may carry too little for a long time to correct anything.
        """
        self.members[name].flops.halve()
        self.measured(name)

    def end_stay(self, name: str, now: float, *, is_bad: bool) -> None:
        """Make a device and newcomers with its token wait after a bad stay, twice as long each time."""
        member = self.members[name]
        for key in ((name, member.address, member.party), member.party):
            if is_bad:
                self._pauses.bad_stay(key, now)
            elif member.tasks - member.tasks_before >= _CLEARED_BY:
                self._pauses.good_stay(key)

    def pause_s(self, name: str, address: str, party: str, now: float) -> float:
        """Seconds a device must wait before it may join; one that has helped before does not wait for its token's."""
        before = self.past.get(name)
        is_same = before is not None and (before.address, before.party) == (address, party)
        has_helped = before is not None and is_same and before.tasks > 0
        own_s = self._pauses.seconds((name, address, party), now)
        return own_s if has_helped else max(own_s, self._pauses.seconds(party, now))

    def is_quarantined(self, name: str, address: str, key: str | None = "") -> bool:
        """Whether a device with this name, address and token is quarantined: it has lost its trust."""
        before = self.past.get(name)
        return before is not None and before.is_same(address, key) and before.trust.is_lost

    def hold(self, name: str) -> None:
        """Keep a connected device from joining again until it is let go."""
        member = self.members[name]
        self._held.add((name, member.address, member.key))

    def let_go(self, name: str) -> None:
        self._held = {held for held in self._held if held[0] != name}

    def is_held(self, name: str, address: str, key: str | None) -> bool:
        return (name, address, key) in self._held

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the devices that may not join."""
        return tuple(sorted({name for name, _, _ in self._held}))

    @contextmanager
    def reserved(self, name: str, *, own: bool = False) -> Generator[str]:
        """Reserve a name, numbered if it is taken, until its device is added.

        `own` allows the names reserved for the server itself.
        """
        wanted = "".join(letter for letter in name if letter.isprintable())[:60].strip() or "device"
        free = self._names.free(
            wanted, self._is_taken if own else lambda name: name in _RESERVED or self._is_taken(name)
        )
        self._reserved.add(free)
        try:
            yield free
        finally:
            self._reserved.remove(free)
            if free not in self.members:
                self._names.freed(free, self._is_taken)

    def profiles(self) -> Profiles | None:
        """A snapshot of the devices that are not late, or of all if all are late; None if none is connected."""
        if self._snapshot is None and self.members:
            self._snapshot = self._on_media(self._table.snapshot(without=self._late))
        return self._snapshot

    def fresh_profiles(self) -> Profiles | None:
        """The connected devices as measured up to now, late ones included; None if none is connected."""
        return self._on_media(self.select(list(self.members))) if self.members else None

    def find_shared_links(self) -> tuple[SharedLink, ...]:
        """Tell from recent traffic which links devices share; return what was found since the last time."""
        before = self.traffic.shared
        networks = {name: network_of(member.address) for name, member in self.members.items() if name != STAND_IN}
        if self.traffic.find(networks):
            self._changed()
        return tuple(link for link in self.traffic.shared if link not in before)

    def _on_media(self, profiles: Profiles) -> Profiles:
        """Show the media that devices share.

        One that all share limits plans by itself, and each link may use all of it, however slow it was beside others.
        Plans know no media of a part of the fleet: there, links keep the rates at which they ran side by side.
        """
        media = {name: link for link in self.traffic.shared if link.is_medium for name in link.devices}
        if media.keys().isdisjoint(profiles.names):
            return profiles
        on = [media.get(name) for name in profiles.names]
        capacity = np.array([np.nan if link is None else link.down_bytes_per_s for link in on])
        medium = tuple("" if link is None else min(link.devices) for link in on)
        shown = replace(profiles, medium=medium, medium_bytes_per_s=capacity)
        if shown.common_medium_bytes_per_s == math.inf:
            return shown
        return replace(shown, down_bytes_per_s=capacity, up_bytes_per_s=capacity)

    def select(self, names: Sequence[str]) -> Profiles:
        """Profiles of some members, in this order."""
        members = [self.members[name] for name in names]
        return Profiles(
            names=tuple(names),
            flops_per_s=np.array([member.flops.value for member in members]),
            down_bytes_per_s=np.array([member.down.value for member in members]),
            up_bytes_per_s=np.array([member.up.value for member in members]),
            latency_s=np.array([member.latency_s for member in members]),
            memory_bytes=np.array([float(member.memory_bytes) for member in members]),
            task_s=np.array([member.fixed.task_s for member in members]),
        )

    def _is_taken(self, name: str) -> bool:
        return name in self.members or name in self._reserved

    def _changed(self) -> None:
        self.number += 1
        self._snapshot = None
