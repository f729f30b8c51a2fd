"""Devices that are far slower than they claim: the plan settles on what they can do, in virtual time."""

from __future__ import annotations

import pytest
from tests.support.virtual_fleet import decoder

from cleave.core.cost.rates import Pace
from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.choose import Local, PassChoice, PassWork, Setting
from cleave.server.planning import Planning
from cleave.server.step_clock import StepClock, StepTime
from cleave.sim.devices import Device
from cleave.sim.fleet import Fleet, batch_of

DEVICES, STEPS = 12, 6


def steps_of(claim: float, steps: int = STEPS) -> tuple[list[StepTime], str]:
    """Train for a few steps on devices that claim to be `claim` times as fast as they are.

    Return the steps, and which term of the last one's prediction was wrong.
    """
    fleet = Fleet([])
    for number in range(DEVICES):
        pace = Pace(2e9 * (1 + 0.2 * (number % 5)), 12.5e6, 2.5e6, 0.004, 0.012)
        fleet.driver.join(f"d{number}", Device(pace, memory_bytes=1 << 30), claim=claim)
    fleet.driver.run_until(lambda: fleet.driver.is_quiet)
    model, roster = decoder(layers=4, hidden=256, inner=768, words=256), fleet.driver.engine.roster
    planning = Planning(
        Setting(wire="bf16"), fleet=lambda: (roster.number, roster.profiles()), tell=lambda choice: None
    )
    clock, work = StepClock(planning.experience, clock=lambda: fleet.driver.now), PassWork(model, 16, 128, True)
    reason = ""
    for _ in range(steps):
        choice = planning.choose_pass(work, Local(), must=True)
        clock.planned(choice, fleet.driver.now)
        run = fleet.resident(model, batch_of(model, fleet.operands, sequences=16, sequence=128), choice.plan)
        fleet.driver.run_until(run.returned.done)
        profiles = roster.fresh_profiles()
        clock.ended(fleet.driver.now, lambda choice, profiles=profiles: remodeled_s(planning, choice, profiles))
        assert profiles is not None
        reason = planning.wrong_term(choice, Local(), profiles)
        planning.step_ended()
    planning.close()
    return list(clock.steps), reason


def remodeled_s(planning: Planning, choice: PassChoice, profiles: Profiles | None) -> float | None:
    remodeled = planning.remodel(choice, Local(), profiles)
    return None if remodeled is None else remodeled.modeled_s


def test_a_fleet_twenty_times_slower_than_it_claims_soon_works_as_if_it_had_told_the_truth() -> None:
    (honest, _), (boastful, _) = steps_of(1.0), steps_of(20.0)
    assert boastful[0].ratio > 3, "its first step takes far longer than predicted"
    assert min(step.seconds for step in boastful[4:]) < 1.5 * honest[-1].seconds


@pytest.mark.parametrize("claim", [1.0, 20.0])
def test_predictions_hold_once_rates_are_learned(claim: float) -> None:
    steps, reason = steps_of(claim, steps=10)
    assert [step.ratio for step in steps[4:]] == pytest.approx([1.0] * 6, abs=0.15)
    assert reason == "", "no term is wrong any more"


def test_the_first_step_of_a_fleet_that_claimed_too_much_says_which_term_was_wrong() -> None:
    _, reason = steps_of(20.0, steps=1)
    assert "computes at" in reason
