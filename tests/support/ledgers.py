"""A ledger with a virtual clock, and small tasks for it."""

from __future__ import annotations

from typing import TypeVar

from cleave.core.cost.rates import Pace
from cleave.core.schedule.ledger import TICK_S, Ledger
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    Accept,
    Command,
    DeviceAdded,
    DeviceId,
    Event,
    Operand,
    OperandId,
    Overdue,
    ResultArrived,
    Task,
    TaskId,
    TasksSubmitted,
    Tick,
)

T = TypeVar("T")

NAMES = [DeviceId(name) for name in ("ann", "bob", "eve", "dan")]
ANN, BOB, EVE, DAN = NAMES
WHOLE, TOP, BOTTOM = Rectangle(0, 2, 0, 3), Rectangle(0, 1, 0, 3), Rectangle(1, 2, 0, 3)
PACE = Pace(flops_per_s=100.0, down_bytes_per_s=100.0, up_bytes_per_s=100.0, latency_s=0.0137)
QUICK = Pace(flops_per_s=1e9, down_bytes_per_s=1e9, up_bytes_per_s=1e9, latency_s=0.01)


def operand(number: int, size: int) -> Operand:
    return Operand(id=OperandId(number), bytes=size, wire_bytes=size)


X, W = operand(1, 10), operand(2, 20)
MADE = Operand(id=OperandId(7), bytes=70, is_made=True)


def task(
    number: int,
    *operands: Operand,
    device: DeviceId = ANN,
    priority: int = 1,
    result_bytes: int = 4,
    seconds: float = 0.0,
    of: int | None = None,
    at: Rectangle = WHOLE,
    is_bound: bool = False,
) -> Task:
    """A task of 2 x 3 elements, or a hedge of the region `of`; a quick device computes it in `seconds`."""
    return Task(
        id=TaskId(number),
        device=device,
        priority=priority,
        operands=operands or (X,),
        rows=at.rows,
        cols=at.cols,
        result_bytes=result_bytes,
        flops=seconds * 1e9,
        region=None if of is None else TaskId(of),
        top=at.top,
        left=at.left,
        is_bound=is_bound,
        group=number,
    )


class Server:
    """A ledger, checked after every event, and the time of its next event."""

    def __init__(self, **memory_bytes: int) -> None:
        self.ledger, self.now = Ledger(), 0.0
        for name, size in memory_bytes.items():
            assert self.tell(DeviceAdded(DeviceId(name), size, QUICK)) == []

    def tell(self, event: Event) -> list[Command]:
        commands = self.ledger.handle(event, self.now)
        self.ledger.check()
        return commands

    def submit(self, *tasks: Task) -> list[Command]:
        return self.tell(TasksSubmitted(tasks))

    def result(self, task: Task, part: Rectangle | None = None) -> list[Command]:
        return self.tell(ResultArrived(task.device, task.id, part or task.whole))

    def wait(self, seconds: float) -> list[Command]:
        """Tick for some seconds, or until a device is overdue; return all commands."""
        said: list[Command] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + TICK_S, end)
            said += self.tell(Tick())
            if any(isinstance(command, Overdue) for command in said):
                return said
        return said


def taken(task: Task, part: Rectangle = WHOLE, *, finished: bool = True) -> Accept:
    return Accept(task, part, (part,), finished)


def only(commands: list[Command], kind: type[T]) -> T:
    (found,) = (command for command in commands if isinstance(command, kind))
    return found
