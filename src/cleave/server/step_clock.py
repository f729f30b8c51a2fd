"""The steps of a training loop: predicted and measured seconds of each, and what each cost the server.

A step begins when its first pass is planned, as a search for a plan says nothing about the next step, and ends when the
optimizer is done and its lesson learned. Its prediction is the cost model's time for its passes, times the factor by
which recent steps were off, plus the time that the training process itself took in recent steps. Called from the
training thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from statistics import median

from cleave.core.plan.choose import PassChoice
from cleave.core.plan.experience import Experience

_KEPT = 256
_LAST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step: what was predicted just before it, and what it took."""

    seconds: float
    predicted_s: float
    modeled_s: float
    """The cost model's own time of the passes, before experience corrects it."""
    waiting_s: float
    """Part of `seconds` in which the training loop waited for devices."""
    grain: str

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.seconds / self.predicted_s


@dataclass(slots=True)
class _Open:
    began_s: float
    waiting_s: float
    grain: str
    arrangement: Hashable
    choice: PassChoice
    modeled_s: float = 0.0
    predicted_s: float = 0.0


class StepClock:
    def __init__(self, experience: Experience, clock: Callable[[], float] = time.perf_counter) -> None:
        self._experience, self._clock = experience, clock
        self._open: _Open | None = None
        self._own_s: deque[float] = deque(maxlen=_LAST)
        self.steps: deque[StepTime] = deque(maxlen=_KEPT)
        """The latest steps, oldest first."""

    @property
    def own_s(self) -> float:
        """Seconds of a step that the training process itself takes; 0 until a step was measured."""
        return median(self._own_s) if self._own_s else 0.0

    def predicted_s(self, choice: PassChoice) -> float | None:
        """Predicted seconds of a step of one such pass; None if nothing could be planned."""
        if choice.modeled_s is None:
            return None
        return choice.modeled_s * self._experience.factor(choice.grain) + self.own_s

    @property
    def is_open(self) -> bool:
        """Whether a pass of the current step was planned."""
        return self._open is not None

    def planned(self, choice: PassChoice, waiting_s: float) -> None:
        """Note that a pass of the current step was planned; `waiting_s` is the time waited for devices so far."""
        modeled_s = choice.modeled_s
        if modeled_s is None:
            return
        if self._open is None:
            arrangement = choice.plan.arrangement if choice.plan is not None else None
            self._open = _Open(self._clock(), waiting_s, choice.grain, arrangement, choice, predicted_s=self.own_s)
        self._open.modeled_s += modeled_s
        self._open.predicted_s += modeled_s * self._experience.factor(choice.grain)

    def ended(self, waiting_s: float, remodel: Callable[[PassChoice], float | None]) -> StepTime | None:
        """End the current step, learn from it and return it; None if no pass was planned for it.

        `remodel` returns the time of a choice by the cost model as it is now, with the rates that the step taught:
        only what those do not explain is experience. The next pass must be planned by the same model.
        """
        opened, self._open = self._open, None
        if opened is None:
            return None
        now_s, then_s = remodel(opened.choice), opened.choice.modeled_s
        explained = now_s / then_s if now_s and then_s else 1.0
        took_s = self._clock() - opened.began_s
        waited_s = min(waiting_s - opened.waiting_s, took_s)
        step = StepTime(
            seconds=took_s,
            predicted_s=opened.predicted_s,
            modeled_s=opened.modeled_s,
            waiting_s=waited_s,
            grain=opened.grain,
        )
        if self.steps:  # the first step also imports, allocates and compiles
            self._own_s.append(took_s - waited_s)
        self._experience.add(opened.grain, opened.arrangement, waited_s, opened.modeled_s * explained)
        self.steps.append(step)
        return step
