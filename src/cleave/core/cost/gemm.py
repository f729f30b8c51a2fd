"""Laws of a block of one gemm: seconds, bytes and memory, and their inverses.

A block is `rows` x `cols` of the output over `inner` of the inner dimension. A device receives its row strip of A and
its column strip of B, multiplies, and returns the block. Strips are sent in turn (a growing square), so that download,
compute and upload overlap: with d, p, u the seconds of each alone, m = max(p, u) and s = min(d / 2m, 1),

    finish = latency + d            if d >= 2m      (the download never waits)
             latency + m (1 + s^2)  otherwise       (m + d^2 / 4m)

Everything is vectorized over devices and knows neither plans nor gemms of a model. docs/cost-model.md has the
derivations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cleave.core.cost.rates import Real, Server
from cleave.core.cost.streams import dy_format
from cleave.core.cost.wire import DEVICE_BYTES, WIRE_BYTES, WireFormat
from cleave.core.fleet.profiles import Floats, Ints, Profiles
from cleave.core.model.gemms import Linear, Role

Limit = Literal["down", "compute", "up", "latency", "server"]

Frame = Literal["inner-side-side", "side-inner-side", "side-side-inner"]
"""How blocks nest: the dimension sheets are stacked in, the one columns lie side by side in, the one devices divide."""

TILE_BYTES = 16e6
"""Working tiles on top of the operands: sub-blocks being multiplied and results waiting for the uplink."""
PANEL = 256
"""Inner length of a panel, for operands that do not fit as a whole; partial sums stay on the device in fp32."""
ACCUMULATOR_BYTES = 4
_TINY = 1e-300
_NO_TRANSFER_S = 1e-30
_BOUNDLESS = 1e12
_SCAN, _GOLDEN = 16, 26


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """Cost of one element per device: the profile seen through a wire format."""

    wire_bytes: float
    """per element of B and of the result"""
    a_bytes: float
    """per element of A, which may travel in a format of its own"""
    down_s: Floats
    """seconds to receive one operand element, of A and B in equal parts as in square blocks"""
    mac_s: Floats
    """seconds per multiply-add"""
    up_s: Floats
    """seconds to return one result element"""
    latency_s: Floats
    memory_bytes: Floats
    remote: Floats
    """1 for a device, 0 for the server itself, which neither receives nor sends"""

    def __len__(self) -> int:
        return len(self.down_s)

    @property
    def operand_bytes(self) -> float:
        """Bytes per operand element, of A and B in equal parts."""
        return (self.a_bytes + self.wire_bytes) / 2

    def take(self, indices: Ints) -> UnitCosts:
        return UnitCosts(
            wire_bytes=self.wire_bytes,
            a_bytes=self.a_bytes,
            down_s=self.down_s[indices],
            mac_s=self.mac_s[indices],
            up_s=self.up_s[indices],
            latency_s=self.latency_s[indices],
            memory_bytes=self.memory_bytes[indices],
            remote=self.remote[indices],
        )

    def with_boundless_memory(self) -> UnitCosts:
        return replace(self, memory_bytes=np.full(len(self), np.inf))


def unit_costs(profiles: Profiles, wire: WireFormat, server: Server, a_wire: WireFormat | None = None) -> UnitCosts:
    """Costs of every device, then of the server itself if it computes; A travels as `a_wire` if that is given."""
    size, a_size = WIRE_BYTES[wire], WIRE_BYTES[a_wire or wire]
    own = 1 if server.flops_per_s > 0 else 0

    def column(values: Floats, servers: float) -> Floats:
        return np.concatenate([values, np.full(own, servers)])

    return UnitCosts(
        wire_bytes=size,
        a_bytes=a_size,
        down_s=column((a_size + size) / 2 / profiles.down_bytes_per_s, _NO_TRANSFER_S),
        mac_s=column(2.0 / profiles.flops_per_s, 2.0 / max(server.flops_per_s, 1.0)),
        up_s=column(size / profiles.up_bytes_per_s, _NO_TRANSFER_S),
        latency_s=column(profiles.latency_s, 0.0),
        memory_bytes=column(profiles.memory_bytes, np.inf),
        remote=column(np.ones(len(profiles)), 0.0),
    )


# ------------------------------------------------------------------------------------------------------ forward


def finish_s(unit: UnitCosts, rows: Floats, cols: Floats, inner: Real) -> Floats:
    """Seconds until each device has returned its block; an empty block takes none."""
    down = unit.down_s * inner * (rows + cols)
    area = rows * cols
    busy = np.maximum(np.maximum(unit.mac_s * inner, unit.up_s) * area, _TINY)
    share = np.minimum(down / (2 * busy), 1.0)
    return np.where(area > 0, unit.latency_s + np.maximum(down, busy * (1 + share * share)), 0.0)


def compute_s(unit: UnitCosts, rows: Floats, cols: Floats, inner: Real) -> Floats:
    """Seconds of each device's processor for its block."""
    return unit.mac_s * inner * rows * cols


def row_costs_s(
    unit: UnitCosts, in_width: int, out_width: int, dy_cost: float = 1.0
) -> tuple[dict[Role, Floats], dict[Role, Floats]]:
    """A layer cut by tokens, with W held: seconds per token and fixed seconds of each device, by role.

    An element of dY takes `dy_cost` times as long to receive as another.

    Per token a device is busy for the slowest of download, compute and upload; dW needs no download, as the device
    already has X and dY, and returns one partial sum of the size of W.
    """
    k, n = in_width, out_width
    mac_s = unit.mac_s * (k * n)
    per_row: dict[Role, Floats] = {
        "forward": np.maximum(np.maximum(k * unit.down_s, mac_s), n * unit.up_s),
        "grad_input": np.maximum(np.maximum(n * dy_cost * unit.down_s, mac_s), k * unit.up_s),
        "grad_weight": mac_s,
    }
    fixed: dict[Role, Floats] = {
        "forward": unit.latency_s,
        "grad_input": unit.latency_s,
        "grad_weight": unit.latency_s + unit.up_s * (k * n),
    }
    return per_row, fixed


def rows_beside_weights(unit: UnitCosts, in_width: int, out_width: int, *, sums: bool) -> Floats:
    """The most tokens each device can hold (X, dY and a result of each) besides W and, with `sums`, a partial dW."""
    room = unit.memory_bytes / DEVICE_BYTES - in_width * out_width * (2 if sums else 1)
    return np.floor(np.maximum(room, 0.0) / (in_width + out_width + max(in_width, out_width)))


def transfers_bytes(unit: UnitCosts, rows: Floats, cols: Floats, inner: Real) -> tuple[Floats, Floats]:
    """Bytes down and up of each block."""
    area = rows * cols
    edges_bytes = np.where(area > 0, unit.a_bytes * rows + unit.wire_bytes * cols, 0.0)
    return unit.remote * inner * edges_bytes, unit.remote * unit.wire_bytes * area


def layer_bytes(linear: Linear, devices: int, wire: WireFormat) -> tuple[float, float]:
    """Bytes down and up of a layer cut by tokens, step after step, through the server.

    X and dY go down and Y and dX come up; a trained W goes to every device, and each returns its partial sum of dW.
    """
    x, y = linear.tokens * linear.in_width, linear.tokens * linear.out_width
    weights = devices * linear.in_width * linear.out_width if "grad_weight" in linear.roles else 0
    down = WIRE_BYTES[wire] * (x + weights) + WIRE_BYTES[dy_format(linear.is_head, wire)] * y
    return down, WIRE_BYTES[wire] * (x + y + weights)


def held_bytes(rows: int, cols: int, inner: int) -> int:
    """Memory of a block on a live device: both operands and the result."""
    return DEVICE_BYTES * (rows * inner + inner * cols + rows * cols)


def block_memory_bytes(unit: UnitCosts, rows: Floats, cols: Floats, inner: Real) -> Floats:
    """The least memory for each block: complete operands, or panels and fp32 partial sums."""
    whole = unit.operand_bytes * inner * (rows + cols) + _tiles_bytes(unit)
    panel = np.minimum(inner, PANEL)
    panels = unit.operand_bytes * panel * (rows + cols) + ACCUMULATOR_BYTES * rows * cols
    return np.minimum(whole, panels)


def limiting(unit: UnitCosts, rows: Floats, cols: Floats, inner: Real) -> list[Limit]:
    """What each block spends most of its time on."""
    area = rows * cols
    parts = np.stack(
        [
            unit.down_s * inner * (rows + cols),
            compute_s(unit, rows, cols, inner),
            unit.up_s * area,
            unit.latency_s + 0 * area,
        ]
    )
    names: tuple[Limit, ...] = ("down", "compute", "up", "latency")
    return [names[i] for i in parts.argmax(axis=0)]


# ------------------------------------------------------------------------------------------------------ inverse


def rows_within(unit: UnitCosts, deadline_s: Real, cols: Real, inner: Real) -> Floats:
    """The most rows (a real number, unbounded by the matrix) each device finishes in time and can hold."""
    return np.minimum(_rows_in_time(unit, deadline_s, cols, inner), rows_that_fit(unit, cols, inner))


def inner_within(unit: UnitCosts, deadline_s: Real, rows: Real, cols: Real) -> Floats:
    """The longest inner range each device finishes in time and can hold, for a block of given sides.

    The finish grows with m = max(p, u), so the range is the lesser of those for m = p, where everything is
    proportional to it, and for m = u, where d = 2 sqrt(u (tau - u)) once the upload takes more than half of the time.
    """
    tau = np.maximum(deadline_s - unit.latency_s, 0.0)
    edges, area = rows + cols, rows * cols
    down, compute, up = unit.down_s * edges, unit.mac_s * area, unit.up_s * area
    share = np.minimum(down / np.maximum(2 * compute, _TINY), 1.0)
    computed = tau / np.maximum(down, compute * (1 + share * share))
    returned = np.where(2 * up <= tau, tau, 2 * np.sqrt(np.maximum(up * (tau - up), 0.0))) / down
    whole = (unit.memory_bytes - _tiles_bytes(unit)) / (unit.operand_bytes * edges)
    panel = (unit.memory_bytes - ACCUMULATOR_BYTES * area) / (unit.operand_bytes * edges)
    fits = np.where(panel >= PANEL, np.inf, np.maximum(np.maximum(whole, panel), 0.0))
    return np.minimum(np.minimum(computed, returned), fits)


def reach(unit: UnitCosts, deadline_s: Real, width: Real, thickness: Real, frame: Frame) -> Floats:
    """How far each device gets along the third dimension of its block, the other two given."""
    match frame:
        case "inner-side-side":
            return rows_within(unit, deadline_s, width, thickness)
        case "side-inner-side":
            return rows_within(unit, deadline_s, thickness, width)
        case "side-side-inner":
            return inner_within(unit, deadline_s, width, thickness)


def reach_and_slopes(
    unit: UnitCosts, deadline_s: Real, width: Floats, thickness: Real, frame: Frame
) -> tuple[Floats, Floats, Floats]:
    """`reach` and its derivatives with respect to the deadline and the width.

    finish(length, width) = deadline gives length_deadline = 1 / f_length and length_width = -f_width / f_length, with
    f_x = s d_x + (1 - s^2) m_x: d grows with a side as down_s inner and with inner as down_s (rows + cols), m in
    proportion to a side, and to inner only while compute binds. Where memory binds, the deadline has no effect.
    """
    length = reach(unit, deadline_s, width, thickness, frame)
    live = length > 0
    size = np.where(live, length, 1.0)
    match frame:
        case "inner-side-side":
            edges, inner, area = size + width, thickness, size * width
        case "side-inner-side":
            edges, inner, area = size + thickness, width, size * thickness
        case "side-side-inner":
            edges, inner, area = width + thickness, size, width * thickness
    compute, up = unit.mac_s * inner * area, unit.up_s * area
    busy = np.maximum(compute, up)
    share = np.minimum(unit.down_s * inner * edges / np.maximum(2 * busy, _TINY), 1.0)
    idle, side_s = 1 - share * share, share * unit.down_s * inner
    inner_busy = np.where(compute >= up, compute, 0.0)
    by_inner = share * unit.down_s * edges + idle * inner_busy / inner
    by_length = by_inner if frame == "side-side-inner" else side_s + idle * busy / size
    by_width = by_inner if frame == "side-inner-side" else side_s + idle * busy / width
    timely = np.maximum(unit.down_s * inner * edges, busy * (1 + share * share)) + unit.latency_s
    held = live & (timely < deadline_s * (1 - 1e-9))
    slope = np.where(live, -by_width / by_length, 0.0)
    if held.any():
        nudge = width * 1e-6
        slope = np.where(held, (reach(unit, deadline_s, width + nudge, thickness, frame) - length) / nudge, slope)
    return length, np.where(live & ~held, 1 / by_length, 0.0), slope


def area_within(unit: UnitCosts, deadline_s: float, short: Real, long: Real, inner: Real) -> Floats:
    """The largest output area each device finishes in time in an output of sides short <= long: the square if it fits.

    With al = down_s inner, be = max(mac_s inner, up_s) and tau = deadline - latency, the best square has side
    tau / 2al while its download never waits, else sqrt((tau - al^2/be) / be); where that exceeds the short side, the
    short side is full and the long one follows.
    """
    tau = np.maximum(deadline_s - unit.latency_s, 0.0)
    line_s, area_s = unit.down_s * inner, np.maximum(unit.mac_s * inner, unit.up_s)
    side = tau / (2 * line_s)
    turn = line_s / area_s
    side = np.where(side <= turn, side, np.sqrt(np.maximum((tau - line_s * turn) / area_s, 0.0)))
    area = np.where(side > short, short * np.minimum(_rows_in_time(unit, deadline_s, short, inner), long), side * side)
    if np.isposinf(unit.memory_bytes).all():
        return area
    return np.minimum(area, _area_that_fits(unit, short, long, inner))


def best_inner(unit: UnitCosts, deadline_s: float, short: float, long: float, inner: int) -> Floats:
    """The inner thickness at which each device multiplies most by the deadline, in an output of sides short <= long.

    With m = th tau the streamed finish leaves d = 2 tau sqrt(th (1 - th)), and the volume grows as 2 th sqrt(1 - th):
    th = 2/3. Beyond up_s / mac_s compute binds and more thickness only adds download. Where a side or the memory is
    full at that thickness, another may be better and is searched for. The search finds the best one, except that
    scarce memory makes hills it can miss by one percent.
    """
    tau = np.maximum(deadline_s - unit.latency_s, 1e-12)
    side = np.sqrt(2 * tau / (3 * unit.up_s))
    preferred = tau * np.sqrt(2.0) / (3 * unit.down_s * side)
    best = np.clip(np.minimum(preferred, unit.up_s / unit.mac_s), 1.0, float(inner))
    free = area_within(unit, deadline_s, _BOUNDLESS, _BOUNDLESS, best)
    bent = np.flatnonzero(area_within(unit, deadline_s, short, long, best) < free * (1 - 1e-9))
    if len(bent) and inner > 1:
        best[bent] = _best_inner_by_search(unit.take(bent), deadline_s, short, long, inner)
    return best


def _best_inner_by_search(unit: UnitCosts, deadline_s: float, short: float, long: float, inner: int) -> Floats:
    """A coarse scan, as memory may make two hills, then golden section over the logarithm of the thickness."""

    def volume(log_inner: Floats) -> Floats:
        return np.exp(log_inner) * area_within(unit, deadline_s, short, long, np.exp(log_inner))

    grid = np.linspace(0.0, math.log(inner), _SCAN)
    scanned = volume(np.broadcast_to(grid[:, None], (_SCAN, len(unit))))
    peak = scanned.argmax(axis=0)
    low, high = grid[np.maximum(peak - 1, 0)], grid[np.minimum(peak + 1, _SCAN - 1)]
    golden = (5**0.5 - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = volume(left), volume(right)
    for _ in range(_GOLDEN):
        thin = at_left >= at_right
        low, high = np.where(thin, low, left), np.where(thin, right, high)
        new = np.where(thin, high - golden * (high - low), low + golden * (high - low))
        at_new = volume(new)
        left, right = np.where(thin, new, right), np.where(thin, left, new)
        at_left, at_right = np.where(thin, at_new, at_right), np.where(thin, at_left, at_new)
    whole = inner * area_within(unit, deadline_s, short, long, float(inner))
    middle = np.exp(np.where(at_left > at_right, left, right))
    return np.where(whole >= np.maximum(at_left, at_right), float(inner), middle)


# ------------------------------------------------------------------------------------------------------ memory


def rows_that_fit(unit: UnitCosts, cols: Real, inner: Real) -> Floats:
    """The most rows whose block fits into each device's memory."""
    whole = (unit.memory_bytes - _tiles_bytes(unit)) / (unit.operand_bytes * inner) - cols
    strip = unit.operand_bytes * np.minimum(inner, PANEL)
    panels = (unit.memory_bytes - strip * cols) / (strip + ACCUMULATOR_BYTES * cols)
    return np.maximum(np.maximum(whole, panels), 0.0)


def _tiles_bytes(unit: UnitCosts) -> Floats:
    return np.minimum(TILE_BYTES, unit.memory_bytes / 8)


def _area_that_fits(unit: UnitCosts, short: Real, long: Real, inner: Real) -> Floats:
    edges = (unit.memory_bytes - _tiles_bytes(unit)) / (unit.operand_bytes * inner)
    side = np.minimum(edges / 2, short)
    whole = side * np.clip(edges - side, 0.0, long)
    strip = unit.operand_bytes * np.minimum(inner, PANEL)
    side = (np.sqrt(strip * strip + ACCUMULATOR_BYTES * unit.memory_bytes) - strip) / ACCUMULATOR_BYTES
    tall = np.clip((unit.memory_bytes - strip * short) / (strip + ACCUMULATOR_BYTES * short), 0.0, long)
    panels = np.where(side > short, short * tall, side * side)
    return np.maximum(whole, panels)


def _rows_in_time(unit: UnitCosts, deadline_s: Real, cols: Real, inner: Real) -> Floats:
    """Inverse of `finish_s` in rows, ignoring memory.

    Download-bound rows are tau/al - cols. Otherwise m + d^2/4m = tau with m = w rows, w = be cols, d = al (rows + cols)
    is the quadratic (w^2 + al^2/4) rows^2 + (al^2 cols/2 - tau w) rows + al^2 cols^2/4 = 0, whose larger root counts.
    """
    tau = np.maximum(deadline_s - unit.latency_s, 0.0)
    line_s = unit.down_s * inner
    work_s = np.maximum(unit.mac_s * inner, unit.up_s) * cols
    streamed = tau / line_s - cols
    quarter = line_s * line_s / 4
    square = work_s * work_s + quarter
    half = (tau * work_s) / (2 * square) - quarter * cols / square
    root = half * half - quarter / square * (cols * cols)
    paced = np.where(root >= 0, half + np.sqrt(np.maximum(root, 0.0)), 0.0)
    return np.maximum(np.where(2 * work_s * streamed <= tau, streamed, paced), 0.0)
