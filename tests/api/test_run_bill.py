"""The bill of a live run: what devices report, at the power of a laptop."""

from __future__ import annotations

import pytest

from cleave.api.run_bill import run_bill
from cleave.core.schedule.link_rate import LinkRate
from cleave.core.schedule.members import Member, Rate


def member(name: str, *, address: str, compute_s: float) -> Member:
    return Member(
        name=name,
        kernel="numpy",
        memory_bytes=1 << 30,
        latency_s=0.01,
        flops=Rate(1.2e12, 1.2e12, 1e15),
        down=LinkRate(1e7),
        up=LinkRate(1e6),
        address=address,
        done_flops=1e12,
        compute_s=compute_s,
        down_bytes=2_000_000,
        up_bytes=1_000_000,
    )


def test_a_run_without_devices_has_no_bill() -> None:
    assert run_bill([], 100.0) is None


def test_a_device_is_billed_for_what_it_reports() -> None:
    bill = run_bill([member("a", address="192.0.2.7", compute_s=40.0)], 100.0)
    assert bill is not None
    # of laptops, a MacBook Air M1 (1.22 TFLOP/s, 15 W) is nearest; it idles at 17.5%, its charger loses 12%
    assert bill.footprint.devices.energy_j == pytest.approx(15 * (1 - 0.175) * 40 / 0.88)
    assert bill.footprint.network.energy_j == pytest.approx(108 * 3)
    assert bill.footprint.server.energy_j == pytest.approx(150 * 100)
    assert bill.footprint.operational_kgco2e == pytest.approx(bill.footprint.energy_j / 3.6e6 * 0.475)


def test_the_servers_own_devices_draw_its_power_only() -> None:
    own, other = member("a", address="127.0.0.1", compute_s=40.0), member("b", address="192.0.2.7", compute_s=40.0)
    alone, both, without = (run_bill(members, 100.0) for members in ([own], [own, other], [other]))
    assert alone is not None
    assert both is not None
    assert without is not None
    assert alone.footprint.devices.energy_j == alone.footprint.network.energy_j == 0
    assert alone.footprint.server.energy_j == pytest.approx(15e3)
    assert both.footprint == without.footprint
    assert both.clouds[0].gpu_s == pytest.approx(2 * without.clouds[0].gpu_s)
