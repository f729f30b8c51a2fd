"""The words between the ledger and whoever drives it: tasks, what happened to them, what to do about it.

A **region** is a rectangle of an output that someone must compute. It begins with one task over all of it; hedges are
further tasks over parts of it. Rectangles are in the coordinates of a task, unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from cleave.core.cost.gemm import Pace
from cleave.core.schedule.rectangles import Rectangle

TaskId = NewType("TaskId", int)
OperandId = NewType("OperandId", int)
DeviceId = NewType("DeviceId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    id: OperandId
    bytes: int
    """What it takes on a device."""
    wire_bytes: int = 0
    """What it takes to send."""
    is_made: bool = False
    """By the device itself, for tasks that come: never sent, and kept until it is released."""


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
    flops: float = 0.0
    effort: float = 1.0
    """How much longer its operations take than those of a large product."""
    up_bytes: int = 0
    region: TaskId | None = None
    """The region it is a hedge for; None: it begins one of its own."""
    top: int = 0
    left: int = 0
    """Where it lies in that region."""
    is_bound: bool = False
    """No other device could do it, as it goes on from what this one has made: it is neither moved nor hedged."""
    work: object = field(default=None, compare=False, repr=False)
    """The driver's own, handed back untouched."""

    @property
    def whole(self) -> Rectangle:
        return Rectangle(0, self.rows, 0, self.cols)

    @property
    def area(self) -> Rectangle:
        """What it covers of its region."""
        return self.whole.moved(self.top, self.left)


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    device: DeviceId
    memory_bytes: int
    pace: Pace


@dataclass(frozen=True, slots=True)
class PaceMeasured:
    device: DeviceId
    pace: Pace


@dataclass(frozen=True, slots=True)
class DeviceLeft:
    device: DeviceId


@dataclass(frozen=True, slots=True)
class DeviceAnswered:
    """A sign of life that is no result."""

    device: DeviceId


@dataclass(frozen=True, slots=True)
class DeviceMoved:
    """Bytes move, to it or from it: however slow, it is at work."""

    device: DeviceId


@dataclass(frozen=True, slots=True)
class TasksSubmitted:
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class ResultArrived:
    """A rectangle that was found right."""

    device: DeviceId
    task: TaskId
    part: Rectangle


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The device could not do it, or what it returned is wrong."""

    device: DeviceId
    task: TaskId


@dataclass(frozen=True, slots=True)
class CancelSent:
    """From here on, everything sent to the device comes after the cancellation."""

    device: DeviceId
    task: TaskId
    unsent: tuple[OperandId, ...] = ()
    """Its operands that did not go out whole."""


@dataclass(frozen=True, slots=True)
class RegionsAbandoned:
    """Nobody wants the results of these any more."""

    regions: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class OperandsReleased:
    """Nobody will ask for these again."""

    operands: tuple[OperandId, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; comes every TICK_S while something is unfinished."""


Event = (
    DeviceJoined
    | PaceMeasured
    | DeviceLeft
    | DeviceAnswered
    | DeviceMoved
    | TasksSubmitted
    | ResultArrived
    | TaskFailed
    | CancelSent
    | RegionsAbandoned
    | OperandsReleased
    | Tick
)


# ------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Start:
    """Tell the device to run it, and send the operands it lacks."""

    task: Task
    missing: tuple[OperandId, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell the device to forget a task, behind all that was sent for it; then say `CancelSent`."""

    task: Task


@dataclass(frozen=True, slots=True)
class Resend:
    """Operands that did not go out whole with a cancelled task are needed by another: send them from the start."""

    device: DeviceId
    operands: tuple[OperandId, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Tell the device to drop operands."""

    device: DeviceId
    operands: tuple[OperandId, ...]


@dataclass(frozen=True, slots=True)
class Accept:
    task: Task
    part: Rectangle
    """What came."""
    fresh: tuple[Rectangle, ...]
    """What of it nobody had brought before."""
    finished: bool
    """The whole region is there now."""


@dataclass(frozen=True, slots=True)
class Refuse:
    device: DeviceId
    reason: str
    is_fault: bool
    """Not merely too late."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """What nobody has any more of a region; it is to be planned anew, as regions of their own."""

    task: Task
    """One that covered all of it."""
    missing: tuple[Rectangle, ...]
    finished: bool
    """Nothing else of its region is missing."""


@dataclass(frozen=True, slots=True)
class Hedge:
    """What a late device holds up and no other has: worth giving to others too, as hedges of `task`'s region."""

    task: Task
    missing: tuple[Rectangle, ...]


@dataclass(frozen=True, slots=True)
class Late:
    """The device is later than it should be: plan without it until it is `Back`."""

    device: DeviceId


@dataclass(frozen=True, slots=True)
class Back:
    device: DeviceId


@dataclass(frozen=True, slots=True)
class Overdue:
    """The device let a deadline pass: part with it."""

    device: DeviceId
    task: Task
    waited_s: float
    expected_s: float


Command = Start | Cancel | Resend | Forget | Accept | Refuse | Orphan | Hedge | Late | Back | Overdue
