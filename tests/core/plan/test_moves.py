"""What moves from one plan to the next, and that a plan is changed only if it soon makes up for that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.core.plan.test_small_fleet import equal, model, posed

from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.resident.moves import cost_s, moving_s
from cleave.core.plan.resident.problem import Leasing, Problem
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import Draft, ResidentPlan, judge

ADAM = Leasing(states=2)
PARTS = model(2)


def judged(problem: Problem, *stages: Draft) -> ResidentPlan:
    plan = judge(problem, stages, 64)
    assert plan is not None
    return plan


def with_uplinks(*up_bytes_per_s: float) -> Profiles:
    return replace(equal(len(up_bytes_per_s), link=1e6), up_bytes_per_s=np.array(up_bytes_per_s))


def test_stages_that_change_come_up_and_what_changes_its_device_goes_down_with_optimizer_states() -> None:
    problem = posed(with_uplinks(1e6, 5e5), PARTS, leasing=ADAM)
    early, late = (judged(problem, Draft(0, at, ((0,),)), Draft(at, 5 - at, ((1,),))) for at in (2, 3))
    first, second = (12 * sum(one.trained for one in part) for part in (PARTS[:2], PARTS[2:]))
    moved = 12 * PARTS[2].trained
    expected_s = max(first / 1e6, second / 5e5) + moved / 1e6
    assert moving_s(problem, early, late) == pytest.approx(expected_s)
    assert moving_s(problem, early, early) == 0
    assert cost_s(problem, early, late) > late.step_s


def test_a_stage_that_stays_where_it_is_does_not_travel() -> None:
    problem = posed(with_uplinks(1e6, 1e6, 1e6), PARTS, leasing=ADAM)
    before = judged(problem, Draft(0, 1, ((0,),)), Draft(1, 2, ((1,),)), Draft(3, 2, ((2,),)))
    after = judged(problem, Draft(0, 1, ((0,),)), Draft(1, 1, ((1,),)), Draft(2, 3, ((2,),)))
    second, third = (12 * sum(one.trained for one in part) for part in (PARTS[1:3], PARTS[3:]))
    assert moving_s(problem, before, after) == pytest.approx((max(second, third) + 12 * PARTS[2].trained) / 1e6)


def test_synchronized_weights_cost_nothing_to_move_and_frozen_ones_go_down_once() -> None:
    fleet, frozen = equal(2, link=1e6), model(2, trained=False)
    stages = Draft(0, 5, ((0,),)), Draft(0, 5, ((1,),))
    for parts, sent in ((PARTS, 0), (frozen, 2 * sum(one.params - one.trained for one in frozen))):
        problem = posed(fleet, parts)
        one, other = (judged(problem, stage) for stage in stages)
        assert moving_s(problem, one, other) == pytest.approx(sent / 1e6)


@pytest.mark.parametrize(("uplink", "stays"), [(1e9, False), (1e6, True)])
def test_a_slow_device_keeps_its_lease_where_taking_it_back_costs_more_than_it_saves(
    uplink: float, stays: bool
) -> None:
    fleet = replace(with_uplinks(uplink, 1e9), flops_per_s=np.array([1e11, 4e11]), down_bytes_per_s=np.full(2, 1e9))
    problem = posed(fleet, PARTS, leasing=ADAM)
    before = judged(problem, Draft(0, 5, ((0,),)))
    after = plan_columns(problem, previous=before)
    assert (after.devices == before.devices) == stays
