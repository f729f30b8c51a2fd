"""Footprints use the published numbers: power by class, grids by country, cloud GPUs by MFU, TDP and PUE."""

from __future__ import annotations

import numpy as np
import pytest

from cleave.core.carbon.bill import fleet_power
from cleave.core.carbon.cloud import CARDS, cloud_card, cloud_footprint
from cleave.core.carbon.energy import Use
from cleave.core.carbon.facts import first_number
from cleave.core.carbon.power import device_power, server_power
from cleave.core.fleet import sampling
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.errors import FleetError
from cleave.facts import table
from cleave.facts.carbon import carbon_facts

FACTS = carbon_facts()


def fleet(**columns: Floats | tuple[str, ...]) -> Profiles:
    given: dict[str, object] = {"flops_per_s": np.array([2e11, 1e12])}
    others = ("down_bytes_per_s", "up_bytes_per_s", "latency_s", "memory_bytes")
    given |= {column: np.full(2, 1e9) for column in others}
    return Profiles(names=("a", "b"), **(given | columns))  # pyright: ignore[reportArgumentType]


def test_columns_of_the_fleet_file_are_used_as_they_are() -> None:
    profiles = fleet(
        watts=np.array([10.0, 20.0]),
        idle_watts=np.array([1.0, 2.0]),
        embodied_kgco2e=np.array([50.0, 60.0]),
        device_class=("phone", "desktop"),
        country=("fr", "pol"),
    )
    power, assumptions = device_power(profiles, FACTS)
    assert power.load_w.tolist() == [10, 20]
    assert power.idle_w.tolist() == [1, 2]
    assert power.embodied_kgco2e.tolist() == [50, 60]
    rows = {row["iso3"]: float(row["gco2e_per_kwh"]) for row in table("carbon_intensity")}
    assert power.kgco2e_per_kwh == pytest.approx(np.array([rows["FRA"], rows["POL"]]) / 1e3)
    assert not [one for one in assumptions if one.column]


def test_defaults_come_from_the_class_and_are_listed() -> None:
    power, assumptions = device_power(fleet(device_class=("phone", "")), FACTS)
    # an iPhone 13 has 0.2 TFLOP/s at 5.85 W; of laptops, a MacBook Air M1 (1.22, 15 W) is nearest to 1 TFLOP/s
    assert power.load_w.tolist() == [5.85, 15.0]
    assert power.idle_w == pytest.approx(np.array([0.085 * 5.85, 0.175 * 15.0]))
    assert power.charger_efficiency.tolist() == [0.317, 0.88]
    assert power.embodied_kgco2e.tolist() == [56, 241]
    assert power.lifetime_s.tolist() == [21900 * 3600, 39420 * 3600]
    # 0.03 kWh/GB of fixed networks, a fifth of a phone's bytes at 0.14 of mobile ones
    assert power.network_j_per_byte == pytest.approx(np.array([0.8 * 0.03 + 0.2 * 0.14, 0.03]) * 3.6e-3)
    assert power.kgco2e_per_kwh.tolist() == [0.475, 0.475]
    columns = {one.column for one in assumptions if one.column}
    assert columns == {"class", "watts", "idle_watts", "embodied_kgco2e", "country"}
    assert all(one.value and one.source for one in assumptions)


def test_a_known_idle_power_is_never_above_an_assumed_load() -> None:
    power, _ = device_power(fleet(idle_watts=np.array([90.0, 1.0]), device_class=("phone", "phone")), FACTS)
    assert power.load_w[0] == 90
    assert (power.load_w >= power.idle_w).all()


def test_idle_power_above_load_is_refused() -> None:
    with pytest.raises(FleetError, match=r"'a'.*10.*12"):
        device_power(fleet(watts=np.array([10.0, 20.0]), idle_watts=np.array([12.0, 2.0])), FACTS)


@pytest.mark.parametrize("code", ["us", "US", "usa", " Usa "])
def test_countries_have_codes_of_two_or_three_letters(code: str) -> None:
    assert FACTS.kgco2e_per_kwh(code).value == pytest.approx(0.369473)


@pytest.mark.parametrize("code", ["xx", "uk", "narnia", "u", "united states"])
def test_an_unknown_country_is_refused_by_name(code: str) -> None:
    with pytest.raises(FleetError, match=code):
        FACTS.kgco2e_per_kwh(code)


def test_every_country_with_links_and_every_code_has_a_grid() -> None:
    for code in (*sampling.countries(table("access")), *(row["iso2"] for row in table("country_codes"))):
        assert FACTS.kgco2e_per_kwh(code).value >= 0
    codes = [row["iso3"] for row in table("country_codes")]
    assert sorted(codes) == sorted(row["iso3"] for row in table("carbon_intensity"))
    assert len({row["iso2"] for row in table("country_codes")}) == len(codes)


def test_the_server_is_where_most_devices_are() -> None:
    server, assumptions = server_power(fleet(country=("fr", "fr")), FACTS)
    assert (server.watts, server.pue) == (150, 1)
    assert server.kgco2e_per_kwh == FACTS.kgco2e_per_kwh("fr").value
    assert "country of the server" in {one.what for one in assumptions}
    assert server_power(fleet(), FACTS, watts=900.0)[0].watts == 900


def test_a_cloud_gpu_by_hand() -> None:
    card, assumptions = cloud_card(FACTS, "A100 SXM4")
    assert (card.peak_flops_per_s, card.mfu, card.tdp_w, card.embodied_kgco2e) == (312e12, 0.47, 400, 127.6)
    assert len(assumptions) == 4
    # an hour of an A100 at 47%: 400 W x 1.15 x 3600 s
    flops = 312e12 * 0.47 * 3600
    found = cloud_footprint(flops, card, pue=1.15, kgco2e_per_kwh=0.4)
    assert card.gpu_s(flops) == pytest.approx(3600)
    assert found.energy_j == pytest.approx(400 * 1.15 * 3600)
    assert found.devices.kgco2e == pytest.approx(0.46 * 0.4)
    assert found.embodied_kgco2e == pytest.approx(127.6 / 26280)
    assert cloud_card(FACTS, "H100 SXM")[0].mfu == pytest.approx(0.405)


def test_the_first_number_of_a_cell_is_read() -> None:
    assert first_number("0.38-0.43 (Llama-3 405B, ~400 TFLOP/s)") == pytest.approx(0.405)
    assert first_number("127.6 (A100); 181 (PCIe)") == 127.6


def test_a_bill_carries_the_cloud_its_sources_and_the_counter_evidence() -> None:
    power = fleet_power(fleet(country=("us", "us")), FACTS)
    none = np.zeros(2)
    bill = power.bill(Use(busy_s=none + 10, down_bytes=none + 1e6, up_bytes=none, wall_s=20.0), flops=1e15)
    assert [cloud.gpu for cloud in bill.clouds] == list(CARDS)
    assert all(one.what and one.value and one.source for one in bill.assumptions)
    assert [one.value for one in bill.evidence] == ["up to 12x", "up to ~25x", "~2 orders of magnitude"]
    assert all("Patterson" in one.source for one in bill.evidence)
    assert bill.compared_with(bill.clouds[0]).energy == bill.footprint.energy_j / bill.clouds[0].footprint.energy_j
