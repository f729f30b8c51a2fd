"""The interface between the engine, its runs and its driver.

A **run** is one piece of work in progress: a product (`gemm/run.py`) or a batch through resident layers
(`resident/run.py`). The engine notifies it of events and it answers with requests, to be carried out in order: events
for the ledger, or actions for the driver. Nothing here knows sockets, clocks or matrices: the payload of a result is
opaque, and whatever reads or writes numbers is an action whose outcome the driver reports back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from cleave import events
from cleave.core.cost.wire import WireFormat
from cleave.core.schedule import tasks as ledger
from cleave.core.schedule.members import Observation
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import Accept, DeviceId, Hedge, Orphan, Task, TaskId
from cleave.errors import CleaveError
from cleave.protocol import messages

# ------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class Check:
    """Decode a result and check it against its operands, off the loop; then report `Checked`."""

    task: Task
    part: Rectangle
    payload: object
    is_strict: bool
    """Check harder, as the device is a suspect."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Store accepted numbers, off the loop: `run.results.keep(item)`; then report `Kept`."""

    run: Run
    item: object


@dataclass(frozen=True, slots=True)
class Audit:
    """Recompute a device's work, off the loop: `run.results.audit(case)`; then report `AuditEnded`."""

    run: Run
    case: object


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan a run for the connected devices, off the loop; then report `Planned`."""

    run: Run


@dataclass(frozen=True, slots=True)
class Disconnect:
    device: DeviceId
    reason: str
    rejoin: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a device: no connected one can do the pending work."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Stop waiting: a device joined or recovered that may do the work."""


@dataclass(frozen=True, slots=True)
class Resolve:
    future: Future[Any]
    value: object


@dataclass(frozen=True, slots=True)
class Reject:
    future: Future[Any]
    error: CleaveError


@dataclass(frozen=True, slots=True)
class Tell:
    event: events.AnyEvent


Action = (
    ledger.Start
    | ledger.Cancel
    | ledger.Resend
    | ledger.Forget
    | Check
    | Keep
    | Audit
    | MakePlan
    | Disconnect
    | Wait
    | Resume
    | Resolve
    | Reject
    | Tell
)

# ------------------------------------------------------------------------------------------------ a run and the engine


@dataclass(frozen=True, slots=True)
class Park:
    """Suspend a run that cannot continue with the connected devices; call `resume` when there are others."""

    run: Run
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Mark a run as over, or waiting for its caller: the next exclusive one may begin."""

    run: Run


@dataclass(frozen=True, slots=True)
class Blame:
    """Count a wrong result against a device."""

    device: DeviceId
    reason: str
    is_final: bool = False
    """Quarantine it at once: its token has been convicted before."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Count a stall against a device: others had to do the work it owed."""

    device: DeviceId
    reason: str


Request = (
    ledger.TasksSubmitted
    | ledger.GroupsAbandoned
    | ledger.OperandsReleased
    | Keep
    | Audit
    | MakePlan
    | Resolve
    | Reject
    | Tell
    | Park
    | End
    | Blame
    | Stall
)
Requests = Iterable[Request]


class Results(Protocol):
    """A run's numbers; called off the loop, from several threads."""

    def check(self, task: Task, part: Rectangle, payload: object, *, is_strict: bool) -> object:
        """Decode a result; raise WrongResult if its operands do not give it."""
        ...

    def keep(self, item: object) -> None:
        """Store numbers; raise WrongResult, storing nothing, if they are implausible."""
        ...

    def audit(self, case: object) -> str:
        """Recompute a device's work; return what is wrong with it, empty if nothing is."""
        ...


class Run(Protocol):
    is_exclusive: bool
    """Whether it may fill the devices' memory, so that other exclusive runs wait until it ends."""

    @property
    def results(self) -> Results: ...

    def format(self, task: Task) -> WireFormat:
        """Return the format in which a task's result is expected."""
        ...

    def describe(self, task: Task) -> messages.RunTask:
        """Return the message that starts a task on its device."""
        ...

    def begin(self, now: float) -> Requests: ...

    def planned(self, plan: object, now: float) -> Requests:
        """Take the plan it asked for, or the error that planning raised."""
        ...

    def accepted(self, accept: Accept, payload: object, now: float) -> Requests: ...

    def kept(self, item: object, now: float) -> Requests: ...

    def spoiled(self, item: object, reason: str, now: float) -> Requests:
        """Handle numbers that were not stored, as they are implausible."""
        ...

    def audited(self, case: object, reason: str, now: float) -> Requests: ...

    def rejected(self, task: Task, device: DeviceId, reason: str) -> Requests:
        """Note a wrong result; its task comes back as an orphan."""
        ...

    def orphaned(self, orphans: Sequence[Orphan], device: DeviceId | None, now: float) -> Requests:
        """Reassign tasks that lost their device; `device` is the one that left or failed, if any did."""
        ...

    def hedged(self, hedges: Sequence[Hedge], now: float) -> Requests: ...

    def left(self, device: DeviceId, now: float) -> Requests: ...

    def late(self, device: DeviceId, now: float) -> Requests: ...

    def stalled(self, device: DeviceId, reason: str, now: float) -> Requests:
        """Do without a device that holds up the others, if they can do its part."""
        ...

    def resume(self, now: float) -> Requests: ...

    def prompted(self, request: object, now: float) -> Requests:
        """Handle a further request from its caller."""
        ...

    def fail(self, error: CleaveError) -> Requests:
        """End the run with an error."""
        ...


Kind = Literal["forward", "backward", "gradients", "weights"]
"""What a task is for: activations, their gradients, gradients of weights, or sending and updating weights."""


class Work(Protocol):
    """Interface of a task's `work`."""

    @property
    def run(self) -> Run: ...

    @property
    def kind(self) -> Kind: ...


def work_of(task: Task) -> Work:
    return cast("Work", task.work)


def run_of(task: Task) -> Run:
    return work_of(task).run


# ------------------------------------------------------------------------------------------------ events of the engine


@dataclass(frozen=True, slots=True)
class RunSubmitted:
    run: Run


@dataclass(frozen=True, slots=True)
class Arrived:
    """A rectangle of a result, as received."""

    device: DeviceId
    task: TaskId
    part: Rectangle
    format: WireFormat
    payload: object
    seen: Observation


@dataclass(frozen=True, slots=True)
class Prompted:
    """A further request from a run's caller."""

    run: Run
    request: object


@dataclass(frozen=True, slots=True)
class Checked:
    device: DeviceId
    task: Task
    part: Rectangle
    values: object
    fault: Exception | None


@dataclass(frozen=True, slots=True)
class Kept:
    run: Run
    item: object
    fault: Exception | None = None


@dataclass(frozen=True, slots=True)
class AuditEnded:
    run: Run
    case: object
    reason: str
    fault: Exception | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    run: Run
    plan: object


@dataclass(frozen=True, slots=True)
class WaitedInVain:
    """No suitable device joined in time for the parked runs."""

    error: CleaveError


@dataclass(frozen=True, slots=True)
class Closed:
    """The server closed: all current and future runs end with this error."""

    error: CleaveError


EngineEvent = (
    ledger.Event | RunSubmitted | Prompted | Arrived | Checked | Kept | AuditEnded | Planned | WaitedInVain | Closed
)
