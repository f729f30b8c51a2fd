"""A driver of the engine without sockets, numbers or an event loop: a device is three queues, the clock is a heap.

The time of a task follows from its bytes, its FLOPs and its device's profile; checks, storing and planning take none.
The interface for a simulator: the same engine and the same runs as a live server, in virtual time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cleave.core.schedule.ledger import TICK_S
from cleave.core.schedule.members import Observation, Pace
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    Cancel,
    CancelSent,
    DeviceAdded,
    DeviceId,
    DeviceRemoved,
    Start,
    Task,
    TaskFailed,
    TaskId,
    Tick,
)
from cleave.server.contract import (
    Action,
    Arrived,
    Audit,
    AuditEnded,
    Check,
    Checked,
    Disconnect,
    EngineEvent,
    Keep,
    Kept,
    MakePlan,
    Planned,
    Reject,
    Resolve,
    Run,
    RunSubmitted,
    Tell,
    Wait,
    run_of,
)
from cleave.server.engine import Engine


@dataclass(slots=True)
class Device:
    """A downlink, a processor and an uplink, each busy until some time."""

    pace: Pace
    memory_bytes: int = 8 << 30
    down_until: float = 0.0
    busy_until: float = 0.0
    up_until: float = 0.0
    cancelled: set[TaskId] = field(default_factory=lambda: set[TaskId]())
    computed_s: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0
    _sent_at: dict[TaskId, float] = field(default_factory=lambda: dict[TaskId, float]())
    """When the results of tasks have left."""

    def compute_s(self, task: Task) -> float:
        return self.pace.task_s + task.flops * task.effort / self.pace.flops_per_s

    def finish(self, task: Task, down_bytes: int, now: float) -> float:
        """Time at which the result of a task started now is back."""
        self.down_until = max(self.down_until, now) + down_bytes / self.pace.down_bytes_per_s
        self.busy_until = max(self.busy_until, self.down_until) + self.compute_s(task)
        self.up_until = max(self.up_until, self.busy_until) + task.up_bytes / self.pace.up_bytes_per_s
        self._sent_at[task.id] = self.up_until
        self.computed_s += self.compute_s(task)
        self.down_bytes += down_bytes
        self.up_bytes += task.up_bytes
        return self.up_until + self.pace.latency_s

    def cancel(self, task: Task, now: float) -> None:
        """Send nothing more of a result; what was to follow it keeps its time, what comes later does not wait."""
        self.cancelled.add(task.id)
        unsent_s = self._sent_at.pop(task.id, now) - now
        self.up_bytes -= min(task.up_bytes, max(0, round(unsent_s * self.pace.up_bytes_per_s)))
        self._sent_at = {id: at for id, at in self._sent_at.items() if at > now}
        self.up_until = max([now, *self._sent_at.values()])


class NoNumbers:
    """Placeholder results for a run without numbers."""

    outputs: list[object]
    is_plausible = True

    def __init__(self) -> None:
        self.outputs = []

    def check(self, task: Task, part: Rectangle, payload: object, *, is_strict: bool) -> object:
        return None

    def begin(self, *, takes_anything: bool) -> None:
        pass

    def leave_alone(self, tasks: Iterable[TaskId]) -> None:
        pass

    def share(self, task: TaskId) -> None:
        pass

    def clear(self, piece: object) -> None:
        pass

    def keep(self, item: object) -> None:
        pass

    def audit(self, case: object) -> str:
        return ""

    def expect_gradients(self) -> None:
        pass

    def gradient(self, parameter: int) -> None:
        return None


class VirtualDriver:
    def __init__(self, planner: Callable[[Run], object] | None = None) -> None:
        self.engine = Engine()
        self.now = 0.0
        self.devices: dict[DeviceId, Device] = {}
        self.told: list[object] = []
        self.workers: set[DeviceId] = set()
        """Devices that were given tasks."""
        self.waits: list[str] = []
        self.failing: Counter[DeviceId] = Counter()
        """How many of its next tasks each device will fail."""
        self._planner = planner
        self._heap: list[tuple[float, int, EngineEvent]] = []
        self._order = itertools.count()
        self._is_ticking = False

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is left to happen."""
        return not self._heap

    def join(self, name: str, device: Device, *, claim: float = 1.0) -> None:
        """Let a device join that claims to be `claim` times as fast as it is."""
        pace = device.pace
        member = self.engine.roster.add(
            name=name,
            kernel="virtual",
            memory_bytes=device.memory_bytes,
            flops_per_s=pace.flops_per_s * claim,
            latency_s=pace.latency_s,
            down_bytes_per_s=pace.down_bytes_per_s,
            up_bytes_per_s=pace.up_bytes_per_s,
        )
        self.devices[DeviceId(name)] = device
        self.post(DeviceAdded(DeviceId(name), device.memory_bytes, member.pace))

    def leave(self, name: str, at: float) -> None:
        self.post(DeviceRemoved(DeviceId(name)), at)

    def submit(self, run: Run) -> None:
        self.post(RunSubmitted(run))

    def post(self, event: EngineEvent, at: float | None = None) -> None:
        heapq.heappush(self._heap, (self.now if at is None else at, next(self._order), event))

    def run_until(self, is_over: Callable[[], bool], limit_s: float = 1e6) -> None:
        while not is_over():
            assert self._heap, f"nothing is left to happen at {self.now:.3f} s; waits: {self.waits[-3:]}"
            self.now, _, event = heapq.heappop(self._heap)
            assert self.now < limit_s, f"not over after {limit_s} virtual seconds"
            self._handle(event)

    def _handle(self, event: EngineEvent) -> None:
        match event:
            case Tick():
                self._is_ticking = False
            case DeviceRemoved(device):
                del self.devices[device]
            case Arrived(device, task):
                if device not in self.devices or task in self.devices[device].cancelled:
                    return
            case _:
                pass
        for action in self.engine.handle(event, self.now):
            self._act(action)
        if self.engine.ledger.is_busy and not self._is_ticking:
            self._is_ticking = True
            self.post(Tick(), self.now + TICK_S)

    def _act(self, action: Action) -> None:
        match action:
            case Start(task, missing):
                self._start(task, sum(operand.wire_bytes for operand in task.operands if operand.id in missing))
            case Cancel(task):
                if task.device in self.devices:
                    self.devices[task.device].cancel(task, self.now)
                    self.post(CancelSent(task.device, task.id))
            case Check(task, part):
                self.post(Checked(task.device, task, part, None, None))
            case Keep(run, item):
                self.post(Kept(run, item))
            case Audit(run, case):
                self.post(AuditEnded(run, case, ""))
            case MakePlan(run):
                assert self._planner is not None
                self.post(Planned(run, self._planner(run)))
            case Disconnect(device, reason):
                raise AssertionError(f"an honest device, {device}, was disconnected: {reason}")
            case Resolve(future, value):
                if not future.done():
                    future.set_result(value)
            case Reject(future, error):
                if not future.done():
                    future.set_exception(error)
            case Wait(reason):
                self.waits.append(reason)
            case Tell(event):
                self.told.append(event)
            case _:
                pass  # dropping operands takes no time

    def _start(self, task: Task, down_bytes: int) -> None:
        device = self.devices.get(task.device)
        if device is None:  # it has just left
            return
        self.workers.add(task.device)
        if self.failing[task.device]:
            self.failing[task.device] -= 1
            self.post(TaskFailed(task.device, task.id))
            return
        back = device.finish(task, down_bytes, self.now)
        compute_s = max(device.compute_s(task), 1e-9)
        seen = Observation(
            flops=task.flops,
            compute_s=compute_s,
            down_bytes=down_bytes,
            down_s=down_bytes / device.pace.down_bytes_per_s,
            up_bytes=task.up_bytes,
            up_s=task.up_bytes / device.pace.up_bytes_per_s,
            payload_bytes=task.up_bytes,
        )
        format = run_of(task).format(task)
        self.post(Arrived(task.device, task.id, task.whole, format, None, seen), back)
