"""Laws of the choice between resident layers and gemms: the faster wins, who must does, and people are told why."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.support.stacks import decoder

from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import ColumnPlan
from cleave.errors import InfeasibleError
from cleave.protocol.decoder import Batch
from cleave.server.grain import Grains

STACK = decoder(hidden=32, layers=2).stack
SEQUENCES, SEQUENCE = 4, 16
BATCH = Batch(
    x=np.zeros((SEQUENCES * SEQUENCE, 32), dtype=np.float32), sequences=SEQUENCES, sequence=SEQUENCE, operands=()
)


def devices(*names: str, flops_per_s: float = 1e10, memory_bytes: float = 1e9, rate: float = 1e6) -> Profiles:
    many = np.ones(len(names))
    return Profiles(
        names=names,
        flops_per_s=flops_per_s * many,
        down_bytes_per_s=rate * many,
        up_bytes_per_s=rate * many,
        latency_s=0.001 * many,
        memory_bytes=memory_bytes * many,
    )


class Place:
    """A fleet that a test changes, and what people were told."""

    def __init__(self, profiles: Profiles | None, arrange: Any = plan_columns) -> None:
        self.number, self.profiles = 0, profiles
        self.told: list[str] = []
        self.previous: list[ColumnPlan | None] = []
        self._inner = arrange
        self.grains = Grains(
            "fp32",
            fleet=lambda: (self.number, self.profiles),
            medium_bytes_per_s=math.inf,
            arrange=self._arrange,
            say=self.told.append,
        )

    def _arrange(self, *args: Any, previous: ColumnPlan | None, **options: Any) -> ColumnPlan:
        self.previous.append(previous)
        return self._inner(*args, previous=previous, **options)

    def change(self, profiles: Profiles | None) -> None:
        self.number, self.profiles = self.number + 1, profiles

    def why_not(self, *, must: bool = False) -> str | None:
        return self.grains.why_not(STACK, SEQUENCES, SEQUENCE, True, must=must)

    def plan(self) -> tuple[ColumnPlan, tuple[str, ...]]:
        return self.grains.plan(STACK, BATCH)


def taking(seconds: float) -> Any:
    def arrange(*args: Any, **options: Any) -> ColumnPlan:
        from dataclasses import replace

        return replace(plan_columns(*args, **options), step_s=seconds)

    return arrange


def test_what_is_foreseen_to_be_faster_is_chosen_and_told() -> None:
    slow = Place(devices("ann", "bob"), taking(1e6))
    reason = slow.why_not()
    assert reason is not None
    assert "1e+06 s with resident layers" in reason
    assert slow.told == [f"grain gemm: {reason}"]
    fast = Place(devices("ann", "bob"), taking(1e-9))
    assert fast.why_not() is None
    (told,) = fast.told
    assert told.startswith("grain resident: ")
    assert "with gemms" in told


def test_who_must_does_even_if_it_is_slower() -> None:
    assert Place(devices("ann"), taking(1e6)).why_not(must=True) is None


@pytest.mark.parametrize("must", [False, True])
def test_where_nothing_fits_the_reason_is_the_planners(must: bool) -> None:
    place = Place(devices("ann", memory_bytes=100))
    reason = place.why_not(must=must)
    assert reason is not None
    assert reason.startswith("no layers can be resident: no columns fit")
    assert "add devices or memory" in reason
    with pytest.raises(InfeasibleError, match="no columns fit"):
        place.plan()


def test_with_nobody_there_gemms_are_chosen_unless_it_must_wait() -> None:
    assert Place(None).why_not() == "no device is there"
    assert Place(None).why_not(must=True) is None
    with pytest.raises(InfeasibleError, match="no device is there"):
        Place(None).plan()


def test_it_is_decided_and_told_once_as_long_as_the_same_devices_are_there() -> None:
    place = Place(devices("ann", "bob"), taking(1e6))
    reasons = {place.why_not() for _ in range(3)}
    place.change(devices("ann", "bob", rate=2e6))
    reasons.add(place.why_not())
    assert len(reasons) == len(place.told) == 1
    place.change(devices("ann", "bob", "cid"))
    place.why_not()
    assert len(place.told) == 2


def test_a_plan_is_made_once_for_a_fleet_that_does_not_change() -> None:
    place = Place(devices("ann", "bob"))
    assert place.plan() is not None
    assert place.plan() == place.plan()
    assert len(place.previous) == 1
    assert place.grains.latest == place.plan()[0]


@pytest.mark.parametrize("factor", [0.93, 1.07])
def test_who_holds_what_stays_when_rates_move_a_little(factor: float) -> None:
    place = Place(devices("ann", "bob", "cid", memory_bytes=64e6))
    held = [(stage.first, stage.count, stage.devices) for stage in place.plan()[0].stages]
    place.change(devices("ann", "bob", "cid", memory_bytes=64e6, flops_per_s=1e10 * factor, rate=1e6 / factor))
    assert [(stage.first, stage.count, stage.devices) for stage in place.plan()[0].stages] == held
    assert place.previous[1] is not None, "the planner is told who holds what"


def test_who_holds_what_is_known_by_name_when_numbers_move() -> None:
    place = Place(devices("ann", "bob"))
    plan, names = place.plan()
    held = [[names[device] for device in stage.devices] for stage in plan.stages]
    place.change(devices("aaa", "ann", "bob"))
    place.plan()
    (_, previous) = place.previous
    assert previous is not None
    now = ("aaa", "ann", "bob")
    assert [[now[device] for device in stage.devices] for stage in previous.stages] == held


def test_when_one_who_held_something_is_gone_all_is_planned_anew() -> None:
    place = Place(devices("ann", "bob"))
    plan, names = place.plan()
    gone = names[plan.stages[0].devices[0]]
    place.change(devices(*[name for name in names if name != gone]))
    place.plan()
    assert place.previous == [None, None]
