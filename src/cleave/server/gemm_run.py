"""Products under way: blocks into tasks, results into outputs, and what was lost to those who end it soonest.

Knows devices only by name and by what the planner may know of them. Lives in the server's event loop; `Job.done` is
what callers in other threads wait for.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from cleave import events
from cleave.core.cost.gemm import DEVICE_BYTES, WireFormat
from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.gemm.layer import Block
from cleave.core.plan.gemm.reassign import plan_redo
from cleave.core.schedule.ledger import Ledger
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    Accept,
    DeviceId,
    Event,
    Hedge,
    Operand,
    Orphan,
    RegionsAbandoned,
    Task,
    TaskId,
    TasksSubmitted,
)
from cleave.errors import CleaveError, InfeasibleError
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Matrix, encoded_bytes
from cleave.protocol.programs import Gemm
from cleave.server.operands import Staging
from cleave.server.product_checks import Evidence, Inspector
from cleave.server.products import LAYOUTS, Cut, Piece, Product

_MOST_WRONG = 3
"""Devices that are wrong about one product, and no others there: something else than a liar is at fault."""


@dataclass(slots=True, eq=False)
class Job:
    """A product on its way; `done` is resolved, in the event loop, when every element is in its place."""

    product: Product
    priority: int
    format: WireFormat
    outputs: list[Matrix]
    blocks: Sequence[Block]
    names: tuple[str, ...]
    done: Future[list[Matrix]] = field(default_factory=lambda: Future[list[Matrix]]())
    regions: set[TaskId] = field(default_factory=lambda: set[TaskId]())
    """Those that are unfinished."""
    parked: int = 0
    wrong: set[str] = field(default_factory=lambda: set[str]())
    """Devices that returned something wrong of it: others do it again."""
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(slots=True, eq=False)
class _Loss:
    """What one device left behind."""

    device: DeviceId
    noticed: float
    blocks: int = 0
    open: int = 0


@dataclass(frozen=True, slots=True)
class _Work:
    """What a task is about."""

    owner: Jobs
    job: Job
    piece: Piece
    loss: _Loss | None


class Jobs:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        ids: Iterator[int],
        ledger: Ledger,
        staging: Staging,
        inspector: Inspector,
        fleet: Callable[[], Profiles | None],
        alone: Callable[[str], None],
        listener: events.Listener,
    ) -> None:
        self._loop, self._ledger, self._staging, self._inspector = loop, ledger, staging, inspector
        self._fleet, self._alone, self._listener = fleet, alone, listener
        self._ids = ids
        self._jobs: set[Job] = set()
        self._parked: list[tuple[Job, Block, _Loss | None]] = []
        self._ended: CleaveError | None = None
        self.handle: Callable[[Event], None] = lambda event: None
        """The dispatcher's, which is made after this."""

    @property
    def is_parked(self) -> bool:
        return bool(self._parked)

    def start(self, job: Job) -> None:
        if self._ended is not None:
            _fail(job, self._ended)
            return
        self._jobs.add(job)
        if job.blocks:
            self._cut(job, job.blocks, job.names, None)
        else:  # nobody was there
            self._plan_again(job, Block(-1, *_whole(job.product)), None)

    def unpark(self) -> None:
        """Someone is there again."""
        parked, self._parked = self._parked, []
        for job, block, loss in parked:
            job.parked -= 1
            self._plan_again(job, block, loss)

    def fail(self, fault: CleaveError, *, for_good: bool) -> None:
        """End every product with an error; `for_good`, those to come too."""
        if for_good:
            self._ended = fault
        self._parked.clear()
        for job in list(self._jobs):
            self._give_up(job, fault)

    # -------------------------------------------------------------------------------------------- for the dispatcher

    def describe(self, task: Task) -> messages.Run:
        work = _work(task)
        slices = self._staging.slice
        return messages.Run(
            task=task.id,
            priority=task.priority,
            format=work.job.format,
            program=Gemm(
                layout=LAYOUTS[work.job.product.role],
                terms=tuple((slices(*a).operand.id, slices(*b).operand.id) for a, b in work.piece.terms),
                rows=task.rows,
                cols=task.cols,
            ),
        )

    def inspect(self, task: Task, part: Rectangle, result: messages.Result, payload: Buffer, harder: bool) -> Matrix:
        job, piece = _work(task).job, _work(task).piece
        layout = LAYOUTS[job.product.role]
        try:
            return self._inspector.inspect(
                piece, layout, job.format, job.evidence, part, result, payload, harder=harder
            )
        except CleaveError:
            raise
        except Exception as fault:  # ours, and no device's: others would fail the same way
            self._give_up(job, CleaveError(f"a result could not be checked: {fault!r}; please report this"))
            raise

    def accept(self, accept: Accept, values: Matrix) -> None:
        work = _work(accept.task)
        job, piece = work.job, work.piece
        out = job.outputs[piece.output][slice(*piece.rows), slice(*piece.cols)]
        for fresh in accept.fresh:
            target = out[fresh.top : fresh.bottom, fresh.left : fresh.right]
            inside = fresh.moved(-accept.part.top, -accept.part.left)
            source = values[inside.top : inside.bottom, inside.left : inside.right]
            if piece.is_partial:
                np.add(target, source, out=target)
            else:
                np.copyto(target, source)
        if accept.finished:
            self._close(accept.task)

    def redo(self, orphans: list[Orphan], device: DeviceId | None) -> None:
        """Plan what is left of tasks for those who are there; what `device` lost is followed until it is made good."""
        loss = _Loss(device, self._loop.time()) if device is not None else None
        for orphan in orphans:
            work = _work(orphan.task)
            own = work.loss or loss
            if own is not None:
                own.open += 1  # stays open while its parts are planned
                own.blocks += work.loss is None
            for missing in orphan.missing:
                self._plan_again(work.job, _block(work, missing), own)
            if own is not None:
                self._made_good(own)
            if orphan.finished:
                self._close(orphan.task)

    def reject(self, task: Task, device: DeviceId, reason: str) -> None:
        """A wrong result: the block is done again by others, unless everyone who is there was wrong."""
        job, profiles = _work(task).job, self._fleet()
        job.wrong.add(device)
        if len(job.wrong) >= _MOST_WRONG and profiles is not None and job.wrong.issuperset(profiles.names):
            fault = CleaveError(
                f"results of one {job.product.role} product were found wrong from all {len(job.wrong)} devices, the "
                f"last: {reason}; check the server's own memory, or who joins this run"
            )
            self._give_up(job, fault)

    def hedge(self, hedges: list[Hedge]) -> None:
        profiles = self._fleet()
        if profiles is None:
            return
        for hedge in hedges:
            work = _work(hedge.task)
            for missing in hedge.missing:
                block = _block(work, missing)
                try:
                    parts = self._planned(work.job, block, profiles)
                except InfeasibleError:
                    continue
                if all(part.inner == block.inner for part in parts):  # a sum of sums cannot race one sum
                    self._cut(work.job, parts, profiles.names, work.loss, of=hedge.task)

    # -------------------------------------------------------------------------------------------- parts

    def _cut(
        self, job: Job, blocks: Sequence[Block], names: tuple[str, ...], loss: _Loss | None, of: Task | None = None
    ) -> None:
        """Blocks into tasks: regions of their own, or hedges of a task's region."""
        tasks = [
            self._task(job, piece, DeviceId(names[block.device]), loss, of)
            for block in blocks
            for piece in job.product.pieces(block)
        ]
        if of is None:
            job.regions.update(task.id for task in tasks)
            if loss is not None:
                loss.open += len(tasks)
        self.handle(TasksSubmitted(tuple(tasks)))

    def _task(self, job: Job, piece: Piece, device: DeviceId, loss: _Loss | None, of: Task | None) -> Task:
        operands: dict[int, Operand] = {}
        for cut in itertools.chain.from_iterable(piece.terms):
            operand = self._staging.slice(*cut).operand
            operands[operand.id] = operand
        rows, cols = piece.rows[1] - piece.rows[0], piece.cols[1] - piece.cols[0]
        top = left = 0
        if of is not None:
            home = _work(of).piece
            top, left = of.top + piece.rows[0] - home.rows[0], of.left + piece.cols[0] - home.cols[0]
        return Task(
            id=TaskId(next(self._ids)),
            device=device,
            priority=job.priority,
            operands=tuple(operands.values()),
            rows=rows,
            cols=cols,
            result_bytes=rows * cols * DEVICE_BYTES,
            flops=2.0 * rows * cols * (piece.inner[1] - piece.inner[0]),
            up_bytes=encoded_bytes(job.format, rows, cols),
            region=None if of is None else of.region or of.id,
            top=top,
            left=left,
            work=_Work(self, job, piece, loss),
        )

    def _plan_again(self, job: Job, block: Block, loss: _Loss | None) -> None:
        if job.done.done():  # failed
            return
        profiles = self._fleet()
        if profiles is not None and job.wrong and not job.wrong.issuperset(profiles.names):
            profiles = profiles.take(np.flatnonzero([name not in job.wrong for name in profiles.names]))
        try:
            parts = self._planned(job, block, profiles) if profiles is not None else None
            reason = "no device is there"
        except InfeasibleError as fault:
            parts, reason = None, str(fault)
        if profiles is None or parts is None:
            self._parked.append((job, block, loss))
            job.parked += 1
            self._alone(reason)
            return
        whole_inner = block.inner == (0, job.product.gemm.k)
        if whole_inner and any(part.inner != block.inner for part in parts):  # now a sum, which starts from zero
            for piece in job.product.pieces(block):
                job.outputs[piece.output][slice(*piece.rows), slice(*piece.cols)] = 0
        self._cut(job, parts, profiles.names, loss)

    def _planned(self, job: Job, block: Block, profiles: Profiles) -> list[Block]:
        """By those who end it soonest: who holds an operand already, and how busy each is, counts."""
        now = self._loop.time()
        terms = [term for piece in job.product.pieces(block) for term in piece.terms]
        names = [DeviceId(name) for name in profiles.names]
        return plan_redo(
            profiles,
            block,
            job.format,
            holds_a=np.array([all(self._holds(name, a) for a, _ in terms) for name in names]),
            holds_b=np.array([all(self._holds(name, b) for _, b in terms) for name in names]),
            backlog_s=np.array([self._ledger.backlog_s(name, now) for name in names]),
        )

    def _holds(self, device: DeviceId, cut: Cut) -> bool:
        found = cut.tensor.slices.get((cut.rows, cut.cols))
        return found is not None and self._ledger.holds(device, found.operand.id)

    def _close(self, task: Task) -> None:
        """A region is complete, or all that was left of it has been planned anew."""
        work = _work(task)
        job = work.job
        job.regions.discard(task.region or task.id)
        if work.loss is not None:
            self._made_good(work.loss)
        if not job.regions and not job.parked:
            self._jobs.discard(job)
            if not job.done.done():
                job.done.set_result(job.outputs)

    def _made_good(self, loss: _Loss) -> None:
        loss.open -= 1
        if loss.open == 0:
            seconds = self._loop.time() - loss.noticed
            self._listener(events.Recovered(device=loss.device, blocks=loss.blocks, seconds=seconds))

    def _give_up(self, job: Job, fault: CleaveError) -> None:
        self._jobs.discard(job)
        _fail(job, fault)
        regions, job.regions = tuple(job.regions), set()
        self.handle(RegionsAbandoned(regions))


def _work(task: Task) -> _Work:
    return cast("_Work", task.work)


def _block(work: _Work, part: Rectangle) -> Block:
    return work.job.product.block(work.piece, (part.top, part.bottom), (part.left, part.right))


def _fail(job: Job, fault: CleaveError) -> None:
    if not job.done.done():
        job.done.set_exception(fault)


def _whole(product: Product) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    gemm = product.gemm
    return (0, gemm.m), (0, gemm.n), (0, gemm.k)
