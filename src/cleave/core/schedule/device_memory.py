"""The operands that devices hold, and the memory left on each.

An operand counts as held as soon as it is on its way: over one ordered channel, later messages cannot tell the
difference. Operands of running tasks are pinned; others are evicted, least recently used first, when room is needed.
Operands that a device made or changed itself cannot be sent again, so they stay until released. A released operand is
dropped as soon as no task pins it. `Holders` indexes the same facts by operand; each `DeviceMemory` keeps it up to
date.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator

from cleave.core.schedule.tasks import DeviceId, Operand, OperandId, Task


class Holders:
    """Which devices hold an operand."""

    def __init__(self) -> None:
        self._devices: dict[OperandId, dict[DeviceId, None]] = {}

    def __getitem__(self, operand: OperandId) -> Collection[DeviceId]:
        """Devices that hold the operand, in the order they got it."""
        return self._devices.get(operand, {}).keys()

    def __iter__(self) -> Iterator[OperandId]:
        return iter(self._devices)

    def add(self, operand: OperandId, device: DeviceId) -> None:
        self._devices.setdefault(operand, {})[device] = None

    def remove(self, operand: OperandId, device: DeviceId) -> None:
        devices = self._devices[operand]
        del devices[device]
        if not devices:
            del self._devices[operand]


class DeviceMemory:
    def __init__(self, device: DeviceId, memory_bytes: int, holders: Holders) -> None:
        self.memory_bytes = memory_bytes
        self.used_bytes = 0
        self._device, self._holders = device, holders
        self._held: OrderedDict[OperandId, int] = OrderedDict()
        """operand -> bytes, least recently used first"""
        self._pins: Counter[OperandId] = Counter()
        """operand -> running tasks that use it"""
        self._released: set[OperandId] = set()
        self._made: set[OperandId] = set()
        self._absent: set[OperandId] = set()
        """Incompletely sent operands; they keep their memory while cancelled tasks pin them."""

    def __contains__(self, operand: OperandId) -> bool:
        return operand in self._held and operand not in self._absent

    def __iter__(self) -> Iterator[OperandId]:
        return (operand for operand in self._held if operand not in self._absent)

    def can_ever_fit(self, task: Task) -> bool:
        return sum(operand.bytes for operand in task.operands) + task.result_bytes <= self.memory_bytes

    def has_room_for(self, task: Task) -> bool:
        """Whether the task fits now, after evicting everything that may be evicted."""
        own = {operand.id for operand in task.operands}
        stays = sum(size for id, size in self._held.items() if id in self._pins or id in self._made or id in own)
        results = self.used_bytes - sum(self._held.values())
        new = sum(operand.bytes for operand in task.operands if operand.id not in self._held)
        return stays + results + new + task.result_bytes <= self.memory_bytes

    def missing(self, task: Task) -> tuple[Operand, ...]:
        """Operands that must be sent before the task can run."""
        held, absent = self._held, self._absent
        return tuple(
            operand
            for operand in task.operands
            if (operand.id not in held or operand.id in absent) and not operand.is_made
        )

    def place(self, task: Task) -> tuple[OperandId, ...] | None:
        """Make room for a task and pin its operands; return those evicted. If it does not fit, change nothing: None."""
        held, pins, absent = self._held, self._pins, self._absent
        need = task.result_bytes
        for operand in task.operands:  # plain loops: a unit has a hundred operands, nearly all of them held
            if operand.id not in held:
                need += operand.bytes
        evicted: tuple[OperandId, ...] | None = ()
        if self.used_bytes + need > self.memory_bytes:
            evicted = self._make_room(need, {operand.id for operand in task.operands})
            if evicted is None:
                return None
        self.used_bytes += need
        for operand in task.operands:
            id = operand.id
            if id not in held or id in absent:
                self._holders.add(id, self._device)
                held[id] = operand.bytes
                absent.discard(id)
                if operand.is_made or operand.is_kept:
                    self._made.add(id)
            elif operand.is_kept:  # it was sent for other tasks before
                self._made.add(id)
            held.move_to_end(id)
            pins[id] = pins.get(id, 0) + 1
        return evicted

    def unplace(self, task: Task) -> tuple[OperandId, ...]:
        """Unpin the operands of a finished task; return those the device must drop."""
        self.used_bytes -= task.result_bytes
        pins, gone = self._pins, list[OperandId]()
        for operand in task.operands:
            id = operand.id
            if pins[id] > 1:
                pins[id] -= 1
                continue
            del pins[id]
            if id in self._released or id in self._absent:
                gone.append(id)
        freed = tuple(operand for operand in gone if operand not in self._absent)
        self._drop(gone)
        return freed

    def release(self, operands: Iterable[OperandId]) -> tuple[OperandId, ...]:
        """Drop operands that no future task will use; return those dropped now. Pinned ones go with their last task."""
        known = [operand for operand in operands if operand in self]
        self._released.update(operand for operand in known if operand in self._pins)
        freed = tuple(operand for operand in known if operand not in self._pins)
        self._drop(freed)
        return freed

    def discard(self, operands: Collection[OperandId]) -> None:
        """Mark incompletely sent operands, which only cancelled tasks use, as not held."""
        for operand in [operand for operand in operands if operand in self]:
            if operand in self._pins:
                self._absent.add(operand)
                self._holders.remove(operand, self._device)
            else:
                self._drop([operand])

    def clear(self) -> None:
        """Drop everything: the device left."""
        self._drop(list(self._held))

    def check(self, tasks: Iterable[Task]) -> None:
        """Assert the invariants, given the running tasks."""
        tasks = list(tasks)
        pins = Counter(operand.id for task in tasks for operand in task.operands)
        results = sum(task.result_bytes for task in tasks)
        assert self.used_bytes == sum(self._held.values()) + results <= self.memory_bytes
        assert pins == self._pins
        assert pins.keys() <= self._held.keys()
        assert self._released <= pins.keys()
        assert self._absent <= pins.keys()
        assert self._made <= self._held.keys()
        assert all(self._device in self._holders[operand] for operand in self)
        assert not any(self._device in self._holders[operand] for operand in self._absent)

    def _make_room(self, need: int, keep: set[OperandId]) -> tuple[OperandId, ...] | None:
        short = self.used_bytes + need - self.memory_bytes
        victims: list[OperandId] = []
        for operand, size in self._held.items():
            if short <= 0:
                break
            if operand not in self._pins and operand not in keep and operand not in self._made:
                victims.append(operand)
                short -= size
        if short > 0:
            return None
        self._drop(victims)
        return tuple(victims)

    def _drop(self, operands: Iterable[OperandId]) -> None:
        for operand in list(operands):
            if operand in self._absent:
                self._absent.remove(operand)
            else:
                self._holders.remove(operand, self._device)
            self.used_bytes -= self._held.pop(operand)
            self._released.discard(operand)
            self._made.discard(operand)
