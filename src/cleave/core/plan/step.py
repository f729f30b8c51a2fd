"""Plan a whole training step: gemm by gemm, or in the fastest way that Cleave can run.

`plan_step` is the step as a sequence of gemms, each cut over the whole fleet (grain "gemm"); equal shapes are planned
once, and attention products stay on the server: their operands are small and their results large. `choose_step` takes
the faster of that and columns with resident weights (`resident`), and lists the arrangements of other systems
(`rivals`) beside it. Those are never chosen, as Cleave cannot run them: they let devices talk to each other. Where one
is faster, the choice says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from cleave.core.cost.rates import Server
from cleave.core.cost.streams import dy_format
from cleave.core.cost.wire import PLAN_WIRE, WireFormat
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.gemms import Gemm, Role, StepGemm, attention_products, step_gemms
from cleave.core.model.shapes import ModelShape
from cleave.core.plan.gemm.product import GemmPlan, Split, plan_gemm
from cleave.core.plan.resident.few_devices import FEW, least_few_s, plan_few
from cleave.core.plan.resident.large_fleet import ModelPlan, plan_resident
from cleave.core.plan.resident.problem import Leasing
from cleave.core.plan.rivals.case import Case, Rival, plural
from cleave.core.plan.rivals.compare import all_rivals
from cleave.core.plan.rivals.products import GROUPED, attention_by_heads_s
from cleave.errors import InfeasibleError

StepGrain = Literal["gemm", "resident"]
COLUMNS = "columns"
_ABOVE_BOUND = 1.45
"""Seconds of columns over their fluid bound, at least."""
ROLES: tuple[Role, ...] = ("forward", "grad_input", "grad_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGemm:
    """One kind of gemm of the step, with the plan for each of its `count` runs."""

    what: StepGemm
    plan: GemmPlan

    @property
    def step_s(self) -> float:
        return self.what.count * self.plan.makespan_s

    @property
    def bound_s(self) -> float:
        return self.what.count * self.plan.bound_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    shape: ModelShape
    tokens: int
    sequence: int
    wire: WireFormat
    grain: StepGrain
    segments: tuple[PlannedGemm, ...]
    attention_flops: int
    attention_s: float
    """attention products on the server; 0 if its speed is not given"""

    @property
    def step_s(self) -> float:
        return sum(segment.step_s for segment in self.segments) + self.attention_s

    @property
    def bound_s(self) -> float:
        return sum(segment.bound_s for segment in self.segments) + self.attention_s

    @property
    def moved_bytes(self) -> float:
        """Bytes through the server, both ways."""
        return sum(one.what.count * float(one.plan.down_bytes.sum() + one.plan.up_bytes.sum()) for one in self.segments)

    def role_s(self, role: Role) -> float:
        return sum(segment.step_s for segment in self.segments if segment.what.role == role)


def plan_step(
    profiles: Profiles,
    shape: ModelShape,
    tokens: int,
    *,
    sequence: int,
    wire: WireFormat = PLAN_WIRE,
    server: Server | None = None,
    split: Split = "auto",
    grouped: bool = True,
) -> StepPlan:
    """Plan a step gemm by gemm; `grouped` merges projections that share an operand (q/k/v, gate/up) into one gemm."""
    server = server or Server()
    plans: dict[tuple[Gemm, WireFormat], GemmPlan] = {}
    segments: list[PlannedGemm] = []
    for what in step_gemms(shape, tokens, grouped):
        a_wire = wire if what.role == "forward" else dy_format(what.segment == "head", wire)
        key = (what.gemm, a_wire)
        if key not in plans:
            plans[key] = plan_gemm(profiles, what.gemm, wire=wire, a_wire=a_wire, server=server, split=split)
        segments.append(PlannedGemm(what=what, plan=plans[key]))
    attention_flops = sum(product.flops for product in attention_products(shape, tokens, sequence))
    return StepPlan(
        shape=shape,
        tokens=tokens,
        sequence=sequence,
        wire=wire,
        grain="gemm",
        segments=tuple(segments),
        attention_flops=attention_flops,
        attention_s=attention_flops / server.flops_per_s if server.flops_per_s > 0 else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """The fastest way to do a step that Cleave can run, and all others."""

    shape: ModelShape
    tokens: int
    sequence: int
    wire: WireFormat
    arrangement: str
    """columns or grouped gemms"""
    step_s: float
    plan: ModelPlan | StepPlan
    rivals: tuple[Rival, ...]
    """every way, fastest first, the chosen one included"""

    @property
    def grain(self) -> StepGrain:
        return "resident" if isinstance(self.plan, ModelPlan) else "gemm"

    @property
    def bound_s(self) -> float:
        return min(self.step_s, self.plan.bound_s)

    @property
    def faster(self) -> tuple[Rival, ...]:
        """Rivals that beat the choice, fastest first."""
        return tuple(rival for rival in self.rivals if not rival.is_ours and rival.step_s < self.step_s)


def choose_step(
    profiles: Profiles,
    shape: ModelShape,
    tokens: int,
    *,
    sequence: int,
    wire: WireFormat = PLAN_WIRE,
    server: Server | None = None,
    resident_only: bool = False,
    leasing: Leasing | None = None,
) -> StepChoice:
    """The faster grain. Gemms are planned in full only if their lower bound could win."""
    server = server or Server()
    attention_products(shape, tokens, sequence)  # raises unless the tokens are whole sequences
    case = Case(profiles=profiles, shape=shape, tokens=tokens, sequence=sequence, wire=wire, server=server)
    ways: dict[str, Rival] = {rival.name: rival for rival in all_rivals(case)}
    plans: dict[str, ModelPlan | StepPlan] = {}
    try:
        columns = plan_fastest_columns(case, leasing)
        plans[COLUMNS] = columns
        seconds = max(columns.step_s, _medium_s(profiles, columns.devices, columns.down_bytes + columns.up_bytes))
        how = _columns(columns) + (", limited by a shared medium" if seconds > columns.step_s else "")
        ways[COLUMNS] = Rival(name=COLUMNS, step_s=seconds, arrangement=how, is_ours=True)
    except InfeasibleError as why:
        if resident_only:
            raise
        ways[COLUMNS] = Rival(name=COLUMNS, step_s=np.inf, arrangement=str(why), is_ours=True)
    if not resident_only and ways[GROUPED].step_s <= ways[COLUMNS].step_s:
        try:
            gemms = plan_step(profiles, shape, tokens, sequence=sequence, wire=wire, server=server)
            attention_s = 0.0 if gemms.attention_s else attention_by_heads_s(case)
            plans[GROUPED] = gemms
            seconds = max(gemms.step_s + attention_s, _medium_s(profiles, frozenset(profiles.names), gemms.moved_bytes))
            how = "q/k/v and gate/up as one gemm, 3D where it pays"
        except InfeasibleError as why:
            if not plans:
                raise
            how, seconds = str(why), np.inf
        ways[GROUPED] = Rival(name=GROUPED, step_s=seconds, arrangement=how, is_ours=True)
    best = min(plans, key=lambda name: ways[name].step_s)
    return StepChoice(
        shape=shape,
        tokens=tokens,
        sequence=sequence,
        wire=wire,
        arrangement=best,
        step_s=ways[best].step_s,
        plan=plans[best],
        rivals=tuple(sorted(ways.values(), key=lambda way: way.step_s)),
    )


def plan_fastest_columns(case: Case, leasing: Leasing | None) -> ModelPlan:
    """The faster plan of the searches for many and for few devices; InfeasibleError if memory holds no columns.

    Of a larger fleet, the latter takes the strongest devices, and only where leases could make them faster than all:
    a leased column has one holder, who takes every row.
    """
    plan, why = _planned(case, plan_resident)
    if len(case.profiles) <= FEW or (leasing is not None and _may_pay(case, leasing, plan)):
        few, _ = _planned(case, partial(plan_few, leasing=leasing))
        if few is not None and (plan is None or few.step_s < plan.step_s):
            plan = few
    if plan is None:
        assert why is not None
        raise why
    return plan


def _planned(case: Case, search: Callable[..., ModelPlan]) -> tuple[ModelPlan | None, InfeasibleError | None]:
    """The plan that a search finds, or why there is none."""
    try:
        plan = search(
            case.profiles, case.shape, case.tokens, sequence=case.sequence, wire=case.wire, server=case.server
        )
    except InfeasibleError as why:
        return None, why
    return plan, None


def _may_pay(case: Case, leasing: Leasing, found: ModelPlan | None) -> bool:
    """Whether the strongest few devices with leases could beat the plan found for all."""
    if found is None:
        return True
    least_s = least_few_s(case.profiles, case.shape, case.tokens, case.sequence, case.wire, leasing)
    return least_s * _ABOVE_BOUND < found.step_s


def _medium_s(profiles: Profiles, devices: Collection[str], moved_bytes: float) -> float:
    """Seconds of the busiest shared medium, whose devices are taken to move equal parts of all bytes."""
    sharing: dict[str, int] = Counter(
        medium for name, medium in zip(profiles.names, profiles.medium, strict=True) if medium and name in devices
    )
    capacities = dict(zip(profiles.medium, profiles.medium_bytes_per_s.tolist(), strict=True))
    return max((moved_bytes * count / len(devices) / capacities[name] for name, count in sharing.items()), default=0.0)


def _columns(plan: ModelPlan) -> str:
    rounds = f" in {len(plan.rounds)} rounds" if len(plan.rounds) > 1 else ""
    where = f"{plural(len(plan.stages), 'stage')} on {plural(len(plan.devices), 'device')}{rounds}"
    leased = sum(column.is_leased for column in plan.columns)
    return f"{where}, chunks of {max(plan.chunks)} tokens" + (f", {leased} leased" if leased else "")
