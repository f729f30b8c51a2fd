"""Laws of churn: stays are in order, their rates are as asked, and the same seed gives the same stays."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import pytest

from cleave.errors import FleetError
from cleave.sim.churn import Stay, constant, daily, of_each, traced

DAY_S = 240.0
KINDS: dict[str, Callable[[random.Random], Iterator[Stay]]] = {
    "constant": lambda rng: constant(rng, 30.0, 20.0),
    "daily": lambda rng: daily(rng, DAY_S),
}


@pytest.mark.parametrize("kind", KINDS)
def test_stays_are_in_order_and_never_empty(kind: str) -> None:
    for seed in range(20):
        stays = list(islice(KINDS[kind](random.Random(seed)), 200))
        assert all(0 <= begin < end for begin, end in stays)
        assert all(before[1] <= after[0] for before, after in pairwise(stays))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_fixes_the_stays_of_each_device_whoever_else_is_there(kind: str) -> None:
    def drawn(names: list[str], seed: int) -> dict[str, list[Stay]]:
        return {name: list(islice(stays, 9)) for name, stays in of_each(names, seed, KINDS[kind]).items()}

    one, other = drawn(["a", "b"], 1), drawn(["b", "c"], 1)
    assert one["b"] == other["b"]
    assert one["a"] != one["b"]
    assert drawn(["b"], 2)["b"] != one["b"]


def test_departures_come_at_the_given_rate_and_absences_last_as_given() -> None:
    stays = list(islice(constant(random.Random(1), 30.0, 20.0), 4000))
    assert sum(end - begin for begin, end in stays) / len(stays) == pytest.approx(120.0, rel=0.1)
    away_s = [after[0] - before[1] for before, after in pairwise(stays)]
    assert sum(away_s) / len(away_s) == pytest.approx(20.0, rel=0.1)


def test_without_a_rate_nobody_leaves() -> None:
    assert list(constant(random.Random(1), 0.0, 20.0)) == [(0.0, math.inf)]


def test_most_devices_are_there_at_night_and_few_in_the_afternoon() -> None:
    fleet = [list(islice(daily(random.Random(seed), DAY_S), 60)) for seed in range(200)]

    def present(hour: float) -> float:
        moment_s = (10 * 24 + hour) * DAY_S / 24
        return sum(any(begin <= moment_s < end for begin, end in stays) for stays in fleet) / len(fleet)

    assert present(3.0) > 0.8
    assert present(21.0) < 0.1
    assert 0.0 < present(13.0) < 0.3


def test_a_trace_is_followed_and_others_stay() -> None:
    text = "device,leave_s,join_s\na,10,20\nb,5,\na,30,40.5\n"
    assert traced(text, "trace.csv", ["a", "b", "c"]) == {
        "a": [(0.0, 10.0), (20.0, 30.0), (40.5, math.inf)],
        "b": [(0.0, 5.0)],
        "c": [(0.0, math.inf)],
    }


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "device,leave_s,join_s"),
        ("device,leave\na,1\n", "device,leave_s,join_s"),
        ("device,leave_s,join_s\na,1\n", "line 2"),
        ("device,leave_s,join_s\na,1,2\nx,1,2\n", "line 3.*'x'"),
        ("device,leave_s,join_s\na,soon,2\n", "line 2.*'soon'"),
        ("device,leave_s,join_s\na,5,4\n", "line 2"),
        ("device,leave_s,join_s\na,-1,4\n", "line 2"),
        ("device,leave_s,join_s\na,5,9\na,7,10\n", "line 3.*9 s or later"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(text: str, fact: str) -> None:
    with pytest.raises(FleetError, match=fact):
        traced(text, "trace.csv", ["a"])
