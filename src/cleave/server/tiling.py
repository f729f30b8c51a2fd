"""Plans as rectangles, for pictures: of the latest pass (tokens x layers), and of the latest product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from cleave.core.model.gemms import Gemm, Role
from cleave.core.plan.gemm.layer import Block
from cleave.core.plan.resident.stages import ResidentPlan


class PlannedProduct(NamedTuple):
    role: Role
    gemm: Gemm
    blocks: Sequence[Block]


class Tile(TypedDict):
    """One device's part: `across` and `down` are ranges of shares of the whole, from 0 to 1."""

    device: str
    across: tuple[float, float]
    down: tuple[float, float]
    leased: bool


class Tiling(TypedDict):
    """`across` and `down` say what the two directions are."""

    across: str
    down: str
    note: str
    tiles: list[Tile]


def of_pass(plan: ResidentPlan) -> Tiling:
    """Layers across, tokens down."""
    tiles = list[Tile]()
    sublayers = max(stage.first + stage.count for stage in plan.stages)
    for stage in plan.stages:
        for part, column in enumerate(stage.columns):
            width = stage.count / len(stage.columns)
            left, total, top = stage.first + part * width, sum(one.sequences for one in column.holdings), 0.0
            for holding in column.holdings:
                bottom = top + holding.sequences / total
                across = (left / sublayers, (left + width) / sublayers)
                tiles.append(Tile(device=holding.device, across=across, down=(top, bottom), leased=column.is_leased))
                top = bottom
    note = f"chunks of {plan.chunk} tokens; predicted {plan.step_s:.3g} s a pass; the limit is {plan.limit}"
    return Tiling(across=f"{sublayers} sublayers", down="tokens", note=note, tiles=tiles)


def of_product(planned: PlannedProduct) -> Tiling:
    """Columns across, rows down; the inner dimension instead of one of them that is not cut."""
    role, gemm, blocks = planned
    sizes = {"rows": gemm.m, "columns": gemm.n, "inner": gemm.k}
    cuts = [{"rows": block.rows, "columns": block.cols, "inner": block.inner} for block in blocks]
    across, down = "columns", "rows"
    if any(cut["inner"] != (0, gemm.k) for cut in cuts):
        across, down = ("inner", "rows") if any(cut["rows"] != (0, gemm.m) for cut in cuts) else ("columns", "inner")
    tiles = [
        Tile(
            device=block.device,
            across=(cut[across][0] / sizes[across], cut[across][1] / sizes[across]),
            down=(cut[down][0] / sizes[down], cut[down][1] / sizes[down]),
            leased=False,
        )
        for block, cut in zip(blocks, cuts, strict=True)
    ]
    note = f"{role.replace('_', ' ')}: {gemm.m} x {gemm.n}, inner {gemm.k}"
    return Tiling(across=f"{sizes[across]} {across}", down=f"{sizes[down]} {down}", note=note, tiles=tiles)
