"""Hand-made plans: given devices for given shards, whatever a planner would choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cleave.core.fleet.profiles import DeviceId
from cleave.core.model.keeping import Keeping
from cleave.core.model.shard import Shard
from cleave.core.plan.resident.problem import Problem
from cleave.core.plan.resident.stages import Column, Holding, ResidentPlan, Stage

Layout = Sequence[tuple[int, Sequence[Sequence[str]]]]
"""Number of sublayers, and the devices of each slice, per stage."""


def stage_of(
    first: int, count: int, slices: Sequence[Sequence[str | tuple[str, float]]], keeps: Keeping = "nothing"
) -> Stage:
    """A stage with devices given by name, or with the number of sequences each should take."""

    def holding(one: str | tuple[str, float]) -> Holding:
        device, sequences = (one, 1.0) if isinstance(one, str) else one
        return Holding(DeviceId(device), sequences, keeps)

    return Stage(
        columns=tuple(
            Column(Shard(first=first, count=count, index=index, of=len(slices)), tuple(map(holding, devices)))
            for index, devices in enumerate(slices)
        )
    )


def plan_of(stages: Sequence[Stage], chunk: int) -> ResidentPlan:
    return ResidentPlan(
        stages=tuple(stages),
        chunk=chunk,
        busiest_s=1.0,
        fill_s=0.0,
        down_bytes=0.0,
        up_bytes=0.0,
        limit="compute",
    )


def leased(counts: Sequence[int], chunk: int = 8, every: int = 1000) -> Callable[..., ResidentPlan]:
    """A planner of a pipeline: one device per stage of so many sublayers, or of the rest, which keeps what it trains.

    Without leases, or with fewer devices, the stages are the same but shared by all devices. A leased plan stands while
    its devices are there.
    """

    def arrange(problem: Problem, previous: ResidentPlan | None = None, **_: object) -> ResidentPlan:
        names, first = sorted(problem.profiles.names), 0  # they join in any order
        is_here = previous is not None and previous.devices <= set(names)
        if previous is not None and is_here and problem.leasing is not None and previous.leased:
            return previous
        stages: list[Stage] = []
        for number, count in enumerate(counts):
            left = len(problem.sums.sublayers) - first
            within = left if number == len(counts) - 1 else min(count, left)
            if within and problem.leasing is not None and len(names) >= len(counts):
                stage = stage_of(first, within, [[names[number]]])
                columns = (stage.columns[0]._replace(is_leased=True, snapshot_every=every),)
                stages.append(replace(stage, columns=columns))
            elif within:
                stages.append(stage_of(first, within, [names]))
            first += within
        return plan_of(stages, chunk)

    return arrange


def arranged(layout: Layout, chunk: int) -> Callable[..., ResidentPlan]:
    """A planner that always returns this layout on connected devices; a slice left without any goes to all of them."""

    def arrange(problem: Problem, **_: object) -> ResidentPlan:
        profiles, sublayers = problem.profiles, problem.sums.sublayers
        stages: list[Stage] = []
        first = 0
        for count, slices in layout:
            present = [[name for name in column if name in profiles.names] or profiles.names for column in slices]
            within = min(count, len(sublayers) - first)
            if within:  # a layout may include a head the model lacks
                stages.append(stage_of(first, within, present))
            first += within
        return plan_of(stages, chunk)

    return arrange
