"""One product in progress: blocks become tasks, accepted rectangles become outputs, lost blocks are reassigned.

Knows devices by name and through the fleet view. Knows no numbers: `results.py` checks and stores them. The caller
waits for `done`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

from cleave import events
from cleave.core.cost.wire import DEVICE_BYTES, WireFormat, encoded_bytes
from cleave.core.model.gemms import Gemm, Role
from cleave.core.plan.gemm.layer import Block, Extent
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
from cleave.errors import CleaveError, InfeasibleError
from cleave.protocol import messages
from cleave.protocol.numbers import Matrix
from cleave.protocol.programs import GemmProgram
from cleave.server.contract import End, Keep, Kind, Park, Reject, Requests, Resolve, Tell
from cleave.server.fleet_view import FleetView
from cleave.server.gemm.product import LAYOUTS, Piece, Product
from cleave.server.gemm.results import Fresh, GemmResults
from cleave.server.operands import Operands

_KINDS: dict[Role, Kind] = {"forward": "forward", "grad_input": "backward", "grad_weight": "gradients"}
_MOST_WRONG = 3
"""Devices wrong about one product, with no others connected, from which the fault is not a single device's."""


@dataclass(slots=True, eq=False)
class _Loss:
    """Work one device left unfinished, until others have recovered it."""

    device: DeviceId
    noticed: float
    blocks: int = 0
    open: int = 0


@dataclass(frozen=True, slots=True)
class GemmWork:
    """Work of a task: one piece of a product."""

    run: GemmRun
    piece: Piece
    loss: _Loss | None

    @property
    def kind(self) -> Kind:
        return self.run.kind


class GemmRun:
    is_exclusive = False

    def __init__(
        self,
        product: Product,
        blocks: Sequence[Block],
        results: GemmResults,
        *,
        priority: int,
        format: WireFormat,
        operands: Operands,
        ids: Iterator[int],
        fleet: FleetView,
    ) -> None:
        """`blocks` is the plan; without one, blocks are placed when the run begins."""
        self.results = results
        self.done: Future[list[Matrix]] = Future()
        self.kind: Kind = _KINDS[product.role]
        self._product, self._blocks, self._priority = product, blocks, priority
        self._format: WireFormat = format
        self._operands, self._ids, self._fleet = operands, ids, fleet
        self._parked: list[tuple[Extent, _Loss | None]] = []
        self._wrong: set[DeviceId] = set()
        """Devices that returned a wrong result: others recompute it."""
        self._open = 0
        """Incomplete regions."""
        self._keeping = 0
        self._is_over = False

    # -------------------------------------------------------------------------------------------- events

    def begin(self, now: float) -> Requests:
        if self._blocks:
            yield from self._cut(self._blocks, None, is_first=True)
        else:
            gemm = self._product.gemm
            yield from self._place(Extent((0, gemm.m), (0, gemm.n), (0, gemm.k)), None, now)

    def accepted(self, accept: Accept, payload: object, now: float) -> Requests:
        work = _work(accept.task)
        self._keeping += 1
        yield Keep(self, Fresh(work.piece, accept.part, accept.fresh, cast("Matrix", payload)))
        if accept.finished:
            yield from self._close(work, now)

    def kept(self, item: object, now: float) -> Requests:
        self._keeping -= 1
        yield from self._finish()

    def spoiled(self, item: object, reason: str, now: float) -> Requests:
        raise AssertionError("products are checked before they are stored")

    def orphaned(self, orphans: Sequence[Orphan], device: DeviceId | None, now: float) -> Requests:
        """Reassign what is left of tasks; a loss of `device` is tracked until it is recovered."""
        loss = _Loss(device, now) if device is not None else None
        for orphan in orphans:
            self.results.share(orphan.task.id)
            work = _work(orphan.task)
            own = work.loss or loss
            if own is not None:
                own.open += 1  # stays open while its parts are planned
                own.blocks += work.loss is None
            for missing in orphan.missing:
                yield from self._place(self._extent(work, missing), own, now)
            if own is not None:
                yield from _make_good(own, now)
            if orphan.finished:
                yield from self._close(work, now)

    def hedged(self, hedges: Sequence[Hedge], now: float) -> Requests:
        for hedge in hedges:
            self.results.share(hedge.task.id)
            work = _work(hedge.task)
            for missing in hedge.missing:
                extent = self._extent(work, missing)
                try:
                    parts = self._planned(extent, now)
                except InfeasibleError:
                    continue
                if all(part.inner == extent.inner for part in parts):  # partial sums cannot race the whole one
                    yield from self._cut(parts, work.loss, of=hedge.task)

    def rejected(self, task: Task, device: DeviceId, reason: str) -> Requests:
        """Note a wrong result: others recompute the block, unless every connected device was wrong."""
        self._wrong.add(device)
        if len(self._wrong) >= _MOST_WRONG and self._fleet.is_only(self._wrong):
            error = CleaveError(
                f"a {self._product.role} product came back wrong from all {len(self._wrong)} devices, "
                f"the last: {reason}; check the server's own memory, and which devices join this run"
            )
            yield from self.fail(error)
            yield End(self)

    def resume(self, now: float) -> Requests:
        parked, self._parked = self._parked, []
        for extent, loss in parked:
            yield from self._place(extent, loss, now)
            if loss is not None:
                yield from _make_good(loss, now)

    def fail(self, error: CleaveError) -> Requests:
        self._is_over = True
        self._parked.clear()
        yield Reject(self.done, error)
        yield GroupsAbandoned((self,))

    def left(self, device: DeviceId, now: float) -> Requests:
        return ()

    def late(self, device: DeviceId, now: float) -> Requests:
        return ()

    def stalled(self, device: DeviceId, reason: str, now: float) -> Requests:
        return ()

    def planned(self, plan: object, now: float) -> Requests:
        raise AssertionError("a product asks for no plan")

    def audited(self, case: object, reason: str, now: float) -> Requests:
        raise AssertionError("products are checked, not audited")

    def prompted(self, request: object, now: float) -> Requests:
        raise AssertionError("a product has no second part")

    # -------------------------------------------------------------------------------------------- tasks

    def format(self, task: Task) -> WireFormat:
        return self._format

    def describe(self, task: Task) -> messages.RunTask:
        piece, slices = _work(task).piece, self._operands.slice
        return messages.RunTask(
            task=task.id,
            priority=task.priority,
            format=self._format,
            program=GemmProgram(
                layout=LAYOUTS[self._product.role],
                terms=tuple((slices(*a).operand.id, slices(*b).operand.id) for a, b in piece.terms),
                rows=task.rows,
                cols=task.cols,
            ),
        )

    def _cut(
        self, blocks: Iterable[Block], loss: _Loss | None, of: Task | None = None, *, is_first: bool = False
    ) -> Requests:
        """Turn blocks into tasks: new regions, or hedges of a task's region. The first ones tile the product."""
        tasks = tuple(
            self._task(piece, block.device, loss, of)
            for block in blocks
            for piece in self._product.pieces(block.extent)
        )
        if is_first:
            self.results.leave_alone(task.id for task in tasks if not _work(task).piece.is_partial)
        if of is None:
            self._open += len(tasks)
            if loss is not None:
                loss.open += len(tasks)
        yield TasksSubmitted(tasks)

    def _task(self, piece: Piece, device: DeviceId, loss: _Loss | None, of: Task | None) -> Task:
        operands: dict[int, Operand] = {}
        for cut in itertools.chain.from_iterable(piece.terms):
            operand = self._operands.slice(*cut).operand
            operands[operand.id] = operand
        rows, cols = piece.rows[1] - piece.rows[0], piece.cols[1] - piece.cols[0]
        top = left = 0
        if of is not None:
            home = _work(of).piece
            top, left = of.top + piece.rows[0] - home.rows[0], of.left + piece.cols[0] - home.cols[0]
        return Task(
            id=TaskId(next(self._ids)),
            device=device,
            group=self,
            priority=self._priority,
            operands=tuple(operands.values()),
            rows=rows,
            cols=cols,
            result_bytes=rows * cols * DEVICE_BYTES,
            flops=Gemm(m=rows, n=cols, k=piece.inner[1] - piece.inner[0]).flops,
            up_bytes=encoded_bytes(self._format, rows, cols),
            region=None if of is None else of.region or of.id,
            top=top,
            left=left,
            work=GemmWork(self, piece, loss),
        )

    def _place(self, extent: Extent, loss: _Loss | None, now: float) -> Requests:
        """Assign an extent to the devices that finish it soonest; park it if none can."""
        if self._is_over:
            return
        try:
            parts = self._planned(extent, now)
        except InfeasibleError as fault:
            self._parked.append((extent, loss))
            if loss is not None:
                loss.open += 1
            yield Park(self, str(fault))
            return
        if extent.inner == (0, self._product.gemm.k) and any(part.inner != extent.inner for part in parts):
            for piece in self._product.pieces(extent):
                self.results.clear(piece)
        yield from self._cut(parts, loss)

    def _planned(self, extent: Extent, now: float) -> list[Block]:
        terms = [term for piece in self._product.pieces(extent) for term in piece.terms]
        a, b = zip(*terms, strict=True)
        return self._fleet.reassign(extent, a, b, self._format, now, avoid=self._wrong)

    def _extent(self, work: GemmWork, part: Rectangle) -> Extent:
        return self._product.extent(work.piece, (part.top, part.bottom), (part.left, part.right))

    # -------------------------------------------------------------------------------------------- completion

    def _close(self, work: GemmWork, now: float) -> Requests:
        """Close a region that is complete, or whose missing parts have been reassigned."""
        self._open -= 1
        if work.loss is not None:
            yield from _make_good(work.loss, now)
        yield from self._finish()

    def _finish(self) -> Requests:
        if not (self._open or self._keeping or self._parked or self._is_over):
            self._is_over = True
            yield Resolve(self.done, self.results.outputs)
            yield End(self)


def _work(task: Task) -> GemmWork:
    return cast("GemmWork", task.work)


def _make_good(loss: _Loss, now: float) -> Requests:
    loss.open -= 1
    if loss.open == 0:
        yield Tell(events.Recovered(device=loss.device, blocks=loss.blocks, seconds=now - loss.noticed))
