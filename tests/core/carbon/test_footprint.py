"""Laws of footprints, and cases done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.core.carbon.energy import Use, awake_idle, footprint, joules_per_flop, kgco2e_per_flop
from cleave.core.carbon.footprint import Footprint, Part
from cleave.core.carbon.power import DevicePower, ServerPower

POWER = DevicePower(
    load_w=np.array([10.0, 100.0]),
    idle_w=np.array([2.0, 20.0]),
    charger_efficiency=np.array([0.5, 0.8]),
    network_j_per_byte=np.array([1e-4, 5e-4]),
    kgco2e_per_kwh=np.array([0.36, 0.72]),
    embodied_kgco2e=np.array([50.0, 200.0]),
    lifetime_s=np.array([1e8, 2e8]),
)
SERVER = ServerPower(watts=100.0, pue=1.5, kgco2e_per_kwh=0.36, embodied_kgco2e=300.0, lifetime_s=3e8)
amounts = st.floats(min_value=0, max_value=1e6)


def use(busy_s: tuple[float, float], down: tuple[float, float], up: tuple[float, float], wall_s: float) -> Use:
    return Use(busy_s=np.array(busy_s), down_bytes=np.array(down), up_bytes=np.array(up), wall_s=wall_s)


@st.composite
def uses(draw: st.DrawFn) -> Use:
    pairs = [(draw(amounts), draw(amounts)) for _ in range(3)]
    return use(pairs[0], pairs[1], pairs[2], draw(amounts))


def parts(of: Footprint) -> list[float]:
    both = [number for part in (of.devices, of.network, of.server) for number in (part.energy_j, part.kgco2e)]
    return [*both, of.embodied_kgco2e, of.energy_j, of.kgco2e]


def test_a_case_by_hand() -> None:
    found = footprint(use((100.0, 10.0), (1e6, 2e6), (1e6, 0.0), 200.0), POWER, SERVER)
    # devices: (10 - 2) x 100 / 0.5 = 1600 J at 0.36, (100 - 20) x 10 / 0.8 = 1000 J at 0.72 kg per 3.6 MJ
    assert found.devices == Part(energy_j=2600.0, kgco2e=pytest.approx(1600 * 1e-7 + 1000 * 2e-7))
    # network: 1e-4 x 2e6 = 200 J, 5e-4 x 2e6 = 1000 J
    assert found.network.energy_j == pytest.approx(1200.0)
    assert found.network.kgco2e == pytest.approx(200 * 1e-7 + 1000 * 2e-7)
    # server: 100 x 1.5 x 200 = 30 kJ
    assert found.server == Part(energy_j=30e3, kgco2e=pytest.approx(30e3 * 1e-7))
    # embodied: 50 x 100 / 1e8 + 200 x 10 / 2e8 + 300 x 200 / 3e8
    assert found.embodied_kgco2e == pytest.approx(5e-5 + 1e-5 + 2e-4)
    assert found.energy_j == pytest.approx(2600 + 1200 + 30e3)
    assert found.kgco2e == pytest.approx(found.operational_kgco2e + 2.6e-4)


def test_no_work_takes_no_energy() -> None:
    found = footprint(use((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), 0.0), POWER, SERVER)
    assert parts(found) == [0.0] * 9


@given(uses(), uses())
def test_the_footprint_of_a_sum_is_the_sum_of_footprints(one: Use, other: Use) -> None:
    together = footprint(one + other, POWER, SERVER)
    apart = footprint(one, POWER, SERVER) + footprint(other, POWER, SERVER)
    assert parts(together) == pytest.approx(parts(apart))


@given(uses(), st.floats(min_value=0, max_value=1e3))
def test_the_footprint_grows_with_the_work(one: Use, times: float) -> None:
    assert parts(footprint(one * times, POWER, SERVER)) == pytest.approx(parts(footprint(one, POWER, SERVER) * times))


def test_only_devices_that_take_part_are_kept_awake() -> None:
    # 2 W x 200 s / 0.5 of the first; the second neither computes nor receives
    awake = awake_idle(use((100.0, 0.0), (1e6, 0.0), (0.0, 0.0), 200.0), POWER)
    assert awake == Part(energy_j=800.0, kgco2e=pytest.approx(800 * 1e-7))


def test_a_marginal_flop_costs_what_the_footprint_says() -> None:
    """One device, one FLOP at a time: the ranking's law is the footprint's own, without the server."""
    flops_per_s, bytes_per_flop = np.array([1e9, 1e10]), 1e-3
    server = ServerPower(watts=0.0, kgco2e_per_kwh=0.0, embodied_kgco2e=0.0, lifetime_s=1.0)
    joules = joules_per_flop(POWER, flops_per_s, bytes_per_flop)
    kilograms = kgco2e_per_flop(POWER, flops_per_s, bytes_per_flop)
    for device in range(2):
        only = np.arange(2) == device
        nothing = np.zeros(2)
        work = Use(busy_s=only / flops_per_s, down_bytes=only * bytes_per_flop, up_bytes=nothing, wall_s=1.0)
        found = footprint(work, POWER, server)
        assert joules[device] == pytest.approx(found.energy_j)
        assert kilograms[device] == pytest.approx(found.kgco2e)


def test_a_comparison_says_how_many_times_as_much() -> None:
    ours = Footprint(devices=Part(energy_j=300.0, kgco2e=3.0), embodied_kgco2e=1.0)
    cloud = Footprint(devices=Part(energy_j=100.0, kgco2e=0.5))
    assert ours.compared_with(cloud) == (3.0, 8.0)
    assert cloud.compared_with(ours) == pytest.approx((1 / 3, 1 / 8))
    assert Footprint().compared_with(Footprint()) == (1.0, 1.0)
    assert ours.compared_with(Footprint()) == (math.inf, math.inf)
