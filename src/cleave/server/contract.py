"""What the engine, its runs and its driver say to each other.

A **run** is one piece of work under way: a product (`gemm/run.py`) or a batch through resident layers
(`resident/run.py`). The engine tells it what happened and it answers with requests, in the order in which they are to
be carried out: events for the ledger, or actions for the driver. Nothing here knows sockets, clocks or matrices: the
payload of a result is opaque, and whatever reads or writes numbers is an action that the driver reports back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, cast

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
    """Decode a result and compare it with its operands, off the loop; then report `Checked`."""

    task: Task
    part: Rectangle
    payload: object
    is_strict: bool
    """The device is a suspect."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Put accepted numbers where they belong, off the loop: `run.results.keep(item)`; then report `Kept`."""

    run: Run
    item: object


@dataclass(frozen=True, slots=True)
class Audit:
    """Recompute what a device did, off the loop: `run.results.audit(case)`; then report `Audited`."""

    run: Run
    case: object


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan a run for the devices present, off the loop; then report `Planned`."""

    run: Run


@dataclass(frozen=True, slots=True)
class Disconnect:
    device: DeviceId
    reason: str
    rejoin: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Work is there that no device present can do."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """A device is there again that work can be given to."""


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
    """The run cannot go on with the devices present; call `resume` when there are others."""

    run: Run
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The run is over, or waits for its caller: the next exclusive one may begin."""

    run: Run


@dataclass(frozen=True, slots=True)
class Blame:
    """A device returned something wrong."""

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
)
Requests = Iterable[Request]


class Results(Protocol):
    """The numbers of a run; called off the loop, from several threads."""

    def check(self, task: Task, part: Rectangle, payload: object, *, is_strict: bool) -> object:
        """Decode a result; WrongResult where its operands do not give it."""
        ...

    def keep(self, item: object) -> None: ...

    def audit(self, case: object) -> str:
        """Recompute a device's work; why it is wrong, or nothing."""
        ...


class Run(Protocol):
    is_exclusive: bool
    """It may fill the devices' memory, so others of its kind wait until it ends."""

    @property
    def results(self) -> Results: ...

    def describe(self, task: Task) -> messages.RunTask:
        """The message that tells a device what to do."""
        ...

    def begin(self, now: float) -> Requests: ...

    def planned(self, plan: object, now: float) -> Requests:
        """A plan was made, or is an InfeasibleError."""
        ...

    def accepted(self, accept: Accept, payload: object, now: float) -> Requests: ...

    def kept(self, item: object, now: float) -> Requests: ...

    def audited(self, case: object, reason: str, now: float) -> Requests: ...

    def rejected(self, task: Task, device: DeviceId, reason: str) -> Requests:
        """A result was found wrong; its task comes back as an orphan."""
        ...

    def orphaned(self, orphans: Sequence[Orphan], device: DeviceId | None, now: float) -> Requests:
        """Nobody has these any more; `device` is whose they were."""
        ...

    def hedged(self, hedges: Sequence[Hedge], now: float) -> Requests: ...

    def left(self, device: DeviceId, now: float) -> Requests: ...

    def late(self, device: DeviceId, now: float) -> Requests: ...

    def resume(self, now: float) -> Requests: ...

    def prompted(self, request: object, now: float) -> Requests:
        """Its caller asks for more."""
        ...

    def fail(self, error: CleaveError) -> Requests:
        """End it with an error."""
        ...


class Work(Protocol):
    """What a task's `work` is."""

    @property
    def run(self) -> Run: ...


def run_of(task: Task) -> Run:
    return cast("Work", task.work).run


# ------------------------------------------------------------------------------------------------ events of the engine


@dataclass(frozen=True, slots=True)
class RunSubmitted:
    run: Run


@dataclass(frozen=True, slots=True)
class Arrived:
    """A rectangle of a result, as it came over the wire."""

    device: DeviceId
    task: TaskId
    part: Rectangle
    format: WireFormat
    payload: object
    seen: Observation


@dataclass(frozen=True, slots=True)
class Prompted:
    """The caller of a run asks for more."""

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
    """Nobody came in time for the work that waits."""

    error: CleaveError


@dataclass(frozen=True, slots=True)
class Closed:
    """Every run ends with this error, and so do those to come."""

    error: CleaveError


EngineEvent = (
    ledger.Event | RunSubmitted | Prompted | Arrived | Checked | Kept | AuditEnded | Planned | WaitedInVain | Closed
)
