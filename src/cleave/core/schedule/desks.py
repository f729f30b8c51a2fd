"""Desks: which devices serve which shard, how many sequences each may have open, and which one gets the next.

The free desks of a shard are ordered by when each should finish one more sequence, so the cost of choosing one does
not depend on how many devices serve the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from cleave.core.model.keeping import Keeping
from cleave.core.model.shard import Shard
from cleave.core.schedule.soonest import Soonest
from cleave.core.schedule.tasks import DeviceId


@dataclass(slots=True, eq=False)
class Desk:
    """A device at a shard: how many sequences it can have open at once, and its speed relative to the others."""

    device: DeviceId
    slots: int
    speed: float
    keeps: Keeping = "nothing"
    """For backward."""
    open: int = 0

    @property
    def next_done(self) -> float:
        """When the device should finish one more sequence, in arbitrary units: only for comparison."""
        return (self.open + 1) / self.speed


class Desks:
    def __init__(self, shards: Iterable[Shard], late: AbstractSet[DeviceId]) -> None:
        """`late` is a live view of stragglers."""
        self._late = late
        self._desks: dict[Shard, dict[DeviceId, Desk]] = {shard: {} for shard in shards}
        self._free: dict[Shard, Soonest] = {shard: Soonest() for shard in self._desks}
        self._shards: dict[DeviceId, list[Shard]] = {}

    def at(self, shard: Shard) -> Collection[Desk]:
        return self._desks[shard].values()

    def of(self, device: DeviceId) -> Iterator[tuple[Shard, Desk]]:
        for shard in self._shards.get(device, ()):
            yield shard, self._desks[shard][device]

    def add(self, shard: Shard, desk: Desk) -> None:
        assert desk.device not in self._desks[shard], "a device has one desk at a shard"
        self._desks[shard][desk.device] = desk
        self._shards.setdefault(desk.device, []).append(shard)
        self._place(shard, desk)

    def remove(self, device: DeviceId) -> None:
        """Remove every desk of a device."""
        for shard in self._shards.pop(device, ()):
            del self._desks[shard][device]
            self._free[shard].discard(device)

    def take(self, shard: Shard, desk: Desk) -> None:
        """Open a sequence."""
        desk.open += 1
        self._place(shard, desk)

    def leave(self, shard: Shard, desk: Desk) -> None:
        """Close a sequence."""
        desk.open -= 1
        if self._desks[shard].get(desk.device) is desk:
            self._place(shard, desk)

    def soonest(self, shard: Shard, may_take: Callable[[DeviceId], bool]) -> Desk | None:
        """The free desk that should finish one more sequence soonest; a late device only if no other is free."""
        late: Desk | None = None
        for device in self._free[shard].in_order():
            if may_take(device):
                desk = self._desks[shard][device]
                if device not in self._late:
                    return desk
                late = late or desk
        return late

    def free_slots(self, shard: Shard) -> int:
        """Number of sequences that healthy devices could still open."""
        return sum(desk.slots - desk.open for desk in self.at(shard) if desk.device not in self._late)

    def _place(self, shard: Shard, desk: Desk) -> None:
        if desk.open < desk.slots:
            self._free[shard].put(desk.device, desk.next_done)
        else:
            self._free[shard].discard(desk.device)

    def check(self) -> None:
        """Assert the invariants; a violation is our bug."""
        for shard, desks in self._desks.items():
            for device, desk in desks.items():
                assert shard in self._shards[device]
                assert 0 <= desk.open <= desk.slots
                is_free = desk.open < desk.slots
                assert (self._free[shard].moment(device) == desk.next_done) == is_free
            assert len(self._free[shard]) == sum(desk.open < desk.slots for desk in desks.values())
