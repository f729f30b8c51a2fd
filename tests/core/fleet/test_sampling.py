"""Laws of randomly drawn fleets."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.fleet import sampling
from cleave.core.fleet.profiles import Profiles, write_csv
from cleave.errors import FleetError
from cleave.facts import table

DEVICES, ACCESS, POLICY = table("devices"), table("access"), table("device_memory_policy")


def draw(mix: dict[str, int], country: str = "us", seed: int = 1) -> Profiles:
    return sampling.sample(DEVICES, ACCESS, POLICY, mix=mix, country=country, rng=np.random.default_rng(seed))


mixes = st.dictionaries(st.sampled_from(sampling.CLASSES), st.integers(0, 40)).filter(lambda mix: sum(mix.values()) > 0)


@settings(deadline=None)
@given(mixes, st.sampled_from(sampling.countries(ACCESS)), st.integers(0, 2**32))
def test_a_fleet_has_the_devices_of_its_mix(mix: dict[str, int], country: str, seed: int) -> None:
    fleet = draw(mix, country, seed)
    assert {name: fleet.device_class.count(name) for name in mix} == mix
    assert len(fleet) == sum(mix.values())
    assert set(fleet.country) == {country}
    assert all(name.startswith(f"{kind}-") for name, kind in zip(fleet.names, fleet.device_class, strict=True))


def test_equal_seeds_give_equal_fleets_and_different_seeds_different_ones() -> None:
    mix = {"phone": 30, "laptop": 20}
    assert write_csv(draw(mix)) == write_csv(draw(mix))
    assert write_csv(draw(mix)) != write_csv(draw(mix, seed=2))


def test_names_are_numbered_from_one_per_class_with_enough_digits() -> None:
    assert draw({"phone": 2, "sbc": 1}).names == ("phone-0001", "phone-0002", "sbc-0001")
    assert draw({"sbc": 10_000}).names[0] == "sbc-00001"


def test_no_phone_exceeds_what_a_phone_can_do() -> None:
    phones = draw({"phone": 8192})
    assert phones.flops_per_s.max() < 5e12
    assert phones.memory_bytes.max() <= 0.5 * 12 * 2**30
    assert phones.memory_bytes.min() >= 0.25 * 4 * 2**30 - 1
    assert phones.watts.max() < 10


def test_usable_memory_is_less_than_physical_memory() -> None:
    for row in DEVICES:
        if float(row["weight"]) == 0:
            continue
        only = [{**row, "weight": "1"}]
        fleet = sampling.sample(
            only, ACCESS, POLICY, mix={row["class"]: 200}, country="us", rng=np.random.default_rng(5)
        )
        capacity = float(row["vram_gb"] or row["ram_gb"]) * 2**30
        least, most = (0.25, 0.5) if row["class"] == "phone" else (0.5, 0.9)
        assert fleet.memory_bytes.min() >= least * capacity - 1
        assert fleet.memory_bytes.max() <= most * capacity


def test_the_median_device_of_a_model_has_the_speed_of_the_table() -> None:
    for row in DEVICES:
        if float(row["weight"]) == 0:
            continue
        fleet = sampling.sample(
            [row], ACCESS, POLICY, mix={row["class"]: 4000}, country="us", rng=np.random.default_rng(5)
        )
        assert np.median(fleet.flops_per_s) == pytest.approx(float(row["sustained_tflops"]) * 1e12, rel=0.02)


def test_models_are_drawn_by_their_weight() -> None:
    """Desktops with an RTX 4090 are the only ones near 100 TFLOP/s, and their weight is 0.02."""
    desktops = draw({"desktop": 40_000})
    assert np.mean(desktops.flops_per_s > 50e12) == pytest.approx(0.02, rel=0.2)


def test_fiber_homes_are_fast_both_ways() -> None:
    """Most US lines above 100 Mbit/s up are fiber, so their downlinks beat the median of all lines."""
    lines = draw({"desktop": 20_000})
    fast_up = lines.up_bytes_per_s > 100e6 / 8
    assert np.median(lines.down_bytes_per_s[fast_up]) > 1.3 * np.median(lines.down_bytes_per_s)
    assert np.corrcoef(np.log(lines.down_bytes_per_s), np.log(lines.up_bytes_per_s))[0, 1] > 0.3


def test_wifi_slows_phones_and_laptops_below_desktops() -> None:
    down = {name: np.median(draw({name: 8192}).down_bytes_per_s) for name in sampling.CLASSES}
    assert down["phone"] < 0.7 * down["desktop"]
    assert down["laptop"] < 0.7 * down["desktop"]


def test_most_links_are_faster_down_than_up() -> None:
    fleet = draw({"phone": 600, "laptop": 300, "desktop": 60, "sbc": 40})
    assert np.median(fleet.down_bytes_per_s / fleet.up_bytes_per_s) > 2
    assert 0.001 < np.median(fleet.latency_s) < 0.1


def test_no_link_beats_a_gigabit_port() -> None:
    fleet = draw({"desktop": 8192}, country="sg")
    assert max(fleet.down_bytes_per_s.max(), fleet.up_bytes_per_s.max()) <= 125e6


def test_refusing_an_unknown_country_lists_the_known_ones() -> None:
    with pytest.raises(FleetError, match="'atlantis'") as caught:
        draw({"phone": 1}, country="Atlantis")
    told = set(re.findall(r"\w+", str(caught.value)))
    assert {"world", "ae", "us", "vn"} <= told
    assert "de" not in told, "without link data"


def test_a_country_may_be_written_in_capitals() -> None:
    assert draw({"phone": 1}, country=" US ").country == ("us",)


@given(mixes)
def test_a_formatted_mix_parses_back_to_itself(mix: dict[str, int]) -> None:
    assert sampling.parse_mix(", ".join(f"{name} = {count}" for name, count in mix.items())) == mix


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", ("''", "class=count")),
        ("phone", ("'phone'", "class=count")),
        ("phone=1,", ("''", "class=count")),
        ("tablet=3", ("'tablet'", "phone, laptop, desktop, sbc")),
        ("phone=many", ("phone", "whole number", "1,000,000", "'many'")),
        ("phone=1.5", ("phone", "whole number", "1,000,000", "'1.5'")),
        ("phone=", ("phone", "whole number", "1,000,000", "''")),
        ("phone=" + "9" * 5000, ("phone", "whole number", "1,000,000", "99999")),
        ("phone=-1", ("phone", "at least 0", "-1")),
        ("phone=0,laptop=0", (" 1 to 1,000,000 ", " 0;")),
        ("phone=2000000", (" 1 to 1,000,000 ", "2,000,000")),
        ("phone=1,phone=2", ("'phone'", "twice")),
    ],
)
def test_a_bad_mix_is_refused_in_one_sentence(text: str, facts: tuple[str, ...]) -> None:
    with pytest.raises(FleetError) as caught:
        sampling.parse_mix(text)
    assert [fact for fact in facts if fact not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@given(st.text())
def test_any_text_parses_to_a_mix_or_a_fleet_error(text: str) -> None:
    try:
        mix = sampling.parse_mix(text)
    except FleetError:
        return
    assert sum(mix.values()) > 0
