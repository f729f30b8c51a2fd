"""Laws of leases over many steps: only devices whose speed is known keep weights, and moves do not cost much.

Steps run on the real engine in virtual time. Every processor has a quota that probes do not show.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from statistics import median

import pytest
from tests.support.leased_steps import LeasedSteps
from tests.support.virtual_fleet import decoder

from cleave.core.cost.rates import Pace
from cleave.core.plan.choose import Setting
from cleave.core.plan.resident.timeline import AHEAD
from cleave.core.schedule.tasks import Task
from cleave.errors import LeaseLost
from cleave.server.resident.lease import Lease
from cleave.sim.devices import Device, Job, LineName
from cleave.sim.fleet import Fleet

MBIT = 1e6 / 8
FLEETS = {
    "home4": [(100, 20), (100, 20), (200, 40), (50, 10)],
    "wifi4": [(300, 300)] * 4,
    "mixed8": [(200, 40), (150, 30), (100, 20), (100, 20), (80, 16), (50, 10), (40, 8), (20, 5)],
}
MODEL = decoder(layers=4, hidden=256, inner=768, words=256)
SETTING = Setting(wire="bf16")
QUOTA = 0.375


@pytest.mark.parametrize("too_high", [1.0, 8.0])
@pytest.mark.parametrize("name", FLEETS)
def test_weights_stay_on_measured_devices_and_seldom_move(name: str, too_high: float) -> None:
    """The last device claims even more than the others."""
    fleet = Fleet(setting=SETTING, media={"air": 300 * MBIT})
    for number, (down, up) in enumerate(FLEETS[name]):
        pace = Pace(50e9 * QUOTA, down * MBIT, up * MBIT, 0.002, 0.002)
        device = Device(pace, 2 << 30, medium="air" if name == "wifi4" else "")
        is_last = number == len(FLEETS[name]) - 1
        fleet.driver.join(f"{name}-{number}", device, claim=(too_high if is_last else 1.0) / QUOTA)
    fleet.driver.run_until(lambda: fleet.driver.is_quiet)
    training = LeasedSteps(fleet, MODEL, SETTING, sequences=8, sequence=256)
    steps = [training.step() for _ in range(10)]
    assert all(step.lenders <= step.measured for step in steps)
    assert steps[-1].lenders, "some keep weights in the end"
    usual_s = median(step.seconds for step in steps)
    assert max(step.seconds for step in steps) < 3.5 * usual_s
    assert sum(before.lenders != after.lenders for before, after in itertools.pairwise(steps)) <= 2


@dataclass(slots=True, eq=False)
class Noting(Device):
    """A device that notes what it sends."""

    sent: list[Task] = field(default_factory=lambda: list[Task]())

    def size(self, line: LineName, job: Job) -> int:
        if line == "up":
            self.sent.append(job.task)
        return Device.size(self, line, job)


def leased(fleet: Fleet) -> Lease:
    """Train until devices keep weights."""
    training = LeasedSteps(fleet, MODEL, SETTING, sequences=8, sequence=256)
    while training.lease is None:
        training.step()
    return training.lease


def test_no_urgent_result_waits_long_for_a_snapshot() -> None:
    devices = [Noting(Pace(20e9, down * MBIT, up * MBIT, 0.002, 0.002), 2 << 30) for down, up in FLEETS["home4"]]
    fleet = Fleet(devices, setting=SETTING)
    lease = leased(fleet)
    for device in devices:
        device.sent.clear()
    snapshot = lease.snapshot(lease.parameters)
    fleet.driver.run_until(snapshot.done.done)
    for device in devices:
        assert all(task.up_bytes / device.pace.up_bytes_per_s < 0.1 for task in device.sent if task.rows > 1)
        assert all(task.priority == AHEAD for task in device.sent if task.rows > 1)
    weights = sum(MODEL.parameters[number].rows * MODEL.parameters[number].cols for number in lease.parameters)
    assert sum(task.rows * task.cols for device in devices for task in device.sent) >= 3 * weights


def test_a_snapshot_of_a_device_that_has_just_left_is_lost_with_it() -> None:
    fleet = Fleet([Device(Pace(20e9, 100 * MBIT, 20 * MBIT, 0.002, 0.002), 2 << 30)] * 2, setting=SETTING)
    lease = leased(fleet)
    fleet.driver.leave(min(lease.devices))
    snapshot = lease.snapshot(lease.parameters)
    fleet.driver.run_until(snapshot.done.done)
    with pytest.raises(LeaseLost):
        snapshot.done.result()
    assert not lease.parameters <= lease.intact
