"""Lower bounds on the time of a gemm: no plan of blocks can be faster under the streamed cost.

2D does not split the inner dimension: a device's share of the output is at most the largest area it finishes in time.
3D may split it: a device's share of the multiply-adds is at most the largest volume it finishes. The bound is the
least time at which all shares together cover the gemm. Under a server cap, egress buys area at a rate that grows with
the area, so the largest devices come first: that is both the bound and the rule by which the planner selects devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cleave.core.cost.gemm import UnitCosts, area_within, best_inner
from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.model.gemms import Gemm

_TOLERANCE = 1e-6
_NEVER_S = 1e12
_Point = tuple[float, float]
"""The logarithms of a time and of the share of the work that is done by then."""


def bound_2d(unit: UnitCosts, gemm: Gemm, server: Server) -> float:
    """Seconds without splitting the inner dimension; infinite if memory can never hold the output at once."""
    target = float(gemm.m) * gemm.n
    ingress_s = target * unit.wire_bytes / server.up_bytes_per_s if len(unit) else 0.0
    if unit.remote.all():
        return max(
            least_time(lambda t: _capped_area(unit, gemm, server, t), target, after_s=_soonest_s(unit)), ingress_s
        )

    def covered(t: float) -> float:  # the server's own part crosses no link
        own = area_within(unit, t, *_sides(gemm), gemm.k)[unit.remote == 0].sum()
        return min(_capped_area(unit, gemm, server, t), own + server.up_bytes_per_s * t / unit.wire_bytes)

    return least_time(covered, target)


def bound_3d(unit: UnitCosts, gemm: Gemm, server: Server, tolerance: float = _TOLERANCE) -> float:
    """Seconds for blocks that may also split the inner dimension; ignores memory, so it holds for any rounds.

    At most `tolerance` of it too low, never too high.
    """
    unit = unit.with_boundless_memory()
    return least_time(
        lambda t: _capped_volume(unit, gemm, server, t), gemm.flops / 2, tolerance, after_s=_soonest_s(unit)
    )


def is_bound_3d_within(unit: UnitCosts, gemm: Gemm, server: Server, deadline_s: float) -> bool:
    """Whether `bound_3d` is at most the deadline, without searching for it."""
    return _capped_volume(unit.with_boundless_memory(), gemm, server, deadline_s) >= gemm.flops / 2


def holds_at_once(unit: UnitCosts, gemm: Gemm) -> bool:
    """Whether the devices' memory could hold the whole gemm in one round, given unlimited time."""
    flat = area_within(unit, _NEVER_S, *_sides(gemm), gemm.k).sum() * gemm.k
    need = gemm.flops / 2 * (1 - 1e-9)
    return float(flat) >= need or float(volume_within(unit, _NEVER_S, gemm).sum()) >= need


def ideal_overlap_bound(unit: UnitCosts, gemm: Gemm) -> float:
    """The Loomis-Whitney bound: 3D, with download, compute and upload overlapping completely.

    Streaming cannot reach it: results exist only after operands. For a device bound by both links it is too low by a
    factor of (2 / 3 sqrt 3)^(2/3), that is 1.19. Kept for comparison with the literature.
    """

    def volume(t: float) -> float:
        tau = np.maximum(t - unit.latency_s, 0.0)
        edge = tau / (2 * unit.down_s)
        face = np.minimum(tau / unit.up_s, float(gemm.m) * gemm.n)
        bound = np.where(edge <= gemm.k * np.sqrt(face), edge * np.sqrt(face), gemm.k * face)
        return float(np.minimum(bound, tau / unit.mac_s).sum())

    return least_time(volume, gemm.flops / 2)


def by_worth(unit: UnitCosts, gemm: Gemm, deadline_s: float) -> Ints:
    """Devices by how much output a byte sent to them earns, most first; the server itself, which costs none, leads."""
    areas = area_within(unit, deadline_s, *_sides(gemm), gemm.k)
    order = np.lexsort((-areas, unit.remote))
    return order[areas[order] > 0]


def _soonest_s(unit: UnitCosts) -> float:
    return float(unit.latency_s.min()) if len(unit) else 0.0


def volume_within(unit: UnitCosts, deadline_s: float, gemm: Gemm) -> Floats:
    """The most multiply-adds each device finishes in time, over all inner thicknesses."""
    thickness = best_inner(unit, deadline_s, *_sides(gemm), gemm.k)
    return thickness * area_within(unit, deadline_s, *_sides(gemm), thickness)


def _sides(gemm: Gemm) -> tuple[float, float]:
    return float(min(gemm.m, gemm.n)), float(max(gemm.m, gemm.n))


def _edges(areas: Floats, short: float) -> Floats:
    """The least rows + columns of a block of the given area."""
    return np.where(areas <= short * short, 2 * np.sqrt(areas), short + areas / short)


def _capped_area(unit: UnitCosts, gemm: Gemm, server: Server, deadline_s: float) -> float:
    """The most output possible by the deadline: from all devices, or from those the egress pays for, largest first."""
    areas = area_within(unit, deadline_s, *_sides(gemm), gemm.k)
    budget = server.down_bytes_per_s * deadline_s
    spent = unit.remote * unit.operand_bytes * gemm.k * _edges(areas, float(min(gemm.m, gemm.n)))
    if spent.sum() <= budget:
        return float(areas.sum())
    order = np.argsort(-areas, kind="stable")
    total = np.cumsum(spent[order])
    paid = int(np.searchsorted(total, budget))
    short = float(min(gemm.m, gemm.n))
    rest = (budget - (total[paid - 1] if paid else 0.0)) / (unit.operand_bytes * gemm.k)
    partial = (rest / 2) ** 2 if rest <= 2 * short else short * (rest - short)
    own = areas[(unit.remote == 0)].sum() - areas[order[:paid]][unit.remote[order[:paid]] == 0].sum()
    return float(areas[order[:paid]].sum() + partial + own)


def _capped_volume(unit: UnitCosts, gemm: Gemm, server: Server, deadline_s: float) -> float:
    """`_capped_area` for volumes: a device's area is at most what its uplink returns, which bounds its reuse.

    A byte down earns most on devices with the largest possible area, a byte up at best the whole inner dimension; each
    cap alone gives a bound on the total, and the smaller of the two holds.
    """
    volumes = volume_within(unit, deadline_s, gemm)
    total = float(volumes.sum())
    tau = np.maximum(deadline_s - unit.latency_s, 0.0)
    face = np.clip(tau / unit.up_s, 1.0, float(gemm.m) * gemm.n)
    for budget, need in (
        (
            server.down_bytes_per_s,
            unit.operand_bytes * volumes / face * _edges(face, float(min(gemm.m, gemm.n))),
        ),
        (server.up_bytes_per_s, unit.wire_bytes * volumes / gemm.k),
    ):
        need = need * unit.remote
        if need.sum() > budget * deadline_s:
            order = np.argsort(need / np.maximum(volumes, 1e-300), kind="stable")
            spent = np.concatenate([[0.0], np.cumsum(need[order])])
            done = np.concatenate([[0.0], np.cumsum(volumes[order])])
            total = min(total, float(np.interp(budget * deadline_s, spent, done)))
    return total


def least_time(
    work: Callable[[float], float], target: float, tolerance: float = _TOLERANCE, *, after_s: float = 0.0
) -> float:
    """The least time at which an increasing `work` reaches the target; at most `tolerance` of it too low, never above.

    Nothing is done before `after_s`, such as the least latency; from there on, work grows about as a power of time, so
    logarithms are searched, by Chandrupatla's method: a parabola through three points where it is safe, else halving.
    """
    if work(_NEVER_S) < target:
        return np.inf

    def point(log_t: float) -> _Point:
        done = work(after_s + math.exp(log_t))
        return log_t, math.log(done / target) if done > 0 else -math.inf

    low, high = point(math.log(1e-3)), point(math.log(4e-3))
    while high[1] < 0:
        low, high = high, point(high[0] + math.log(4))
    while low[1] >= 0:
        low, high = point(low[0] - math.log(4)), low
    before = low
    guess = (low[0] + high[0]) / 2
    while True:
        new = point(guess)
        if new[1] < 0:
            before, replaced, low, far = low, low, new, high
        else:
            replaced, high, far = high, new, low
        low_s, high_s = after_s + math.exp(low[0]), after_s + math.exp(high[0])
        if high_s - low_s <= tolerance * low_s:
            return low_s  # the side that is still a lower bound
        if high[1] > 0:
            guess = _parabola(new, far, replaced)
        elif new is low and math.isfinite(before[1]):  # done in full, and no more than that: only the rise tells
            guess = low[0] + (low[0] - before[0]) * low[1] / (before[1] - low[1])
        else:
            guess = (low[0] + high[0]) / 2
        least = tolerance / 2 * low_s / (high_s - low_s) * (high[0] - low[0])  # so that the far end comes in too
        guess = min(max(guess, low[0] + least), high[0] - least)


def _parabola(new: _Point, far: _Point, old: _Point) -> float:
    """Where a parabola through three points, x as a function of y, is zero between the first two.

    Their middle if it is not monotonic there, or a point is infinite.
    """
    (a, at_a), (b, at_b), (c, at_c) = new, far, old
    if not (math.isfinite(at_a) and math.isfinite(at_b) and math.isfinite(at_c)) or at_c == at_b:
        return (a + b) / 2
    along, up = (a - b) / (c - b), (at_a - at_b) / (at_c - at_b)
    if not 1 - math.sqrt(1 - along) < up < math.sqrt(along):
        return (a + b) / 2
    to_far = at_a / (at_b - at_a) * at_c / (at_b - at_c) * (b - a)
    return a + to_far + (c - a) * at_a / (at_c - at_a) * at_b / (at_c - at_b)
