"""The vocabulary between the ledger and its driver: tasks, events (what happened) and commands (what to do about it).

A **region** is a rectangle of an output that must be computed. It begins with one task over all of it; hedges are
further tasks over parts of it. A **group** is whatever the submitter says its regions belong to (a run, a seat), so
that they can be abandoned together. Rectangles are in a task's own coordinates unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NewType

from cleave.core.cost.rates import Pace
from cleave.core.fleet.profiles import DeviceId
from cleave.core.schedule.rectangles import Rectangle

TaskId = NewType("TaskId", int)
OperandId = NewType("OperandId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    id: OperandId
    bytes: int
    """Memory it takes on a device."""
    wire_bytes: int = 0
    """Bytes on the wire when it is sent."""
    is_made: bool = False
    """The device computes it itself, for later tasks: never sent, and kept until it is released."""
    is_kept: bool = False
    """The device changes it: sent once, and kept until it is released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    id: TaskId
    device: DeviceId
    priority: int
    """Lower numbers run first."""
    operands: tuple[Operand, ...]
    rows: int
    cols: int
    result_bytes: int
    """Memory its result takes on the device until it is sent."""
    flops: float = 0.0
    effort: float = 1.0
    """How much longer its operations take than those of a large product, as a factor."""
    up_bytes: int = 0
    region: TaskId | None = None
    """The region it hedges; None: it opens a region of its own."""
    top: int = 0
    left: int = 0
    """Position in that region."""
    is_bound: bool = False
    """It continues from state that only this device has: never moved, never hedged."""
    group: Hashable = field(default=None, compare=False, repr=False)
    """The group its region belongs to, if any; a hedge belongs to the group of its region."""
    work: object = field(default=None, compare=False, repr=False)
    """The submitter's own data, handed back untouched."""

    @property
    def region_id(self) -> TaskId:
        return self.id if self.region is None else self.region

    @property
    def whole(self) -> Rectangle:
        return Rectangle(0, self.rows, 0, self.cols)

    @property
    def area(self) -> Rectangle:
        """The part of its region that it covers, in the region's coordinates."""
        return self.whole.moved(self.top, self.left)


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class DeviceAdded:
    device: DeviceId
    memory_bytes: int
    pace: Pace


@dataclass(frozen=True, slots=True)
class PaceMeasured:
    device: DeviceId
    pace: Pace


@dataclass(frozen=True, slots=True)
class DeviceRemoved:
    device: DeviceId


@dataclass(frozen=True, slots=True)
class DeviceAnswered:
    """The device answered a heartbeat."""

    device: DeviceId


@dataclass(frozen=True, slots=True)
class DeviceMoved:
    """Bytes moved to or from the device: it may be making progress on a slow link."""

    device: DeviceId


@dataclass(frozen=True, slots=True)
class TasksSubmitted:
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class ResultArrived:
    """A rectangle of a result arrived and was verified."""

    device: DeviceId
    task: TaskId
    part: Rectangle


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The device could not do the task, or returned a wrong result."""

    device: DeviceId
    task: TaskId


@dataclass(frozen=True, slots=True)
class CancelSent:
    """A cancellation is on the wire: everything sent to the device from now on arrives after it."""

    device: DeviceId
    task: TaskId
    unsent: tuple[OperandId, ...] = ()
    """Operands of the task not sent completely."""


@dataclass(frozen=True, slots=True)
class GroupsAbandoned:
    """The results of all open regions of these groups are no longer needed."""

    groups: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class OperandsReleased:
    """No future task will use these operands."""

    operands: tuple[OperandId, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; sent every TICK_S while the ledger is busy."""


Event = (
    DeviceAdded
    | PaceMeasured
    | DeviceRemoved
    | DeviceAnswered
    | DeviceMoved
    | TasksSubmitted
    | ResultArrived
    | TaskFailed
    | CancelSent
    | GroupsAbandoned
    | OperandsReleased
    | Tick
)


# ------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Start:
    """Tell the device to run the task, and send the operands it lacks."""

    task: Task
    missing: tuple[OperandId, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell the device to drop a task, after everything already sent for it; then report `CancelSent`."""

    task: Task


@dataclass(frozen=True, slots=True)
class Resend:
    """Send operands from the start: a cancelled task left them incomplete and another task needs them."""

    device: DeviceId
    operands: tuple[OperandId, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Tell the device to drop operands."""

    device: DeviceId
    operands: tuple[OperandId, ...]


@dataclass(frozen=True, slots=True)
class Accept:
    """Use a result."""

    task: Task
    part: Rectangle
    """The rectangle that arrived."""
    fresh: tuple[Rectangle, ...]
    """The parts of it that no other device had returned before."""
    finished: bool
    """Its region is now complete."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Ignore a result or a failure."""

    device: DeviceId
    reason: str
    is_fault: bool
    """The device broke the protocol; otherwise it was just too late."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """Plan parts of a region again, as new regions: no device has them anymore."""

    task: Task
    """A task that covered all of them."""
    missing: tuple[Rectangle, ...]
    finished: bool
    """Nothing else of its region is missing: the region is closed."""


@dataclass(frozen=True, slots=True)
class Hedge:
    """Give parts that a late device holds up to others too, as hedges of the task's region."""

    task: Task
    missing: tuple[Rectangle, ...]


@dataclass(frozen=True, slots=True)
class Late:
    """The device became late: plan without it until it is `Back`."""

    device: DeviceId


@dataclass(frozen=True, slots=True)
class Back:
    """The device is no longer late."""

    device: DeviceId


@dataclass(frozen=True, slots=True)
class Stalled:
    """The device of a bound task holds up the others: do without it. Repeated until the task is over or abandoned."""

    task: Task
    waited_s: float
    """Seconds since the task started, server stalls excluded."""
    expected_s: float


@dataclass(frozen=True, slots=True)
class Overdue:
    """Disconnect the device: it missed a deadline. Repeated every tick until it has left."""

    device: DeviceId
    task: Task
    waited_s: float
    """Seconds since the task started, server stalls excluded."""
    expected_s: float


Command = Start | Cancel | Resend | Forget | Accept | Refuse | Orphan | Hedge | Late | Back | Stalled | Overdue
