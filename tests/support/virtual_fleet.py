"""A fleet of virtual devices and a Llama-like model without numbers, for runs of the real engine in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from tests.support.engine_driver import Device, NoNumbers, VirtualDriver

from cleave.core.cost.rates import Pace
from cleave.core.model.batch import Batch
from cleave.core.model.decoder import Attention, Decoder, Head, Mlp, Norm, Parameter, View, Weight
from cleave.core.model.gemms import Linear, Role
from cleave.core.plan.choose import Local, PassWork, Setting, choose_layer, plan_pass
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import InfeasibleError
from cleave.protocol.numbers import NumpyCodec
from cleave.server.contract import Run
from cleave.server.fleet_view import FleetView
from cleave.server.gemm.product import Product
from cleave.server.gemm.run import GemmRun
from cleave.server.operands import Operands, Tensor
from cleave.server.resident.audits import Audits, AuditTotals
from cleave.server.resident.run import ResidentRun

_HEAD = 64
SETTING = Setting(wire="bf16")


class Fleet:
    """A virtual driver with devices and everything runs need."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self.driver = VirtualDriver(self._plan)
        self.operands = Operands(NumpyCodec(), lambda ids: None)
        self.ids: Iterator[int] = itertools.count(1)
        for number, device in enumerate(devices):
            self.driver.join(f"d{number}", device)
        self.driver.run_until(lambda: self.driver.is_quiet)

    @property
    def view(self) -> FleetView:
        return FleetView(self.driver.engine.ledger, self.driver.engine.roster)

    def product(self, role: Role, a: Tensor, b: Tensor, linear: Linear) -> GemmRun:
        plan = choose_layer(linear, self.driver.engine.roster.profiles(), SETTING, Local()).plan
        assert plan is not None
        run = GemmRun(
            Product(role, (a,), (b,)),
            plan.blocks[role],
            NoNumbers(),
            priority=1,
            format="bf16",
            operands=self.operands,
            ids=self.ids,
            fleet=self.view,
        )
        self.driver.submit(run)
        return run

    def resident(self, decoder: Decoder, batch: Batch[Tensor], plan: ResidentPlan | None = None) -> ResidentRun:
        engine = self.driver.engine
        run = ResidentRun(
            decoder,
            batch,
            plan,
            NoNumbers(),
            format="bf16",
            gradient_format="bf16",
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
        )
        self.driver.submit(run)
        return run

    def _plan(self, run: Run) -> object:
        assert isinstance(run, ResidentRun)
        profiles = self.driver.engine.roster.profiles()
        assert profiles is not None
        work = PassWork(run.decoder, run.batch.sequences, run.batch.sequence, run.batch.is_trained, run.batch.wants_dx)
        try:
            return plan_pass(work, profiles, SETTING)
        except InfeasibleError as fault:
            return fault

    def assert_nothing_is_left(self) -> None:
        self.driver.engine.ledger.check()
        assert not self.driver.engine.ledger.is_busy
        assert not self.driver.engine.is_waiting


def uneven(count: int) -> Iterator[Device]:
    """Devices of different speeds, with 256 MB each."""
    for number in range(count):
        pace = Pace(2e10 * (1 + number % 5), 4e6 * (1 + number % 7), 2e6 * (1 + number % 3), 0.01)
        yield Device(pace, memory_bytes=256 << 20)


def decoder(
    *, layers: int = 6, hidden: int = 512, inner: int = 1536, words: int = 4096, has_head: bool = True
) -> Decoder:
    """A Llama-like decoder whose views are whole parameters."""
    shapes: list[tuple[int, int]] = []

    def weight(rows: int, cols: int) -> int:
        shapes.append((rows, cols))
        return len(shapes) - 1

    parts: list[Attention | Mlp] = []
    for _ in range(layers):
        norm = Norm(kind="rms", eps=1e-6, weight=weight(1, hidden))
        q, k, v, o = (Weight(weight=weight(hidden, hidden)) for _ in range(4))
        parts.append(Attention(norm=norm, q=q, k=k, v=v, o=o, head_dim=_HEAD, scale=_HEAD**-0.5))
        norm = Norm(kind="rms", eps=1e-6, weight=weight(1, hidden))
        gate, up = (Weight(weight=weight(inner, hidden)) for _ in range(2))
        down = Weight(weight=weight(hidden, inner))
        parts.append(Mlp(norm=norm, gate=gate, up=up, down=down, activation="silu"))
    head = Head(weight=Weight(weight=weight(words, hidden)), norm=Norm(kind="rms", eps=1e-6, weight=weight(1, hidden)))
    return Decoder(
        hidden=hidden,
        parts=tuple(parts),
        head=head if has_head else None,
        parameters=tuple(Parameter(rows, cols, True) for rows, cols in shapes),
        views=tuple(View(number, (0, rows), (0, cols)) for number, (rows, cols) in enumerate(shapes)),
    )


def batch_of(model: Decoder, operands: Operands, *, sequences: int = 32, sequence: int = 32) -> Batch[Tensor]:
    """A batch without numbers: zeros that take no memory."""
    tokens = sequences * sequence

    def zeros(rows: int, cols: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        return np.broadcast_to(np.float32(0), (rows, cols))

    return Batch(
        x=zeros(tokens, model.hidden),
        sequences=sequences,
        sequence=sequence,
        operands=tuple(operands.tensor(one.rows, one.cols, "bf16") for one in model.parameters),
        targets=zeros(tokens, 1),
        scales=zeros(tokens, 1),
        wants_dx=False,
    )
