"""The only decider of who does what when: events in, commands out. No clock, no sockets, no numbers of matrices.

A task is one run of a program on operands, planned for one device. It starts when it is next in line (lower priority
number first, then in order of submission), when the device has few others unfinished, and when its operands and result
fit into the device's memory beside what is pinned there; operands nobody needs now make room, the least recently used
first. An operand that a device holds is never sent again. A result comes in rectangles; each is accepted exactly once,
by the device that has the task now. When a device leaves, what is left of its tasks is handed back as orphans, to be
planned anew. Tasks wait for room and turn, never for other tasks of their gemm: there is no barrier.

`check` states the invariants; tests call it after every event.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NewType

from cleave.core.rectangles import Rectangle, subtract

TaskId = NewType("TaskId", int)
OperandId = NewType("OperandId", int)
DeviceId = NewType("DeviceId", str)

IN_FLIGHT = 6
"""Tasks a device may have unfinished: enough that its links and its compute never wait for the server's turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    id: OperandId
    bytes: int
    """What it takes on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    id: TaskId
    device: DeviceId
    priority: int
    operands: tuple[Operand, ...]
    rows: int
    cols: int
    result_bytes: int
    """What its result takes on the device until it is sent."""


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    device: DeviceId
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceLeft:
    device: DeviceId


@dataclass(frozen=True, slots=True)
class TasksSubmitted:
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class ResultArrived:
    device: DeviceId
    task: TaskId
    part: Rectangle


@dataclass(frozen=True, slots=True)
class TaskFailed:
    device: DeviceId
    task: TaskId


@dataclass(frozen=True, slots=True)
class OperandsReleased:
    """Nobody will ask for these again."""

    operands: tuple[OperandId, ...]


Event = DeviceJoined | DeviceLeft | TasksSubmitted | ResultArrived | TaskFailed | OperandsReleased


# ------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Start:
    """Tell the device to run it, and send the operands it lacks."""

    task: Task
    missing: tuple[OperandId, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Tell the device to drop operands."""

    device: DeviceId
    operands: tuple[OperandId, ...]


@dataclass(frozen=True, slots=True)
class Accept:
    task: Task
    part: Rectangle
    finished: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    device: DeviceId
    reason: str


@dataclass(frozen=True, slots=True)
class Orphan:
    """What is left of a task whose device is gone or could not do it."""

    task: Task
    missing: tuple[Rectangle, ...]


Command = Start | Forget | Accept | Refuse | Orphan


@dataclass(slots=True)
class _Unfinished:
    task: Task
    missing: list[Rectangle]


@dataclass(slots=True)
class _Device:
    memory_bytes: int
    held: OrderedDict[OperandId, int] = field(default_factory=lambda: OrderedDict[OperandId, int]())
    """operand -> bytes, least recently used first; held or on its way, which is the same over one ordered channel"""
    pins: dict[OperandId, int] = field(default_factory=lambda: dict[OperandId, int]())
    released: set[OperandId] = field(default_factory=lambda: set[OperandId]())
    """dropped as soon as no task needs them"""
    running: dict[TaskId, _Unfinished] = field(default_factory=lambda: dict[TaskId, _Unfinished]())
    waiting: list[tuple[int, int, Task]] = field(default_factory=lambda: list[tuple[int, int, Task]]())
    used_bytes: int = 0


class Ledger:
    def __init__(self) -> None:
        self._devices: dict[DeviceId, _Device] = {}
        self._sequence = 0

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        return tuple(self._devices)

    def holds(self, device: DeviceId, operand: OperandId) -> bool:
        return device in self._devices and operand in self._devices[device].held

    def unfinished(self, device: DeviceId) -> int:
        if device not in self._devices:
            return 0
        return len(self._devices[device].running) + len(self._devices[device].waiting)

    def handle(self, event: Event) -> list[Command]:
        match event:
            case DeviceJoined(device, memory_bytes):
                assert device not in self._devices, "the roster gives unique names"
                self._devices[device] = _Device(memory_bytes)
                return []
            case DeviceLeft(device):
                return self._leave(device)
            case TasksSubmitted(tasks):
                return self._submit(tasks)
            case ResultArrived(device, task, part):
                return self._arrive(device, task, part)
            case TaskFailed(device, task):
                return self._fail(device, task)
            case OperandsReleased(operands):
                return self._release(operands)

    # -------------------------------------------------------------------------------------------- by event

    def _leave(self, name: DeviceId) -> list[Command]:
        device = self._devices.pop(name, None)
        if device is None:
            return []
        orphans: list[Command] = [Orphan(entry.task, tuple(entry.missing)) for entry in device.running.values()]
        orphans += [Orphan(task, (_whole(task),)) for _, _, task in sorted(device.waiting, key=lambda entry: entry[:2])]
        return orphans

    def _submit(self, tasks: tuple[Task, ...]) -> list[Command]:
        orphans: list[Command] = []
        touched: dict[DeviceId, _Device] = {}
        for task in tasks:
            device = self._devices.get(task.device)
            if device is None or not _can_ever_fit(task, device):
                orphans.append(Orphan(task, (_whole(task),)))
                continue
            self._sequence += 1
            heapq.heappush(device.waiting, (task.priority, self._sequence, task))
            touched[task.device] = device
        started = [command for name, device in touched.items() for command in self._start(name, device)]
        return started + orphans

    def _arrive(self, name: DeviceId, task: TaskId, part: Rectangle) -> list[Command]:
        device = self._devices.get(name)
        entry = device.running.get(task) if device else None
        if device is None or entry is None:
            return [Refuse(name, f"a result of task {task}, which this device does not have")]
        missing = subtract(entry.missing, part)
        if missing is None:
            return [Refuse(name, f"{part} of task {task}, which is not missing")]
        entry.missing = missing
        if missing:
            return [Accept(entry.task, part, finished=False)]
        return [Accept(entry.task, part, finished=True), *self._end(name, device, task)]

    def _fail(self, name: DeviceId, task: TaskId) -> list[Command]:
        device = self._devices.get(name)
        entry = device.running.get(task) if device else None
        if device is None or entry is None:
            return [Refuse(name, f"a failure of task {task}, which this device does not have")]
        return [*self._end(name, device, task), Orphan(entry.task, tuple(entry.missing))]

    def _release(self, operands: tuple[OperandId, ...]) -> list[Command]:
        commands: list[Command] = []
        for name, device in self._devices.items():
            known = [operand for operand in operands if operand in device.held]
            device.released.update(operand for operand in known if operand in device.pins)
            free = tuple(operand for operand in known if operand not in device.pins)
            if free:
                _drop(device, free)
                commands += [Forget(name, free), *self._start(name, device)]
        return commands

    # -------------------------------------------------------------------------------------------- one device

    def _end(self, name: DeviceId, device: _Device, task: TaskId) -> list[Command]:
        ended = device.running.pop(task).task
        device.used_bytes -= ended.result_bytes
        for operand in ended.operands:
            device.pins[operand.id] -= 1
            if device.pins[operand.id] == 0:
                del device.pins[operand.id]
        free = tuple(operand.id for operand in ended.operands if _is_free(device, operand.id))
        commands: list[Command] = []
        if free:
            _drop(device, free)
            commands.append(Forget(name, free))
        return commands + self._start(name, device)

    def _start(self, name: DeviceId, device: _Device) -> list[Command]:
        """Start what is next in line, as long as there is a turn and room for it."""
        commands: list[Command] = []
        while device.waiting and len(device.running) < IN_FLIGHT:
            task = device.waiting[0][2]
            missing = tuple(operand for operand in task.operands if operand.id not in device.held)
            need = sum(operand.bytes for operand in missing) + task.result_bytes
            evicted = _make_room(device, need, {operand.id for operand in task.operands})
            if evicted is None:
                break
            if evicted:
                commands.append(Forget(name, evicted))
            heapq.heappop(device.waiting)
            device.used_bytes += need
            for operand in task.operands:
                device.held[operand.id] = operand.bytes
                device.held.move_to_end(operand.id)
                device.pins[operand.id] = device.pins.get(operand.id, 0) + 1
            device.running[task.id] = _Unfinished(task, [_whole(task)])
            commands.append(Start(task, tuple(operand.id for operand in missing)))
        return commands

    def check(self) -> None:
        """The invariants; a violation is our own bug."""
        for device in self._devices.values():
            results = sum(entry.task.result_bytes for entry in device.running.values())
            assert device.used_bytes == sum(device.held.values()) + results <= device.memory_bytes
            pins: dict[OperandId, int] = {}
            for entry in device.running.values():
                assert entry.missing, "a task with nothing missing is finished"
                for operand in entry.task.operands:
                    pins[operand.id] = pins.get(operand.id, 0) + 1
            assert pins == device.pins
            assert pins.keys() <= device.held.keys()
            assert device.released <= pins.keys()
            assert len(device.running) <= IN_FLIGHT
            assert device.running or not device.waiting, "a device with work waiting has work"


def _whole(task: Task) -> Rectangle:
    return Rectangle(0, task.rows, 0, task.cols)


def _can_ever_fit(task: Task, device: _Device) -> bool:
    return sum(operand.bytes for operand in task.operands) + task.result_bytes <= device.memory_bytes


def _is_free(device: _Device, operand: OperandId) -> bool:
    return operand in device.released and operand not in device.pins


def _make_room(device: _Device, need: int, keep: set[OperandId]) -> tuple[OperandId, ...] | None:
    """Operands dropped to make room for `need` bytes; None, and nothing dropped, if there cannot be room now."""
    short = device.used_bytes + need - device.memory_bytes
    victims: list[OperandId] = []
    for operand, size in device.held.items():
        if short <= 0:
            break
        if operand not in device.pins and operand not in keep:
            victims.append(operand)
            short -= size
    if short > 0:
        return None
    _drop(device, tuple(victims))
    return tuple(victims)


def _drop(device: _Device, operands: tuple[OperandId, ...]) -> None:
    for operand in operands:
        device.used_bytes -= device.held.pop(operand)
        device.released.discard(operand)
