"""Pictures of plans: tiles cover the whole without overlap, whatever the plan."""

from __future__ import annotations

import pytest

from cleave.core.fleet.profiles import DeviceId
from cleave.core.model.gemms import Gemm
from cleave.core.plan.gemm.layer import Block
from cleave.server.tiling import PlannedProduct, Tile, of_product

GEMM = Gemm(m=8, n=6, k=4)
ALL = ((0, 8), (0, 6), (0, 4))


def area(tile: Tile) -> float:
    return (tile["across"][1] - tile["across"][0]) * (tile["down"][1] - tile["down"][0])


@pytest.mark.parametrize(
    ("cut", "across", "down"),
    [(0, "6 columns", "8 rows"), (1, "6 columns", "8 rows"), (2, "6 columns", "4 inner")],
)
def test_tiles_of_a_product_cover_it(cut: int, across: str, down: str) -> None:
    first, last = list(ALL), list(ALL)
    first[cut], last[cut] = (0, 1), (1, ALL[cut][1])
    blocks = [Block(DeviceId(name), *extent) for name, extent in (("ann", first), ("bob", last))]
    found = of_product(PlannedProduct("grad_weight", GEMM, blocks))
    assert (found["across"], found["down"]) == (across, down)
    assert [tile["device"] for tile in found["tiles"]] == ["ann", "bob"]
    assert sum(map(area, found["tiles"])) == pytest.approx(1)
