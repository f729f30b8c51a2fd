"""Open regions: what is still missing from each, which tasks may deliver it, and the group each belongs to.

Every element of a region is missing until a task delivers it or it is orphaned, and while it is missing some task
covers it. Regions know tasks but no queues, memory or time; the ledger tells them what happened to a task.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from cleave.core.schedule.rectangles import Rectangle, within, without
from cleave.core.schedule.tasks import DeviceId, Orphan, Task, TaskId


@dataclass(slots=True)
class _Region:
    group: Hashable
    missing: list[Rectangle]
    tasks: dict[TaskId, Task]
    """Queued and running tasks that may still deliver parts of it."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The effect of a result on its region."""

    fresh: tuple[Rectangle, ...]
    """The parts that were missing until now, in the task's coordinates."""
    pointless: list[Task]
    """Tasks of the region, perhaps the deliverer itself, that can deliver nothing more."""
    finished: bool


class Regions:
    def __init__(self) -> None:
        self._regions: dict[TaskId, _Region] = {}
        self._groups: dict[Hashable, dict[TaskId, None]] = {}
        """group -> its open regions; regions without a group are not listed"""

    def __len__(self) -> int:
        return len(self._regions)

    def is_open(self, group: Hashable) -> bool:
        """Whether some region of the group is unfinished."""
        return group in self._groups

    def add(self, task: Task) -> bool:
        """Open a task's region, or add a hedge to one; False if nothing the hedge covers is missing anymore."""
        if task.region is None:
            self._regions[task.id] = _Region(task.group, [task.whole], {task.id: task})
            if task.group is not None:
                self._groups.setdefault(task.group, {})[task.id] = None
            return True
        region = self._regions.get(task.region)
        if region is None or not within(region.missing, task.area):
            return False
        region.tasks[task.id] = task
        return True

    def deliver(self, task: Task, part: Rectangle) -> Delivery:
        """Mark a rectangle of a task's result as delivered."""
        region = self._regions[task.region_id]
        fresh = within(region.missing, part.moved(task.top, task.left))
        for piece in fresh:
            region.missing = without(region.missing, piece)
        pointless = [other for other in region.tasks.values() if not within(region.missing, other.area)]
        for other in pointless:
            del region.tasks[other.id]
        if not region.missing:
            self._close(task.region_id)
        return Delivery(_seen_from(task, fresh), pointless, not region.missing)

    def give_up(self, task: Task) -> Orphan | None:
        """Remove a task that will not be done; orphan its missing parts that no other task covers."""
        region = self._regions[task.region_id]
        missing = self.uncovered(task)
        del region.tasks[task.id]
        for piece in missing:
            region.missing = without(region.missing, piece.moved(task.top, task.left))
        if not region.missing:
            self._close(task.region_id)
        return Orphan(task, missing, not region.missing) if missing else None

    def abandon(self, groups: Iterable[Hashable]) -> list[Task]:
        """Close all regions of some groups; return the tasks that are now pointless."""
        ids = [id for group in groups if group is not None for id in self._groups.pop(group, ())]
        return [task for id in ids for task in self._regions.pop(id).tasks.values()]

    def uncovered(self, task: Task, ignoring: Collection[DeviceId] = ()) -> tuple[Rectangle, ...]:
        """Missing parts of a task that no other task covers, ignoring the tasks of some devices."""
        region = self._regions[task.region_id]
        missing = within(region.missing, task.area)
        for other in region.tasks.values():
            if other.id != task.id and other.device not in ignoring:
                missing = without(missing, other.area)
        return _seen_from(task, missing)

    def check(self, live: dict[TaskId, Task]) -> None:
        """Assert the invariants, given all queued and running tasks that are not cancelled."""
        assert live == {task.id: task for region in self._regions.values() for task in region.tasks.values()}
        for id, region in self._regions.items():
            assert region.missing, "a region with nothing missing is finished"
            rest = region.missing
            for task in region.tasks.values():
                assert task.region_id == id
                assert within(region.missing, task.area), "a task that can deliver nothing is cancelled"
                rest = without(rest, task.area)
            assert not rest, "some task covers everything that is missing"
        grouped: dict[Hashable, set[TaskId]] = {}
        for id, region in self._regions.items():
            if region.group is not None:
                grouped.setdefault(region.group, set()).add(id)
        assert grouped == {group: set(ids) for group, ids in self._groups.items()}

    def _close(self, id: TaskId) -> None:
        group = self._regions.pop(id).group
        if group is not None:
            ids = self._groups[group]
            del ids[id]
            if not ids:
                del self._groups[group]


def _seen_from(task: Task, pieces: Iterable[Rectangle]) -> tuple[Rectangle, ...]:
    """Pieces of a region in the task's own coordinates."""
    return tuple(piece.moved(-task.top, -task.left) for piece in pieces)
