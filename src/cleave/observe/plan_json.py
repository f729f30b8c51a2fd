"""Plans as JSON: the stable format of `cleave plan --json` (DESIGN.md, docs/plan-json.md)."""

from __future__ import annotations

from typing import TypedDict

from cleave.core.planner.gemm import GemmPlan
from cleave.core.planner.step import PlannedGemm, StepPlan


class GemmJson(TypedDict):
    m: int
    n: int
    k: int


class BlockJson(TypedDict):
    device: str
    rows: list[int]
    cols: list[int]
    inner: list[int]


class LeftOutJson(TypedDict):
    device: str
    reason: str


class GemmPlanJson(TypedDict):
    gemm: GemmJson
    wire: str
    split: str
    makespan_s: float
    bound_s: float
    rounds: int
    limit: str
    down_bytes: float
    up_bytes: float
    blocks: list[BlockJson]
    left_out: list[LeftOutJson]


class SegmentJson(GemmPlanJson):
    segment: str
    role: str
    count: int
    members: list[str]
    step_s: float


class StepPlanJson(TypedDict):
    model: str
    tokens: int
    sequence: int
    wire: str
    step_s: float
    bound_s: float
    grain: str
    attention_flops: int
    attention_s: float
    segments: list[SegmentJson]


def as_json(plan: GemmPlan | StepPlan) -> GemmPlanJson | StepPlanJson:
    if isinstance(plan, GemmPlan):
        return _gemm_plan(plan)
    return {
        "model": plan.shape.name,
        "tokens": plan.tokens,
        "sequence": plan.sequence,
        "wire": plan.wire,
        "step_s": plan.step_s,
        "bound_s": plan.bound_s,
        "grain": plan.grain,
        "attention_flops": plan.attention_flops,
        "attention_s": plan.attention_s,
        "segments": [_segment(segment) for segment in plan.segments],
    }


def _segment(segment: PlannedGemm) -> SegmentJson:
    what = segment.what
    return {
        "segment": what.segment,
        "role": what.role,
        "count": what.count,
        "members": list(what.members),
        "step_s": segment.step_s,
        **_gemm_plan(segment.plan),
    }


def _gemm_plan(plan: GemmPlan) -> GemmPlanJson:
    tiling = plan.tiling
    blocks = zip(tiling.device.tolist(), tiling.rows.tolist(), tiling.cols.tolist(), tiling.inner.tolist(), strict=True)
    return {
        "gemm": {"m": plan.gemm.m, "n": plan.gemm.n, "k": plan.gemm.k},
        "wire": plan.wire,
        "split": plan.split,
        "makespan_s": plan.makespan_s,
        "bound_s": plan.bound_s,
        "rounds": plan.rounds,
        "limit": plan.limit,
        "down_bytes": float(plan.down_bytes.sum()),
        "up_bytes": float(plan.up_bytes.sum()),
        "blocks": [{"device": plan.names[d], "rows": r, "cols": c, "inner": i} for d, r, c, i in blocks],
        "left_out": [{"device": device, "reason": reason} for device, reason in plan.left_out.items()],
    }
