"""Laws of choices and plans: the faster grain is chosen, reported once, and kept while the devices stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.stacks import decoder

from cleave.core.fleet.profiles import DeviceId, Profiles
from cleave.core.model.gemms import Linear
from cleave.core.plan.choose import Local, PassChoice, PassWork, Setting
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import InfeasibleError
from cleave.server.planning import Planning

WORK = PassWork(
    decoder(hidden=128, head_dim=32, inner=768, words=512).decoder, sequences=8, sequence=64, is_trained=True
)
LINEAR = Linear(tokens=512, in_width=128, out_width=128)
HERE = Local()


def devices(*names: str, flops_per_s: float = 1e10, rate: float = 1e6, memory_bytes: float = 1e9) -> Profiles:
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
    """A fleet that a test changes, with the messages of its planner."""

    def __init__(self, profiles: Profiles | None, arrange: Callable[..., ResidentPlan] = plan_columns) -> None:
        self.number, self.profiles = 0, profiles
        self.told: list[PassChoice] = []
        self.previous: list[ResidentPlan | None] = []
        self._inner = arrange
        self.planning = Planning(
            Setting(wire="fp32"),
            fleet=lambda: (self.number, self.profiles),
            tell=self.told.append,
            arrange=self._arrange,
        )

    def _arrange(self, *args: Any, previous: ResidentPlan | None, **options: Any) -> ResidentPlan:
        self.previous.append(previous)
        return self._inner(*args, previous=previous, **options)

    def change(self, profiles: Profiles | None) -> None:
        self.number, self.profiles = self.number + 1, profiles

    def choose(self, *, must: bool = False) -> PassChoice:
        return self.planning.choose_pass(WORK, HERE, must=must)

    def held(self) -> list[tuple[object, ...]]:
        """Shards and devices of each stage, with resident layers forced."""
        plan = self.choose(must=True).plan
        assert plan is not None
        return [(stage.shards, stage.devices) for stage in plan.stages]


def taking(seconds: float) -> Callable[..., ResidentPlan]:
    def arrange(*args: Any, **options: Any) -> ResidentPlan:
        return replace(plan_columns(*args, **options), busiest_s=seconds, fill_s=0.0)

    return arrange


def test_the_grain_predicted_to_be_faster_is_chosen_and_reported() -> None:
    slow = Place(devices("ann", "bob"), taking(1e6))
    choice = slow.choose()
    assert not choice.is_resident
    assert choice.plan is None
    assert "1e+06 s with resident layers" in choice.reason
    assert [(told.grain, told.reason) for told in slow.told] == [("gemm", choice.reason)]
    fast = Place(devices("ann", "bob"), taking(1e-9))
    assert fast.choose().is_resident
    (told,) = fast.told
    assert told.grain == "resident"
    assert told.modeled_s == told.resident_s < told.gemm_s
    assert "with gemms" in told.reason


def test_only_devices_that_may_lend_keep_what_they_train() -> None:
    def leased(lenders: frozenset[DeviceId] | None, work: PassWork) -> set[str]:
        profiles = devices("ann", "bob", rate=1e5)
        planning = Planning(
            Setting(wire="fp32"), fleet=lambda: (1, profiles), tell=lambda choice: None, lenders=lambda: lenders
        )
        plan = planning.choose_pass(work, HERE, must=True).plan
        assert plan is not None
        columns = (column for stage in plan.stages for column in stage.columns)
        return {holding.device for column in columns if column.is_leased for holding in column.holdings}

    work = replace(WORK, lease_states=2)
    assert leased(None, WORK) == set()
    assert leased(None, work)
    assert leased(frozenset({DeviceId("bob")}), work) == {"bob"}
    assert leased(frozenset(), work) == set()


def test_resident_layers_can_be_forced_even_if_slower() -> None:
    forced = Place(devices("ann"), taking(1e6)).choose(must=True)
    assert forced.is_resident
    assert "with gemms" not in forced.reason, "nothing is compared that cannot be chosen"


@pytest.mark.parametrize("must", [False, True])
def test_when_nothing_fits_the_planners_reason_is_given(must: bool) -> None:
    place = Place(devices("ann", memory_bytes=100))
    choice = place.choose(must=must)
    assert not choice.is_resident
    assert choice.reason.startswith("no layers can be resident: no columns fit")
    assert "add devices or memory" in choice.reason
    with pytest.raises(InfeasibleError, match="no columns fit"):
        place.planning.plan_again(WORK, (), ())


def test_without_devices_gemms_are_chosen_unless_resident_layers_are_forced() -> None:
    assert not Place(None).choose().is_resident
    forced = Place(None).choose(must=True)
    assert forced.is_resident
    assert forced.plan is None
    with pytest.raises(InfeasibleError, match="no connected device"):
        Place(None).planning.plan_again(WORK, (), ())


def test_the_grain_is_chosen_and_reported_once_for_the_same_devices() -> None:
    place = Place(devices("ann", "bob"), taking(1e6))
    reasons = {place.choose().reason for _ in range(3)}
    place.change(devices("ann", "bob", rate=2e6))
    place.planning.step_ended()
    reasons.add(place.choose().reason)
    assert len(reasons) == len(place.told) == 1
    place.change(devices("ann", "bob", "cid"))
    place.planning.step_ended()
    place.choose()
    assert len(place.told) == 2


def test_an_unchanged_fleet_is_planned_once() -> None:
    place = Place(devices("ann", "bob"))
    assert place.held() == place.held()
    assert len(place.previous) == 1
    assert place.planning.latest == place.choose(must=True).plan


@pytest.mark.parametrize("factor", [0.95, 1.07])
def test_arrangements_stay_when_rates_change_a_little(factor: float) -> None:
    place = Place(devices("ann", "bob", "cid", memory_bytes=64e6))
    held, before = place.held(), place.planning.latest
    place.change(devices("ann", "bob", "cid", memory_bytes=64e6, flops_per_s=1e10 * factor, rate=1e6 * factor))
    place.planning.step_ended()
    assert place.held() == held
    assert len(place.previous) == 1, "no other arrangement is searched for"
    after = place.planning.latest
    assert before is not None
    assert after is not None
    assert (after.step_s < before.step_s) == (factor > 1), "it is judged by the new rates"


@pytest.mark.parametrize(("factor", "steps"), [(0.5, 1), (1.07, 8)])
def test_other_arrangements_are_searched_for_when_this_one_gets_slow_and_now_and_then(
    factor: float, steps: int
) -> None:
    place = Place(devices("ann", "bob", "cid", memory_bytes=64e6))
    place.held()
    for _ in range(steps):
        assert len(place.previous) == 1
        place.change(devices("ann", "bob", "cid", memory_bytes=64e6, flops_per_s=1e10 * factor, rate=1e6 * factor))
        place.planning.step_ended()
        place.held()
    assert len(place.previous) == 2
    assert place.previous[1] is not None, "the planner is told who holds what"


def test_a_device_that_joins_is_used_from_the_next_step() -> None:
    place = Place(devices("ann"))
    before = place.planning.layer(LINEAR, HERE)
    place.change(devices("ann", "bob"))
    assert place.planning.layer(LINEAR, HERE) is before, "a join does not drop a plan"
    place.planning.step_ended()
    after = place.planning.layer(LINEAR, HERE).plan
    assert after is not None
    assert {block.device for block in after.blocks["forward"]} == {"ann", "bob"}


def test_a_departed_device_is_left_out_at_once() -> None:
    place = Place(devices("ann", "bob"))
    place.planning.layer(LINEAR, HERE)
    place.change(devices("bob"))
    plan = place.planning.layer(LINEAR, HERE).plan
    assert plan is not None
    assert {block.device for block in plan.blocks["forward"]} == {"bob"}


def test_devices_found_wrong_are_avoided_when_others_can_do_the_work() -> None:
    place = Place(devices("ann", "bob"))
    assert place.planning.plan_again(WORK, (), {"ann"}).devices == {"bob"}
    alone = Place(devices("ann"))
    assert alone.planning.plan_again(WORK, (), {"ann"}).devices == {"ann"}
    with pytest.raises(InfeasibleError, match="no connected device"):
        alone.planning.plan_again(WORK, {"ann"}, ())


def test_large_fleets_are_planned_in_another_process_with_the_same_result() -> None:
    names = [f"d{number}" for number in range(40)]
    place = Place(devices(*names))
    planning = Planning(Setting(wire="fp32"), fleet=lambda: (1, place.profiles), tell=place.told.append)
    try:
        there = planning.layer(LINEAR, HERE).plan
    finally:
        planning.close()
    from cleave.core.plan.choose import choose_layer

    here = choose_layer(LINEAR, place.profiles, Setting(wire="fp32"), HERE).plan
    assert there == here


def test_plans_of_products_stand_until_they_get_slow_and_for_a_few_steps() -> None:
    place = Place(devices("ann", "bob"))
    first = place.planning.layer(LINEAR, HERE).plan
    assert first is not None
    for factor in (0.95, 1.05, 0.97):
        place.change(devices("ann", "bob", rate=1e6 * factor))
        place.planning.step_ended()
        judged = place.planning.layer(LINEAR, HERE).plan
        assert judged is not None
        assert judged.blocks == first.blocks
        assert (judged.total_s < first.total_s) == (factor > 1), "it is judged by the new rates"


def test_a_step_does_not_wait_for_another_plan_of_a_large_fleet() -> None:
    names = [f"d{number}" for number in range(40)]
    fleet = [(1, devices(*names))]
    planning = Planning(Setting(wire="fp32"), fleet=lambda: fleet[0], tell=lambda choice: None)
    try:
        first = planning.layer(LINEAR, HERE).plan
        assert first is not None
        rates = np.where(np.arange(40) < 20, 1e6, 1e5)
        fleet[0] = (2, replace(devices(*names), down_bytes_per_s=rates, up_bytes_per_s=rates))
        planning.step_ended()
        standing = planning.layer(LINEAR, HERE).plan
        assert standing is not None
        assert standing.blocks == first.blocks, "it serves on while another one is searched for"
        assert standing.total_s > first.total_s
        planning.settle()
        found = planning.layer(LINEAR, HERE).plan
        assert found is not None
        assert found.total_s < standing.total_s
        gone = {block.device for block in found.blocks["forward"]}.pop()
        fleet[0] = (3, devices(*(name for name in names if name != gone)))
        replaced = planning.layer(LINEAR, HERE).plan
        assert replaced is not None
        assert all(block.device != gone for blocks in replaced.blocks.values() for block in blocks)
    finally:
        planning.close()


def test_a_grain_whose_steps_take_far_longer_than_predicted_is_chosen_anew() -> None:
    place = Place(devices("ann", "bob"), taking(20.0))
    first = place.choose()
    assert not first.is_resident
    assert 10 < first.gemm_s < 20
    for _ in range(4):
        place.planning.experience.add("gemm", None, 1e3 * first.gemm_s, first.gemm_s)
        place.planning.step_ended()
    assert place.choose().is_resident


def test_advice_is_about_the_latest_batch_and_leaves_its_plan_alone() -> None:
    fleet = devices("ann", "bob", flops_per_s=1e8, rate=1e9)
    planning = Planning(Setting(wire="fp32"), fleet=lambda: (0, fleet), tell=lambda _: None)
    assert planning.advice() == ()
    choice = planning.choose_pass(WORK, HERE, must=True)
    told = planning.advice()
    assert told[0].change < -0.2, "two more devices of the same kind"
    assert planning.choose_pass(WORK, HERE, must=True) is choice
    planning.close()
