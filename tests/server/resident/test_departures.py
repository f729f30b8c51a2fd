"""What a departure costs in the middle of a pass: the real engine in virtual time, without numbers."""

from __future__ import annotations

import pytest
from tests.support.plans import Layout, plan_of, stage_of
from tests.support.virtual_fleet import decoder

from cleave.core.cost.rates import Pace
from cleave.sim.devices import Device
from cleave.sim.fleet import Fleet, batch_of

MATES: Layout = [(5, [["d0", "d1"]])]
PIPELINE: Layout = [(2, [["d0"]]), (3, [["d1"]])]
FAST, SLOW = 1e9, 1e6
"""Bytes per second of an uplink: gradients take a small part of a step, or most of it."""


class Steps:
    """Steps of two devices under one plan; the figures are those of the last one."""

    def __init__(self, layout: Layout, up_bytes_per_s: float) -> None:
        self.devices = [Device(Pace(40e9, FAST, up_bytes_per_s, 0.001), 4 << 30) for _ in range(2)]
        self._fleet, self._model = Fleet(self.devices), decoder(layers=2, hidden=256, inner=704, words=1024)
        stages = [stage_of(5 * at // 2 if at else 0, count, slices, "all") for at, (count, slices) in enumerate(layout)]
        self._plan = plan_of(stages, chunk=64)

    def step(self, leaving_after_s: float | None = None) -> float:
        """Seconds of a step, in which the first device may leave."""
        for device in self.devices:
            device.computed_s, device.up_bytes = 0.0, 0
        driver = self._fleet.driver
        began = driver.now
        batch = batch_of(self._model, self._fleet.operands, sequences=8, sequence=64)
        run = self._fleet.resident(self._model, batch, self._plan)
        if leaving_after_s is not None:
            driver.leave("d0", began + leaving_after_s)
        driver.run_until(run.returned.done)
        assert run.returned.exception() is None
        self._fleet.check_idle()
        return driver.now - began

    @property
    def computed_s(self) -> list[float]:
        return [device.computed_s for device in self.devices]

    @property
    def up_bytes(self) -> list[int]:
        return [device.up_bytes for device in self.devices]


@pytest.mark.parametrize("at", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("layout", [MATES, PIPELINE], ids=["mates", "pipeline"])
def test_what_a_device_had_done_takes_no_longer_to_compute_again(layout: Layout, at: float) -> None:
    """The device that does it keeps as much for backward as the other did, also of what it only rebuilds."""
    steps = Steps(layout, FAST)
    steps.step()
    usual_s, usual = steps.step(), steps.computed_s
    steps.step(leaving_after_s=at * usual_s)
    assert sum(steps.computed_s) - sum(usual) <= usual[0]
    assert steps.computed_s[1] > usual[1], "it did the other's part"


@pytest.mark.parametrize("at", [0.2, 0.4, 0.6])
def test_gradients_lost_while_they_were_read_travel_with_those_of_the_mate(at: float) -> None:
    """Part of the way through the uploads, which end a step and take most of it."""
    steps = Steps(MATES, SLOW)
    steps.step()
    usual_s, usual, sent = steps.step(), steps.computed_s, steps.up_bytes
    reading_s = sent[1] / SLOW
    assert reading_s > 0.8 * usual_s
    lost_s = steps.step(leaving_after_s=usual_s - (1 - at) * reading_s) - usual_s
    assert steps.up_bytes[1] <= 1.15 * sent[1], "not all of it twice"
    assert lost_s <= usual[0] + 0.15 * reading_s
