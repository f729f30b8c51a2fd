"""Reassign a block of a departed or late device, during a live run, to the devices that finish it soonest.

Some devices already hold one of its operands (mates in its column or row) and need only lines of the other; some have
a backlog. The block is cut by rows or by columns, by water-filling over all devices, with the missing operand and the
backlog as fixed costs, and the faster of the two cuts is used. `repair.py` is the offline counterpart for whole tilings
and thousands of devices.
"""

from __future__ import annotations

import numpy as np

from cleave.core.cost.gemm import UnitCosts, row_costs_s, rows_beside_weights, unit_costs
from cleave.core.cost.rates import Server
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Bools, DeviceId, Floats, Ints, Profiles
from cleave.core.model.gemms import Linear
from cleave.core.plan.gemm.layer import Block, Extent, fill, plan_linear


def plan_redo(
    profiles: Profiles, extent: Extent, wire: WireFormat, *, holds_a: Bools, holds_b: Bools, backlog_s: Floats
) -> list[Block]:
    """Cut the extent into blocks for devices of `profiles`; InfeasibleError if none can hold even the smallest."""
    unit = unit_costs(profiles, wire, Server())
    m, n, k = (end - start for start, end in extent)
    cuts = (
        ("rows", *_by_lines(unit, m, n, k, holds_b, backlog_s)),
        ("cols", *_by_lines(unit, n, m, k, holds_a, backlog_s)),
    )
    side, shares, finish_s = min(cuts, key=lambda cut: cut[2])
    if shares is None or not np.isfinite(finish_s):
        linear = Linear(tokens=m, in_width=k, out_width=n, roles=("forward",))
        return [_offset(part, extent) for part in plan_linear(profiles, linear, wire, search=False).blocks["forward"]]
    start = extent.rows[0] if side == "rows" else extent.cols[0]
    ends = (start + np.cumsum(shares)).tolist()
    return [
        Block(DeviceId(name), *extent._replace(**{side: (end - share, end)}))
        for name, share, end in zip(profiles.names, shares.tolist(), ends, strict=True)
        if share
    ]


def _by_lines(
    unit: UnitCosts, lines: int, across: int, inner: int, holds: Bools, backlog_s: Floats
) -> tuple[Ints | None, float]:
    """Return lines per device and the finish of the last; devices without the shared operand fetch it first."""
    per_line, fixed = row_costs_s(unit, inner, across)
    line_s = per_line["forward"]
    fixed_s = fixed["forward"] + backlog_s + np.where(holds, 0.0, unit.down_s * (across * inner))
    shares = fill(lines, fixed_s, line_s, rows_beside_weights(unit, inner, across, sums=False))
    if shares is None:
        return None, np.inf
    return shares, float((fixed_s + line_s * shares)[shares > 0].max())


def _offset(part: Block, extent: Extent) -> Block:
    (top, bottom), (left, right), (front, back) = part.rows, part.cols, part.inner
    down, across, deep = extent.rows[0], extent.cols[0], extent.inner[0]
    return Block(part.device, (top + down, bottom + down), (left + across, right + across), (front + deep, back + deep))
