"""Plans as JSON: the stable format of `cleave plan --json` (docs/planner.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from cleave.core.model.sublayers import sublayers_of
from cleave.core.plan.gemm.product import GemmPlan
from cleave.core.plan.resident.large_fleet import ModelPlan
from cleave.core.plan.resident.plane import Tile, tiles
from cleave.core.plan.step import PlannedGemm, StepChoice, StepPlan


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


class UnitJson(TypedDict):
    device: str
    slice: int
    tokens: list[int]


class StageJson(TypedDict):
    segment: str
    first: int
    count: int
    slices: int
    leased: bool
    snapshot_every: int | None
    params: int
    units: list[UnitJson]


class RivalJson(TypedDict):
    name: str
    fits: bool
    step_s: float | None
    arrangement: str
    runs: bool
    spares: str


class FasterJson(TypedDict):
    name: str
    factor: float
    spares: str


class ChoiceJson(TypedDict):
    model: str
    lora: int | None
    tokens: int
    sequence: int
    wire: str
    step_s: float
    bound_s: float
    grain: str
    arrangement: str
    segments: list[StageJson] | list[SegmentJson]
    rivals: list[RivalJson]
    faster: list[FasterJson]


class ColumnsJson(ChoiceJson):
    activation_s: float
    synchronisation_s: float
    fill_s: float
    limit: str
    rounds: int
    chunk: int
    down_bytes: float
    up_bytes: float
    log_bytes: float
    left_out: list[LeftOutJson]


_Reasons = Mapping[str, str]


def as_json(
    plan: GemmPlan | StepPlan | StepChoice, also_left_out: _Reasons | None = None
) -> GemmPlanJson | StepPlanJson | ChoiceJson:
    """The plan; `also_left_out` has reasons for devices that the planner was not given."""
    others = also_left_out or {}
    if isinstance(plan, GemmPlan):
        return _gemm_plan(plan, others)
    if isinstance(plan, StepPlan):
        return _step(plan, others)
    return _choice(plan, others)


def _choice(choice: StepChoice, others: _Reasons) -> ChoiceJson:
    plan = choice.plan
    chosen: ChoiceJson = {
        "model": choice.shape.name,
        "lora": choice.shape.adapter_rank or None,
        "tokens": choice.tokens,
        "sequence": choice.sequence,
        "wire": choice.wire,
        "step_s": choice.step_s,
        "bound_s": choice.bound_s,
        "grain": choice.grain,
        "arrangement": choice.arrangement,
        "segments": _step(plan, others)["segments"] if isinstance(plan, StepPlan) else _stages(plan),
        "rivals": [
            {
                "name": rival.name,
                "fits": rival.fits,
                "step_s": rival.step_s if rival.fits else None,
                "arrangement": rival.arrangement,
                "runs": rival.is_ours,
                "spares": rival.spares,
            }
            for rival in choice.rivals
        ],
        "faster": [
            {"name": rival.name, "factor": choice.step_s / rival.step_s, "spares": rival.spares}
            for rival in choice.faster
        ],
    }
    if not isinstance(plan, ModelPlan):
        return chosen
    columns: ColumnsJson = {
        **chosen,
        "activation_s": plan.activation_s,
        "synchronisation_s": plan.synchronisation_s,
        "fill_s": plan.fill_s,
        "limit": plan.limit,
        "rounds": len(plan.rounds),
        "chunk": max(plan.chunks),
        "down_bytes": plan.down_bytes,
        "up_bytes": plan.up_bytes,
        "log_bytes": plan.log_bytes,
        "left_out": _left_out(plan.left_out, others),
    }
    return columns


def _stages(plan: ModelPlan) -> list[StageJson]:
    sublayers = sublayers_of(plan.shape)
    units: list[list[Tile]] = [[] for _ in plan.stages]
    for tile in tiles(plan):
        units[tile.stage].append(tile)
    return [
        {
            "segment": "+".join(dict.fromkeys(sublayer.kind for sublayer in held)),
            "first": stage.first,
            "count": stage.count,
            "slices": len(stage.columns),
            "leased": stage.columns[0].is_leased,
            "snapshot_every": stage.columns[0].snapshot_every or None,
            "params": sum(sublayer.params for sublayer in held),
            "units": [{"device": u.device, "slice": u.part, "tokens": list(u.tokens)} for u in of_stage],
        }
        for stage, of_stage in zip(plan.stages, units, strict=True)
        for held in [sublayers[stage.first : stage.first + stage.count]]
    ]


def _step(plan: StepPlan, others: _Reasons) -> StepPlanJson:
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
        "segments": [_segment(segment, others) for segment in plan.segments],
    }


def _segment(segment: PlannedGemm, others: _Reasons) -> SegmentJson:
    what = segment.what
    return {
        "segment": what.segment,
        "role": what.role,
        "count": what.count,
        "members": list(what.members),
        "step_s": segment.step_s,
        **_gemm_plan(segment.plan, others),
    }


def _gemm_plan(plan: GemmPlan, others: _Reasons) -> GemmPlanJson:
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
        "left_out": _left_out(plan.left_out, others),
    }


def _left_out(reasons: _Reasons, others: _Reasons) -> list[LeftOutJson]:
    return [{"device": device, "reason": reason} for device, reason in {**reasons, **others}.items()]
