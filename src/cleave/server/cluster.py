"""The fleet as training sees it: tensors, products and passes, from any thread.

Callers submit work and wait on futures; everything else happens in the server's event loop (`driver.py`), where one
engine decides. This module only connects the two and reports totals.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from cleave import events, settings
from cleave.core.cost.lease import LIVE_LOG_BYTES
from cleave.core.cost.rates import Server
from cleave.core.cost.streams import stream_format
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.decoder import Decoder
from cleave.core.model.gemms import Linear, Role
from cleave.core.model.shard import Shard
from cleave.core.plan.choose import Arrange, LayerChoice, Local, PassChoice, PassWork, Setting
from cleave.core.plan.gemm.layer import Block, LinearPlan
from cleave.core.plan.resident.few_devices import FEW
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.core.plan.resident.timeline import AHEAD
from cleave.core.schedule.members import STAND_IN, Member
from cleave.core.schedule.tasks import DeviceId
from cleave.core.verify.trust import usual_share
from cleave.core.verify.vouching import Vouching
from cleave.errors import FleetGoneError, InfeasibleError, InputError
from cleave.protocol.numbers import Codec, Matrix, NumpyCodec
from cleave.server.activity import StepActivity
from cleave.server.admission.handshake import PAUSED
from cleave.server.admission.tokens import Keys
from cleave.server.contract import EngineEvent, Run, RunSubmitted
from cleave.server.driver import Driver
from cleave.server.engine import Engine
from cleave.server.fleet_view import FleetView
from cleave.server.gemm.product import Product
from cleave.server.gemm.results import Checker, GemmResults, UncheckedResults
from cleave.server.gemm.run import GemmRun
from cleave.server.gemm.trial import ROUNDS_S, trial
from cleave.server.operands import Tensor
from cleave.server.planning import Planning, Snapshot
from cleave.server.resident.activations import Batched
from cleave.server.resident.audit_case import Replay
from cleave.server.resident.audits import Audits, AuditTotals
from cleave.server.resident.lease import Lease, Lent
from cleave.server.resident.pass_lease import PassLease
from cleave.server.resident.results import ResidentResults
from cleave.server.resident.run import ResidentRun
from cleave.server.server_cost import BYTE_S, TASK_S
from cleave.server.status import DeviceStatus, FleetStatus
from cleave.server.steps import Steps
from cleave.server.tiling import PlannedProduct
from cleave.server.vacancy import StandIn
from cleave.transport.base import Channel

_ELSEWHERE = Local()
"""The caller computes nothing that devices could."""
_UNUSED = (
    "the server alone is predicted to be faster ({}); offload always uses the devices anyway, and a larger batch or "
    "faster links may make them worthwhile"
)
_DRAINED = "drained by whoever runs the server"
_WAIT_S = 1.0
_Result = TypeVar("_Result")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals so far over all devices, including departed ones."""

    devices: int
    down_bytes: int
    up_bytes: int
    waiting_s: float
    checking_s: float
    products: int
    audited_units: int
    wrong_audits: int
    predicted_s: float | None
    """Prediction for the last step."""


class Cluster:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        wire: WireFormat = settings.WIRE,
        keys: Keys | None = None,
        codec: Codec | None = None,
        listener: events.Listener = lambda event: None,
        alone_wait_s: float = settings.ALONE_WAIT_S,
        stand_in: StandIn | None = None,
        stands_in: bool = True,
        medium_bytes_per_s: float = math.inf,
        cores: float = math.inf,
        arrange: Arrange = plan_columns,
        replay: Replay | None = None,
        draw: Callable[[], float] | None = None,
        is_scale_test: bool = False,
    ) -> None:
        """Audits need `replay`; how many there are depends on the trust that comes with `keys`.

        `stand_in` runs a device in this process: with `stands_in` whenever no other is connected, else only where work
        must not wait. `draw` returns a random number between 0 and 1, by which accounts are sampled. A scale test
        admits devices that compute nothing, and checks no result.
        """
        self.wire: WireFormat = wire
        self.loop = loop
        self._codec, self._replay = codec or NumpyCodec(), None if is_scale_test else replay
        self._results = UncheckedResults if is_scale_test else GemmResults
        self._keys = keys or Keys()
        self.engine, self._lock = Engine(), threading.RLock()
        self._fleet = FleetView(self.engine.ledger, self.engine.roster)
        self._listener = _harmless(listener)
        self._grain: events.GrainChosen | None = None
        self.planning = Planning(
            Setting(
                wire=wire,
                medium_bytes_per_s=medium_bytes_per_s,
                cores=cores,
                server=Server(task_s=TASK_S, byte_s=BYTE_S),
                log_bytes=LIVE_LOG_BYTES,
            ),
            fleet=self._snapshot,
            tell=lambda choice: self.tell(
                events.GrainChosen(grain=choice.grain, reason=choice.reason, predicted_s=choice.modeled_s)
            ),
            arrange=arrange,
            audited=self._audited,
            lenders=self._lenders,
        )
        self._checker, self._audit_totals = Checker(self._codec), AuditTotals()
        self._driver = Driver(
            loop,
            self.engine,
            lock=self._lock,
            codec=self._codec,
            keys=self._keys,
            planner=self._plan_again,
            wait_s=alone_wait_s,
            stand_in=stand_in,
            stands_in=stands_in,
            listener=self.tell,
            is_scale_test=is_scale_test,
        )
        self._steps = Steps(
            self.planning,
            self.engine.roster,
            self._lock,
            local=_ELSEWHERE,
            traffic=self._driver.traffic,
            tell=self.tell,
        )
        self._draw = draw or secrets.SystemRandom().random
        self._ids = itertools.count(1)
        self._products = self._products_then = 0
        self._is_unused = False
        self._is_closed = False
        self._drained: set[DeviceId] = set()
        self._product: PlannedProduct | None = None
        self._closing: list[Callable[[], None]] = []

    # -------------------------------------------------------------------------------------------- work

    def tensor(self, rows: int, cols: int, format: WireFormat | None = None) -> Tensor:
        """Create an identity for a matrix; bind its numbers before it is used in a product."""
        return self._driver.operands.tensor(rows, cols, format or self.wire)

    def choose_layer(self, linear: Linear, local: Local = _ELSEWHERE) -> LayerChoice:
        """Choose where a linear layer's products are computed, and by which devices; asked once per call."""
        self.check_open()
        return self.planning.layer(linear, local)

    def choose_pass(self, work: PassWork, local: Local = _ELSEWHERE, *, must: bool = False) -> PassChoice:
        """Choose whether layers stay on devices for such a batch, and which devices hold them; asked once per batch."""
        self.check_open()
        choice = self.planning.choose_pass(work, local, must=must)
        if work.is_trained and choice.is_resident:
            self._try_out()
        if work.is_trained:
            self._steps.planned(choice, local)
        return choice

    def _try_out(self) -> None:
        """Measure the owner's new devices under load, beside a pass, so that the next one may let them keep weights.

        Measure those that take part in the pass, too: a device that mostly waits for its links looks faster than it is.
        If there are many, measure only the strongest, as a plan with leases has no more devices.
        """
        with self._lock:
            own = [
                member
                for member in self.engine.roster.members.values()
                if member.level == "own" and member.name != STAND_IN
            ]
            strongest = sorted(own, key=lambda member: -member.flops.value)[:FEW]
            found = [member for member in strongest if not (member.is_measured or member.is_tried)]
            for member in found:
                member.is_tried = True
        for member in found:
            self._try_round(member, ROUNDS_S)

    def _try_round(self, member: Member, rounds_s: Sequence[float]) -> None:
        """Give a device the next round of its trial, once it is done with the one before."""
        if not rounds_s or self._is_closed or self.engine.roster.members.get(member.name) is not member:
            return
        product, blocks = trial(DeviceId(member.name), member.flops.value, rounds_s[0], self.tensor)
        run = self._product_run(product, blocks, self.wire, AHEAD)
        run.done.add_done_callback(lambda done: None if done.exception() else self._try_round(member, rounds_s[1:]))
        self._driver.post_soon(RunSubmitted(run))

    def step_ended(self) -> None:
        """Mark a step boundary: later plans may use devices that have joined since the last one."""
        if self._products == self._products_then and self.planning.kept and self.devices and not self._is_unused:
            self._is_unused = True
            reason = _UNUSED.format(self.planning.kept)
            self.tell(events.Note(text=f"devices have no work: {reason}"))
            self._driver.tell_idle(reason)
        self._products_then = self._products
        with self._lock:
            self.engine.activity.step_ended(self.loop.time())
            drained, self._drained = self._drained, set()
        for device in drained:
            self.disconnect(device, _DRAINED, rejoin=False)
        self._steps.ended()
        self.planning.step_ended()

    def submit(
        self,
        role: Role,
        a: tuple[Tensor, ...],
        b: tuple[Tensor, ...],
        plan: LinearPlan | None,
        *,
        priority: int = 1,
        format: WireFormat | None = None,
    ) -> Future[list[Matrix]]:
        """Start a product of staged tensors; its outputs are fp32. Without a plan it waits for a device.

        Results travel in `format`, by default that of the first operand.
        """
        product, blocks = Product(role, a, b), plan.blocks[role] if plan is not None else ()
        self._product = PlannedProduct(role, product.gemm, blocks)
        run = self._product_run(product, blocks, format or a[0].format, priority)
        self._start(run)
        return run.done

    def _product_run(self, product: Product, blocks: Sequence[Block], format: WireFormat, priority: int) -> GemmRun:
        inner = (0, product.gemm.k)
        has_sums = not blocks or any(block.inner != inner for block in blocks)
        return GemmRun(
            product,
            blocks,
            self._results(product, format, self._checker, has_sums=has_sums),
            priority=priority,
            format=format,
            operands=self._driver.operands,
            ids=self._ids,
            fleet=self._fleet,
        )

    def lease(self, decoder: Decoder, plan: ResidentPlan, lent: Mapping[int, Lent]) -> Lease:
        """Prepare to lend parameters to the devices that hold them alone under a plan."""
        self.check_open()
        return Lease(
            decoder,
            plan,
            lent,
            operands=self._driver.operands,
            ids=self._ids,
            fleet=self._fleet,
            post=self._post_open,
        )

    def _post_open(self, event: EngineEvent) -> None:
        self.check_open()
        self._driver.post_soon(event)

    def run(
        self,
        decoder: Decoder,
        batch: Batched,
        plan: ResidentPlan | None = None,
        lease: PassLease | None = None,
        *,
        dy: Matrix | None = None,
        is_exact: bool = False,
        is_beside: bool = False,
    ) -> ResidentRun:
        """Start a batch through a decoder's resident layers, under the plan made for it.

        With a lease, the plan is the lease's. `is_exact` brings gradients of weights back in fp32, whatever the wire.
        """
        run = ResidentRun(
            decoder,
            batch,
            plan,
            ResidentResults(decoder, self._codec, self._driver.operands, self._replay, self._audit_totals),
            format=self.wire,
            gradient_format="fp32" if is_exact else stream_format("weight gradient", self.wire),
            operands=self._driver.operands,
            ids=self._ids,
            fleet=self._fleet,
            audits=Audits(
                can_replay=self._replay is not None,
                draw=self._draw,
                roster=self.engine.roster,
                vouching=self.engine.vouching,
                totals=self._audit_totals,
            ),
            post=self._driver.post_soon,
            lease=lease,
            dy=dy,
            is_beside=is_beside,
        )
        if lease is not None:
            lease.follow(run)
        self._start(run)
        return run

    def place(self, work: PassWork) -> ResidentPlan | None:
        """Plan for the devices that are connected now; None if they cannot do it."""
        try:
            return self.planning.plan_again(work, (), ())
        except InfeasibleError:
            return None

    def rehouse(self, work: PassWork, lease: Lease, shards: Collection[Shard]) -> ResidentPlan | None:
        """Plan for a lease whose devices stay, but those of some shards; None if no other device can keep these."""
        return self.planning.rehouse(work, lease.plan, shards, lease.failed)

    def intact(self, lease: Lease) -> frozenset[int]:
        """Leased parameters that their devices still hold."""
        with self._lock:
            return lease.intact

    def _start(self, run: Run) -> None:
        self.check_open()
        self._products += 1
        if self._is_unused:
            self._is_unused = False
            self._driver.tell_idle("")
        self._driver.post_soon(RunSubmitted(run))

    def wait(self, future: Future[_Result]) -> _Result:
        """Return a future's result; time in which at least one thread is in here counts as waiting."""
        with self._steps.waiting.counted():
            while not future.done():
                with suppress(TimeoutError):  # in short waits, as Windows does not interrupt a long one
                    future.result(_WAIT_S)
            return future.result()

    def check_open(self) -> None:
        """Raise FleetGoneError if the fleet is closed."""
        if self._is_closed:
            raise FleetGoneError(
                "the fleet is closed; keep it open while you train, or continue without it after "
                "cleave.undistribute(model)"
            )

    @contextmanager
    def rescue(self) -> Generator[None]:
        """Do work that must not wait for devices: this server computes while none is connected, in any setting."""
        self._driver.rescue(is_on=True)
        try:
            yield
        finally:
            self._driver.rescue(is_on=False)

    def before_closing(self, call: Callable[[], None]) -> None:
        """Register a call to make, in the owner's thread, before the fleet closes."""
        self._closing.append(call)

    def prepare_closing(self) -> None:
        """Make the calls that `before_closing` registered, while devices are still connected."""
        for call in self._closing if not self._is_closed else ():
            call()

    @contextmanager
    def vouching(self) -> Generator[Vouching]:
        """Give access to the record of unchecked work, locked while it is used."""
        with self._lock:
            yield self.engine.vouching

    # -------------------------------------------------------------------------------------------- status

    def tell(self, event: events.AnyEvent) -> None:
        """Report an event to the owner of the fleet."""
        if isinstance(event, events.GrainChosen):
            self._grain = event
        self._listener(event)

    def wait_for_devices(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` devices are connected, or the time is up; return whether they are."""
        with self.fleet_changed:
            return self.fleet_changed.wait_for(lambda: self.devices >= count, timeout_s)

    @property
    def fleet_changed(self) -> threading.Condition:
        """Notified when a device joins or leaves."""
        return self._driver.fleet_changed

    @property
    def devices(self) -> int:
        """Number of connected devices, not counting this server itself."""
        members = self.engine.roster.members
        return len(members) - (STAND_IN in members)

    @property
    def profiles(self) -> Profiles | None:
        """The fleet as the planner sees it."""
        return self._snapshot()[1]

    def members(self) -> list[Member]:
        """Return every device that ever joined, with its record."""
        with self._lock:
            return [*self.engine.roster.past.values(), *self.engine.roster.members.values()]

    def here(self) -> list[Member]:
        with self._lock:
            return list(self.engine.roster.members.values())

    def status(self) -> FleetStatus:
        totals = self.totals()
        with self._lock:
            late, drained, paused = set(self.engine.ledger.late), set(self._drained), self.engine.roster.held
        return FleetStatus(
            devices=tuple(
                DeviceStatus.of(
                    member,
                    is_late=member.name in late,
                    is_leaving=member.name in drained,
                    token=member.key if member.key and self._keys.lists(member.key) else "",
                )
                for member in self.here()
            ),
            grain=self._grain.grain if self._grain else None,
            grain_reason=self._grain.reason if self._grain else "",
            predicted_s=self._steps.predicted_s,
            steps=self._steps.times,
            off_reason=self._steps.off_reason,
            shared_links=tuple(map(str, self.engine.roster.traffic.shared)),
            down_bytes=totals.down_bytes,
            up_bytes=totals.up_bytes,
            products=totals.products,
            waiting_s=totals.waiting_s,
            checking_s=totals.checking_s,
            paused=paused,
        )

    def plan(self) -> ResidentPlan | None:
        """The plan of the latest pass through resident layers, if that is how the model is trained now."""
        return self.planning.latest if self._grain is not None and self._grain.grain == "resident" else None

    @property
    def product(self) -> PlannedProduct | None:
        """The latest product, with the plan for it."""
        return self._product

    def activity(self) -> StepActivity | None:
        """What devices computed in the latest step."""
        with self._lock:
            return self.engine.activity.latest

    def totals(self) -> Totals:
        down, up = self._driver.traffic()
        return Totals(
            devices=self.devices,
            down_bytes=down,
            up_bytes=up,
            waiting_s=self._steps.waiting.seconds,
            checking_s=self._checker.busy_s + self._audit_totals.busy_s,
            products=self._products,
            audited_units=self._audit_totals.units,
            wrong_audits=self._audit_totals.wrong,
            predicted_s=times[-1].predicted_s if (times := self._steps.times) else None,
        )

    def _snapshot(self) -> Snapshot:
        with self._lock:
            return self.engine.roster.number, self.engine.roster.profiles()

    def _audited(self) -> dict[str, float]:
        """Share of each device's work on resident layers that is audited once the device is proven, where not 0."""
        if self._replay is None:
            return {}
        with self._lock:
            members, convicted = list(self.engine.roster.members.values()), self.engine.vouching.is_convicted
            shares = {
                member.name: usual_share("stranger" if convicted(member.key or "") else member.level, len(members))
                for member in members
                if member.level != "own"
            }
        return {name: share for name, share in shares.items() if share}

    def _lenders(self) -> frozenset[DeviceId]:
        """Devices that may keep weights: the owner's own, as what they do by themselves cannot be checked.

        And only once their speed was measured: one that is slower than it claims would have to give them back.
        """
        with self._lock:
            members, convicted = list(self.engine.roster.members.values()), self.engine.vouching.is_convicted
            return frozenset(
                DeviceId(member.name)
                for member in members
                if member.is_measured and member.level == "own"
                if member.name != STAND_IN and not convicted(member.key or "")
            )

    def _plan_again(self, run: Run) -> object:
        assert isinstance(run, ResidentRun), "only passes ask for plans"
        batch = run.batch
        work = PassWork(run.decoder, batch.sequences, batch.sequence, batch.is_trained, batch.wants_dx)
        return self.planning.plan_again(work, run.unable, run.barred)

    # -------------------------------------------------------------------------------------------- orders

    def pause(self, device: str) -> None:
        """Have a device hand its work back and stay away until it is resumed."""
        with self._lock:
            self.engine.roster.hold(self._present(device).name)
        self.disconnect(device, PAUSED, rejoin=True)

    def resume(self, device: str) -> None:
        """Let a paused device join again, which it tries every half a minute or sooner."""
        with self._lock:
            self.engine.roster.let_go(device)

    def drain(self, device: str) -> None:
        """Have a device leave when the step is over; at once if it has no work."""
        with self._lock:
            self._present(device)
            if self.engine.is_busy:
                self._drained.add(DeviceId(device))
                return
        self.disconnect(device, _DRAINED, rejoin=False)

    def ban(self, device: str) -> None:
        """Have a device leave for the rest of the run, as if its results had been wrong."""
        with self._lock:
            self._present(device).trust.lose()
        self.disconnect(device, "banned by whoever runs the server", rejoin=False)

    def _present(self, device: str) -> Member:
        member = self.engine.roster.members.get(device)
        if member is None or device == STAND_IN:
            raise InputError(f"expected a connected device, got {device!r}, which may have left just now")
        return member

    def disconnect(self, device: str, reason: str, *, rejoin: bool) -> None:
        """Disconnect a device soon; with `rejoin` it may come back."""
        self.loop.call_soon_threadsafe(lambda: self._driver.disconnect(DeviceId(device), reason, rejoin=rejoin))

    # -------------------------------------------------------------------------------------------- event loop

    async def serve(self, channel: Channel) -> None:
        """Serve a device from its hello to its last byte."""
        await self._driver.serve(channel)

    async def administers(self, token: str, address: str) -> bool:
        """Whether a token, shown by someone at an address, lets a person view and control the run."""
        return await self._driver.doorkeeper.administers(token, address)

    async def close(self, reason: str, *, rejoin: bool) -> None:
        self._is_closed = True
        await self._driver.close(FleetGoneError(f"the server closed: {reason}"), reason, rejoin=rejoin)
        self.planning.close()


def _harmless(listener: events.Listener) -> events.Listener:
    """Contain a listener's failures: one that cannot write (a full disk) must not cost a device its tasks."""

    def listen(event: events.AnyEvent) -> None:
        try:
            listener(event)
        except Exception:
            log.exception("could not report an event: %s", event)

    return listen
