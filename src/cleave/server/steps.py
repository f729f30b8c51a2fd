"""Compare the steps of a run with their predictions, and correct planning by what they show."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from cleave import events
from cleave.core.plan.choose import Local, PassChoice
from cleave.core.plan.experience import OFF
from cleave.core.schedule.members import STAND_IN, Roster
from cleave.server.planning import Planning
from cleave.server.server_cost import Handling
from cleave.server.step_clock import StepClock, StepTime
from cleave.server.waiting import Waiting


class Steps:
    def __init__(
        self,
        planning: Planning,
        roster: Roster,
        lock: threading.RLock,
        *,
        local: Local,
        traffic: Callable[[], tuple[int, int]],
        tell: events.Listener,
    ) -> None:
        """`lock` guards the roster; `traffic` returns the bytes moved so far, down and up."""
        self._planning, self._roster, self._lock = planning, roster, lock
        self._traffic, self._tell = traffic, tell
        self._clock, self._handling = StepClock(planning.experience), Handling()
        self._latest: PassChoice | None = None
        self._local = local
        self.waiting = Waiting()
        self.off_reason = ""
        """Why a step took far longer than predicted, if one did."""

    @property
    def times(self) -> tuple[StepTime, ...]:
        """The latest steps, oldest first."""
        return tuple(self._clock.steps)

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds of a step of one pass like the latest."""
        return self._clock.predicted_s(self._latest) if self._latest is not None else None

    def planned(self, choice: PassChoice, local: Local) -> None:
        """Note that a pass of the current step was planned."""
        self._latest, self._local = choice, local
        self._clock.planned(choice, self.waiting.seconds)

    def ended(self) -> None:
        """End the current step: learn from it, and say what made it slow."""
        self._find_shared_links()
        if self._clock.is_open:
            self._learn_server_costs()  # first, as the model of the next step has them too
        step = self._clock.ended(self.waiting.seconds, self._remodeled_s)
        if step is not None:
            self._explain(step)

    def _find_shared_links(self) -> None:
        with self._lock:
            found = self._roster.find_shared_links()
            shared, names = self._roster.traffic.shared, self._roster.members.keys() - {STAND_IN}
        for link in found:
            self._tell(events.Note(text=f"{link}; plans take that into account from now on"))
        # what all devices share limits a step as the server's own link would
        lines = [link for link in shared if not link.is_medium and names <= link.devices]
        self._planning.server_links(
            min((link.down_bytes_per_s for link in lines), default=math.inf),
            min((link.up_bytes_per_s for link in lines), default=math.inf),
        )

    def _learn_server_costs(self) -> None:
        with self._lock:
            tasks = sum(member.tasks for member in self._roster.members.values())
        costs = self._handling.learn(self.waiting.cpu_s, tasks, sum(self._traffic()))
        self._planning.server_costs(costs.task_s, costs.byte_s)

    def _remodeled_s(self, choice: PassChoice) -> float | None:
        with self._lock:
            profiles = self._roster.fresh_profiles()
        remodeled = self._planning.remodel(choice, self._local, profiles)
        if remodeled is None:
            return None
        if self._latest is choice:
            self._latest = remodeled
        return remodeled.modeled_s

    def _explain(self, step: StepTime) -> None:
        """Say why a step took far longer than predicted, if what its tasks measured tells."""
        with self._lock:
            profiles = self._roster.fresh_profiles()
        if step.ratio < OFF or self._latest is None or profiles is None:
            return
        reason = self._planning.wrong_term(self._latest, self._local, profiles)
        if reason:
            took = f"a step took {step.seconds:.3g} s instead of the predicted {step.predicted_s:.3g} s"
            self.off_reason = f"{took}: {reason}"
            self._tell(events.Note(text=f"{self.off_reason}; the next plan takes that into account"))
