"""Real training in virtual time: torch, leases and the engine are those of a live run, devices and links are simulated.

Devices answer zeros, so only seconds and bytes mean anything. What the server computes takes no time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from cleave.core.cost.lease import LIVE_LOG_BYTES
from cleave.core.cost.streams import stream_format
from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Matrix
from cleave.core.model.decoder import Decoder
from cleave.core.model.gemms import Linear
from cleave.core.model.shard import Shard
from cleave.core.plan.choose import LayerChoice, Local, PassChoice, PassWork, Setting
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.core.schedule.tasks import OperandsReleased, Task
from cleave.errors import InfeasibleError
from cleave.protocol.numbers import NumpyCodec
from cleave.server.contract import EngineEvent, Run, RunSubmitted
from cleave.server.fleet_view import FleetView
from cleave.server.operands import Operands, Tensor
from cleave.server.planning import Planning
from cleave.server.resident.activations import Batched
from cleave.server.resident.audits import Audits, AuditTotals
from cleave.server.resident.lease import Lease, Lent
from cleave.server.resident.results import ResidentResults
from cleave.server.resident.run import ResidentRun
from cleave.sim.devices import Device
from cleave.sim.driver import VirtualDriver

_ALONE = Local()
_Result = TypeVar("_Result")


class VirtualTraining:
    """A fleet in virtual time that models can be distributed to."""

    def __init__(
        self,
        devices: Mapping[str, Device],
        *,
        wire: WireFormat = "bf16",
        arrange: Callable[..., ResidentPlan] = plan_columns,
    ) -> None:
        self.wire: WireFormat = wire
        self.driver = VirtualDriver(self._plan, answer=_zeros)
        self._codec, self._ids = NumpyCodec(), itertools.count(1)
        self._operands = Operands(self._codec, lambda ids: self.driver.post(OperandsReleased(ids)))
        engine = self.driver.engine
        self._fleet = FleetView(engine.ledger, engine.roster)
        self.planning = Planning(
            Setting(wire=wire, log_bytes=LIVE_LOG_BYTES),
            fleet=lambda: (engine.roster.number, engine.roster.profiles()),
            tell=lambda choice: None,
            arrange=arrange,
        )
        for name, device in devices.items():
            self.driver.join(name, device)
        self.driver.run_until(lambda: self.driver.is_quiet)

    def tensor(self, rows: int, cols: int, format: WireFormat | None = None) -> Tensor:
        return self._operands.tensor(rows, cols, format or self.wire)

    def choose_layer(self, linear: Linear, local: Local = _ALONE) -> LayerChoice:
        raise AssertionError("layers are resident")

    def submit(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("layers are resident")

    def choose_pass(self, work: PassWork, local: Local = _ALONE, *, must: bool = False) -> PassChoice:
        return self.planning.choose_pass(work, local, must=must)

    def step_ended(self) -> None:
        self.planning.step_ended()

    def lease(self, decoder: Decoder, plan: ResidentPlan, lent: Mapping[int, Lent]) -> Lease:
        return Lease(
            decoder,
            plan,
            lent,
            operands=self._operands,
            ids=self._ids,
            fleet=self._fleet,
            post=self._post,
        )

    def run(
        self,
        decoder: Decoder,
        batch: Batched,
        plan: ResidentPlan | None = None,
        lease: Any = None,
        *,
        dy: Matrix | None = None,
        is_exact: bool = False,
        is_beside: bool = False,
    ) -> ResidentRun:
        engine = self.driver.engine
        run = ResidentRun(
            decoder,
            batch,
            plan,
            ResidentResults(decoder, self._codec, self._operands, None, AuditTotals()),
            format=self.wire,
            gradient_format="fp32" if is_exact else stream_format("weight gradient", self.wire),
            operands=self._operands,
            ids=self._ids,
            fleet=self._fleet,
            audits=Audits(
                can_replay=False,
                draw=lambda: 1.0,
                roster=engine.roster,
                vouching=engine.vouching,
                totals=AuditTotals(),
            ),
            post=self._post,
            lease=lease,
            dy=dy,
            is_beside=is_beside,
        )
        if lease is not None:
            lease.follow(run)
        self._post(RunSubmitted(run))
        return run

    def place(self, work: PassWork) -> ResidentPlan | None:
        try:
            return self.planning.plan_again(work, (), ())
        except InfeasibleError:
            return None

    def rehouse(self, work: PassWork, lease: Lease, shards: Collection[Shard]) -> ResidentPlan | None:
        return self.planning.rehouse(work, lease.plan, shards, lease.failed)

    def intact(self, lease: Lease) -> frozenset[int]:
        return lease.intact

    @contextmanager
    def rescue(self) -> Generator[None]:
        yield

    def before_closing(self, call: Callable[[], None]) -> None:
        pass

    def wait(self, future: Future[_Result]) -> _Result:
        self.driver.run_until(future.done)
        return future.result()

    def _post(self, event: EngineEvent) -> None:
        """Let the engine learn of something while the caller goes on, as from another thread."""
        self.driver.post(event)
        self.driver.catch_up()

    def _plan(self, run: Run) -> object:
        assert isinstance(run, ResidentRun), "only passes ask for plans"
        batch = run.batch
        work = PassWork(run.decoder, batch.sequences, batch.sequence, batch.is_trained, batch.wants_dx)
        return self.planning.plan_again(work, run.unable, run.barred)


def _zeros(task: Task) -> bytes:
    return bytes(task.up_bytes)
