"""Laws of predictions: steps that always take the same time are predicted exactly, whatever the model says of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tests.support.stacks import decoder

from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.choose import Local, PassChoice, PassWork, Setting
from cleave.server.planning import Planning
from cleave.server.step_clock import StepClock, StepTime

HERE = Local()
DECODER = decoder(hidden=128, head_dim=32, inner=768, words=512).decoder
SHORT, LONG = (PassWork(DECODER, sequences=8, sequence=length, is_trained=True) for length in (64, 128))
FLEET = Profiles(
    names=("ann", "bob"),
    flops_per_s=np.full(2, 1e10),
    down_bytes_per_s=np.full(2, 1e6),
    up_bytes_per_s=np.full(2, 1e6),
    latency_s=np.full(2, 0.001),
    memory_bytes=np.full(2, 1e9),
)


class Loop:
    """A training loop in virtual time, on a fleet whose rates move without a new snapshot."""

    def __init__(self) -> None:
        self.now = self.waited_s = 0.0
        self.rates = FLEET
        self.planning = Planning(Setting(wire="fp32"), fleet=lambda: (0, FLEET), tell=lambda choice: None)
        self.clock = StepClock(self.planning.experience, clock=lambda: self.now)
        self.lesson_s = 0.0

    def step(
        self,
        *works: PassWork,
        waits_s: float,
        own_s: float = 0.0,
        learns_s: float = 0.0,
        slower: float = 1.0,
    ) -> StepTime:
        """Run a step of these passes, in which links become `slower` than they were."""
        for work in works or (SHORT,):
            self.clock.planned(self.planning.choose_pass(work, HERE, must=True), self.waited_s)
        self.now += waits_s + own_s
        self.waited_s += waits_s
        self.rates = replace(
            self.rates,
            down_bytes_per_s=self.rates.down_bytes_per_s / slower,
            up_bytes_per_s=self.rates.up_bytes_per_s / slower,
        )
        self.lesson_s = learns_s
        step = self.clock.ended(self.waited_s, self._remodel)
        assert step is not None
        self.planning.step_ended()
        return step

    def _remodel(self, choice: PassChoice) -> float | None:
        self.now += self.lesson_s
        remodeled = self.planning.remodel(choice, HERE, self.rates)
        return None if remodeled is None else remodeled.modeled_s


def modeled_s(work: PassWork = SHORT) -> float:
    seconds = Loop().planning.choose_pass(work, HERE, must=True).modeled_s
    assert seconds is not None
    return seconds


@pytest.mark.parametrize("error", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("own_s", "learns_s"), [(0, 0), (5, 0), (0, 0.2), (2, 3)])
def test_equal_steps_are_predicted_exactly_from_the_third_on(error: float, own_s: float, learns_s: float) -> None:
    loop, waits_s = Loop(), error * modeled_s()
    steps = [loop.step(waits_s=waits_s, own_s=own_s, learns_s=learns_s) for _ in range(5)]
    assert [step.seconds for step in steps] == pytest.approx([waits_s + own_s + learns_s] * 5)
    assert [step.ratio for step in steps[2:]] == pytest.approx([1.0] * 3)


def test_equal_steps_are_predicted_exactly_however_waiting_and_own_time_share_them() -> None:
    loop, whole_s = Loop(), 2 * modeled_s()
    shares = [0.9, 0.5, 0.8, 0.2, 0.7, 0.6]
    steps = [loop.step(waits_s=share * whole_s, own_s=(1 - share) * whole_s) for share in shares]
    assert [step.ratio for step in steps[2:]] == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("slower", [0.85, 1.3])  # a factor of 1.5 would have the grain chosen anew
def test_what_the_model_learned_in_a_step_is_in_the_next_prediction(slower: float) -> None:
    loop, waits_s = Loop(), modeled_s()
    first = [loop.step(waits_s=waits_s, own_s=1.0, slower=slower) for _ in range(2)]
    later = [loop.step(waits_s=waits_s, own_s=1.0) for _ in range(4)]
    assert later[0].modeled_s / first[0].modeled_s == pytest.approx(slower**2, rel=0.05), "the model moved"
    assert [step.ratio for step in later] == pytest.approx([1.0] * 4)


def test_a_model_that_moves_in_every_step_does_not_carry_predictions_away() -> None:
    loop, waits_s, slower = Loop(), modeled_s(), 1.04
    steps = [loop.step(waits_s=waits_s, slower=slower) for _ in range(12)]
    assert steps[-1].modeled_s > 1.25 * waits_s, "it moved far"
    # the middle one of the last three steps was measured one move of the model ago
    most = max(after.modeled_s / before.modeled_s for before, after in pairwise(steps))
    assert all(1 / most - 1e-9 <= step.ratio <= 1.0 + 1e-9 for step in steps[2:])


def test_what_was_learned_with_batches_of_one_length_counts_for_those_of_another() -> None:
    loop, short_s, long_s = Loop(), modeled_s(SHORT), modeled_s(LONG)
    loop.step(SHORT, LONG, waits_s=short_s + long_s)
    for _ in range(4):
        loop.step(SHORT, waits_s=short_s, slower=1.2)
    for _ in range(3):
        loop.step(SHORT, waits_s=short_s)
    step = loop.step(LONG, waits_s=long_s)
    assert step.modeled_s > 1.5 * long_s
    assert step.ratio == pytest.approx(1.0, abs=0.1)


def test_a_prediction_is_made_before_its_step() -> None:
    loop, waits_s = Loop(), modeled_s()
    for _ in range(4):
        loop.step(waits_s=waits_s)
    slow = loop.step(waits_s=3 * waits_s)
    assert slow.predicted_s == pytest.approx(waits_s)
