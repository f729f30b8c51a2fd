"""Churn of steps that are done gemm by gemm, where memory holds no columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.sim.test_system import fleet, setting

from cleave.sim.cleave import Run, simulate_cleave
from cleave.sim.gemm_course import GemmCourse, step_s
from cleave.sim.planning import plan_gemms
from cleave.sim.world import World

CHOSEN = setting(fleet(6, flops=1e9), sequences=16)


def test_without_changes_every_batch_takes_the_planned_time() -> None:
    plan = plan_gemms(CHOSEN, CHOSEN.profiles)
    course = GemmCourse(CHOSEN, World(CHOSEN.profiles), plan).run(3)
    assert course.batch_s == pytest.approx((plan.step_s,) * 3)
    assert course.departures == course.joins == course.replans == 0


def test_a_departure_costs_its_repair_and_what_fewer_devices_take_longer() -> None:
    plan, whole = plan_gemms(CHOSEN, CHOSEN.profiles), CHOSEN.profiles
    leaver, at_s = whole.names[2], plan.step_s / 2
    stays = {name: [(0.0, at_s if name == leaver else np.inf)] for name in whole.names}
    course = GemmCourse(CHOSEN, World(whole, stays=lambda: stays), plan).run(2)
    left = whole.take(np.array([0, 1, 3, 4, 5]))
    fewer_s = step_s(plan_gemms(CHOSEN, left), left)
    (recovery_s,) = course.recovery_s
    assert recovery_s > 0
    assert course.batch_s == pytest.approx((at_s + recovery_s + fewer_s / 2, fewer_s))
    assert (course.departures, course.replans) == (1, 1)


def test_with_nobody_left_a_batch_waits_for_who_comes_back() -> None:
    profiles = fleet(1, flops=1e9)
    chosen = setting(profiles, sequences=16)
    plan = plan_gemms(chosen, profiles)
    half_s = plan.step_s / 2
    stays = {"d0": [(0.0, half_s), (half_s + 100.0, np.inf)]}
    course = GemmCourse(chosen, World(profiles, stays=lambda: stays), plan).run(1)
    assert course.waited_s == pytest.approx(100.0 - sum(course.recovery_s), abs=1e-6)
    assert course.joins == course.departures == 1


def test_where_memory_holds_no_columns_churn_is_simulated_all_the_same() -> None:
    profiles = replace(fleet(3, flops=1e9), memory_bytes=np.full(3, 5e5))
    chosen = setting(profiles, sequences=4)
    still = simulate_cleave(chosen, Run(world=World(profiles), method="law"))
    assert still.detail["method"] == "gemms"
    assert still.batch_s is not None
    stays = {"d0": [(0.0, np.inf)], "d1": [(0.0, still.batch_s / 3)], "d2": [(0.0, np.inf)]}
    run = Run(world=World(profiles, stays=lambda: stays), batches=2, has_churn=True, method="law")
    found = simulate_cleave(chosen, run)
    assert found.fits, found.reason
    assert found.detail["departures"] == 1
    assert found.batch_s is not None
    assert found.batch_s > still.batch_s


def test_every_method_fills_every_figure() -> None:
    cramped = replace(fleet(3, flops=1e9), memory_bytes=np.full(3, 5e5))
    for profiles, method in ((fleet(4), "engine"), (fleet(4), "law"), (fleet(64), "law"), (cramped, "law")):
        found = simulate_cleave(setting(profiles), Run(world=World(profiles), method=method))  # type: ignore[arg-type]
        figures = (found.batch_s, found.down_bytes, found.up_bytes, found.memory_bytes, found.recovery_s)
        assert all(figure is not None and figure > 0 for figure in figures), (method, figures)
        assert 0 < found.devices_used <= len(profiles)
        assert found.memory_bytes is not None
        assert found.memory_bytes <= profiles.memory_bytes.max()
