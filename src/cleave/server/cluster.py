"""The way of a product through the fleet: stage, plan, submit, and wait for what `jobs.py` collects.

Callers live in any thread and wait on futures; everything else happens in the server's event loop. Plans are made in
the caller's thread, once for equal sizes and an unchanged fleet. With no device at all products wait: for one to join,
or for this server itself to compute, if it may.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cleave import events
from cleave.core.cost.gemm import WireFormat
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.gemms import Role
from cleave.core.plan.gemm.layer import Linear, LinearPlan, plan_linear
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import ColumnPlan
from cleave.core.schedule.ledger import Ledger
from cleave.core.schedule.members import STAND_IN, Member, Roster
from cleave.core.schedule.tasks import DeviceId, DeviceLeft, OperandId, OperandsReleased
from cleave.core.verify.recompute import Policy
from cleave.errors import FleetGoneError, InfeasibleError
from cleave.protocol.decoder import Batch, Stack
from cleave.protocol.numbers import Codec, Matrix, NumpyCodec
from cleave.server.admission.tokens import Keys
from cleave.server.audits import Audits, Replay
from cleave.server.connections import Dispatcher
from cleave.server.gemm_run import Job, Jobs
from cleave.server.grain import Arrange, Grains
from cleave.server.operands import Staging, Tensor
from cleave.server.product_checks import Inspector
from cleave.server.products import Product
from cleave.server.resident_run import Passes, PassRun
from cleave.transport.base import Channel
from cleave.transport.memory import memory_pair

_REFRESH_S = 2.0
_IDLE_S = 30.0
"""Without work for so long while others had some, a device is told why."""

_Result = TypeVar("_Result")

StandIn = Callable[[Channel], Coroutine[None, None, None]]
"""A device in the server's own process, at its end of a channel."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Totals:
    """What has happened so far, over all devices, gone ones included."""

    devices: int
    down_bytes: int
    up_bytes: int
    waiting_s: float
    checking_s: float
    products: int
    audited_units: int
    wrong_audits: int


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
        stand_in: StandIn | None = None,
        medium_bytes_per_s: float = math.inf,
        arrange: Arrange = plan_columns,
        trust: Policy = "sample",
        replay: Replay | None = None,
        audit_rng: np.random.Generator | None = None,
    ) -> None:
        """`replay` makes audits possible, as `trust` says."""
        self.wire: WireFormat = wire
        self._loop, self._listener, self._gone_s, self._stand_in = loop, _harmless(listener), gone_s, stand_in
        codec = codec or NumpyCodec()
        self._roster, self._ledger, self._inspector = Roster(), Ledger(), Inspector(codec)
        self._staging = Staging(codec, self._release)
        self.medium_bytes_per_s = medium_bytes_per_s
        """Shared by everything down and up, as on one Wi-Fi."""
        ids = itertools.count(1)
        self._jobs = Jobs(
            loop,
            ids=ids,
            ledger=self._ledger,
            staging=self._staging,
            inspector=self._inspector,
            fleet=lambda: self._fleet[1],
            alone=self._wait_or_compute,
            listener=self._listener,
        )
        self.grains = Grains(
            wire,
            fleet=lambda: self._fleet,
            medium_bytes_per_s=medium_bytes_per_s,
            arrange=arrange,
            say=lambda text: self._listener(events.Note(text=text)),
        )
        self._audits = Audits(
            loop,
            policy=trust,
            replay=replay,
            staging=self._staging,
            roster=self._roster,
            listener=self._listener,
            rng=audit_rng,
        )
        self._audits.part = lambda device, reason: self._dispatcher.part(device, reason, rejoin=False)
        self._passes = Passes(
            loop,
            ids=ids,
            ledger=self._ledger,
            staging=self._staging,
            codec=codec,
            fleet=lambda: self._fleet[1],
            planner=self._plan_pass,
            audits=self._audits,
            alone=self._wait_or_compute,
            listener=self._listener,
        )
        self._dispatcher = Dispatcher(
            loop,
            ledger=self._ledger,
            roster=self._roster,
            staging=self._staging,
            keys=keys or Keys(),
            fleet_changed=self._fleet_changed,
            left=self._device_left,
            listener=self._listener,
        )
        self._jobs.handle = self._passes.handle = self._dispatcher.handle
        self._standing_in: set[asyncio.Task[None]] = set()
        self._giving_up: asyncio.TimerHandle | None = None
        self._plans: dict[Linear, LinearPlan] = {}
        self._rows_suffice: set[Linear] = set()
        self._planned_for = -1
        self._planned_names: tuple[str, ...] = ()
        self._planning = threading.Lock()
        self._fleet: tuple[int, Profiles | None] = (0, None)
        self.devices = 0
        """How many are there, this server itself not counted."""
        self._arrival = threading.Condition()
        self._products = 0
        self._waiting_s = 0.0
        self._refresher: asyncio.TimerHandle | None = None

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
        try:
            found = self._plan(linear, number, profiles)
        except InfeasibleError:  # for those who are there now: it waits for others, and says so
            found = None
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
        self._loop.call_soon_threadsafe(self._jobs.start, job)
        return job.done

    def may_run(
        self, stack: Stack, sequences: int, sequence: int, is_trained: bool, *, must: bool = False
    ) -> str | None:
        """None: layers shall be resident for such a batch; else why not. With `must` only if they cannot be."""
        return self.grains.why_not(stack, sequences, sequence, is_trained, must=must)

    def run(self, stack: Stack, batch: Batch) -> PassRun:
        """Start a batch on its way through a stack of resident layers."""
        self._products += 1
        with suppress(InfeasibleError):  # it waits for others, and says so
            self.grains.plan(stack, batch)  # here, as it takes time that the event loop does not have
        return self._passes.start(stack, batch, self.wire)

    def wait(self, future: Future[_Result]) -> _Result:
        """What was asked for; the time until it is there counts as waiting."""
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
        checking_s = self._inspector.busy_s + self._audits.busy_s
        audits = self._audits.units, self._audits.wrong
        return Totals(self.devices, down, up, self._waiting_s, checking_s, self._products, *audits)

    # -------------------------------------------------------------------------------------------- event loop

    async def serve(self, channel: Channel) -> None:
        """A device's whole stay."""
        await self._dispatcher.serve(channel)

    async def close(self, reason: str, *, rejoin: bool) -> None:
        for timer in (self._refresher, self._giving_up):
            if timer is not None:
                timer.cancel()
        for work in (self._jobs, self._passes):
            work.fail(FleetGoneError(f"the server closed: {reason}"), for_good=True)
        await self._dispatcher.close(reason, rejoin=rejoin)

    # -------------------------------------------------------------------------------------------- fleet

    def _look(self) -> None:
        """At who is there, for those who plan and those who wait."""
        self._fleet = (self._roster.number, self._roster.profiles())
        self.devices = len(self._roster.members.keys() - {STAND_IN})
        with self._arrival:
            self._arrival.notify_all()

    def _device_left(self, device: DeviceId) -> None:
        """What it had goes to others, of whom it is none any more."""
        self._look()
        self._dispatcher.handle(DeviceLeft(device), device)
        self._passes.left(device)

    def _fleet_changed(self) -> None:
        """Someone came, or is late, or no longer."""
        self._look()
        if self._fleet[1] is not None:
            if self._giving_up is not None:
                self._giving_up.cancel()
                self._giving_up = None
            if self.devices and STAND_IN in self._roster.members:
                self._dispatcher.part(STAND_IN, "a device is there again", rejoin=False)
            self._jobs.unpark()
            self._passes.unpark()
            self._passes.lag({DeviceId(name) for name, member in self._roster.members.items() if member.is_late})
            self._refresh_later()

    def _plan_pass(
        self, stack: Stack, batch: Batch, unable: Collection[DeviceId], barred: Collection[DeviceId], *, anew: bool
    ) -> tuple[ColumnPlan, tuple[str, ...]]:
        """Without those who could not do it and, if the others can, without those who were found wrong."""
        if barred:
            with suppress(InfeasibleError):
                return self.grains.plan(stack, batch, self._without({*unable, *barred}))
        return self.grains.plan(stack, batch, self._without(unable) if unable else None, anew=anew)

    def _without(self, devices: Collection[DeviceId]) -> tuple[int, Profiles]:
        number, profiles = self._fleet
        names = profiles.names if profiles is not None else ()
        others = np.flatnonzero([name not in devices for name in names])
        if profiles is None or not len(others):
            raise InfeasibleError("no device is there that can do it")
        return hash((number, frozenset(devices))), profiles.take(others)

    def _wait_or_compute(self, reason: str) -> None:
        """Work is there and nobody who can do it."""
        if self._giving_up is not None or self._standing_in:
            return
        if self._stand_in is not None and not self._roster.members:
            self._listener(events.Paused(reason="no device is there; this server computes until one joins"))
            servers, devices = memory_pair()
            for stay in (self._dispatcher.serve(servers, own=STAND_IN), self._stand_in(devices)):
                task = self._loop.create_task(stay)
                self._standing_in.add(task)
                task.add_done_callback(self._stood_in)
            return
        self._listener(events.Paused(reason=f"{reason}; waiting {self._gone_s:.0f} s for one to join"))
        self._giving_up = self._loop.call_later(self._gone_s, self._give_up, reason)

    def _stood_in(self, stay: asyncio.Task[None]) -> None:
        """The server no longer stands in; someone else may have come and gone meanwhile."""
        self._standing_in.discard(stay)
        is_parked = self._jobs.is_parked or self._passes.is_parked
        if not self._standing_in and is_parked and not self._roster.members:
            self._wait_or_compute("no device is there")

    def _give_up(self, reason: str) -> None:
        self._giving_up = None
        waited = f"{reason}, for {self._gone_s:.0f} s, so the work stopped; start devices with cleave join and resume"
        for work in (self._jobs, self._passes):
            work.fail(FleetGoneError(waited), for_good=False)

    def _refresh_later(self) -> None:
        if self._refresher is None:
            self._refresher = self._loop.call_later(_REFRESH_S, self._refresh)

    def _refresh(self) -> None:
        self._refresher = None
        self._dispatcher.heartbeat()
        self._roster.refresh()
        self._fleet = (self._roster.number, self._roster.profiles())
        self._tell_idle_ones()
        if self._fleet[1] is not None:
            self._refresh_later()

    def _tell_idle_ones(self) -> None:
        """Plans leave out who would make the others wait."""
        now = self._loop.time()
        for member in self._roster.members.values():
            if self._ledger.unfinished(DeviceId(member.name)) or member.tasks_then != member.tasks:
                member.idle_since, member.was_told_idle, member.products_then = now, False, self._products
                member.tasks_then = member.tasks
            has_missed_some = self._products - member.products_then > 1
            if now - member.idle_since > _IDLE_S and has_missed_some and not member.was_told_idle:
                member.was_told_idle = True
                self._dispatcher.tell_idle(
                    member.name,
                    f"at {member.flops.value / 1e9:.1f} GFLOP/s, {member.down.value / 1e6:.1f} MB/s down and "
                    f"{member.up.value / 1e6:.1f} MB/s up, the others end sooner without this device; it is in reserve",
                )

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
