"""Who takes over a block that a live device left, or is late with: whoever ends soonest.

Others may hold one of its operands already (mates of its column, or of its row) and then need only the lines of the
other; some are busy for a while. The block is cut by rows or by columns, over all of them by water-filling with what
each has to fetch and to finish first as its fixed cost, and the sooner of the two is taken. The offline twin of this,
over whole tilings and thousands of devices, is `repair.py`.
"""

from __future__ import annotations

import numpy as np

from cleave.core.cost.gemm import Server, UnitCosts, WireFormat, row_costs_s, rows_beside_weights, unit_costs
from cleave.core.fleet.profiles import Bools, Floats, Ints, Profiles
from cleave.core.plan.gemm.layer import Block, Linear, fill, plan_linear


def plan_redo(
    profiles: Profiles, block: Block, wire: WireFormat, *, holds_a: Bools, holds_b: Bools, backlog_s: Floats
) -> list[Block]:
    """The block in pieces for those of `profiles`; InfeasibleError where no device can hold even the smallest."""
    unit = unit_costs(profiles, wire, Server())
    m, n, k = (end - start for start, end in (block.rows, block.cols, block.inner))
    ways = (
        ("rows", *_by_lines(unit, m, n, k, holds_b, backlog_s)),
        ("cols", *_by_lines(unit, n, m, k, holds_a, backlog_s)),
    )
    side, shares, taken_s = min(ways, key=lambda way: way[2])
    if shares is None or not np.isfinite(taken_s):
        linear = Linear(tokens=m, in_width=k, out_width=n, roles=("forward",))
        return [_placed(part, block) for part in plan_linear(profiles, linear, wire, search=False).blocks["forward"]]
    start = block.rows[0] if side == "rows" else block.cols[0]
    ends = (start + np.cumsum(shares)).tolist()
    return [
        block._replace(device=device, **{side: (end - share, end)})
        for device, (share, end) in enumerate(zip(shares.tolist(), ends, strict=True))
        if share
    ]


def _by_lines(
    unit: UnitCosts, lines: int, across: int, inner: int, holds: Bools, backlog_s: Floats
) -> tuple[Ints | None, float]:
    """Lines of each device, and when the last is done; what all of them need whole is held, or comes first."""
    per_line, fixed = row_costs_s(unit, inner, across)
    line_s = per_line["forward"]
    fixed_s = fixed["forward"] + backlog_s + np.where(holds, 0.0, unit.down_s * (across * inner))
    shares = fill(lines, fixed_s, line_s, rows_beside_weights(unit, inner, across, sums=False))
    if shares is None:
        return None, np.inf
    return shares, float((fixed_s + line_s * shares)[shares > 0].max())


def _placed(part: Block, block: Block) -> Block:
    (top, bottom), (left, right), (front, back) = part.rows, part.cols, part.inner
    down, across, deep = block.rows[0], block.cols[0], block.inner[0]
    return Block(part.device, (top + down, bottom + down), (left + across, right + across), (front + deep, back + deep))
