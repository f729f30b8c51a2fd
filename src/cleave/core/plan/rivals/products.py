"""A step product by product: Cleave's own grain "gemm", and two variations on it. The optimizer is on the server.

Gemms one by one or grouped over the whole fleet, and gemms inside groups of devices that take layers in turn (a fluid
estimate; nothing runs it). Where a time is a lower bound, it favors the way it describes. No blocks are made here:
`step` plans the grouped gemms in full if they could win.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from cleave.core.carbon.energy import Use
from cleave.core.cost.bound import bound_2d, bound_3d, least_time, volume_within
from cleave.core.cost.gemm import UnitCosts, best_inner, unit_costs
from cleave.core.model.gemms import Gemm, step_gemms
from cleave.core.plan.rivals.case import RIVAL_WIRE, Case, Rival, plural

GROUPED = "grouped gemms"
_GROUPS = (4, 16, 64)
_FLUID = 1e-3  # tolerance of bisected fluid times
_SAMPLE = 512
"""Fluid estimates sample about this many devices of larger fleets, evenly."""


def gemms_one_by_one(case: Case) -> Rival:
    """Every gemm cut in 2D over the whole fleet, one after another."""
    unit = unit_costs(case.profiles, case.wire, case.server)
    seconds = {what.gemm: 0.0 for what in step_gemms(case.shape, case.tokens, grouped=False)}
    for gemm in seconds:
        seconds[gemm] = bound_2d(unit.with_boundless_memory(), gemm, case.server)
    total_s = sum(what.count * seconds[what.gemm] for what in step_gemms(case.shape, case.tokens, grouped=False))
    return Rival(
        name="gemms one by one",
        step_s=total_s + attention_by_heads_s(case),
        arrangement="each gemm over the whole fleet in 2D (lower bound), attention by heads",
        is_ours=True,
    )


def grouped_gemms(case: Case) -> Rival:
    """Cleave's grain "gemm": q/k/v and gate/up grouped, the inner dimension split where that pays."""
    unit = unit_costs(case.profiles, case.wire, case.server)
    seconds: dict[Gemm, float] = {}
    for what in step_gemms(case.shape, case.tokens):
        if what.gemm not in seconds:
            flat = bound_2d(unit.with_boundless_memory(), what.gemm, case.server)
            seconds[what.gemm] = min(flat, bound_3d(unit, what.gemm, case.server))
    total_s = sum(what.count * seconds[what.gemm] for what in step_gemms(case.shape, case.tokens))
    return Rival(
        name=GROUPED,
        step_s=total_s + attention_by_heads_s(case),
        arrangement="q/k/v and gate/up as one gemm, 3D where it pays (lower bound), attention by heads",
        is_ours=True,
    )


def layer_groups(case: Case) -> Rival:
    """The fleet in groups, each with its own layers and 3D gemms inside; a fluid estimate without fill or borders.

    As of any rival, its numbers have 16 bits.
    """
    case = replace(case, wire=RIVAL_WIRE)
    best_s, best_groups = inf, 1
    attention_s = attention_by_heads_s(case)
    for groups in sorted({min(groups, case.shape.layers) for groups in _GROUPS}):
        total_s = attention_s
        for what in _distinct(case):
            times = what.count / groups if what.count > 1 else 1
            total_s += times * _fluid_s(case, what.gemm, groups if what.count > 1 else 1)
        if total_s < best_s:
            best_s, best_groups = total_s, groups
    return Rival(
        name="layer groups",
        step_s=best_s,
        arrangement="fewer devices than groups of layers"
        if best_s == inf
        else f"{best_groups} groups of devices with {plural(ceil(case.shape.layers / best_groups), 'layer')} each, "
        "3D gemms inside (fluid estimate)",
        spares="a fluid estimate: it waits for no stage and has no borders between blocks; nothing runs it",
    )


@dataclass(frozen=True, slots=True)
class _Often:
    gemm: Gemm
    count: int


def _distinct(case: Case) -> Iterable[_Often]:
    counts: dict[tuple[Gemm, bool], int] = {}
    for what in step_gemms(case.shape, case.tokens):
        key = what.gemm, what.count > 1
        counts[key] = counts.get(key, 0) + what.count
    return [_Often(gemm, count) for (gemm, _), count in counts.items()]


def _fluid_s(case: Case, gemm: Gemm, copies: int) -> float:
    """Seconds of `copies` equal gemms at once over all devices, or over a sample with its share of the work."""
    step = max(len(case.profiles) // _SAMPLE, 1)
    sample = np.argsort(case.profiles.up_bytes_per_s, kind="stable")[step // 2 :: step]
    some: UnitCosts = unit_costs(case.profiles, case.wire, replace(case.server, flops_per_s=0.0)).take(sample)
    some = some.with_boundless_memory()
    share = len(sample) / len(case.profiles)
    work = gemm.flops / 2 * copies * share
    seconds = least_time(lambda t: float(volume_within(some, t, gemm).sum()), work, _FLUID)
    is_shared = case.server.is_capped or any(case.profiles.medium)
    if not is_shared or seconds == inf:  # more groups than devices
        return seconds
    volume = volume_within(some, seconds, gemm)
    inner = best_inner(some, seconds, float(min(gemm.m, gemm.n)), float(max(gemm.m, gemm.n)), gemm.k)
    area = volume / inner
    down, up = some.wire_bytes * float((2 * inner * np.sqrt(area)).sum()), some.wire_bytes * float(area.sum())
    each = np.full(len(case.profiles), (down + up) / share / len(case.profiles))
    served_s = max(down / share / case.server.down_bytes_per_s, up / share / case.server.up_bytes_per_s)
    return max(seconds, served_s, case.medium_s(each))


def attention_by_heads_s(case: Case) -> float:
    """Seconds of scores and contexts, divided by heads and sequences among the devices in any number."""
    return attention_use(case).wall_s


def attention_use(case: Case) -> Use:
    """What scores and contexts take of each device: heads are shared out so that all finish together."""
    shape, profiles, size = case.shape, case.profiles, case.terms.activation_bytes
    one = case.sequence * shape.head_dim
    shared = 2 * shape.kv_heads / shape.heads
    heads = shape.layers * case.tokens / case.sequence * shape.heads
    none = np.zeros(len(profiles))
    total = Use(busy_s=none, down_bytes=none, up_bytes=none, wall_s=0.0)
    for down, up, flops in ((1 + shared, 1.0, 2.0), (3 + shared, 1 + shared, 5.0)):
        busy_s = flops * case.sequence * one / profiles.flops_per_s
        per_s = np.maximum(
            np.maximum(down * size * one / profiles.down_bytes_per_s, up * size * one / profiles.up_bytes_per_s),
            busy_s,
        )
        wall_s = heads / float((1 / per_s).sum())
        own = wall_s / per_s
        moved = own * size * one
        total += Use(busy_s=own * busy_s, down_bytes=down * moved, up_bytes=up * moved, wall_s=wall_s)
    return total
