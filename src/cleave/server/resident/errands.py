"""Errands: one small program each for certain devices, such as an update of leased weights, and what they return.

Unlike a pass or a product, an errand can be done by its own device alone. If one cannot be done, the others still are,
so that it is known what every remaining device did; then the run ends with LeaseLost. Errands run beside passes; a
device gets its tasks by priority, then in the order in which they were submitted. Knows no leases; `lease.py` words the
errands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

import numpy as np

from cleave.core.cost.wire import DEVICE_BYTES, WireFormat, encoded_bytes
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
from cleave.errors import CleaveError, LeaseLost, WrongResult
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Matrix
from cleave.protocol.programs import Program
from cleave.server.contract import End, Keep, Reject, Requests, Resolve, Run
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


@dataclass(frozen=True, slots=True, eq=False)
class _ErrandWork:
    run: Run
    number: int
    message: messages.RunTask


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
        if not np.isfinite(values).all():
            raise WrongResult("numbers that are not finite")
        self.matrices[item.number][part.top : part.bottom, part.left : part.right] = values.reshape(
            part.rows, part.cols
        )

    def check(self, task: Task, part: Rectangle, payload: object, *, is_strict: bool) -> object:
        raise AssertionError("errands are bound to devices that are trusted")

    def audit(self, case: object) -> str:
        raise AssertionError("errands are not audited")


class ErrandRun:
    """A run of errands. `done` has what they return, in their order."""

    is_exclusive = False

    def __init__(
        self,
        assign: Callable[[], Sequence[Errand]],
        lost: Callable[[DeviceId], None],
        *,
        priority: int,
        ids: Iterator[int],
        fleet: FleetView,
    ) -> None:
        """`assign` words the errands when the run begins, in the engine's thread; `lost` hears of failed devices."""
        self.results = ErrandResults()
        self.done: Future[list[Matrix]] = Future()
        self._assign, self._lost, self._priority, self._ids, self._fleet = assign, lost, priority, ids, fleet
        self._errands: Sequence[Errand] = ()
        self._open = self._keeping = 0
        self._fault = ""

    def format(self, task: Task) -> WireFormat:
        return _FORMAT

    def describe(self, task: Task) -> messages.RunTask:
        return cast("_ErrandWork", task.work).message

    def begin(self, now: float) -> Requests:
        self._errands = self._assign()
        self.results.expect(self._errands)
        tasks: list[Task] = []
        for number, errand in enumerate(self._errands):
            if all(self._fleet.holds(errand.device, operand) for operand in errand.held):
                tasks.append(self._task(number, errand))
            else:
                self._lose(errand.device, "no longer holds what it was lent")
        self._open = len(tasks)
        yield TasksSubmitted(tuple(tasks))
        yield from self._finish()

    def _task(self, number: int, errand: Errand) -> Task:
        id = TaskId(next(self._ids))
        message = messages.RunTask(task=id, priority=self._priority, format=_FORMAT, program=errand.program)
        return Task(
            id=id,
            device=errand.device,
            group=self,
            priority=self._priority,
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
        self._open -= accept.finished
        self._keeping += 1
        yield Keep(self, _Part(cast("_ErrandWork", accept.task.work).number, accept.part, payload))

    def kept(self, item: object, now: float) -> Requests:
        self._keeping -= 1
        yield from self._finish()

    def _finish(self) -> Requests:
        if not self._open and not self._keeping:
            yield End(self)
            yield (
                Reject(self.done, LeaseLost(self._fault)) if self._fault else Resolve(self.done, self.results.matrices)
            )

    def spoiled(self, item: object, reason: str, now: float) -> Requests:
        assert isinstance(item, _Part)
        self._keeping -= 1
        self._lose(self._errands[item.number].device, f"returned {reason}")
        yield from self._finish()

    def orphaned(self, orphans: Sequence[Orphan], device: DeviceId | None, now: float) -> Requests:
        for orphan in orphans:
            self._open -= 1
            self._lose(orphan.task.device, "left, or could not do what it was asked")
        yield from self._finish()

    def _lose(self, device: DeviceId, reason: str) -> None:
        self._fault = f"{device} {reason}"
        self._lost(device)

    def left(self, device: DeviceId, now: float) -> Requests:
        return ()

    def late(self, device: DeviceId, now: float) -> Requests:
        return ()

    def stalled(self, device: DeviceId, reason: str, now: float) -> Requests:
        return ()

    def resume(self, now: float) -> Requests:
        return ()

    def fail(self, error: CleaveError) -> Requests:
        yield GroupsAbandoned((self,))
        yield Reject(self.done, error)

    def planned(self, plan: object, now: float) -> Requests:
        raise AssertionError("errands need no plan")

    def audited(self, case: object, reason: str, now: float) -> Requests:
        raise AssertionError("errands are not audited")

    def rejected(self, task: Task, device: DeviceId, reason: str) -> Requests:
        raise AssertionError("errands are not checked")

    def hedged(self, hedges: Sequence[Hedge], now: float) -> Requests:
        raise AssertionError("tasks bound to a device are not hedged")

    def prompted(self, request: object, now: float) -> Requests:
        raise AssertionError("an errand takes no further requests")
