"""A fleet of simulated devices, and everything that runs of the real engine need on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from cleave.core.cost.rates import Server
from cleave.core.cost.streams import stream_format
from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Batch
from cleave.core.model.decoder import Decoder
from cleave.core.model.gemms import Linear, Role
from cleave.core.plan.choose import Local, PassWork, Setting, choose_layer, plan_pass
from cleave.core.plan.gemm.layer import Block
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import InfeasibleError
from cleave.protocol.numbers import NumpyCodec
from cleave.server.contract import Run
from cleave.server.fleet_view import FleetView
from cleave.server.gemm.product import Product
from cleave.server.gemm.results import GemmResults
from cleave.server.gemm.run import GemmRun
from cleave.server.operands import Operands, Tensor
from cleave.server.resident.audits import Audits, AuditTotals
from cleave.server.resident.pass_lease import PassLease
from cleave.server.resident.results import ResidentResults
from cleave.server.resident.run import ResidentRun
from cleave.sim.devices import Device
from cleave.sim.driver import VirtualDriver
from cleave.sim.numberless import NoNumbers

SETTING = Setting(wire="bf16")


class Fleet:
    """A virtual driver with devices and everything runs need."""

    def __init__(
        self,
        devices: Iterable[Device] = (),
        *,
        setting: Setting = SETTING,
        server: Server | None = None,
        media: Mapping[str, float] | None = None,
        disconnected: Callable[[str, str], None] | None = None,
    ) -> None:
        """The planner's beliefs are in `setting`; `server` and `media` are what links truly share."""
        self._setting = setting
        self.driver = VirtualDriver(self._plan, server, media, disconnected)
        self.operands = Operands(NumpyCodec(), lambda ids: None)
        self.ids: Iterator[int] = itertools.count(1)
        for number, device in enumerate(devices):
            self.driver.join(f"d{number}", device)
        self.driver.run_until(lambda: self.driver.is_quiet)

    @property
    def view(self) -> FleetView:
        return FleetView(self.driver.engine.ledger, self.driver.engine.roster)

    def product(self, role: Role, a: Tensor, b: Tensor, linear: Linear) -> GemmRun:
        plan = choose_layer(linear, self.driver.engine.roster.profiles(), self._setting, Local()).plan
        assert plan is not None
        return self.blocks(Product(role, (a,), (b,)), plan.blocks[role])

    def blocks(self, product: Product, blocks: Sequence[Block]) -> GemmRun:
        run = GemmRun(
            product,
            blocks,
            cast("GemmResults", NoNumbers()),
            priority=1,
            format=self._setting.wire,
            operands=self.operands,
            ids=self.ids,
            fleet=self.view,
        )
        self.driver.submit(run)
        return run

    def resident(
        self,
        decoder: Decoder,
        batch: Batch[Tensor],
        plan: ResidentPlan | None = None,
        lease: PassLease | None = None,
    ) -> ResidentRun:
        engine = self.driver.engine
        run = ResidentRun(
            decoder,
            batch,
            plan,
            cast("ResidentResults", NoNumbers()),
            format=self._setting.wire,
            gradient_format=stream_format("weight gradient", self._setting.wire),
            operands=self.operands,
            ids=self.ids,
            fleet=self.view,
            audits=Audits(
                can_replay=False,
                draw=lambda: 1.0,
                roster=engine.roster,
                vouching=engine.vouching,
                totals=AuditTotals(),
            ),
            post=self.driver.post,
            lease=lease,
        )
        self.driver.submit(run)
        return run

    def check_idle(self) -> None:
        """Raise unless the ledger is consistent and has nothing left to do."""
        self.driver.engine.ledger.check()
        assert not self.driver.engine.ledger.is_busy
        assert not self.driver.engine.is_waiting

    def _plan(self, run: Run) -> object:
        assert isinstance(run, ResidentRun)
        profiles = self.driver.engine.roster.profiles()
        if profiles is None:
            return InfeasibleError("no device is connected")
        work = PassWork(run.decoder, run.batch.sequences, run.batch.sequence, run.batch.is_trained, run.batch.wants_dx)
        try:
            return plan_pass(work, profiles, self._setting)
        except InfeasibleError as fault:
            return fault


def batch_of(
    model: Decoder,
    operands: Operands,
    *,
    sequences: int = 32,
    sequence: int = 32,
    wire: WireFormat = "bf16",
    wants_dx: bool = False,
) -> Batch[Tensor]:
    """A batch without numbers: zeros that take no memory. `wants_dx`: the gradient of its input goes to the server."""
    tokens = sequences * sequence

    def zeros(rows: int, cols: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        return np.broadcast_to(np.float32(0), (rows, cols))

    return Batch(
        x=zeros(tokens, model.hidden),
        sequences=sequences,
        sequence=sequence,
        operands=tuple(operands.tensor(one.rows, one.cols, wire) for one in model.parameters),
        targets=zeros(tokens, 1),
        scales=zeros(tokens, 1),
        wants_dx=wants_dx,
    )
