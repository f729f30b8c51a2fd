"""Errands: one small program each for certain devices, such as an update of leased weights, and what they return.

Unlike a pass or a product, an errand can be done by its own device alone. If one cannot be done, those of other devices
still are, so that it is known what every remaining device did; then the run ends with LeaseLost. Errands run beside
passes; a device gets its tasks by priority, then in the order in which they were submitted. Errands in the background
are submitted one at a time, so that they take no more than one of the few places for tasks under way. Knows no leases;
`lease.py` words the errands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from cleave.core.cost.wire import DEVICE_BYTES, WireFormat, encoded_bytes
from cleave.core.plan.resident.timeline import AHEAD, FIRST
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    Accept,
    DeviceId,
    GroupsAbandoned,
    Hedge,
    Operand,
    Orphan,
    Task,
    TaskId,
    TasksSubmitted,
)
from cleave.errors import CleaveError, LeaseLost
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Matrix
from cleave.protocol.programs import Program
from cleave.server.contract import End, Keep, Kind, Reject, Requests, Resolve, Run
from cleave.server.fleet_view import FleetView

_FORMAT: WireFormat = "fp32"
"""Results are weights, optimizer states and sums, which are never rounded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Errand:
    device: DeviceId
    program: Program
    operands: tuple[Operand, ...]
    """All that it uses, including what it makes."""
    held: tuple[Operand, ...] = ()
    """Those that its device must hold already: a device that left and came back holds nothing."""
    rows: int = 1
    cols: int = 1
    flops: float = 0.0
    is_urgent: bool = True
    """Goes before passes; else when links have nothing else to do."""
    is_pressing: bool = True
    """Whether `settled` waits for it."""


@dataclass(frozen=True, slots=True, eq=False)
class _ErrandWork:
    run: Run
    number: int
    message: messages.RunTask
    kind: ClassVar[Kind] = "weights"


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    number: int
    part: Rectangle
    payload: object


class ErrandResults:
    """The matrices that errands return."""

    def __init__(self) -> None:
        self.matrices: list[Matrix] = []

    def expect(self, errands: Sequence[Errand]) -> None:
        self.matrices = [np.empty((errand.rows, errand.cols), dtype=np.float32) for errand in errands]

    def keep(self, item: object) -> None:
        assert isinstance(item, _Part)
        part = item.part
        values = np.frombuffer(cast("Buffer", item.payload), dtype="<f4")
        self.matrices[item.number][part.top : part.bottom, part.left : part.right] = values.reshape(
            part.rows, part.cols
        )

    def check(self, task: Task, part: Rectangle, payload: object, *, is_strict: bool) -> object:
        raise AssertionError("errands are bound to devices that are trusted")

    def audit(self, case: object) -> str:
        raise AssertionError("errands are not audited")


class ErrandRun:
    """A run of errands. `done` has what they return, in their order; `settled` is done when the pressing ones are."""

    is_exclusive = False

    def __init__(
        self,
        assign: Callable[[], Sequence[Errand]],
        lost: Callable[[DeviceId], None],
        *,
        ids: Iterator[int],
        fleet: FleetView,
        is_in_turn: bool = False,
    ) -> None:
        """`assign` words the errands when the run begins, in the engine's thread.

        `lost` hears of devices that failed while they were connected: those that left hold nothing any more.

        With `is_in_turn`, a device gets one errand after the other, pressing ones first.
        """
        self.results = ErrandResults()
        self.done: Future[list[Matrix]] = Future()
        self.settled: Future[None] = Future()
        self._assign, self._lost, self._ids, self._fleet = assign, lost, ids, fleet
        self._is_in_turn = is_in_turn
        self._errands: Sequence[Errand] = ()
        self._waiting: dict[DeviceId, deque[int]] = {}
        """Errands not submitted yet, by number."""
        self._running: dict[DeviceId, set[int]] = {}
        self._open = self._pressing = self._keeping = 0
        self._fault = ""
        self._is_over = False

    @property
    def is_done(self) -> bool:
        """Whether its caller has everything, or the error."""
        return self.done.done()

    def format(self, task: Task) -> WireFormat:
        return _FORMAT

    def describe(self, task: Task) -> messages.RunTask:
        return cast("_ErrandWork", task.work).message

    def begin(self, now: float) -> Requests:
        self._errands = self._assign()
        self.results.expect(self._errands)
        for number in sorted(range(len(self._errands)), key=lambda number: not self._errands[number].is_pressing):
            self._waiting.setdefault(self._errands[number].device, deque()).append(number)
        self._open, self._pressing = len(self._errands), sum(errand.is_pressing for errand in self._errands)
        for device in list(self._waiting):
            yield from self._submit(device)
        yield from self._finish()

    def _submit(self, device: DeviceId) -> Requests:
        """Submit a device's errands, or the next of them."""
        waiting, running = self._waiting[device], self._running.setdefault(device, set())
        tasks: list[Task] = []
        while waiting and not (self._is_in_turn and running):
            errand = self._errands[waiting[0]]
            if not all(self._fleet.holds(device, operand) for operand in errand.held):
                self._lose(device, "no longer holds what it was lent")
                break
            number = waiting.popleft()
            running.add(number)
            tasks.append(self._task(number, errand))
        if tasks:
            yield TasksSubmitted(tuple(tasks))

    def _task(self, number: int, errand: Errand) -> Task:
        id, priority = TaskId(next(self._ids)), FIRST if errand.is_urgent else AHEAD
        message = messages.RunTask(task=id, priority=priority, format=_FORMAT, program=errand.program)
        return Task(
            id=id,
            device=errand.device,
            group=self,
            priority=priority,
            operands=errand.operands,
            rows=errand.rows,
            cols=errand.cols,
            result_bytes=DEVICE_BYTES,
            flops=errand.flops,
            up_bytes=encoded_bytes(_FORMAT, errand.rows, errand.cols),
            is_bound=True,
            work=_ErrandWork(self, number, message),
        )

    def accepted(self, accept: Accept, payload: object, now: float) -> Requests:
        number = cast("_ErrandWork", accept.task.work).number
        self._keeping += 1
        yield Keep(self, _Part(number, accept.part, payload))
        if accept.finished:
            device = accept.task.device
            self._running[device].remove(number)
            self._close(number)
            yield from self._submit(device)

    def kept(self, item: object, now: float) -> Requests:
        self._keeping -= 1
        yield from self._finish()

    def _finish(self) -> Requests:
        """Say what is complete."""
        if not self._pressing and not self._fault:
            yield Resolve(self.settled, None)
        if self._open or self._keeping or self._is_over:
            return
        self._is_over = True
        yield End(self)
        if self._fault:
            yield from self._reject(LeaseLost(self._fault))
        else:
            yield Resolve(self.done, self.results.matrices)

    def _reject(self, error: CleaveError) -> Requests:
        yield Reject(self.settled, error)
        yield Reject(self.done, error)

    def spoiled(self, item: object, reason: str, now: float) -> Requests:
        assert isinstance(item, _Part)
        self._keeping -= 1
        self._lose(self._errands[item.number].device, f"returned {reason}")
        yield from self._finish()

    def orphaned(self, orphans: Sequence[Orphan], device: DeviceId | None, now: float) -> Requests:
        for orphan in orphans:
            number = cast("_ErrandWork", orphan.task.work).number
            self._running[orphan.task.device].remove(number)
            self._close(number)
            self._lose(orphan.task.device, "left, or could not do what it was asked")
        yield from self._finish()

    def _lose(self, device: DeviceId, reason: str) -> None:
        self._fault = f"{device} {reason}"
        for number in self._waiting.pop(device):
            self._close(number)
        self._waiting[device] = deque()
        if device in self._fleet:
            self._lost(device)

    def _close(self, number: int) -> None:
        self._open -= 1
        self._pressing -= self._errands[number].is_pressing

    def left(self, device: DeviceId, now: float) -> Requests:
        return ()

    def late(self, device: DeviceId, now: float) -> Requests:
        return ()

    def stalled(self, device: DeviceId, reason: str, now: float) -> Requests:
        return ()

    def resume(self, now: float) -> Requests:
        return ()

    def fail(self, error: CleaveError) -> Requests:
        self._is_over = True
        yield GroupsAbandoned((self,))
        yield from self._reject(error)

    def planned(self, plan: object, now: float) -> Requests:
        raise AssertionError("errands need no plan")

    def audited(self, case: object, reason: str, now: float) -> Requests:
        raise AssertionError("errands are not audited")

    def rejected(self, task: Task, device: DeviceId, reason: str) -> Requests:
        raise AssertionError("errands are not checked")

    def hedged(self, hedges: Sequence[Hedge], now: float) -> Requests:
        raise AssertionError("tasks bound to a device are not hedged")

    def prompted(self, request: object, now: float) -> Requests:
        """End early: nobody needs the rest."""
        assert isinstance(request, LeaseLost)
        if not self._is_over:
            yield from self.fail(request)
            yield End(self)
