"""The operands one device holds, or will once what is on its way has arrived, and the room they leave.

Which of the two makes no difference over one ordered channel. What tasks run on is pinned; the rest makes room, the
least recently used first, but for what the device made itself, which stays until it is released. What nobody will ask
for again goes as soon as no task runs on it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

from cleave.core.schedule.tasks import Operand, OperandId, Task


class Shelf:
    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.used_bytes = 0
        self._held: OrderedDict[OperandId, int] = OrderedDict()
        """operand -> bytes, least recently used first"""
        self._pins: Counter[OperandId] = Counter()
        self._released: set[OperandId] = set()
        self._made: set[OperandId] = set()
        self._absent: set[OperandId] = set()
        """Did not go out whole with a cancelled task, and keep their room while other cancelled tasks pin them."""

    def __contains__(self, operand: OperandId) -> bool:
        return operand in self._held and operand not in self._absent

    def can_ever_fit(self, task: Task) -> bool:
        return sum(operand.bytes for operand in task.operands) + task.result_bytes <= self.memory_bytes

    def has_room_for(self, task: Task) -> bool:
        """Now, with all dropped that may be."""
        mine = {operand.id for operand in task.operands}
        stays = sum(size for id, size in self._held.items() if id in self._pins or id in self._made or id in mine)
        results = self.used_bytes - sum(self._held.values())
        new = sum(operand.bytes for operand in task.operands if operand.id not in self._held)
        return stays + results + new + task.result_bytes <= self.memory_bytes

    def missing(self, task: Task) -> tuple[Operand, ...]:
        """What is to be sent for it."""
        return tuple(operand for operand in task.operands if operand.id not in self and not operand.is_made)

    def place(self, task: Task) -> tuple[OperandId, ...] | None:
        """Make room and pin what a task needs; what was dropped for it, or None, and nothing changed, without room."""
        need = sum(operand.bytes for operand in task.operands if operand.id not in self._held) + task.result_bytes
        dropped = self._make_room(need, {operand.id for operand in task.operands})
        if dropped is None:
            return None
        self.used_bytes += need
        for operand in task.operands:
            self._held[operand.id] = operand.bytes
            self._held.move_to_end(operand.id)
            self._pins[operand.id] += 1
            self._absent.discard(operand.id)
            if operand.is_made:
                self._made.add(operand.id)
        return dropped

    def unplace(self, task: Task) -> tuple[OperandId, ...]:
        """A task has ended: what is dropped with it."""
        self.used_bytes -= task.result_bytes
        for operand in task.operands:
            self._pins[operand.id] -= 1
            if self._pins[operand.id] == 0:
                del self._pins[operand.id]
        loose = [operand.id for operand in task.operands if operand.id not in self._pins]
        free = tuple(operand for operand in loose if operand in self._released and operand not in self._absent)
        self._drop(operand for operand in loose if operand in self._released or operand in self._absent)
        return free

    def release(self, operands: Iterable[OperandId]) -> tuple[OperandId, ...]:
        """Nobody will ask for these again: what is dropped now; what is pinned goes with its last task."""
        known = [operand for operand in operands if operand in self._held]
        self._released.update(operand for operand in known if operand in self._pins)
        free = tuple(operand for operand in known if operand not in self._pins)
        self._drop(free)
        return free

    def discard(self, operands: Collection[OperandId]) -> None:
        """These did not go out whole, and no task that is not cancelled needs them."""
        self._absent.update(operand for operand in operands if operand in self._pins)
        self._drop(operand for operand in operands if operand in self._held and operand not in self._pins)

    def check(self, tasks: Iterable[Task]) -> None:
        """The invariants, given the tasks that run."""
        tasks = list(tasks)
        pins = Counter(operand.id for task in tasks for operand in task.operands)
        results = sum(task.result_bytes for task in tasks)
        assert self.used_bytes == sum(self._held.values()) + results <= self.memory_bytes
        assert pins == self._pins
        assert pins.keys() <= self._held.keys()
        assert self._released <= pins.keys()
        assert self._absent <= pins.keys()
        assert self._made <= self._held.keys()

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
            self.used_bytes -= self._held.pop(operand)
            self._released.discard(operand)
            self._absent.discard(operand)
            self._made.discard(operand)
