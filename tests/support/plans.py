"""Plans by hand: given devices for given shards, whatever a planner would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cleave.core.fleet.profiles import DeviceId, Profiles
from cleave.core.model.shard import Shard
from cleave.core.model.sublayers import Sublayer
from cleave.core.plan.resident.stages import Column, Holding, ResidentPlan, Stage

Layout = Sequence[tuple[int, Sequence[Sequence[str]]]]
"""Of each stage: how many sublayers, and the devices of each slice."""


def stage_of(first: int, count: int, slices: Sequence[Sequence[str | tuple[str, float]]]) -> Stage:
    """Devices by name, or with the sequences that each should take."""

    def holding(one: str | tuple[str, float]) -> Holding:
        device, sequences = (one, 1.0) if isinstance(one, str) else one
        return Holding(DeviceId(device), sequences)

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


def arranged(layout: Layout, chunk: int) -> Callable[..., ResidentPlan]:
    """Always this, as far as its devices are there; a slice whose devices are all gone goes to all that are there."""

    def arrange(profiles: Profiles, sublayers: Sequence[Sublayer], **_: object) -> ResidentPlan:
        stages: list[Stage] = []
        first = 0
        for count, slices in layout:
            present = [[name for name in column if name in profiles.names] or profiles.names for column in slices]
            within = min(count, len(sublayers) - first)
            if within:  # the head, where there is none
                stages.append(stage_of(first, within, present))
            first += within
        return plan_of(stages, chunk)

    return arrange
