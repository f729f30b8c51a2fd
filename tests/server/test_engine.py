"""The engine without sockets or numbers, in virtual time: the interface a simulator drives.

A gemm step and a resident pass on a thousand devices of different speeds, undisturbed and with departures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.engine_driver import Device, NoNumbers, VirtualDriver
from tests.support.grids import fast_and_slow

from cleave.core.cost.rates import Pace
from cleave.core.model.batch import Batch
from cleave.core.model.decoder import Attention, Decoder, Head, Mlp, Norm, Parameter, View, Weight
from cleave.core.model.gemms import Linear, Role
from cleave.core.plan.choose import Local, PassWork, Setting, choose_layer, plan_pass
from cleave.errors import CleaveError, InfeasibleError
from cleave.events import Recovered
from cleave.protocol.numbers import NumpyCodec
from cleave.server.contract import Closed, Run
from cleave.server.fleet_view import FleetView
from cleave.server.gemm.product import Product
from cleave.server.gemm.run import GemmRun
from cleave.server.operands import Operands, Tensor
from cleave.server.resident.audits import Audits, AuditTotals
from cleave.server.resident.run import ResidentRun

DEVICES = 1000
SETTING = Setting(wire="bf16")
LAYERS, HIDDEN, INNER, WORDS, HEAD = 6, 512, 1536, 4096, 64
SEQUENCES, SEQUENCE = 32, 32


class Fleet:
    """A virtual driver with devices and everything runs need."""

    def __init__(self, count: int = DEVICES) -> None:
        self.driver = VirtualDriver(self._plan)
        self.operands = Operands(NumpyCodec(), lambda ids: None)
        self.ids: Iterator[int] = itertools.count(1)
        for number in range(count):
            pace = Pace(2e10 * (1 + number % 5), 4e6 * (1 + number % 7), 2e6 * (1 + number % 3), 0.01)
            self.driver.join(f"d{number}", Device(pace, memory_bytes=256 << 20))
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

    def resident(self, decoder: Decoder, batch: Batch[Tensor]) -> ResidentRun:
        engine = self.driver.engine
        run = ResidentRun(
            decoder,
            batch,
            None,
            NoNumbers(),
            format="bf16",
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
        work = PassWork(run.decoder, run.batch.sequences, run.batch.sequence, run.batch.is_trained)
        try:
            return plan_pass(work, profiles, SETTING)
        except InfeasibleError as fault:
            return fault

    def assert_nothing_is_left(self) -> None:
        self.driver.engine.ledger.check()
        assert not self.driver.engine.ledger.is_busy
        assert not self.driver.engine.is_waiting


def decoder(*, has_head: bool = True) -> Decoder:
    """A Llama-like decoder whose views are whole parameters."""
    shapes: list[tuple[int, int]] = []

    def weight(rows: int, cols: int) -> int:
        shapes.append((rows, cols))
        return len(shapes) - 1

    parts: list[Attention | Mlp] = []
    for _ in range(LAYERS):
        norm = Norm(kind="rms", eps=1e-6, weight=weight(1, HIDDEN))
        q, k, v, o = (Weight(weight=weight(HIDDEN, HIDDEN)) for _ in range(4))
        parts.append(Attention(norm=norm, q=q, k=k, v=v, o=o, head_dim=HEAD, scale=HEAD**-0.5))
        norm = Norm(kind="rms", eps=1e-6, weight=weight(1, HIDDEN))
        gate, up = (Weight(weight=weight(INNER, HIDDEN)) for _ in range(2))
        down = Weight(weight=weight(HIDDEN, INNER))
        parts.append(Mlp(norm=norm, gate=gate, up=up, down=down, activation="silu"))
    head = Head(weight=Weight(weight=weight(WORDS, HIDDEN)), norm=Norm(kind="rms", eps=1e-6, weight=weight(1, HIDDEN)))
    return Decoder(
        hidden=HIDDEN,
        parts=tuple(parts),
        head=head if has_head else None,
        parameters=tuple(Parameter(rows, cols, True) for rows, cols in shapes),
        views=tuple(View(number, (0, rows), (0, cols)) for number, (rows, cols) in enumerate(shapes)),
    )


def batch_of(model: Decoder, operands: Operands) -> Batch[Tensor]:
    """A batch without numbers: zeros that take no memory."""
    tokens = SEQUENCES * SEQUENCE

    def zeros(rows: int, cols: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        return np.broadcast_to(np.float32(0), (rows, cols))

    return Batch(
        x=zeros(tokens, HIDDEN),
        sequences=SEQUENCES,
        sequence=SEQUENCE,
        operands=tuple(operands.tensor(one.rows, one.cols, "bf16") for one in model.parameters),
        targets=zeros(tokens, 1),
        scales=zeros(tokens, 1),
        wants_dx=False,
    )


@pytest.mark.parametrize("departures", fast_and_slow([60], [0]))
def test_a_gemm_step_on_a_thousand_devices_completes_despite_departures(departures: int) -> None:
    fleet = Fleet()
    tokens, width, out = 4096, 1024, 4096
    linear = Linear(tokens=tokens, in_width=width, out_width=out)
    x, w, dy = (fleet.operands.tensor(r, c, "bf16") for r, c in ((tokens, width), (out, width), (tokens, out)))
    runs = [fleet.product("forward", x, w, linear), fleet.product("grad_input", dy, w, linear)]
    runs.append(fleet.product("grad_weight", dy, x, linear))
    for number in range(departures):
        fleet.driver.leave(f"d{number * 13}", fleet.driver.now + 0.005 + 0.003 * number)
    fleet.driver.run_until(lambda: all(run.done.done() for run in runs))
    assert not [run for run in runs if run.done.exception()]
    assert len(fleet.driver.workers) > DEVICES // 4, "the work is spread"
    fleet.assert_nothing_is_left()


@pytest.mark.parametrize("departures", fast_and_slow([40], [0]))
def test_a_resident_pass_on_a_thousand_devices_completes_despite_departures(departures: int) -> None:
    fleet = Fleet()
    model = decoder()
    run = fleet.resident(model, batch_of(model, fleet.operands))
    fleet.driver.run_until(lambda: len(fleet.driver.workers) > 0)
    holders = sorted(fleet.driver.workers)[:departures]
    for number, name in enumerate(holders):
        fleet.driver.leave(name, fleet.driver.now + 0.05 * number)
    fleet.driver.run_until(run.returned.done)
    assert run.outputs.exception() is None
    assert run.returned.exception() is None
    assert len(fleet.driver.workers) > DEVICES // 2, "the work is spread"
    recovered = {event.device for event in fleet.driver.told if isinstance(event, Recovered)}
    assert bool(recovered) == bool(departures)
    fleet.assert_nothing_is_left()


def test_a_device_that_fails_a_unit_each_way_is_excluded_and_the_pass_completes() -> None:
    """Without a head, backward is submitted on its own, under the plan that forward began with."""
    fleet = Fleet(8)
    model = decoder(has_head=False)
    run = fleet.resident(model, batch_of(model, fleet.operands))
    fleet.driver.run_until(lambda: len(fleet.driver.workers) > 1)
    unfit = sorted(fleet.driver.workers)[0]
    fleet.driver.failing[unfit] = 1
    fleet.driver.run_until(run.outputs.done)
    assert run.unable == {unfit}
    fleet.driver.failing[unfit] = 1
    run.backward(np.broadcast_to(np.float32(0), (SEQUENCES * SEQUENCE, HIDDEN)))
    fleet.driver.run_until(run.returned.done)
    assert run.returned.exception() is None
    fleet.assert_nothing_is_left()


def test_a_loss_that_waits_for_a_device_is_reported_once_when_it_is_recovered() -> None:
    fleet = Fleet(1)
    linear = Linear(tokens=4096, in_width=1024, out_width=1024)
    x, w = fleet.operands.tensor(4096, 1024, "bf16"), fleet.operands.tensor(1024, 1024, "bf16")
    run = fleet.product("forward", x, w, linear)
    fleet.driver.run_until(lambda: len(fleet.driver.workers) > 0)
    fleet.driver.leave("d0", fleet.driver.now)
    fleet.driver.run_until(lambda: fleet.driver.engine.is_waiting)
    assert not [event for event in fleet.driver.told if isinstance(event, Recovered)]
    fleet.driver.join("d1", Device(Pace(2e10, 4e6, 2e6, 0.01), memory_bytes=256 << 20))
    fleet.driver.run_until(run.done.done)
    assert [event.device for event in fleet.driver.told if isinstance(event, Recovered)] == ["d0"]
    fleet.assert_nothing_is_left()


def test_a_plan_for_a_run_that_failed_meanwhile_starts_nothing() -> None:
    fleet = Fleet(4)
    model = decoder()
    run = fleet.resident(model, batch_of(model, fleet.operands))
    fleet.driver.post(Closed(CleaveError("the server closed")))
    fleet.driver.run_until(lambda: fleet.driver.is_quiet)
    assert isinstance(run.returned.exception(), CleaveError)
    assert not fleet.driver.workers
    fleet.assert_nothing_is_left()


def test_a_run_whose_own_code_fails_ends_with_an_error_and_disturbs_no_other() -> None:
    class Broken(GemmRun):
        def kept(self, item: object, now: float) -> Iterator[object]:  # type: ignore[override]
            raise ZeroDivisionError

    fleet = Fleet(4)
    linear = Linear(tokens=64, in_width=32, out_width=32)
    x, w = fleet.operands.tensor(64, 32, "bf16"), fleet.operands.tensor(32, 32, "bf16")
    good = fleet.product("forward", x, w, linear)
    bad = Broken(
        Product("forward", (x,), (w,)),
        (),
        NoNumbers(),
        priority=1,
        format="bf16",
        operands=fleet.operands,
        ids=fleet.ids,
        fleet=fleet.view,
    )
    fleet.driver.submit(bad)
    fleet.driver.run_until(lambda: good.done.done() and bad.done.done())
    assert good.done.exception() is None
    assert isinstance(bad.done.exception(), CleaveError)
    fleet.assert_nothing_is_left()
