"""Figures of a run, added up from its events: for the live screen, the final report and its JSON."""

from __future__ import annotations

import statistics
from collections import deque

from cleave import events

_RECENT_STEPS = 20  # steps to average rates over


class RunFigures:
    """An event listener."""

    def __init__(self) -> None:
        self.started: events.RunStarted | None = None
        self.losses: list[float] = []
        self.evaluated: events.Evaluated | None = None
        self.grain: events.GrainChosen | None = None
        self.waits: str | None = None
        """Why no device computes, while that is so."""
        self.undone = 0
        """Steps that were undone, as unchecked work was found wrong."""
        self.recent: deque[events.StepDone] = deque(maxlen=_RECENT_STEPS)
        self._step_s: list[float] = []
        self._waiting_s = self._checking_s = 0.0

    def __call__(self, event: events.AnyEvent) -> None:
        match event:
            case events.RunStarted():
                self.started = event
            case events.StepDone():
                self.losses.append(event.loss)
                self.recent.append(event)
                self._step_s.append(event.seconds)
                self._waiting_s += event.waiting_s
                self._checking_s += event.checking_s
                self.waits = None
            case events.RolledBack():
                before = self.started.first_step - 1 if self.started else 0
                del self.losses[max(0, event.step - before) :]
                self.undone += event.from_step - event.step
            case events.Evaluated():
                self.evaluated = event
            case events.GrainChosen():
                self.grain = event
            case events.Paused():
                self.waits = event.reason
            case events.DeviceJoined():
                self.waits = None
            case _:
                pass

    # -------------------------------------------------------------------------------------------- recent steps

    def mean(self, field: str) -> float:
        """Mean of a field of recent steps."""
        return sum(getattr(step, field) for step in self.recent) / max(len(self.recent), 1)

    @property
    def tokens_per_s(self) -> float:
        return self.mean("tokens") / max(self.mean("seconds"), 1e-9)

    @property
    def left_s(self) -> float:
        """Expected seconds until the last step."""
        if not self.started or not self.recent:
            return 0.0
        return (self.started.steps - self.recent[-1].step) * self.mean("seconds")

    @property
    def recent_waiting_share(self) -> float:
        return self.mean("waiting_s") / max(self.mean("seconds"), 1e-9)

    # -------------------------------------------------------------------------------------------- the whole run

    @property
    def predicted_step_s(self) -> float | None:
        """What was predicted of the latest step, or at first when the grain was chosen."""
        if self.recent and self.recent[-1].predicted_s is not None:
            return self.recent[-1].predicted_s
        if self.grain is None or self.grain.predicted_s is None:
            return None
        return self.grain.predicted_s * (self.started.passes_per_step if self.started else 1)

    @property
    def measured_step_s(self) -> float | None:
        """Median, so that a step that waited for devices to return does not count."""
        return statistics.median(self._step_s) if self._step_s else None

    @property
    def steps_s(self) -> float:
        return sum(self._step_s)

    @property
    def waiting_s(self) -> float:
        """Seconds in which the training loop waited for devices."""
        return self._waiting_s

    @property
    def checking_s(self) -> float:
        """Seconds the server spent verifying results, while devices computed."""
        return self._checking_s
