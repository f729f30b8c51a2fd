"""Batches of a plan's columns under true rates and churn, by the planner's own law: for fleets too large for events.

What is approximated, against the engine event by event:

- between changes, every batch takes the same time, computed once;
- the server's links carry all bytes at full capacity; media that only some devices share are not counted;
- when a device leaves, its column mates redo its whole step after their own work: the batch takes that much longer,
  whenever it left, which is the most it can cost; columns that lose devices in the same batch recover side by side;
- when a device leaves that was alone in its column, the batch begins again, and the fleet is planned anew after it;
- newcomers take a seat in a column that lost one, otherwise they are idle until the next plan;
- the fleet is planned again once a batch takes 1 / 0.7 of the planned time, as on a live server, in no time;
- a stall slows a device's processor down by the share of time it is stalled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cleave.core.fleet.profiles import Bools, Profiles
from cleave.core.plan.choose import WORTH_CHANGING
from cleave.core.plan.resident.large_fleet import ModelPlan
from cleave.core.plan.resident.standing import StandingColumns, standing
from cleave.errors import InfeasibleError
from cleave.sim.course import Attendance, Change, Course
from cleave.sim.planning import replan
from cleave.sim.setting import Setting
from cleave.sim.world import World

_TRY_AGAIN = 2
"""Batches between two plans, unless one is needed to go on."""


def true_rates(world: World, now: float) -> Profiles:
    """True profiles, with processors slowed by their stalls."""
    truth = world.truth(now)
    return replace(truth, flops_per_s=truth.flops_per_s * (1 - world.stall_share)) if world.stall_share else truth


@dataclass(slots=True)
class _State:
    plan: ModelPlan
    columns: StandingColumns
    planned_s: float
    step_s: float
    """Of the columns as they are."""
    lost: list[int]
    """Columns that lost a device, once per device."""
    age: int = 0
    """Batches since the plan was made."""


class ColumnsCourse:
    def __init__(self, setting: Setting, world: World, plan: ModelPlan) -> None:
        """The plan is for the devices that are there at the start."""
        self._setting, self._world = setting, world
        self._attendance = Attendance(setting.profiles.names, world.lives())
        self._truth = true_rates(world, 0.0)
        self._state = self._planned(plan)
        self._recovery_s: list[float] = []
        self._departures = self._joins = self._replans = 0
        self._now = self._waited_s = 0.0

    def run(self, batches: int) -> Course:
        took, ended = list[float](), list[float]()
        for number in range(batches):
            took.append(self._batch(is_first=number == 0))
            ended.append(self._now)
        return Course(
            method="columns",
            batch_s=tuple(took),
            ended_s=tuple(ended),
            changes=tuple(self._attendance.history),
            recovery_s=tuple(self._recovery_s),
            departures=self._departures,
            joins=self._joins,
            replans=self._replans,
            waited_s=self._waited_s,
        )

    def _batch(self, *, is_first: bool) -> float:
        self._refresh()
        state = self._state
        if not is_first and state.step_s * WORTH_CHANGING > state.planned_s and state.age >= _TRY_AGAIN:
            self._replan()
            state = self._state
        state.age += 1
        began, gone = self._now, np.zeros(len(self._setting.profiles), dtype=np.bool_)
        step_s, added = state.step_s, dict[int, float]()
        newcomers: list[int] = []
        takeover_s: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
        while True:
            end = began + step_s + max(added.values(), default=0.0)
            change = next(self._attendance.until(end), None)
            if change is None:
                break
            self._count(change)
            if change.joins:
                newcomers.append(change.device)
                continue
            columns = state.columns.columns_of(change.device)
            if not columns or gone[change.device]:
                continue
            gone[change.device] = True
            state.lost += columns
            if takeover_s is None:
                takeover_s = state.columns.takeover_s()
            redo_s = float(takeover_s[change.device])
            if not np.isfinite(redo_s):  # it was alone in its column: another plan, and the batch begins again
                redo_s = max(change.at - began, 0.0)
            self._recovery_s.append(redo_s)
            for column in columns:
                added[column] = added.get(column, 0.0) + redo_s
        self._now = end
        if gone.any() or newcomers:
            self._settle(gone, newcomers)
        return end - began

    def _settle(self, gone: Bools, newcomers: list[int]) -> None:
        """Reseat devices after a batch; plan again if a column has nobody left and nobody to take it."""
        state, present = self._state, self._present()
        columns = state.columns.without(gone)
        if columns is None:
            self._replan()
            return
        for device in newcomers:
            if present[device] and (column := columns.seat(device, state.lost)) is not None:
                columns = columns.seated(device, column)
                if column in columns.columns_of(device):  # else it was left without rows
                    state.lost.remove(column)
        state.columns = columns.measured()
        state.step_s = state.columns.step_s

    def _refresh(self) -> None:
        """Follow the drift of true rates."""
        truth = true_rates(self._world, self._now)
        if not self._world.is_still and truth is not self._truth:
            self._truth = truth
            state = self._state
            state.columns = state.columns.on(truth).measured()
            state.step_s = state.columns.step_s

    def _replan(self) -> None:
        """Plan for the devices that are there, waiting for more if they cannot hold the model."""
        while True:
            present = np.flatnonzero(self._present())
            try:
                if len(present) == 0:
                    raise InfeasibleError("no device is there")
                plan = replan(self._setting, self._truth.take(present), self._state.plan)
                break
            except InfeasibleError:
                at = self._attendance.next_at()
                for change in self._attendance.until(at):
                    self._count(change)
                self._waited_s += max(at - self._now, 0.0)
                self._now = max(at, self._now)
        self._replans += 1
        self._state = self._planned(plan)

    def _planned(self, plan: ModelPlan) -> _State:
        columns = standing(plan, self._truth, self._setting.server)
        return _State(plan, columns, plan.step_s, columns.step_s, [])

    def _count(self, change: Change) -> None:
        if change.joins:
            self._joins += 1
        else:
            self._departures += 1

    def _present(self) -> Bools:
        return np.array(self._attendance.present, dtype=np.bool_)
