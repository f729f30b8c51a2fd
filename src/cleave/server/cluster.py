"""The way of a product through the fleet: stage, plan, cut, submit, collect.

Callers live in any thread and wait on futures; everything else happens in the server's event loop. Plans are made in
the caller's thread, once for equal sizes and an unchanged fleet. A product whose devices left is planned anew for
what is missing; with no device at all it waits, and fails when none comes for too long.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from cleave import events
from cleave.core.cost import DEVICE_BYTES, WireFormat
from cleave.core.fleet import Profiles
from cleave.core.graph import Role
from cleave.core.ledger import (
    Accept,
    DeviceId,
    Ledger,
    OperandId,
    OperandsReleased,
    Orphan,
    Start,
    Task,
    TaskId,
    TasksSubmitted,
)
from cleave.core.planner.linear import Block, Linear, LinearPlan, plan_linear
from cleave.errors import CleaveError, FleetGoneError, InfeasibleError
from cleave.server.dispatcher import Dispatcher
from cleave.server.keys import Keys
from cleave.server.products import LAYOUTS, Piece, Product
from cleave.server.roster import Member, Roster
from cleave.server.staging import Staging, Tensor
from cleave.transport.base import Channel
from cleave.wire import messages
from cleave.wire.frame import Buffer
from cleave.wire.numbers import Codec, Matrix, NumpyCodec

_REFRESH_S = 2.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """A product on its way; `done` is resolved, in the event loop, when every element is in its place."""

    product: Product
    priority: int
    format: WireFormat
    outputs: list[Matrix]
    blocks: Sequence[Block]
    names: tuple[str, ...]
    done: Future[list[Matrix]] = field(default_factory=lambda: Future[list[Matrix]]())
    open_tasks: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """What has happened so far, over all devices, gone ones included."""

    devices: int
    down_bytes: int
    up_bytes: int
    waiting_s: float
    products: int


class Cluster:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        wire: WireFormat = "fp32",
        keys: Keys | None = None,
        codec: Codec | None = None,
        listener: events.Listener = lambda event: None,
        gone_s: float = 60.0,
    ) -> None:
        self.wire: WireFormat = wire
        self._loop, self._listener, self._gone_s = loop, _harmless(listener), gone_s
        self._codec = codec or NumpyCodec()
        self._roster, self._ledger = Roster(), Ledger()
        self._staging = Staging(self._codec, self._release)
        self._dispatcher = Dispatcher(
            ledger=self._ledger,
            roster=self._roster,
            staging=self._staging,
            keys=keys or Keys(),
            describe=self._describe,
            accepted=self._accept,
            orphaned=self._redo,
            fleet_changed=self._fleet_changed,
            listener=self._listener,
        )
        self._task_ids = itertools.count(1)
        self._tasks: dict[TaskId, tuple[Job, Piece]] = {}
        self._parked: list[tuple[Job, Block]] = []
        self._giving_up: asyncio.TimerHandle | None = None
        self._plans: dict[Linear, LinearPlan] = {}
        self._rows_suffice: set[Linear] = set()
        self._planned_for = -1
        self._planned_names: tuple[str, ...] = ()
        self._planning = threading.Lock()
        self._fleet: tuple[int, Profiles | None] = (0, None)
        self._arrival = threading.Condition()
        self._products = 0
        self._waiting_s = 0.0
        self._refresher: asyncio.TimerHandle | None = None
        self._closed: FleetGoneError | None = None

    # -------------------------------------------------------------------------------------------- any thread

    def tensor(self, rows: int, cols: int, format: WireFormat | None = None) -> Tensor:
        """An identity for a matrix; bind its numbers before it is used in a product."""
        return self._staging.tensor(rows, cols, format or self.wire)

    def plan(self, linear: Linear) -> LinearPlan | None:
        """How a layer is cut over the fleet as it is now; None while nobody is there."""
        return self._plan(linear, *self._fleet)

    def _plan(self, linear: Linear, number: int, profiles: Profiles | None) -> LinearPlan | None:
        if profiles is None:
            return None
        with self._planning:
            if number != self._planned_for:
                if profiles.names != self._planned_names:
                    self._rows_suffice.clear()
                self._plans.clear()
                self._planned_for, self._planned_names = number, profiles.names
            found = self._plans.get(linear)
            if found is None:
                # with the same devices at other speeds, what was cut by rows still is
                found = plan_linear(profiles, linear, self.wire, search=linear not in self._rows_suffice)
                self._plans[linear] = found
                if found.way == "rows":
                    self._rows_suffice.add(linear)
            return found

    def submit(
        self, role: Role, a: tuple[Tensor, ...], b: tuple[Tensor, ...], linear: Linear, *, priority: int = 1
    ) -> Future[list[Matrix]]:
        """Start a product of staged tensors; its outputs come as fp32."""
        product = Product(role, a, b)
        number, profiles = self._fleet  # one look: a plan numbers the devices of just this fleet
        found = self._plan(linear, number, profiles)
        job = Job(
            product=product,
            priority=priority,
            format=a[0].format,
            outputs=[],
            blocks=found.blocks[role] if found else (),
            names=profiles.names if profiles else (),
        )
        partial = any(block.inner != (0, product.gemm.k) for block in job.blocks)
        job.outputs = [(np.zeros if partial else np.empty)(shape, dtype=np.float32) for shape in product.outputs]
        self._products += 1
        self._loop.call_soon_threadsafe(self._start, job)
        return job.done

    def wait(self, future: Future[list[Matrix]]) -> list[Matrix]:
        """A product's outputs; the time until they are there counts as waiting."""
        started = time.perf_counter()
        try:
            return future.result()
        finally:
            self._waiting_s += time.perf_counter() - started

    def wait_for_devices(self, count: int, timeout_s: float) -> None:
        with self._arrival:
            if not self._arrival.wait_for(lambda: self.devices >= count, timeout_s):
                raise FleetGoneError(
                    f"expected {count} device{'s' if count > 1 else ''} within {timeout_s:.0f} s, but "
                    f"{self.devices or 'none'} came; start one with cleave join, or wait longer"
                )

    @property
    def devices(self) -> int:
        profiles = self._fleet[1]
        return len(profiles) if profiles else 0

    @property
    def profiles(self) -> Profiles | None:
        """The fleet as the planner sees it."""
        return self._fleet[1]

    def members(self) -> list[Member]:
        """Every device that was ever here, with what it has done."""
        return [*self._roster.past.values(), *self._roster.members.values()]

    def here(self) -> list[Member]:
        return list(self._roster.members.values())

    def totals(self) -> Totals:
        down, up = self._dispatcher.traffic()
        return Totals(self.devices, down, up, self._waiting_s, self._products)

    # -------------------------------------------------------------------------------------------- event loop

    async def serve(self, channel: Channel) -> None:
        """A device's whole stay."""
        await self._dispatcher.serve(channel)

    async def close(self, reason: str, *, rejoin: bool) -> None:
        if self._refresher is not None:
            self._refresher.cancel()
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._closed = FleetGoneError(f"the server closed: {reason}")
        self._fail(self._closed)
        await self._dispatcher.close(reason, rejoin=rejoin)

    def _start(self, job: Job) -> None:
        if job.blocks and self._closed is None:
            self._cut(job, job.blocks, job.names)
        else:  # nobody was there
            self._replan(job, Block(-1, *_whole(job.product)))

    def _cut(self, job: Job, blocks: Sequence[Block], names: tuple[str, ...]) -> None:
        """Blocks into tasks."""
        tasks: list[Task] = []
        for block in blocks:
            device = DeviceId(names[block.device])
            tasks += [self._task(job, piece, device) for piece in job.product.pieces(block)]
        job.open_tasks += len(tasks)
        self._dispatcher.handle(TasksSubmitted(tuple(tasks)))

    def _task(self, job: Job, piece: Piece, device: DeviceId) -> Task:
        operands = {
            operand.id: operand
            for a, b in piece.terms
            for operand in (self._staging.slice(*a).operand, self._staging.slice(*b).operand)
        }
        rows, cols = piece.rows[1] - piece.rows[0], piece.cols[1] - piece.cols[0]
        task = Task(
            id=TaskId(next(self._task_ids)),
            device=device,
            priority=job.priority,
            operands=tuple(operands.values()),
            rows=rows,
            cols=cols,
            result_bytes=rows * cols * DEVICE_BYTES,
        )
        self._tasks[task.id] = job, piece
        return task

    def _describe(self, start: Start) -> messages.Run:
        job, piece = self._tasks[start.task.id]
        slices = self._staging.slice
        return messages.Run(
            task=start.task.id,
            priority=start.task.priority,
            format=job.format,
            program=messages.Gemm(
                layout=LAYOUTS[job.product.role],
                terms=tuple((slices(*a).operand.id, slices(*b).operand.id) for a, b in piece.terms),
                rows=start.task.rows,
                cols=start.task.cols,
            ),
        )

    def _accept(self, accept: Accept, result: messages.Result, payload: Buffer) -> None:
        job, piece = self._tasks[accept.task.id]
        part, (top, _), (left, _) = accept.part, piece.rows, piece.cols
        out = job.outputs[piece.output][top + part.top : top + part.bottom, left + part.left : left + part.right]
        self._codec.decode_into(payload, result.format, out, add=piece.is_partial)
        if accept.finished:
            self._roster.members[accept.task.device].tasks += 1
            self._finish(accept.task.id)

    def _finish(self, task: TaskId) -> None:
        job, _ = self._tasks.pop(task)
        job.open_tasks -= 1
        if job.open_tasks == 0 and not job.done.done():
            job.done.set_result(job.outputs)

    def _redo(self, orphans: list[Orphan]) -> None:
        """Plan what is left of tasks for those who are there."""
        for orphan in orphans:
            job, piece = self._tasks.pop(orphan.task.id)
            for missing in orphan.missing:
                block = job.product.block(piece, (missing.top, missing.bottom), (missing.left, missing.right))
                self._replan(job, block)
            job.open_tasks -= 1

    def _replan(self, job: Job, block: Block) -> None:
        if self._closed is not None:
            _fail(job, self._closed)
        if job.done.done():  # failed
            return
        profiles = self._fleet[1]
        if profiles is None:
            self._park(job, block)
            return
        m, n, k = (end - start for start, end in (block.rows, block.cols, block.inner))
        linear = Linear(tokens=m, in_width=k, out_width=n, roles=("forward",))
        try:
            parts = plan_linear(profiles, linear, job.format, search=False).blocks["forward"]
        except InfeasibleError as fault:
            _fail(job, fault)
            return
        moved = [
            Block(part.device, *(_shift(of, by) for of, by in zip(part[1:], block[1:], strict=True))) for part in parts
        ]
        whole_inner = block.inner == (0, job.product.gemm.k)
        if whole_inner and any(part.inner != block.inner for part in moved):  # now a sum, which starts from zero
            for piece in job.product.pieces(block):
                job.outputs[piece.output][slice(*piece.rows), slice(*piece.cols)] = 0
        self._cut(job, moved, profiles.names)

    # -------------------------------------------------------------------------------------------- fleet

    def _fleet_changed(self) -> None:
        self._fleet = (self._roster.number, self._roster.profiles())
        with self._arrival:
            self._arrival.notify_all()
        if self._fleet[1] is not None:
            if self._giving_up is not None:
                self._giving_up.cancel()
                self._giving_up = None
            parked, self._parked = self._parked, []
            for job, block in parked:
                self._replan(job, block)
                job.open_tasks -= 1
            self._refresh_later()

    def _park(self, job: Job, block: Block) -> None:
        self._parked.append((job, block))
        job.open_tasks += 1  # so that it cannot finish without this
        if self._giving_up is None:
            self._listener(events.Paused(reason=f"no device is there; waiting {self._gone_s:.0f} s for one to join"))
            self._giving_up = self._loop.call_later(self._gone_s, self._give_up)

    def _give_up(self) -> None:
        self._giving_up = None
        self._fail(
            FleetGoneError(
                f"no device for {self._gone_s:.0f} s, so the work stopped; start devices with cleave join and resume"
            )
        )

    def _fail(self, fault: CleaveError) -> None:
        for job, _ in (*self._parked, *self._tasks.values()):
            _fail(job, fault)
        self._parked.clear()

    def _refresh_later(self) -> None:
        if self._refresher is None:
            self._refresher = self._loop.call_later(_REFRESH_S, self._refresh)

    def _refresh(self) -> None:
        self._refresher = None
        self._dispatcher.probe()
        self._roster.refresh()
        self._fleet = (self._roster.number, self._roster.profiles())
        if self._fleet[1] is not None:
            self._refresh_later()

    def _release(self, operands: tuple[OperandId, ...]) -> None:
        if self._loop.is_closed():
            return

        def release() -> None:
            self._staging.forget(operands)
            self._dispatcher.handle(OperandsReleased(operands))

        self._loop.call_soon_threadsafe(release)


def _harmless(listener: events.Listener) -> events.Listener:
    """A listener that cannot write (a full disk) must not cost a device its tasks."""

    def listen(event: events.AnyEvent) -> None:
        try:
            listener(event)
        except Exception:
            log.exception("an event could not be told: %s", event)

    return listen


def _fail(job: Job, fault: CleaveError) -> None:
    if not job.done.done():
        job.done.set_exception(fault)


def _whole(product: Product) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    gemm = product.gemm
    return (0, gemm.m), (0, gemm.n), (0, gemm.k)


def _shift(part: tuple[int, int], by: tuple[int, int]) -> tuple[int, int]:
    return part[0] + by[0], part[1] + by[0]
