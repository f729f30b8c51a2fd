"""The engine without sockets or numbers, in virtual time: the interface a simulator drives.

A gemm step and a resident pass on a thousand devices of different speeds, undisturbed and with departures.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.grids import sample_and_rest
from tests.support.virtual_fleet import decoder, uneven

from cleave.core.cost.rates import Pace
from cleave.core.model.gemms import Linear
from cleave.errors import CleaveError
from cleave.events import Recovered
from cleave.server.contract import Closed
from cleave.server.gemm.product import Product
from cleave.server.gemm.run import GemmRun
from cleave.sim.devices import Device
from cleave.sim.fleet import Fleet, batch_of
from cleave.sim.numberless import NoNumbers

DEVICES = 1000


@pytest.mark.parametrize("departures", sample_and_rest([60], [0]))
def test_a_gemm_step_on_a_thousand_devices_completes_despite_departures(departures: int) -> None:
    fleet = Fleet(uneven(DEVICES))
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
    fleet.check_idle()


@pytest.mark.parametrize("departures", sample_and_rest([40], [0]))
def test_a_resident_pass_on_a_thousand_devices_completes_despite_departures(departures: int) -> None:
    fleet = Fleet(uneven(DEVICES))
    model = decoder()
    run = fleet.resident(model, batch_of(model, fleet.operands))
    fleet.driver.run_until(lambda: len(fleet.driver.workers) > 0)
    holders = sorted(fleet.driver.workers)[:departures]
    for number, name in enumerate(holders):
        fleet.driver.leave(name, fleet.driver.now + 0.05 * number)
    fleet.driver.run_until(run.returned.done)
    assert run.outputs.exception() is None
    assert run.returned.exception() is None
    assert len(fleet.driver.workers) > DEVICES // 4, "the work is spread"
    recovered = {event.device for event in fleet.driver.told if isinstance(event, Recovered)}
    assert bool(recovered) == bool(departures)
    fleet.check_idle()


def test_a_device_that_fails_a_unit_each_way_is_excluded_and_the_pass_completes() -> None:
    """Without a head, backward is submitted on its own, under the plan that forward began with."""
    fleet = Fleet(uneven(8))
    model = decoder(has_head=False)
    run = fleet.resident(model, batch_of(model, fleet.operands))
    fleet.driver.run_until(lambda: len(fleet.driver.workers) > 1)
    unfit = sorted(fleet.driver.workers)[0]
    fleet.driver.failing[unfit] = 1
    fleet.driver.run_until(run.outputs.done)
    assert run.unable == {unfit}
    fleet.driver.failing[unfit] = 1
    run.backward(np.broadcast_to(np.float32(0), run.batch.x.shape))
    fleet.driver.run_until(run.returned.done)
    assert run.returned.exception() is None
    fleet.check_idle()


def test_a_loss_that_waits_for_a_device_is_reported_once_when_it_is_recovered() -> None:
    fleet = Fleet(uneven(1))
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
    fleet.check_idle()


def test_a_plan_for_a_run_that_failed_meanwhile_starts_nothing() -> None:
    fleet = Fleet(uneven(4))
    model = decoder()
    run = fleet.resident(model, batch_of(model, fleet.operands))
    fleet.driver.post(Closed(CleaveError("the server closed")))
    fleet.driver.run_until(lambda: fleet.driver.is_quiet)
    assert isinstance(run.returned.exception(), CleaveError)
    assert not fleet.driver.workers
    fleet.check_idle()


def test_a_run_whose_own_code_fails_ends_with_an_error_and_disturbs_no_other() -> None:
    class Broken(GemmRun):
        def kept(self, item: object, now: float) -> Iterator[object]:  # type: ignore[override]
            raise ZeroDivisionError

    fleet = Fleet(uneven(4))
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
    fleet.check_idle()
