"""What devices computed in the latest step, result by result: the timeline of the dashboard.

Lives with the engine and uses its clock; the caller that ends a step holds the engine's lock. For a large fleet, only
the first results of a step are kept: nobody can look at more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from cleave.core.schedule.members import Observation
from cleave.core.schedule.tasks import DeviceId, Task
from cleave.server.contract import Kind, Run, run_of, work_of

_MOST = 4096


class Span(NamedTuple):
    """A device computing one block; seconds are since the step began."""

    device: DeviceId
    round: int
    """The product, or the pass through resident layers, that it is part of, counted within the step."""
    kind: Kind
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class StepActivity:
    seconds: float
    is_cut: bool
    """Whether there were more results than are kept."""
    spans: tuple[Span, ...]


class Activity:
    def __init__(self) -> None:
        self.latest: StepActivity | None = None
        """The latest step that is over."""
        self._began_s: float | None = None
        self._rounds: WeakKeyDictionary[Run, int] = WeakKeyDictionary()
        self._spans: list[Span] = []
        self._is_cut = False

    def arrived(self, task: Task, seen: Observation, now: float) -> None:
        """Note a result that just arrived."""
        if self._began_s is None:
            return
        if len(self._spans) >= _MOST:
            self._is_cut = True
            return
        run = run_of(task)
        number = self._rounds.setdefault(run, len(self._rounds) + 1)
        to_s = now - self._began_s - seen.up_s
        from_s = max(0.0, to_s - seen.compute_s)
        self._spans.append(Span(task.device, number, work_of(task).kind, from_s, max(from_s, to_s)))

    def step_ended(self, now: float) -> None:
        """End the step, and begin the next one."""
        if self._began_s is not None and self._spans:
            self.latest = StepActivity(now - self._began_s, self._is_cut, tuple(self._spans))
        self._began_s, self._spans, self._is_cut = now, [], False
        self._rounds = WeakKeyDictionary()
