"""Drive the real engine in virtual time: no sockets, no numbers, no event loop; the clock is a heap of events.

The engine, its ledger and its runs are those of a live server; only devices and links are simulated. Links are shared
max-min fairly under the server's capacity and shared media. Checks, storing and planning take no time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from cleave.core.cost.rates import Pace, Server
from cleave.core.schedule.ledger import TICK_S
from cleave.core.schedule.members import Observation
from cleave.core.schedule.tasks import (
    Cancel,
    CancelSent,
    DeviceAdded,
    DeviceId,
    DeviceRemoved,
    OperandId,
    Start,
    Task,
    TaskFailed,
    Tick,
)
from cleave.errors import CleaveError
from cleave.protocol.messages import encode
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
from cleave.sim.devices import RESULT_HEADER_BYTES, STORE_HEADER_BYTES, Device, Job, LineName
from cleave.sim.links import SharedLinks

_LEAST_S = 1e-9


class SimulationStuck(CleaveError):
    """Nothing is left to happen, or virtual time ran out, before the work was done."""


@dataclass(frozen=True, slots=True)
class _Called:
    """Something of the world happens: a device joins, leaves, stalls, or changes its rates."""

    happen: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Served:
    """A line has finished with a job."""

    device: Device
    name: DeviceId
    line: LineName
    turn: int


@dataclass(frozen=True, slots=True)
class _Flowed:
    """The first of the transfers that share capacity is complete, unless others began or ended since."""

    version: int


SimEvent = EngineEvent | _Called | _Served | _Flowed


class VirtualDriver:
    def __init__(
        self,
        planner: Callable[[Run], object] | None = None,
        server: Server | None = None,
        media: Mapping[str, float] | None = None,
        disconnected: Callable[[str, str], None] | None = None,
        answer: Callable[[Task], object] | None = None,
    ) -> None:
        """`media` are the bytes per second of media that devices share, both ways together.

        `disconnected` is told of devices that the engine disconnects, and why; without it, that is an error.
        `answer` gives the payload of a task's result, which is then stored; without it, results have no numbers.
        """
        server = server or Server()
        self.engine = Engine()
        self.now = 0.0
        self.devices: dict[DeviceId, Device] = {}
        self.told: list[object] = []
        self.workers: set[DeviceId] = set()
        """Devices that were given tasks."""
        self.waits: list[str] = []
        self.failing: Counter[DeviceId] = Counter()
        """How many of its next tasks each device will fail."""
        self._planner, self._disconnected, self._answer = planner, disconnected, answer
        capacity = {"server down": server.down_bytes_per_s, "server up": server.up_bytes_per_s}
        capacity |= {f"medium {name}": bytes_per_s for name, bytes_per_s in (media or {}).items()}
        self._links: SharedLinks[tuple[DeviceId, LineName]] = SharedLinks(capacity)
        self._flow_version = 0
        self._heap: list[tuple[float, int, SimEvent]] = []
        self._order = itertools.count()
        self._is_ticking = False
        self._started: dict[DeviceId, None] = {}
        """Devices that an event brought tasks, in order."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is left to happen."""
        return not self._heap

    def join(self, name: str, device: Device, *, claim: float = 1.0, believed: Pace | None = None) -> None:
        """Let a device join that claims to be `claim` times as fast as it is, or to have the `believed` rates."""
        pace = believed or device.pace
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

    def leave(self, name: str, at: float | None = None) -> None:
        self.post(DeviceRemoved(DeviceId(name)), at)

    def call_at(self, at: float, happen: Callable[[], None]) -> None:
        """Let something of the world happen then."""
        self._push(_Called(happen), max(at, self.now))

    def submit(self, run: Run) -> None:
        self.post(RunSubmitted(run))

    def post(self, event: EngineEvent, at: float | None = None) -> None:
        self._push(event, self.now if at is None else at)

    def catch_up(self) -> None:
        """Let everything happen that is due by now."""
        self.run_until(lambda: not self._heap or self._heap[0][0] > self.now)

    def run_until(self, is_over: Callable[[], bool], limit_s: float = 1e6) -> None:
        while not is_over():
            if not self._heap:
                raise SimulationStuck(f"nothing is left to happen at {self.now:.3f} s; waits: {self.waits[-3:]}")
            at, _, event = heapq.heappop(self._heap)
            if at >= limit_s:
                raise SimulationStuck(f"not over after {limit_s} virtual seconds")
            self.now = at
            self._happen(event)

    # -------------------------------------------------------------------------------------------- events

    def _happen(self, event: SimEvent) -> None:
        match event:
            case _Called(happen):
                happen()
            case _Served(device, name, line, turn):
                if device.lines[line].turn == turn:
                    self._served(device, name, line)
            case _Flowed(version):
                if version == self._flow_version:
                    self._flowed()
            case _:
                self._handle(event)

    def _handle(self, event: EngineEvent) -> None:
        match event:
            case Tick():
                self._is_ticking = False
            case DeviceRemoved(name):
                if (gone := self.devices.pop(name, None)) is None:
                    return
                for line in ("down", "up"):
                    self._stop(name, line)
                gone.forget()
            case Arrived(name, task):
                if name not in self.devices or task in self.devices[name].cancelled:
                    return
            case _:
                pass
        for action in self.engine.handle(event, self.now):
            self._act(action)
        for name in self._started:  # a server sends the most urgent of the tasks that one event brought
            if name in self.devices:
                self._serve(self.devices[name], name, "down")
        self._started.clear()
        if self.engine.ledger.is_busy and not self._is_ticking:
            self._is_ticking = True
            self.post(Tick(), self.now + TICK_S)

    def _act(self, action: Action) -> None:
        match action:
            case Start(task, missing):
                self._start(task, frozenset(missing))
            case Cancel(task):
                if task.device in self.devices:
                    self._cancel(self.devices[task.device], task)
                    self.post(CancelSent(task.device, task.id))
            case Check(task, part):
                self.post(Checked(task.device, task, part, None, None))
            case Keep(run, item):
                if self._answer is not None:
                    run.results.keep(item)
                self.post(Kept(run, item))
            case Audit(run, case):
                self.post(AuditEnded(run, case, ""))
            case MakePlan(run):
                assert self._planner is not None
                self.post(Planned(run, self._planner(run)))
            case Disconnect(device, reason):
                if self._disconnected is None:
                    raise AssertionError(f"an honest device, {device}, was disconnected: {reason}")
                self.leave(device)
                self._disconnected(device, reason)
            case Resolve(future, value):
                if not future.done():
                    future.set_result(value)
            case Reject(future, error):
                if not future.done():
                    future.set_exception(error)
            case Wait(reason):
                self.waits.append(reason)
            case Tell():
                self.told.append(cast(object, action.event))
            case _:
                pass  # dropping operands takes no time

    # -------------------------------------------------------------------------------------------- devices

    def _start(self, task: Task, missing: frozenset[OperandId]) -> None:
        device = self.devices.get(task.device)
        if device is None:  # it has just left
            return
        self.workers.add(task.device)
        if self.failing[task.device]:
            self.failing[task.device] -= 1
            self.post(TaskFailed(task.device, task.id))
            return
        device.peak_bytes = max(device.peak_bytes, self.engine.ledger.used_bytes(task.device))
        device.coming |= missing
        down_bytes = len(encode(run_of(task).describe(task))) + STORE_HEADER_BYTES * len(missing)
        down_bytes += sum(operand.wire_bytes for operand in task.operands if operand.id in missing)
        self._wait_for(device, "down", Job(task, down_bytes, task.up_bytes + RESULT_HEADER_BYTES, missing))
        self._started[task.device] = None

    def _wait_for(self, device: Device, line: LineName, job: Job) -> None:
        """Queue a job: on a downlink after those of earlier events, which the server's system has already taken."""
        earliest = self.now if line == "down" else 0.0
        heapq.heappush(device.lines[line].waiting, (earliest, job.task.priority, next(self._order), job))

    def _enter(self, device: Device, name: DeviceId, line: LineName, job: Job) -> None:
        self._wait_for(device, line, job)
        self._serve(device, name, line)

    def _serve(self, device: Device, name: DeviceId, line: LineName) -> None:
        """Let an idle line begin with the next job."""
        queue = device.lines[line]
        while queue.job is None and queue.waiting:
            job = heapq.heappop(queue.waiting)[-1]
            if job.task.id in device.cancelled:
                device.coming -= job.brings if line == "down" else frozenset()
                continue
            queue.job, queue.began, queue.turn = job, self.now, queue.turn + 1
            served = _Served(device, name, line, queue.turn)
            if line == "compute":
                seconds = device.compute_s(job.task)
                self._push(served, max(self.now, device.stalled_until) + seconds)
                continue
            size, pools = device.size(line, job), self._links.limiting(self._pools(device, line))
            if not size or not pools:
                self._push(served, self.now + size / device.rate(line))
            else:
                self._links.begin((name, line), size, device.rate(line), pools, self.now)
                self._expect()

    def _served(self, device: Device, name: DeviceId, line: LineName) -> None:
        queue = device.lines[line]
        job, queue.job = queue.job, None
        assert job is not None
        job.seconds[line] = self.now - queue.began
        match line:
            case "down":
                device.down_bytes += job.down_bytes
                device.coming -= job.brings
                device.unready.append(job)
                for ready in device.ready():
                    self._enter(device, name, "compute", ready)
            case "compute":
                device.computed_s += device.compute_s(job.task)
                self._enter(device, name, "up", job)
            case "up":
                device.up_bytes += job.up_bytes
                self._returned(device, job)
        self._serve(device, name, line)

    def _returned(self, device: Device, job: Job) -> None:
        task = job.task
        seen = Observation(
            flops=task.flops,
            compute_s=max(job.seconds["compute"], _LEAST_S),
            down_bytes=job.down_bytes,
            down_s=job.seconds["down"],
            up_bytes=job.up_bytes,
            up_s=job.seconds["up"],
            payload_bytes=task.up_bytes,
        )
        payload = None if self._answer is None else self._answer(task)
        arrived = Arrived(task.device, task.id, task.whole, run_of(task).format(task), payload, seen)
        self.post(arrived, self.now + device.pace.latency_s)

    def _cancel(self, device: Device, task: Task) -> None:
        """Compute a cancelled task no further than it is, and send nothing more of its result."""
        device.cancelled.add(task.id)
        queue = device.lines["up"]
        if queue.job is None or queue.job.task.id != task.id:
            return
        unsent = self._stop(task.device, "up")
        if unsent is None:
            unsent = queue.job.up_bytes - (self.now - queue.began) * device.pace.up_bytes_per_s
        device.up_bytes += queue.job.up_bytes - round(min(max(unsent, 0.0), queue.job.up_bytes))
        queue.job = None
        queue.turn += 1
        self._serve(device, task.device, "up")

    # -------------------------------------------------------------------------------------------- shared capacity

    def _pools(self, device: Device, line: LineName) -> tuple[str, ...]:
        medium = (f"medium {device.medium}",) if device.medium else ()
        return (f"server {line}", *medium)

    def _stop(self, name: DeviceId, line: LineName) -> float | None:
        """End a transfer that shares capacity; return what it has not moved, None if there is no such transfer."""
        if (name, line) not in self._links:
            return None
        unsent = self._links.end((name, line), self.now)
        self._expect()
        return unsent

    def _expect(self) -> None:
        """Await the end of the first transfer at the current rates."""
        self._flow_version += 1
        if (first := self._links.next_end()) is not None:
            self._push(_Flowed(self._flow_version), first[0])

    def _flowed(self) -> None:
        first = self._links.next_end()
        assert first is not None
        name, line = first[1]
        self._links.end(first[1], self.now)
        self._expect()
        self._served(self.devices[name], name, line)

    def _push(self, event: SimEvent, at: float) -> None:
        heapq.heappush(self._heap, (at, next(self._order), event))
