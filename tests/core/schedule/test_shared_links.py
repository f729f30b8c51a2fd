"""Laws of shared links: the sum that stays the same while its parts vary is found, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest

from cleave.core.fleet.profiles import Bools, Floats
from cleave.core.schedule.members import Roster
from cleave.core.schedule.shared_links import Carried, SharedLink, Traffic, network_of

WINDOW_S = 0.05
Carry = Callable[[Bools], Floats]
"""From which directions are full, [device, way], to the bytes/s that each carries."""


def watch(
    traffic: Traffic, names: Iterable[str], carry: Carry, *, windows: int = 40, noise: float = 0.03, seed: int = 0
) -> None:
    """Let traffic flow for some windows, each with directions that are full at random."""
    rng = np.random.default_rng(seed)
    names = list(names)
    bytes_, full_s, now_s = np.zeros((len(names), 2)), np.zeros((len(names), 2)), 1e3 * seed
    for _ in range(windows + 1):
        totals = np.stack([bytes_[:, 0], full_s[:, 0], bytes_[:, 1], full_s[:, 1]], axis=1).tolist()
        traffic.sampled(now_s, {name: Carried(*row) for name, row in zip(names, totals, strict=True)})
        is_full = rng.random((len(names), 2)) < 0.5
        rates = carry(is_full) * (1 + noise * rng.standard_normal((len(names), 2)))
        bytes_, full_s, now_s = bytes_ + WINDOW_S * rates, full_s + WINDOW_S * is_full, now_s + WINDOW_S


def own(rates: Mapping[str, tuple[float, float]]) -> Carry:
    return lambda is_full: is_full * np.array(list(rates.values()))


def medium(capacity: float) -> Carry:
    return lambda is_full: is_full * capacity / max(is_full.sum(), 1)


def line(down: float, up: float) -> Carry:
    return lambda is_full: is_full * np.array([down, up]) / np.maximum(is_full.sum(axis=0), 1)


def side_by_side(*parts: tuple[int, Carry]) -> Carry:
    ends = np.cumsum([0, *(count for count, _ in parts)]).tolist()
    return lambda is_full: np.concatenate(
        [carry(is_full[begin:end]) for (_, carry), begin, end in zip(parts, ends[:-1], ends[1:], strict=True)]
    )


def found(names: list[str], carry: Carry, networks: list[str] | None = None) -> tuple[SharedLink, ...]:
    traffic = Traffic()
    watch(traffic, names, carry)
    traffic.find(dict(zip(names, networks or ["10.0.0.0/24"] * len(names), strict=True)))
    return traffic.shared


FOUR = ["a", "b", "c", "d"]


def test_devices_on_one_medium_share_it_both_ways() -> None:
    (link,) = found(FOUR, medium(37.5e6))
    assert (link.devices, link.is_medium, link.is_servers) == (set(FOUR), True, False)
    assert link.down_bytes_per_s == link.up_bytes_per_s == pytest.approx(37.5e6, rel=0.05)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_asymmetric_links_of_their_own_are_not_shared(count: int) -> None:
    rates = {f"d{i}": (12.5e6 * (1 + i % 3), 2.5e6 * (1 + i % 2)) for i in range(count)}
    assert found(list(rates), own(rates)) == ()


def test_noise_that_averages_out_over_many_links_is_no_sign_of_a_shared_one() -> None:
    names = [f"d{i}" for i in range(32)]
    traffic = Traffic()
    watch(traffic, names, lambda is_full: np.full(is_full.shape, 5e6), noise=0.15)
    traffic.find(dict.fromkeys(names, "home"))
    assert traffic.shared == ()


def test_a_line_that_devices_share_limits_each_direction_by_itself() -> None:
    (link,) = found(FOUR, line(12.5e6, 2.5e6))
    assert (link.is_medium, link.is_servers) == (False, False)
    assert (link.down_bytes_per_s, link.up_bytes_per_s) == pytest.approx((12.5e6, 2.5e6), rel=0.05)


def test_what_devices_of_several_networks_share_is_the_servers_own_link() -> None:
    (link,) = found(FOUR, line(125e6, 125e6), networks=["1.1.1.1", "2.2.2.2", "3.3.3.3", "4.4.4.4"])
    assert (link.devices, link.is_medium, link.is_servers) == (set(FOUR), False, True)
    assert "server" in str(link)


def test_one_device_whose_directions_slow_each_other_down_is_on_a_medium() -> None:
    (link,) = found(["a"], medium(10e6))
    assert link.is_medium
    assert link.down_bytes_per_s == pytest.approx(10e6, rel=0.05)


def test_each_network_has_its_own_medium() -> None:
    networks = ["1.1.1.1"] * 3 + ["2.2.2.2"] * 3
    links = found(list("abcxyz"), side_by_side((3, medium(20e6)), (3, medium(50e6))), networks)
    assert {link.devices: round(link.down_bytes_per_s / 1e6, -1) for link in links} == {
        frozenset("abc"): 20.0,
        frozenset("xyz"): 50.0,
    }


def test_a_wired_device_is_not_on_the_wifi_of_the_others() -> None:
    (link,) = found([*FOUR, "wired"], side_by_side((4, medium(37.5e6)), (1, own({"wired": (125e6, 125e6)}))))
    assert link.devices == set(FOUR)


def test_an_idle_device_of_the_network_counts_as_on_its_medium() -> None:
    (link,) = found([*FOUR, "idle"], side_by_side((4, medium(37.5e6)), (1, lambda is_full: 0.0 * is_full)))
    assert "a" in link.devices
    traffic = Traffic()
    watch(traffic, FOUR, medium(37.5e6))
    traffic.find(dict.fromkeys([*FOUR, "new"], "home"))
    (link,) = traffic.shared
    assert link.devices == {*FOUR, "new"}


def test_a_claim_stands_while_links_are_quiet_and_falls_when_traffic_exceeds_it() -> None:
    traffic, home = Traffic(), dict.fromkeys(FOUR, "home")
    watch(traffic, FOUR, medium(37.5e6))
    assert traffic.find(home)
    (link,) = traffic.shared
    watch(traffic, FOUR, lambda is_full: np.full(is_full.shape, 1e5), windows=200, seed=1)
    assert not traffic.find(home)
    assert traffic.shared == (link,)
    watch(traffic, FOUR, own(dict.fromkeys(FOUR, (60e6, 60e6))), windows=200, seed=2)
    assert traffic.find(home)
    assert traffic.shared == ()


def test_departed_devices_share_nothing() -> None:
    traffic = Traffic()
    watch(traffic, FOUR, medium(37.5e6))
    traffic.find(dict.fromkeys(FOUR, "home"))
    traffic.find({"a": "home", "b": "home"})
    assert [link.devices for link in traffic.shared] == [{"a", "b"}]
    traffic.find({})
    assert traffic.shared == ()


def roster_on_wifi(*others: str) -> Roster:
    roster = Roster()
    for name in (*FOUR, *others):
        roster.add(
            name=name,
            kernel="none",
            memory_bytes=10**9,
            flops_per_s=1e9,
            latency_s=0.01,
            down_bytes_per_s=9e6,
            up_bytes_per_s=8e6,
            address="192.168.1.7" if name in FOUR else "8.8.8.8",
        )
    watch(roster.traffic, FOUR, medium(37.5e6))
    return roster


def test_plans_see_a_medium_that_all_devices_share_and_what_one_link_alone_could_use_of_it() -> None:
    roster = roster_on_wifi()
    number = roster.number
    (link,) = roster.find_shared_links()
    assert roster.find_shared_links() == (), "it is news only once"
    assert roster.number > number
    for profiles in (roster.profiles(), roster.fresh_profiles()):
        assert profiles is not None
        assert profiles.common_medium_bytes_per_s == link.down_bytes_per_s == pytest.approx(37.5e6, rel=0.05)
        assert {*profiles.down_bytes_per_s, *profiles.up_bytes_per_s} == {link.down_bytes_per_s}


def test_plans_keep_the_rates_of_links_on_a_medium_that_only_some_devices_share() -> None:
    roster = roster_on_wifi("elsewhere")
    assert len(roster.find_shared_links()) == 1
    profiles = roster.profiles()
    assert profiles is not None
    assert profiles.medium == ("a", "a", "a", "a", "")
    assert profiles.common_medium_bytes_per_s == math.inf
    assert {*profiles.down_bytes_per_s} == {9e6}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("8.8.8.8", "8.8.8.8", True),
        ("8.8.8.8", "8.8.8.9", False),
        ("192.168.1.7", "192.168.1.200", True),
        ("192.168.1.7", "192.168.2.7", False),
        ("::ffff:192.168.1.7", "192.168.1.9", True),
        ("2600::1", "2600::2", True),
        ("2600:0:0:1::1", "2600::1", False),
        ("", "", True),
    ],
)
def test_devices_behind_one_address_or_in_one_private_network_belong_together(
    one: str, other: str, is_same: bool
) -> None:
    assert (network_of(one) == network_of(other)) == is_same
