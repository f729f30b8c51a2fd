"""Plan the three gemms of one linear layer, or one product alone, over a live fleet.

Y = X W^T, dX = dY W, dW = dY^T X share operands. Two ways to cut them are compared by the cost model:

- **rows**: each device takes some of the tokens through all of W. W travels once and stays; the rows of X and dY that a
  device received for Y and dX are those it needs for dW; and only partial sums of dW come back. Per token a device is
  busy for the longest of download, compute and upload, so shares follow by water-filling.
- **blocks**: `plan_gemm` cuts each gemm separately. It moves more bytes, but no device has to hold all of W and no
  partial sums come back: better for large fleets on slow links, or for small memories.

Every task and byte also costs the server's own core. Of a large fleet, only devices that are worth that take part: on a
thousand of them, small blocks would take longer to hand out than to compute.

Plans depend on sizes and profiles only, so equal layers share one and a row always goes to the same device.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from cleave.core.cost.bound import bound_2d, bound_3d, by_worth
from cleave.core.cost.gemm import (
    UnitCosts,
    area_within,
    finish_s,
    held_bytes,
    layer_bytes,
    row_costs_s,
    rows_beside_weights,
    unit_costs,
)
from cleave.core.cost.rates import Server
from cleave.core.cost.streams import dy_format
from cleave.core.cost.wire import DEVICE_BYTES, WIRE_BYTES, WireFormat
from cleave.core.fleet.profiles import DeviceId, Floats, Ints, Profiles
from cleave.core.model.decoder import Range
from cleave.core.model.gemms import Gemm, Linear, Role
from cleave.core.plan.gemm.product import plan_gemm
from cleave.errors import InfeasibleError

_MIN_SPEEDUP = 1.15  # blocks must be this much faster than rows, which keeps plans stable
_LEAST_DEVICES = 4  # fewer are not tried: the server's part is small then
_ROUGHLY = 0.01  # how much too low a bound may be that decides whether to plan at all


class Extent(NamedTuple):
    """A box of a gemm: some rows and columns of the output, over some of the inner dimension."""

    rows: Range
    cols: Range
    inner: Range


class Block(NamedTuple):
    """An extent, and the device that computes it."""

    device: DeviceId
    rows: Range
    cols: Range
    inner: Range

    @property
    def extent(self) -> Extent:
        return Extent(self.rows, self.cols, self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPlan:
    """Blocks and predicted time of each gemm of a layer."""

    way: Literal["rows", "blocks"]
    blocks: dict[Role, tuple[Block, ...]]
    seconds: dict[Role, float]
    """Predicted, from the first byte sent to the last byte received."""
    moved_bytes: float
    """Down and up, through the server."""
    server_s: float = 0.0
    """Time of the server's core."""

    @property
    def tasks(self) -> int:
        return sum(len(blocks) for blocks in self.blocks.values())

    @property
    def devices_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def total_s(self) -> float:
        return self.devices_s + self.server_s

    def charged(self, server: Server) -> LinearPlan:
        """The same with the server's time for its tasks and bytes."""
        return replace(self, server_s=self.tasks * server.task_s + self.moved_bytes * server.byte_s)


def plan_linear(
    profiles: Profiles, linear: Linear, wire: WireFormat, *, server: Server | None = None, search: bool = True
) -> LinearPlan:
    """Return the fastest plan found. Raises InfeasibleError if no device can hold even the smallest block.

    `server` says what tasks and bytes cost its core. Without `search`, use rows wherever they fit: good enough for work
    that must be reassigned at once.
    """
    server = server or Server()
    if search and server.task_s + server.byte_s > 0:
        profiles = _worthwhile(profiles, linear, wire, server)
    return _faster_way(profiles, linear, wire, server, search=search)


def judge_linear(
    plan: LinearPlan, profiles: Profiles, linear: Linear, wire: WireFormat, server: Server
) -> LinearPlan | None:
    """The same blocks with the time they take on other profiles; None if one of their devices is gone."""
    place = {name: i for i, name in enumerate(profiles.names)}
    if not all(block.device in place for blocks in plan.blocks.values() for block in blocks):
        return None
    if plan.way == "rows":
        role = linear.roles[0]
        spans = [block.inner if role == "grad_weight" else block.rows for block in plan.blocks[role]]
        used = np.array([place[block.device] for block in plan.blocks[role]])
        unit = unit_costs(profiles, wire, Server()).take(used)
        seconds = _rows_s(unit, linear, wire, np.array([end - start for start, end in spans]))
    else:
        seconds = {role: _blocks_s(plan.blocks[role], role, place, profiles, linear, wire) for role in linear.roles}
    return replace(plan, seconds=seconds).charged(server)


def _blocks_s(
    blocks: tuple[Block, ...],
    role: Role,
    place: Mapping[str, int],
    profiles: Profiles,
    linear: Linear,
    wire: WireFormat,
) -> float:
    """Seconds until all blocks of a product are back, each device taking its own in turn."""
    devices = np.array([place[block.device] for block in blocks])
    sides = [
        np.array([end - start for start, end in spans], dtype=np.float64)
        for spans in zip(*((block.rows, block.cols, block.inner) for block in blocks), strict=True)
    ]
    unit = unit_costs(profiles, wire, Server(), _a_wire(role, linear, wire)).take(devices)
    return float(np.bincount(devices, finish_s(unit, *sides)).max())


def least_linear_s(profiles: Profiles, linear: Linear, wire: WireFormat) -> float:
    """Seconds that no plan for the layer can beat; found in milliseconds, where a plan takes seconds."""
    unit = unit_costs(_in_wire_bytes(profiles, wire), wire, Server())
    blocks_s = sum(bound_3d(unit, gemm, Server(), _ROUGHLY) for gemm in linear.gemms.values())
    unit = unit_costs(profiles, wire, Server())
    per_row, fixed, most = _row_costs(unit, linear, _dy_cost(linear, wire))
    shares = fill(linear.tokens, fixed, per_row, most)
    if shares is None:
        return blocks_s
    # whole rows: a device may have one more than at the level at which all finish together
    return min(blocks_s, float((fixed + np.maximum(shares - 1, 0) * per_row)[shares > 0].max()))


def _row_costs(unit: UnitCosts, linear: Linear, dy_cost: float) -> tuple[Floats, Floats, Floats]:
    """Of all roles together, with W held: seconds per token, fixed seconds, and the most tokens that fit."""
    per_row, fixed = row_costs_s(unit, linear.in_width, linear.out_width, dy_cost)
    most = rows_beside_weights(unit, linear.in_width, linear.out_width, sums="grad_weight" in linear.roles)
    return _total(per_row, linear), _total(fixed, linear), most


def _total(of: dict[Role, Floats], linear: Linear) -> Floats:
    return np.sum([of[role] for role in linear.roles], axis=0)


def _dy_cost(linear: Linear, wire: WireFormat) -> float:
    """Bytes of an element of dY over those of another."""
    return WIRE_BYTES[dy_format(linear.is_head, wire)] / WIRE_BYTES[wire]


def _worthwhile(profiles: Profiles, linear: Linear, wire: WireFormat, server: Server) -> Profiles:
    """The devices that make the layer faster, the server's time for them included: all, or the best half, quarter, ...

    Judged by the lower bounds of the products, with square blocks. All of them if memory does not hold a product at
    once.
    """
    unit = unit_costs(_in_wire_bytes(profiles, wire), wire, Server())
    largest = max(linear.gemms.values(), key=lambda gemm: gemm.m * gemm.n)
    within_s = bound_2d(unit, largest, Server())
    order = by_worth(unit, largest, within_s) if np.isfinite(within_s) else np.arange(0)
    best_s, best = np.inf, np.arange(len(profiles))
    count = len(order)
    while count >= _LEAST_DEVICES:
        chosen = order[:count]
        total_s = sum(_least_s(unit.take(chosen), gemm, server) for gemm in linear.gemms.values())
        if total_s < best_s:
            best_s, best = total_s, np.sort(chosen)
        count //= 2
    return profiles.take(best)


def _least_s(unit: UnitCosts, gemm: Gemm, server: Server) -> float:
    """Lower bound of a product on these devices, plus the server's time for their tasks and bytes."""
    bound_s = bound_2d(unit, gemm, Server())
    if not np.isfinite(bound_s):
        return bound_s
    sides = np.sqrt(area_within(unit, bound_s, min(gemm.m, gemm.n), max(gemm.m, gemm.n), gemm.k))
    moved_bytes = unit.operand_bytes * 2 * gemm.k * float(sides.sum()) + unit.wire_bytes * gemm.m * gemm.n
    return bound_s + len(unit) * server.task_s + moved_bytes * server.byte_s


def _faster_way(profiles: Profiles, linear: Linear, wire: WireFormat, server: Server, *, search: bool) -> LinearPlan:
    rows = _by_rows(profiles, linear, wire)
    rows = rows.charged(server) if rows is not None else None
    if rows is not None and not search:
        return rows
    unit = unit_costs(_in_wire_bytes(profiles, wire), wire, Server())
    least_s = sum(bound_2d(unit, gemm, Server()) for gemm in linear.gemms.values())
    if rows is not None and rows.total_s <= least_s * _MIN_SPEEDUP:
        return rows
    try:
        blocks = _by_blocks(profiles, linear, wire).charged(server)
    except InfeasibleError:
        if rows is None:
            raise
        return rows
    return blocks if rows is None or blocks.total_s * _MIN_SPEEDUP < rows.total_s else rows


def _by_rows(profiles: Profiles, linear: Linear, wire: WireFormat) -> LinearPlan | None:
    """Cut by rows; None if too few devices can hold all of W along with some tokens and their results."""
    k, n = linear.in_width, linear.out_width
    unit = unit_costs(profiles, wire, Server())
    roles = linear.roles
    per_row, fixed = row_costs_s(unit, k, n, _dy_cost(linear, wire))
    if roles[0] != "grad_weight":
        fixed[roles[0]] = fixed[roles[0]] + unit.down_s * (k * n)  # the first gemm that needs W brings it along
    most = rows_beside_weights(unit, k, n, sums="grad_weight" in roles)
    shares = fill(linear.tokens, _total(fixed, linear), _total(per_row, linear), most)
    if shares is None:
        return None
    ends = np.cumsum(shares)
    used = np.flatnonzero(shares)
    blocks: dict[Role, list[Block]] = {role: [] for role in roles}
    for number in used.tolist():
        device, tokens = DeviceId(profiles.names[number]), (int(ends[number] - shares[number]), int(ends[number]))
        cuts: dict[Role, Block] = {
            "forward": Block(device, tokens, (0, n), (0, k)),
            "grad_input": Block(device, tokens, (0, k), (0, n)),
            "grad_weight": Block(device, (0, n), (0, k), tokens),
        }
        for role in roles:
            blocks[role].append(cuts[role])
    return LinearPlan(
        way="rows",
        blocks={role: tuple(cut) for role, cut in blocks.items()},
        seconds=_rows_s(unit.take(used), linear, wire, shares[used]),
        moved_bytes=sum(layer_bytes(linear, len(used), wire)),
    )


def _rows_s(unit: UnitCosts, linear: Linear, wire: WireFormat, shares: Ints) -> dict[Role, float]:
    """Seconds of each product of a layer cut by rows, with so many rows on each device."""
    k, n = linear.in_width, linear.out_width
    per_row, fixed = row_costs_s(unit, k, n, _dy_cost(linear, wire))
    taken = {role: fixed[role] + shares * per_row[role] for role in linear.roles}
    first = linear.roles[0]
    if first != "grad_weight":  # W arrives strip by strip with the rows, overlapping with compute
        wide, inner = (n, k) if first == "forward" else (k, n)
        taken[first] = finish_s(unit, shares.astype(np.float64), np.full(len(unit), float(wide)), float(inner))
    return {role: float(taken[role].max()) for role in linear.roles}


def fill(rows: int, fixed_s: Floats, row_s: Floats, most: Floats) -> Ints | None:
    """Divide rows among devices so that max(fixed_s + rows x row_s) is least; None if `most` does not suffice.

    Water-filling: bisect for the level T with sum of min((T - fixed) / row, most) = rows, as rows grow with T.
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
    # Each leftover row goes to the device that would finish it first, which may be a fast one several times.
    extendable = np.flatnonzero(shares + 1 <= most)
    ends = [(float(fixed_s[i] + row_s[i] * (shares[i] + 1)), int(i)) for i in extendable]
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
    scaled, names = _in_wire_bytes(profiles, wire), [DeviceId(name) for name in profiles.names]
    room_bytes: list[float] = (profiles.memory_bytes / 2).tolist()  # the next block arrives while one is computed
    blocks: dict[Role, tuple[Block, ...]] = {}
    seconds: dict[Role, float] = {}
    moved_bytes = 0.0
    for role, gemm in linear.gemms.items():
        a_wire = _a_wire(role, linear, wire)
        plan = plan_gemm(scaled, gemm, wire=wire, a_wire=a_wire)
        tiling = plan.tiling
        order = np.argsort(tiling.round, kind="stable")
        columns = (tiling.device[order], tiling.rows[order], tiling.cols[order], tiling.inner[order])
        blocks[role] = tuple(
            piece
            for device, (r0, r1), (c0, c1), (k0, k1) in zip(*(column.tolist() for column in columns), strict=True)
            for piece in fit(Block(names[int(device)], (r0, r1), (c0, c1), (k0, k1)), room_bytes[int(device)])
        )
        seconds[role] = plan.makespan_s
        moved_bytes += sum(_moved_bytes(block, WIRE_BYTES[a_wire], WIRE_BYTES[wire]) for block in blocks[role])
    return LinearPlan(way="blocks", blocks=blocks, seconds=seconds, moved_bytes=moved_bytes)


def _a_wire(role: Role, linear: Linear, wire: WireFormat) -> WireFormat:
    """Format in which the first operand travels: X forward, dY else."""
    return wire if role == "forward" else dy_format(linear.is_head, wire)


def _moved_bytes(block: Block, a_bytes: float, other_bytes: float) -> float:
    rows, cols, inner = (end - start for start, end in (block.rows, block.cols, block.inner))
    return a_bytes * inner * rows + other_bytes * (inner * cols + rows * cols)


def fit(block: Block, memory_bytes: float) -> list[Block]:
    """Halve a block along its longest side until operands and result of every piece fit into the memory."""
    a, c, k = (end - start for start, end in (block.rows, block.cols, block.inner))
    if held_bytes(a, c, k) <= memory_bytes or (a, c, k) == (1, 1, 1):
        return [block]
    longest = max((a, "rows"), (c, "cols"), (k, "inner"))[1]
    start, end = getattr(block, longest)
    middle = (start + end) // 2
    halves = (block._replace(**{longest: (start, middle)}), block._replace(**{longest: (middle, end)}))
    return [piece for half in halves for piece in fit(half, memory_bytes)]


def _in_wire_bytes(profiles: Profiles, wire: WireFormat) -> Profiles:
    """Scale memory to the planner's unit: it counts wire bytes, while devices hold fp32."""
    return Profiles(
        names=profiles.names,
        flops_per_s=profiles.flops_per_s,
        down_bytes_per_s=profiles.down_bytes_per_s,
        up_bytes_per_s=profiles.up_bytes_per_s,
        latency_s=profiles.latency_s,
        memory_bytes=profiles.memory_bytes * (WIRE_BYTES[wire] / DEVICE_BYTES),
    )
