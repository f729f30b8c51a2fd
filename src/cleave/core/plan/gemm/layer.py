"""How one linear layer's three gemms, or one product alone, are cut over a live fleet.

Y = X W^T, dX = dY W, dW = dY^T X share operands. Two ways to cut them are compared by the cost model:

- **rows**: each device takes some of the tokens through the whole of W. W travels once and stays, the rows of X and dY
  that a device received for Y and dX are those it needs for dW, and only partial sums of dW come back. Per token a
  device is busy with the slowest of its links and its compute, so shares follow by water-filling.
- **blocks**: `plan_gemm` cuts each gemm by itself. It moves more, but needs no device to hold all of W and returns no
  partial sums: what large fleets on slow links, or small memories, call for.

Plans depend on sizes and profiles alone, so equal layers share one and a row always meets the same device.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from cleave.core.cost.bound import bound_2d
from cleave.core.cost.gemm import (
    DEVICE_BYTES,
    WIRE_BYTES,
    Server,
    WireFormat,
    finish_s,
    row_costs_s,
    rows_beside_weights,
    unit_costs,
)
from cleave.core.fleet.profiles import Floats, Ints, Profiles
from cleave.core.model.gemms import Gemm, Role
from cleave.core.plan.gemm.product import plan_gemm
from cleave.errors import InfeasibleError

_WORTH_SEARCHING = 1.15  # rows are kept unless blocks could be, and are, this much faster: plans should be steady


class Block(NamedTuple):
    device: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    inner: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPlan:
    way: Literal["rows", "blocks"]
    blocks: dict[Role, tuple[Block, ...]]
    seconds: dict[Role, float]
    """Predicted, from the first byte down to the last byte up."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One layer, or several that read the same X side by side."""

    tokens: int
    in_width: int
    out_width: int
    roles: tuple[Role, ...] = ("forward", "grad_input", "grad_weight")
    """Those that are wanted, in the order in which they come."""

    @property
    def gemms(self) -> dict[Role, Gemm]:
        m, n, k = self.tokens, self.out_width, self.in_width
        gemms: dict[Role, Gemm] = {
            "forward": Gemm(m=m, n=n, k=k),
            "grad_input": Gemm(m=m, n=k, k=n),
            "grad_weight": Gemm(m=n, n=k, k=m),
        }
        return {role: gemms[role] for role in self.roles}


def plan_linear(profiles: Profiles, linear: Linear, wire: WireFormat, *, search: bool = True) -> LinearPlan:
    """The faster of both ways; InfeasibleError where no device can hold even the smallest block.

    Without `search`, rows wherever they fit: good enough for a piece of work that must go on at once.
    """
    rows = _by_rows(profiles, linear, wire)
    if rows is not None and not search:
        return rows
    unit = unit_costs(_as_held(profiles, wire), wire, Server())
    least_s = sum(bound_2d(unit, gemm, Server()) for gemm in linear.gemms.values())
    if rows is not None and rows.total_s <= least_s * _WORTH_SEARCHING:
        return rows
    try:
        blocks = _by_blocks(profiles, linear, wire)
    except InfeasibleError:
        if rows is None:
            raise
        return rows
    return blocks if rows is None or blocks.total_s * _WORTH_SEARCHING < rows.total_s else rows


def _by_rows(profiles: Profiles, linear: Linear, wire: WireFormat) -> LinearPlan | None:
    """None where no device holds W whole beside some tokens, and their results."""
    k, n = linear.in_width, linear.out_width
    unit = unit_costs(profiles, wire, Server())
    roles = linear.roles
    per_row, fixed = row_costs_s(unit, k, n)
    if roles[0] != "grad_weight":
        fixed[roles[0]] = fixed[roles[0]] + unit.down_s * (k * n)  # W comes with whoever needs it first

    def total(of: dict[Role, Floats]) -> Floats:
        return np.sum([of[role] for role in roles], axis=0)

    most = rows_beside_weights(unit, k, n, sums="grad_weight" in roles)
    shares = fill(linear.tokens, total(fixed), total(per_row), most)
    if shares is None:
        return None
    ends = np.cumsum(shares)
    used = np.flatnonzero(shares)
    blocks: dict[Role, list[Block]] = {role: [] for role in roles}
    for device in used.tolist():
        tokens = (int(ends[device] - shares[device]), int(ends[device]))
        cuts: dict[Role, Block] = {
            "forward": Block(device, tokens, (0, n), (0, k)),
            "grad_input": Block(device, tokens, (0, k), (0, n)),
            "grad_weight": Block(device, (0, n), (0, k), tokens),
        }
        for role in roles:
            blocks[role].append(cuts[role])
    taken = {role: fixed[role] + shares * per_row[role] for role in roles}
    if roles[0] != "grad_weight":  # W arrives with the rows, strip by strip, and is multiplied as it comes
        wide, inner = (n, k) if roles[0] == "forward" else (k, n)
        taken[roles[0]] = finish_s(unit, shares.astype(np.float64), np.full(len(unit), float(wide)), float(inner))
    return LinearPlan(
        way="rows",
        blocks={role: tuple(cut) for role, cut in blocks.items()},
        seconds={role: float(taken[role][used].max()) for role in roles},
    )


def fill(rows: int, fixed_s: Floats, row_s: Floats, most: Floats) -> Ints | None:
    """Whole rows for each device such that fixed + rows x row_s ends as soon as it can; None if `most` is too little.

    The level T with sum min((T - fixed)/row, most) = rows, by bisection, as each device's rows grow with T.
    """
    if most.sum() < rows:
        return None

    def filled(level: float) -> Floats:
        return np.clip((level - fixed_s) / row_s, 0.0, most)

    low, high = float(fixed_s.min()), float((fixed_s + row_s * np.minimum(most, rows)).max())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if filled(middle).sum() < rows else (low, middle)
    exact = filled(high)
    shares = np.floor(exact).astype(np.int64)
    left = rows - int(shares.sum())
    # one by one to whoever ends soonest with it: a fast device may take several while a slow one does its first
    open_to = np.flatnonzero(shares + 1 <= most)
    ends = [(float(fixed_s[i] + row_s[i] * (shares[i] + 1)), int(i)) for i in open_to]
    heapq.heapify(ends)
    for _ in range(left):
        end, i = ends[0]
        shares[i] += 1
        if shares[i] + 1 <= most[i]:
            heapq.heapreplace(ends, (end + float(row_s[i]), i))
        else:
            heapq.heappop(ends)
    return shares


def _by_blocks(profiles: Profiles, linear: Linear, wire: WireFormat) -> LinearPlan:
    scaled = _as_held(profiles, wire)
    held_bytes: list[float] = (profiles.memory_bytes / 2).tolist()  # the next block arrives while one is computed
    blocks: dict[Role, tuple[Block, ...]] = {}
    seconds: dict[Role, float] = {}
    for role, gemm in linear.gemms.items():
        plan = plan_gemm(scaled, gemm, wire=wire)
        tiling = plan.tiling
        order = np.argsort(tiling.round, kind="stable")
        columns = (tiling.device[order], tiling.rows[order], tiling.cols[order], tiling.inner[order])
        blocks[role] = tuple(
            piece
            for device, (r0, r1), (c0, c1), (k0, k1) in zip(*(column.tolist() for column in columns), strict=True)
            for piece in fit(Block(int(device), (r0, r1), (c0, c1), (k0, k1)), held_bytes[int(device)])
        )
        seconds[role] = plan.makespan_s
    return LinearPlan(way="blocks", blocks=blocks, seconds=seconds)


def fit(block: Block, memory_bytes: float) -> list[Block]:
    """A block as it is, or in pieces whose operands and result fit into the memory, halving its longest side."""
    a, c, k = (end - start for start, end in (block.rows, block.cols, block.inner))
    if DEVICE_BYTES * (a * k + k * c + a * c) <= memory_bytes or (a, c, k) == (1, 1, 1):
        return [block]
    longest = max((a, "rows"), (c, "cols"), (k, "inner"))[1]
    start, end = getattr(block, longest)
    middle = (start + end) // 2
    halves = (block._replace(**{longest: (start, middle)}), block._replace(**{longest: (middle, end)}))
    return [piece for half in halves for piece in fit(half, memory_bytes)]


def _as_held(profiles: Profiles, wire: WireFormat) -> Profiles:
    """Memory as the planner counts it, in bytes of the wire, where devices hold fp32."""
    return Profiles(
        names=profiles.names,
        flops_per_s=profiles.flops_per_s,
        down_bytes_per_s=profiles.down_bytes_per_s,
        up_bytes_per_s=profiles.up_bytes_per_s,
        latency_s=profiles.latency_s,
        memory_bytes=profiles.memory_bytes * (WIRE_BYTES[wire] / DEVICE_BYTES),
    )


def moved_bytes(linear: Linear, devices: int, wire: WireFormat) -> tuple[float, float]:
    """Of a layer cut by rows: X and dY down and W to every device; Y and dX up, and a partial sum of dW from each."""
    rows = linear.tokens * (linear.in_width + linear.out_width)
    weights = devices * linear.in_width * linear.out_width if "grad_weight" in linear.roles else 0
    return WIRE_BYTES[wire] * (rows + weights), WIRE_BYTES[wire] * (rows + weights)
