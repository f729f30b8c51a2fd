"""The plan of the latest pass as rectangles, for pictures: sublayers in one direction, sequences in the other."""

from __future__ import annotations

from typing import TypedDict

from cleave.core.plan.resident.stages import ResidentPlan


class Tile(TypedDict):
    """One device's part: `sublayers` and `rows` are ranges, the latter as shares of all sequences."""

    device: str
    stage: int
    sublayers: list[float]
    rows: list[float]
    leased: bool


class Tiling(TypedDict):
    sublayers: int
    chunk: int
    limit: str
    predicted_s: float
    tiles: list[Tile]


def tiling(plan: ResidentPlan | None) -> Tiling:
    if plan is None:
        return Tiling(sublayers=0, chunk=0, limit="", predicted_s=0.0, tiles=[])
    tiles = list[Tile]()
    for number, stage in enumerate(plan.stages):
        for part, column in enumerate(stage.columns):
            width = stage.count / len(stage.columns)
            left, total, top = stage.first + part * width, sum(one.sequences for one in column.holdings), 0.0
            for holding in column.holdings:
                bottom = top + holding.sequences / total
                sides = [left, left + width]
                tiles.append(
                    Tile(
                        device=str(holding.device),
                        stage=number,
                        sublayers=sides,
                        rows=[top, bottom],
                        leased=column.is_leased,
                    )
                )
                top = bottom
    sublayers = max(stage.first + stage.count for stage in plan.stages)
    return Tiling(sublayers=sublayers, chunk=plan.chunk, limit=plan.limit, predicted_s=plan.step_s, tiles=tiles)
