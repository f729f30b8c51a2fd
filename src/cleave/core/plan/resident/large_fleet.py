"""Plan a training step in columns with resident weights, for fleets of any size.

The step is the plane tokens x parameters; its columns stay on devices, and rows flow through. `cover` answers whether
a fleet can do it in given times, `search` finds the times. A model that the fleet's memory cannot hold at once is done
in rounds, each a run of sublayers whose weights are sent for forward and again for backward. The result is a frozen
plan with its reasons; `plane` draws it, `step` compares it with all other ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cleave.core.cost.rates import Server
from cleave.core.cost.resident import SublayerSums, sum_up
from cleave.core.cost.terms import lean_terms
from cleave.core.cost.wire import PLAN_WIRE, WireFormat
from cleave.core.fleet.profiles import DeviceId, Ints, Profiles
from cleave.core.model.keeping import KEEPINGS
from cleave.core.model.shapes import ModelShape
from cleave.core.model.shard import Shard
from cleave.core.model.sublayers import sublayers_of
from cleave.core.plan.resident.cover import Cover, Group, Recipe, StageCover
from cleave.core.plan.resident.search import Found, Search, area_bound_s
from cleave.core.plan.resident.stages import Column, ColumnLimit, Holding, ResidentPlan, Stage
from cleave.errors import InfeasibleError

_ROUNDS = (1, 2, 4, 8)
_PLENTY = 1.3  # with memory for this many models, rounds are not worth trying


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Sublayers whose weights are on devices at the same time."""

    plan: ResidentPlan
    recipe: Recipe
    synchronisation_s: float
    """the part of the busiest device's time that weights and gradients take"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A step of a named model in one round, or in several if memory cannot hold it at once."""

    shape: ModelShape
    tokens: int
    sequence: int
    wire: WireFormat
    rounds: tuple[Round, ...]
    bound_s: float
    """one rectangle of tokens x parameters of any size per device, no fill: no columns can be faster"""
    left_out: dict[str, str]
    """device -> reason"""
    lease_states: int | None = None
    """optimizer states per trained weight, if columns could be leased"""

    @property
    def task(self) -> tuple[ModelShape, int, int, WireFormat]:
        return self.shape, self.tokens, self.sequence, self.wire

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(stage for part in self.rounds for stage in part.plan.stages)

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(column for stage in self.stages for column in stage.columns)

    @property
    def log_bytes(self) -> float:
        """Inputs and output gradients that the server keeps between two snapshots of leased columns."""
        return sum(part.plan.log_bytes for part in self.rounds)

    @property
    def devices(self) -> frozenset[DeviceId]:
        return frozenset(device for part in self.rounds for device in part.plan.devices)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens that travel together, per round."""
        return tuple(part.plan.chunk for part in self.rounds)

    @property
    def limit(self) -> ColumnLimit:
        return max(self.rounds, key=lambda part: part.plan.step_s).plan.limit

    @property
    def step_s(self) -> float:
        return sum(part.plan.step_s for part in self.rounds)

    @property
    def activation_s(self) -> float:
        return sum(part.plan.busiest_s - part.synchronisation_s for part in self.rounds)

    @property
    def synchronisation_s(self) -> float:
        return sum(part.synchronisation_s for part in self.rounds)

    @property
    def fill_s(self) -> float:
        return sum(part.plan.fill_s for part in self.rounds)

    @property
    def down_bytes(self) -> float:
        return sum(part.plan.down_bytes for part in self.rounds)

    @property
    def up_bytes(self) -> float:
        return sum(part.plan.up_bytes for part in self.rounds)


def plan_resident(
    profiles: Profiles,
    shape: ModelShape,
    tokens: int,
    *,
    sequence: int,
    wire: WireFormat = PLAN_WIRE,
    server: Server | None = None,
    previous: ModelPlan | None = None,
) -> ModelPlan:
    """The fastest columns found; with a `previous` plan, only its rounds and recipe are tried, which is quick."""
    server = server or Server()
    if previous is not None and previous.task != (shape, tokens, sequence, wire):
        previous = None
    # sort devices, so that not even rounding depends on the order of the fleet
    order = np.lexsort(
        (
            profiles.latency_s,
            profiles.memory_bytes,
            profiles.flops_per_s,
            profiles.down_bytes_per_s,
            profiles.up_bytes_per_s,
        )
    )
    given, profiles = profiles, profiles.take(order)
    whole = sum_up(sublayers_of(shape), hidden=shape.hidden, sequence=sequence, terms=lean_terms(wire))
    found: list[tuple[_Part, ...]] = []
    for rounds in [len(previous.rounds)] if previous else _rounds(profiles, whole):
        parts = _in_rounds(profiles, whole, tokens, server, rounds, previous)
        if parts is not None:
            found.append(parts)
    if not found:
        if previous is not None:
            return plan_resident(given, shape, tokens, sequence=sequence, wire=wire, server=server)
        raise InfeasibleError(_why_not(profiles, whole))
    best = min(found, key=lambda parts: sum(part.cover.seconds for part in parts))
    bound_s = best[0].bound_s if len(best) == 1 else area_bound_s(profiles, whole, tokens, is_held=False)
    return ModelPlan(
        shape=shape,
        tokens=tokens,
        sequence=sequence,
        wire=wire,
        rounds=tuple(_described(part, sequence, profiles.names) for part in best),
        bound_s=bound_s,
        left_out=_left_out(profiles, best),
    )


class _Part(NamedTuple):
    """The cover found for one round."""

    first: int
    """its first sublayer, in the whole stack"""
    recipe: Recipe
    cover: Cover
    bound_s: float


def _rounds(profiles: Profiles, whole: SublayerSums) -> list[int]:
    """Numbers of rounds to try: as few as memory allows and a few more.

    Just one if memory is plentiful, or if weights are frozen: those travel once and stay.
    """
    terms = whole.terms
    models = float(profiles.memory_bytes.sum() / ((terms.resident_bytes + terms.accumulator_bytes) * whole.sums[0, -1]))
    if models > _PLENTY or whole.sums[1, -1] < whole.sums[0, -1]:
        return [1]
    layers = len(whole) // 2
    return [rounds for rounds in sorted({*_ROUNDS, layers}) if rounds <= layers and rounds * models >= 1]


def _in_rounds(
    profiles: Profiles, whole: SublayerSums, tokens: int, server: Server, rounds: int, previous: ModelPlan | None
) -> tuple[_Part, ...] | None:
    """Plan every round of the stack; equal ones only once."""
    layers = len(whole) // 2
    cuts = [2 * (number * layers // rounds) for number in range(rounds)] + [len(whole)]
    plans: dict[tuple[object, ...], tuple[Found | None, float]] = {}
    found: list[_Part] = []
    for number, (first, until) in enumerate(pairwise(cuts)):
        sublayers = whole.sublayers[first:until]
        if sublayers not in plans:
            part = sum_up(sublayers, hidden=whole.hidden, sequence=whole.sequence, terms=whole.terms)
            search = Search(profiles, part, tokens, server, is_held=rounds == 1)
            before = previous.rounds[number] if previous else None
            plan = search.repeated(before.recipe, before.plan.stages) if before else search.best()
            plans[sublayers] = plan, search.bound_s
        plan, bound_s = plans[sublayers]
        if plan is None:
            return None
        found.append(_Part(first, plan.recipe, plan.cover, bound_s))
    return tuple(found)


# ------------------------------------------------------------------------------------------------------ telling


def _described(found: _Part, sequence: int, names: tuple[str, ...]) -> Round:
    cover = found.cover
    return Round(
        plan=ResidentPlan(
            stages=tuple(_stage(one, cover.keeps[one.kind], found.first, sequence, names) for one in cover.stages),
            chunk=found.recipe.chunk,
            busiest_s=cover.activation_s + cover.synchronisation_s,
            fill_s=cover.fill_s,
            down_bytes=cover.down_bytes,
            up_bytes=cover.up_bytes,
            limit=cover.limit,
        ),
        recipe=found.recipe,
        synchronisation_s=cover.synchronisation_s,
    )


def _stage(of: StageCover, keeps: Ints, offset: int, sequence: int, names: tuple[str, ...]) -> Stage:
    def held(group: Group) -> tuple[Holding, ...]:
        numbers: list[int] = group.devices.tolist()
        sequences: list[float] = (group.rows / sequence).tolist()
        levels: list[int] = keeps[group.devices].tolist()
        return tuple(
            Holding(DeviceId(names[number]), share, KEEPINGS[level])
            for number, share, level in zip(numbers, sequences, levels, strict=True)
        )

    return Stage(
        columns=tuple(
            Column(Shard(first=of.first + offset, count=of.count, index=index, of=len(of.groups)), held(group))
            for index, group in enumerate(of.groups)
        )
    )


def _left_out(profiles: Profiles, parts: tuple[_Part, ...]) -> dict[str, str]:
    used = np.zeros(len(profiles), dtype=np.bool_)
    for part in parts:
        for stage in part.cover.stages:
            for group in stage.groups:
                used[group.devices] = True
    cramped = profiles.memory_bytes < profiles.memory_bytes[used].min()
    slow = profiles.up_bytes_per_s < profiles.up_bytes_per_s[used].min()
    reasons: dict[str, str] = {}
    for device in np.flatnonzero(~used).tolist():
        reasons[profiles.names[device]] = (
            "memory: too small for a column that its links could serve"
            if cramped[device]
            else "uplink: too slow to finish any column's weights and rows in time"
            if slow[device]
            else "speed: the columns are filled by devices that can take more rows x weights"
        )
    return reasons


def _why_not(profiles: Profiles, whole: SublayerSums) -> str:
    terms = whole.terms
    needed = (terms.resident_bytes + terms.accumulator_bytes) * max(sublayer.params for sublayer in whole.sublayers)
    memory = profiles.memory_bytes
    return (
        f"no columns fit: the largest sublayer takes {needed / 1e9:.3g} GB, or a fraction of it in slices, and "
        f"{len(profiles)} devices offer {memory.sum() / 1e9:.3g} GB, the largest {memory.max() / 1e9:.3g} GB; add "
        "devices or memory, or use --grain gemm"
    )
