"""Batches gemm by gemm under true rates and churn, by the planner's own law: for fleets whose memory holds no columns.

What is approximated, against the engine event by event:

- gemms follow one another without overlap; between changes every batch takes the same time, computed once;
- when a device leaves, the rest repair its blocks of the gemm under way as the live server does, all of them, which is
  the most it can cost; where nobody can, that gemm begins again;
- the gemms after a change are planned for the devices that are there, in no time.
"""

from __future__ import annotations

import numpy as np

from cleave.core.cost.gemm import compute_s, unit_costs
from cleave.core.fleet.profiles import Ints, Profiles
from cleave.core.plan.gemm.product import SERVER, GemmPlan
from cleave.core.plan.gemm.repair import repair
from cleave.core.plan.resident.standing import Loads
from cleave.core.plan.step import StepPlan
from cleave.errors import InfeasibleError
from cleave.sim.columns import true_rates
from cleave.sim.course import Attendance, Course
from cleave.sim.planning import plan_gemms
from cleave.sim.setting import Setting
from cleave.sim.world import World


def makespan_s(plan: GemmPlan, truth: Profiles) -> float:
    """Seconds of a gemm's blocks on true rates: rounds follow one another, and the server's links carry all bytes."""
    unit = unit_costs(truth.take(_places(plan, truth)), plan.wire, plan.server, plan.a_wire)
    rounds_s = np.zeros(plan.rounds)
    np.maximum.at(rounds_s, plan.tiling.round, plan.tiling.finish_s(unit))
    server_s = max(
        float(plan.down_bytes.sum()) / plan.server.down_bytes_per_s,
        float(plan.up_bytes.sum()) / plan.server.up_bytes_per_s,
    )
    return max(float(rounds_s.sum()), server_s)


def step_s(plan: StepPlan, truth: Profiles) -> float:
    """Seconds of a step on true rates."""
    return plan.attention_s + sum(part.what.count * makespan_s(part.plan, truth) for part in plan.segments)


def gemm_loads(plan: StepPlan, truth: Profiles) -> Loads:
    """What a step asks of each device; memory is that of its largest block."""
    down, up, memory, compute = (np.zeros(len(truth) + 1) for _ in range(4))
    for part in plan.segments:
        one, count = part.plan, part.what.count
        places = np.append(_places(one, truth), len(truth))  # the server, where it computes too, comes last
        device = places[one.tiling.device]
        unit = unit_costs(truth.take(places[:-1]), one.wire, one.server, one.a_wire)
        np.add.at(down, device, count * one.down_bytes)
        np.add.at(up, device, count * one.up_bytes)
        np.maximum.at(memory, device, one.tiling.memory_bytes(unit))
        tiling = one.tiling
        busy_s = compute_s(unit.take(tiling.device), tiling.heights, tiling.widths, tiling.depths)
        np.add.at(compute, device, count * busy_s)
    return Loads(down[:-1], up[:-1], memory[:-1], compute[:-1])


def usual_recovery_s(plan: StepPlan, truth: Profiles) -> float | None:
    """Seconds in which the others repair the longest gemm without one of its devices; None if they cannot."""
    longest = max((part.plan for part in plan.segments), key=lambda one: one.makespan_s)
    used = sorted(_users(longest) - {SERVER})
    try:
        return repair(longest, truth, used[:1]).recovery_s
    except InfeasibleError:
        return None


class GemmCourse:
    def __init__(self, setting: Setting, world: World, plan: StepPlan) -> None:
        """The plan is for the devices that are there at the start."""
        self._setting, self._world = setting, world
        self._attendance = Attendance(setting.profiles.names, world.lives())
        self._plan: StepPlan | None = plan
        self._known: tuple[StepPlan, Profiles, float] | None = None
        self._recovery_s: list[float] = []
        self._departures = self._joins = self._replans = 0
        self._now = self._waited_s = 0.0

    def run(self, batches: int) -> Course:
        took, ended = list[float](), list[float]()
        for _ in range(batches):
            took.append(self._batch())
            ended.append(self._now)
        return Course(
            method="gemms",
            batch_s=tuple(took),
            ended_s=tuple(ended),
            changes=tuple(self._attendance.history),
            recovery_s=tuple(self._recovery_s),
            departures=self._departures,
            joins=self._joins,
            replans=self._replans,
            waited_s=self._waited_s,
        )

    def _batch(self) -> float:
        left, took = 1.0, 0.0
        while left > 0:
            plan = self._planned()
            truth = (
                true_rates(self._world, self._now)
                if self._known is None or not self._world.is_still
                else self._known[1]
            )
            seconds = self._step_s(plan, truth)
            change = next(self._attendance.until(self._now + left * seconds), None)
            if change is None:
                took += left * seconds
                self._now += left * seconds
                break
            passed_s = max(change.at - self._now, 0.0)
            left -= passed_s / seconds
            if change.joins:
                self._joins += 1
            else:
                self._departures += 1
                passed_s += self._recover(plan, truth, self._setting.profiles.names[change.device], 1 - left)
            took += passed_s
            self._now += passed_s
            self._plan = None
        return took

    def _step_s(self, plan: StepPlan, truth: Profiles) -> float:
        """Seconds of a step, computed once while nothing changes."""
        if self._known is None or self._known[0] is not plan or self._known[1] is not truth:
            self._known = plan, truth, step_s(plan, truth)
        return self._known[2]

    def _recover(self, plan: StepPlan, truth: Profiles, name: str, done: float) -> float:
        """Seconds in which others do a device's blocks of the gemm that is under way once so much of a step is done."""
        gemm = _under_way(plan, truth, done)
        if name not in _users(gemm):
            return 0.0
        others = np.flatnonzero(self._attendance.present)
        try:
            seconds = repair(gemm, truth.take(others), [name]).recovery_s if len(others) else makespan_s(gemm, truth)
        except InfeasibleError:
            seconds = makespan_s(gemm, truth)
        self._recovery_s.append(seconds)
        return seconds

    def _planned(self) -> StepPlan:
        """The plan for the devices that are there; wait for more if they cannot do it."""
        while self._plan is None:
            present = np.flatnonzero(self._attendance.present)
            try:
                if len(present) == 0:
                    raise InfeasibleError("no device is there")
                self._plan = plan_gemms(self._setting, true_rates(self._world, self._now).take(present))
                self._replans += 1
            except InfeasibleError:
                at = self._attendance.next_at()  # raises if nothing changes any more
                for change in self._attendance.until(at):
                    self._joins, self._departures = self._joins + change.joins, self._departures + (not change.joins)
                self._waited_s += max(at - self._now, 0.0)
                self._now = max(at, self._now)
        return self._plan


def _under_way(plan: StepPlan, truth: Profiles, done: float) -> GemmPlan:
    """The gemm that is under way when this share of a step is done."""
    at_s = done * step_s(plan, truth)
    for part in plan.segments:
        at_s -= part.what.count * makespan_s(part.plan, truth)
        if at_s < 0:
            return part.plan
    return plan.segments[-1].plan


def _users(plan: GemmPlan) -> set[str]:
    numbers: list[int] = plan.tiling.device.tolist()
    return {plan.names[number] for number in numbers}


def _places(plan: GemmPlan, truth: Profiles) -> Ints:
    """Indices of the plan's devices; the server, if it computes too, is none of them."""
    places = {name: number for number, name in enumerate(truth.names)}
    return np.array([places[name] for name in plan.names if name in places], dtype=np.int64)
