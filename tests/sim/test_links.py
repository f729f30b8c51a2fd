"""Laws of max-min fair sharing."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.sim.links import SharedLinks, fair_rates

CAPS = st.floats(0.1, 100.0)


@given(st.lists(st.tuples(CAPS, st.booleans(), st.booleans()), min_size=1, max_size=8), CAPS, CAPS)
def test_nobody_gets_more_without_taking_from_one_who_has_no_more(
    flows: list[tuple[float, bool, bool]], first: float, second: float
) -> None:
    caps = [cap for cap, _, _ in flows]
    pools = [("a",) * in_a + ("b",) * in_b for _, in_a, in_b in flows]
    capacity = {"a": first, "b": second}
    rates = fair_rates(caps, pools, capacity)
    load = {name: sum(rate for rate, through in zip(rates, pools, strict=True) if name in through) for name in capacity}
    assert all(load[name] <= capacity[name] * (1 + 1e-9) for name in capacity)
    for rate, cap, through in zip(rates, caps, pools, strict=True):
        assert rate <= cap
        is_bottleneck = [
            load[name] >= capacity[name] * (1 - 1e-9)
            and rate >= max(other for other, its in zip(rates, pools, strict=True) if name in its) * (1 - 1e-9)
            for name in through
        ]
        assert rate == cap or any(is_bottleneck), "its own link is full, or a full pool in which nobody has more"


def test_what_slow_links_leave_is_divided_among_the_others() -> None:
    rates = fair_rates([1.0, 10.0, 10.0], [("server",)] * 3, {"server": 9.0})
    np.testing.assert_allclose(rates, [1.0, 4.0, 4.0])


def test_pools_without_limit_limit_nobody() -> None:
    np.testing.assert_allclose(fair_rates([3.0, 5.0], [("server",)] * 2, {"server": inf}), [3.0, 5.0])


def test_a_transfer_speeds_up_when_another_ends() -> None:
    links: SharedLinks[str] = SharedLinks({"server": 10.0})
    links.begin("short", 10.0, 100.0, ("server",), now=0.0)
    links.begin("long", 30.0, 100.0, ("server",), now=0.0)
    assert links.next_end() == (pytest.approx(2.0), "short")
    assert links.end("short", now=2.0) == pytest.approx(0.0)
    assert links.next_end() == (pytest.approx(4.0), "long"), "20 bytes are left, at the full rate"
    assert links.end("long", now=3.0) == pytest.approx(10.0)
    assert links.next_end() is None
