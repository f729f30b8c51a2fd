"""Laws of the line-up: rows become devices, repeated rows get numbers and media of their own."""

from __future__ import annotations

import numpy as np
import pytest

from cleave.core.fleet.profiles import Profiles, read_csv
from cleave.emulate.devices import capacities, devices_of

CSV = """device,flops_per_s,down_bytes_per_s,up_bytes_per_s,latency_s,memory_bytes,task_s,medium,medium_bytes_per_s
a,1e9,1e6,2e6,0.01,1e8,0.002,wifi,5e6
b,2e9,3e6,4e6,0.02,2e8,,wifi,5e6
c,3e9,5e6,6e6,0.03,3e8,,,
"""


@pytest.fixture
def fleet() -> Profiles:
    return read_csv(CSV, "fleet.csv")


def test_every_row_is_a_device_with_the_numbers_of_that_row(fleet: Profiles) -> None:
    devices = devices_of(fleet)
    assert [device.name for device in devices] == ["a", "b", "c"]
    second = devices[1]
    assert (second.flops_per_s, second.down_bytes_per_s, second.up_bytes_per_s) == (2e9, 3e6, 4e6)
    assert (second.latency_s, second.memory_bytes, second.task_s, second.medium) == (0.02, 200_000_000, 0.0, "wifi")
    assert capacities(devices) == {"wifi": 5e6}
    assert devices[2].medium_bytes_per_s == np.inf


@pytest.mark.parametrize("count", [1, 3, 4, 10])
def test_a_count_repeats_the_rows_under_names_that_differ(fleet: Profiles, count: int) -> None:
    devices = devices_of(fleet, count)
    assert len({device.name for device in devices}) == len(devices) == count
    assert [device.flops_per_s for device in devices] == [(1e9, 2e9, 3e9)[i % 3] for i in range(count)]


def test_each_repetition_shares_a_medium_of_its_own(fleet: Profiles) -> None:
    assert len(capacities(devices_of(fleet, 9))) == 3


def test_calibration_fills_in_only_what_a_row_lacks(fleet: Profiles) -> None:
    measured = read_csv(CSV.replace("0.002", "0.5"), "measured.csv")
    assert [device.task_s for device in devices_of(fleet, calibration=measured)] == [0.002, 0.5, 0.5]
