"""A whole training step. For now it is a sequence of gemms, each cut over the whole fleet (grain "gemm").

Equal shapes are planned once. The seam for what comes next: a step is a list of segments with their units, whatever
the grain; columns with resident weights and chunks of tokens will be further kinds of segment plans beside
`PlannedGemm`, and this module the place that chooses among them. Attention products stay on the server at this grain:
their operands are small and their results large, so no link can pay for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cleave.core.cost import Server, WireFormat
from cleave.core.fleet import Profiles
from cleave.core.graph import Gemm, Role, StepGemm, attention_products, step_gemms
from cleave.core.planner.gemm import GemmPlan, Split, plan_gemm
from cleave.core.shapes import ModelShape

Grain = Literal["gemm"]
ROLES: tuple[Role, ...] = ("forward", "grad_input", "grad_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGemm:
    """One kind of gemm of the step, with the plan that each of its `count` runs follows."""

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
    grain: Grain
    segments: tuple[PlannedGemm, ...]
    attention_flops: int
    attention_s: float
    """of the attention products on the server; 0 where its speed is not given"""

    @property
    def step_s(self) -> float:
        return sum(segment.step_s for segment in self.segments) + self.attention_s

    @property
    def bound_s(self) -> float:
        return sum(segment.bound_s for segment in self.segments) + self.attention_s

    def role_s(self, role: Role) -> float:
        return sum(segment.step_s for segment in self.segments if segment.what.role == role)


def plan_step(
    profiles: Profiles,
    shape: ModelShape,
    tokens: int,
    *,
    sequence: int,
    wire: WireFormat = "bf16",
    server: Server | None = None,
    split: Split = "auto",
    grouped: bool = True,
) -> StepPlan:
    """`grouped` treats projections that share an operand (q/k/v, gate/up) as one gemm."""
    server = server or Server()
    plans: dict[Gemm, GemmPlan] = {}
    segments: list[PlannedGemm] = []
    for what in step_gemms(shape, tokens, grouped):
        if what.gemm not in plans:
            plans[what.gemm] = plan_gemm(profiles, what.gemm, wire=wire, server=server, split=split)
        segments.append(PlannedGemm(what=what, plan=plans[what.gemm]))
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
