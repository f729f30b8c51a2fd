"""Simulate Cleave itself on a setting: which method, one batch or many, and what a departure costs.

The methods, from exact to fast; the outcome says which was used:

- `engine`: the real engine, event by event, with the terms of today's devices (fp32 at rest). For up to 16 devices, up
  to `_MOST_TASKS` tasks, and models that its decoders can describe.
- `timeline`: the plan's stages played event by event on true rates (`core/plan/resident/timeline.py`), with lean
  devices (16 bits at rest). For one batch on up to 16 devices.
- `columns`: the planner's law on true rates, with lean devices. For any number of devices, and under churn.
- `gemms`: where memory holds no columns, gemm by gemm; the cost law of the planner on true rates, also under churn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cleave.core.plan.resident.few_devices import FEW, pose_model
from cleave.core.plan.resident.large_fleet import ModelPlan
from cleave.core.plan.resident.small_fleet import judge_again
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.core.plan.resident.standing import standing
from cleave.core.plan.rivals.case import plural
from cleave.core.plan.step import StepPlan
from cleave.errors import InfeasibleError, InputError
from cleave.sim.columns import ColumnsCourse, true_rates
from cleave.sim.course import Attendance, Course
from cleave.sim.engine_course import EngineCourse
from cleave.sim.gemm_course import GemmCourse, gemm_loads, step_s, usual_recovery_s
from cleave.sim.planning import plan_setting
from cleave.sim.setting import Outcome, Setting
from cleave.sim.stack import can_describe
from cleave.sim.world import World

SYSTEM = "cleave"
MethodChoice = Literal["auto", "engine", "law"]
_MOST_TASKS = 60_000
_USUAL_CHUNK = 64
_TRIED_DEPARTURES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How to simulate a setting."""

    world: World
    batches: int = 1
    has_churn: bool = False
    method: MethodChoice = "auto"
    watch: Callable[[Course], None] = lambda course: None
    """Hears of the batches, once they are done."""


def simulate_cleave(setting: Setting, run: Run | None = None) -> Outcome:
    """Simulate batches; without `run`, one batch in a world that is as believed."""
    run = run or Run(world=World(setting.profiles, seed=setting.seed))
    try:
        if run.method == "engine" or (run.method == "auto" and suits_engine(setting, run.batches)):
            try:
                return _by_engine(setting, run)
            except InfeasibleError:
                if run.method == "engine":
                    raise
        return _by_law(setting, run)
    except InfeasibleError as why:
        return Outcome(system=SYSTEM, fits=False, reason=str(why))


def suits_engine(setting: Setting, batches: int) -> bool:
    """Whether every event of every batch can be simulated in seconds."""
    columns = min(len(setting.profiles), 2 * setting.model.layers + 1)
    tasks = 2 * columns * setting.sequences * -(-setting.sequence // _USUAL_CHUNK) * batches
    return len(setting.profiles) <= FEW and tasks <= _MOST_TASKS and can_describe(setting.model)


def _by_engine(setting: Setting, run: Run) -> Outcome:
    if not can_describe(setting.model):
        raise InputError(
            f"the engine cannot simulate {setting.model.name}, whose norms or projections its decoders lack; "
            "use --method law"
        )
    course = EngineCourse(setting, run.world)
    done = course.run(run.batches)
    run.watch(done)
    plan = course.plan
    assert plan is not None
    return Outcome(
        system=SYSTEM,
        fits=True,
        reason=f"{plural(len(plan.stages), 'stage')}, chunks of {plan.chunk} tokens",
        batch_s=done.mean_s,
        down_bytes=max(device.down_bytes for device in course.devices) / run.batches,
        up_bytes=max(device.up_bytes for device in course.devices) / run.batches,
        memory_bytes=max(device.peak_bytes for device in course.devices),
        devices_used=len(plan.devices),
        recovery_s=None if run.has_churn or len(plan.devices) < 2 else _recovery_by_engine(setting, run.world, plan),
        detail={
            "planned_s": plan.step_s,
            "server_down_bytes": sum(device.down_bytes for device in course.devices) / run.batches,
            "server_up_bytes": sum(device.up_bytes for device in course.devices) / run.batches,
            **_counts(done),
        },
    )


def _recovery_by_engine(setting: Setting, world: World, plan: ResidentPlan) -> float | None:
    """Mean of what the departure of a device adds to a batch that is half done; None if nobody can take over."""
    names = sorted(plan.devices)
    added: list[float] = []
    for name in names[:: max(len(names) // _TRIED_DEPARTURES, 1)][:_TRIED_DEPARTURES]:
        course = EngineCourse(setting, world)
        usual_s = course.batch()
        try:
            added.append(course.batch(leaving=name, after_s=usual_s / 2) - usual_s)
        except InfeasibleError:
            return None
    return sum(added) / len(added)


def _by_law(setting: Setting, run: Run) -> Outcome:
    present = np.flatnonzero(Attendance(setting.profiles.names, run.world.lives()).present) if run.has_churn else None
    if present is not None and len(present) == 0:
        raise InfeasibleError("no device is there at the start; add devices, or choose another --churn")
    profiles = setting.profiles if present is None else setting.profiles.take(present)
    plan = plan_setting(setting, profiles)
    if isinstance(plan, StepPlan):
        return _by_gemms(setting, run, plan)
    truth = true_rates(run.world, 0.0)
    columns = standing(plan, truth, setting.server)
    first_s, loads, takeover_s = columns.step_s, columns.loads(), columns.takeover_s()
    if not run.has_churn and len(setting.profiles) <= FEW:
        done = _played(setting, run, plan)
    elif run.has_churn:
        done = ColumnsCourse(setting, run.world, plan).run(run.batches)
    else:
        later_s = columns.measured().step_s if truth is not setting.profiles else first_s
        done = Course(method="columns", batch_s=(first_s, *(min(first_s, later_s),) * (run.batches - 1)))
    run.watch(done)
    held_s = takeover_s[~np.isnan(takeover_s)]
    usual_recovery_s = float(np.where(np.isfinite(held_s), held_s, first_s / 2).mean())  # alone: half a batch is lost
    return Outcome(
        system=SYSTEM,
        fits=True,
        reason=f"{plural(len(plan.stages), 'stage')}, chunks of {max(plan.chunks)} tokens, limited by {plan.limit}",
        batch_s=done.mean_s,
        down_bytes=float(loads.down_bytes.max()),
        up_bytes=float(loads.up_bytes.max()),
        memory_bytes=float(loads.memory_bytes.max()),
        devices_used=len(plan.devices),
        recovery_s=float(np.mean(done.recovery_s)) if done.recovery_s else usual_recovery_s,
        detail={
            "planned_s": plan.step_s,
            "server_down_bytes": plan.down_bytes,
            "server_up_bytes": plan.up_bytes,
            "stages": len(plan.stages),
            "rounds": len(plan.rounds),
            "chunk": max(plan.chunks),
            **_counts(done),
        },
    )


def _played(setting: Setting, run: Run, plan: ModelPlan) -> Course:
    """Play the plan's stages on true rates."""
    problem = pose_model(
        true_rates(run.world, 0.0),
        setting.model,
        setting.tokens,
        sequence=setting.sequence,
        wire=setting.wire,
        server=setting.server,
    )
    played = judge_again(problem, plan.rounds[0].plan) if len(plan.rounds) == 1 else None
    seconds = standing(plan, problem.profiles, setting.server).step_s if played is None else played.step_s
    return Course(method="columns" if played is None else "timeline", batch_s=(seconds,) * run.batches)


def _by_gemms(setting: Setting, run: Run, plan: StepPlan) -> Outcome:
    truth = true_rates(run.world, 0.0)
    if run.has_churn:
        done = GemmCourse(setting, run.world, plan).run(run.batches)
    else:
        done = Course(method="gemms", batch_s=(step_s(plan, truth),) * run.batches)
    run.watch(done)
    loads = gemm_loads(plan, truth)
    return Outcome(
        system=SYSTEM,
        fits=True,
        reason="gemm by gemm: memory holds no columns",
        batch_s=done.mean_s,
        down_bytes=float(loads.down_bytes.max()),
        up_bytes=float(loads.up_bytes.max()),
        memory_bytes=float(loads.memory_bytes.max()),
        devices_used=int((loads.down_bytes > 0).sum()),
        recovery_s=float(np.mean(done.recovery_s)) if done.recovery_s else usual_recovery_s(plan, truth),
        detail={
            "planned_s": plan.step_s,
            "server_down_bytes": float(loads.down_bytes.sum()),
            "server_up_bytes": float(loads.up_bytes.sum()),
            **_counts(done),
        },
    )


def _counts(done: Course) -> dict[str, float | int | str]:
    counts: dict[str, float | int | str] = {"method": done.method, "batches": len(done.batch_s)}
    if len(done.batch_s) > 1:
        spread = np.percentile(done.batch_s, (5, 50, 95)).tolist()
        counts |= dict(zip(("batch_p5_s", "batch_median_s", "batch_p95_s"), spread, strict=True))
    if done.departures or done.joins:
        counts |= {"departures": done.departures, "joins": done.joins, "replans": done.replans}
        counts |= {"waited_s": done.waited_s}
    return counts
