"""Plan one gemm: assign blocks of it to devices.

2D and 3D plans are computed where they can pay off, and the faster one is kept. If the server's links are capped, each
device has a price: the most worthwhile are selected (`bound.by_worth`), just enough to balance the devices' time
against the server's. A fleet whose memory cannot hold the output at once works in rounds. Devices without a block are
reported as left out, with the reason. A plan knows profiles and costs, not sockets or ledgers; `repair` fixes it when
devices leave or join.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, product
from typing import Literal

import numpy as np

from cleave.core.cost.bound import bound_2d, bound_3d, by_worth, holds_at_once, is_bound_3d_within
from cleave.core.cost.gemm import Limit, UnitCosts, finish_s, limiting, rows_that_fit, unit_costs
from cleave.core.cost.rates import Server
from cleave.core.cost.wire import PLAN_WIRE, WireFormat
from cleave.core.fleet.profiles import Floats, Ints, Profiles
from cleave.core.model.gemms import Gemm
from cleave.core.plan.gemm.flat import plan_flat
from cleave.core.plan.gemm.slabs import plan_slabs
from cleave.core.plan.gemm.tiling import Tiling, join
from cleave.errors import InfeasibleError

SERVER = "server"
"""Device name of the block that the server computes itself."""

Split = Literal["auto", "2d", "3d"]

_WORTH_TRYING = 0.98  # a 3D plan is computed only if its bound is below this share of the 2D plan
_CAP_BINDS = 1.1  # beyond this slowdown by the cap, using the whole fleet is not tried
_FIRST_COUNT = 64
_NEIGHBORS = 3
_MAX_ROUNDS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPlan:
    """Blocks of one gemm with their devices, and what they cost."""

    gemm: Gemm
    wire: WireFormat
    a_wire: WireFormat
    """Format of A: the wire, or that of the head's dY."""
    server: Server
    split: Literal["2d", "3d"]
    names: tuple[str, ...]
    """Devices by the numbers in `tiling.device`; the server comes last if it computes."""
    tiling: Tiling
    finish_s: Floats
    """Finish of each block, from the start of its round."""
    down_bytes: Floats
    up_bytes: Floats
    makespan_s: float
    bound_s: float
    """Lower bound for any plan of this split."""
    rounds: int
    limit: Limit
    """The bottleneck: what takes most of the devices' time, or the server if its links finish last."""
    left_out: dict[str, str]
    """Reason per device without a block."""

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s


def plan_gemm(
    profiles: Profiles,
    gemm: Gemm,
    *,
    wire: WireFormat = PLAN_WIRE,
    a_wire: WireFormat | None = None,
    server: Server | None = None,
    split: Split = "auto",
) -> GemmPlan:
    """Return the fastest plan found. Raises InfeasibleError if not even the smallest block fits a device.

    A travels as `a_wire` if that is given.
    """
    server = server or Server()
    unit = unit_costs(profiles, wire, server, a_wire)
    _check_memory(unit, profiles, gemm)
    best: _Candidate | None = None
    if split != "3d":
        best = _in_rounds(unit, gemm, server, "2d", bound_2d(unit, gemm, server))
    if split == "3d" or (
        split == "auto"
        and gemm.k > 1
        and (best is None or is_bound_3d_within(unit, gemm, server, best.makespan_s * _WORTH_TRYING))
    ):
        slabs = _in_rounds(unit, gemm, server, "3d", bound_3d(unit, gemm, server))
        if slabs and (best is None or slabs.makespan_s < best.makespan_s):
            best = slabs
    if best is None:
        raise InfeasibleError(
            f"no plan fits gemm {gemm.m} x {gemm.n} x {gemm.k}: with {profiles.memory_bytes.max():.0f} bytes on the "
            f"largest device it would take more than {_MAX_ROUNDS} rounds; add devices with more memory"
        )
    return _describe(profiles, unit, gemm, (wire, a_wire or wire), server, best)


def plan_alone(unit: UnitCosts, gemm: Gemm) -> tuple[Tiling, float] | None:
    """Return just a 2D tiling and its time, in rounds if memory requires; for parts of a gemm."""
    found = _in_rounds(unit, gemm, Server(), "2d", bound_2d(unit, gemm, Server()))
    return (found.tiling, found.makespan_s) if found else None


# ------------------------------------------------------------------------------------------------------ search


@dataclass(frozen=True, slots=True)
class _Candidate:
    split: Literal["2d", "3d"]
    tiling: Tiling
    makespan_s: float
    bound_s: float


def _in_rounds(
    unit: UnitCosts, gemm: Gemm, server: Server, split: Literal["2d", "3d"], bound_s: float
) -> _Candidate | None:
    """Plan one round if the fleet's memory holds the output, else a grid of as few rounds as possible."""
    down, across = 1, 1
    while True:
        heights, widths = _parts(gemm.m, down), _parts(gemm.n, across)
        sizes = {(a, c) for a in set(heights) for c in set(widths)}
        plans: dict[tuple[int, int], tuple[Tiling, float] | None] = {}
        for a, c in sizes:
            part = Gemm(m=a, n=c, k=gemm.k)
            plans[a, c] = _capped(
                unit, part, server, split, bound_s if part == gemm else _bound(unit, part, server, split)
            )
        found = {size: plan for size, plan in plans.items() if plan}
        if len(found) == len(plans):
            break
        if (down, across) == (gemm.m, gemm.n) or down * across >= _MAX_ROUNDS:
            return None
        if gemm.m / down >= gemm.n / across:
            down = min(2 * down, gemm.m)
        else:
            across = min(2 * across, gemm.n)
    tilings: list[Tiling] = []
    makespan_s = 0.0
    for (top, a), (left, c) in product(_offsets(heights), _offsets(widths)):
        tilings.append(found[a, c][0].shifted(top, left, len(tilings)))
        makespan_s += found[a, c][1]
    if len(tilings) > 1:  # ignoring memory: a valid bound, if a loose one
        bound_s = _bound(unit.with_boundless_memory(), gemm, server, split)
    return _Candidate(split, join(tilings), makespan_s, bound_s)


def _parts(side: int, count: int) -> list[int]:
    return [(number + 1) * side // count - number * side // count for number in range(count)]


def _offsets(parts: list[int]) -> list[tuple[int, int]]:
    """(start, size) of parts laid end to end."""
    return list(zip([0, *accumulate(parts[:-1])], parts, strict=True))


def _capped(
    unit: UnitCosts, gemm: Gemm, server: Server, split: Literal["2d", "3d"], bound_s: float
) -> tuple[Tiling, float] | None:
    """Find the best plan under the server's caps, with all devices or with the most worthwhile ones."""
    if not np.isfinite(bound_s) or (split == "3d" and not holds_at_once(unit, gemm)):
        return None
    free_s = _bound(unit, gemm, Server(), split) if server.is_capped else bound_s
    best: tuple[Tiling, float] | None = None
    if bound_s < free_s * _CAP_BINDS:
        found = _plan(unit, np.arange(len(unit)), gemm, split, free_s)
        if found:
            best = found[0], max(found[1], _server_s(unit, found[0], server))
            if best[1] <= found[1]:
                return best
    if not server.is_capped:
        return best
    selected = _select(unit, gemm, server, split, bound_s)
    return min((x for x in (best, selected) if x), key=lambda x: x[1], default=None)


def _select(
    unit: UnitCosts, gemm: Gemm, server: Server, split: Literal["2d", "3d"], bound_s: float
) -> tuple[Tiling, float] | None:
    """Search for the best number of devices: more of them finish sooner, but the server has more to send."""
    ranked = by_worth(unit, gemm, bound_s)
    best: tuple[Tiling, float] | None = None
    tried: set[int] = set()

    def attempt(count: int) -> float | None:
        """Return the ratio of the devices' time to the server's; None if that many devices cannot do it."""
        nonlocal best
        tried.add(count)
        some = unit.take(ranked[:count])
        found = _plan(unit, ranked[:count], gemm, split, max(bound_s, _bound(some, gemm, Server(), split)))
        if found is None:
            return None
        server_s = _server_s(unit, found[0], server)
        if best is None or max(found[1], server_s) < best[1]:
            best = found[0], max(found[1], server_s)
        return found[1] / max(server_s, found[1] / 2)

    low, high, count = 1, len(ranked), min(_FIRST_COUNT, len(ranked))
    while low <= high and count not in tried:
        ratio = attempt(count)
        if ratio is None:
            low, count = count + 1, min(2 * count, high)
            continue
        low, high = (low, count - 1) if ratio < 1 else (count + 1, high)
        count = int(np.clip(count * ratio, low, max(high, low)))
    if best is not None:  # with few devices, neighboring counts may fit better
        middle = len(np.unique(best[0].device))
        for count in range(middle - _NEIGHBORS, middle + _NEIGHBORS + 1):
            if middle <= _FIRST_COUNT and 1 <= count <= len(ranked) and count not in tried:
                attempt(count)
    return best


def _bound(unit: UnitCosts, gemm: Gemm, server: Server, split: Literal["2d", "3d"]) -> float:
    return bound_2d(unit, gemm, server) if split == "2d" else bound_3d(unit, gemm, server)


def _plan(
    unit: UnitCosts, devices: Ints, gemm: Gemm, split: Literal["2d", "3d"], target_s: float
) -> tuple[Tiling, float] | None:
    search = plan_flat if split == "2d" else plan_slabs
    found = search(unit.take(devices), gemm.m, gemm.n, gemm.k, target_s)
    if found is None:
        return None
    tiling = found[0].of_devices(devices)
    return tiling, float(tiling.finish_s(unit).max())


def _server_s(unit: UnitCosts, tiling: Tiling, server: Server) -> float:
    """Seconds that the server's links need for a plan's bytes."""
    down, up = tiling.transfers_bytes(unit)
    return float(max(down.sum() / server.down_bytes_per_s, up.sum() / server.up_bytes_per_s))


# ------------------------------------------------------------------------------------------------------ result


def _describe(
    profiles: Profiles,
    unit: UnitCosts,
    gemm: Gemm,
    wires: tuple[WireFormat, WireFormat],
    server: Server,
    best: _Candidate,
) -> GemmPlan:
    tiling = best.tiling
    down, up = tiling.transfers_bytes(unit)
    finish = tiling.finish_s(unit)
    rounds = int(tiling.round.max()) + 1
    names = (*profiles.names, SERVER) if server.flops_per_s > 0 else profiles.names
    return GemmPlan(
        gemm=gemm,
        wire=wires[0],
        a_wire=wires[1],
        server=server,
        split=best.split,
        names=names,
        tiling=tiling,
        finish_s=finish,
        down_bytes=down,
        up_bytes=up,
        makespan_s=best.makespan_s,
        bound_s=best.bound_s,
        rounds=rounds,
        limit=_limit(unit, tiling, finish, best.makespan_s),
        left_out=_left_out(unit, names, gemm, server, tiling, best.makespan_s / rounds),
    )


def _limit(unit: UnitCosts, tiling: Tiling, finish: Floats, makespan_s: float) -> Limit:
    last = np.zeros(int(tiling.round.max()) + 1)
    np.maximum.at(last, tiling.round, finish)
    if last.sum() < makespan_s * (1 - 1e-6):
        return "server"
    kinds = limiting(unit.take(tiling.device), tiling.heights, tiling.widths, tiling.depths)
    totals: dict[Limit, float] = {}
    for kind, seconds in zip(kinds, finish.tolist(), strict=True):
        totals[kind] = totals.get(kind, 0.0) + seconds
    return max(totals, key=lambda kind: totals[kind])


def _left_out(
    unit: UnitCosts, names: tuple[str, ...], gemm: Gemm, server: Server, tiling: Tiling, makespan_s: float
) -> dict[str, str]:
    idle = np.setdiff1d(np.arange(len(unit)), tiling.device)
    if not len(idle):
        return {}
    some = unit.take(idle)
    one = np.ones(len(idle))
    fastest_s = finish_s(some, one, one, float(gemm.k))
    fits = rows_that_fit(some, one, float(gemm.k)) >= 1
    reasons: dict[str, str] = {}
    for i, device in enumerate(idle.tolist()):
        if not fits[i]:
            reason = f"memory: one row and column need more than its {some.memory_bytes[i] / 1e6:.0f} MB"
        elif some.latency_s[i] >= makespan_s:
            reason = f"latency: {some.latency_s[i]:.3g} s, and the others finish in {makespan_s:.3g} s"
        elif fastest_s[i] >= makespan_s:
            reason = f"too slow: one element takes it {fastest_s[i]:.3g} s, and the others finish in {makespan_s:.3g} s"
        elif server.is_capped:
            reason = "server link: its bytes earn more with faster devices"
        else:
            reason = "no whole row left: its share would be less than one row or column"
        reasons[names[device]] = reason
    return reasons


def _check_memory(unit: UnitCosts, profiles: Profiles, gemm: Gemm) -> None:
    one = np.ones(len(unit))
    if (rows_that_fit(unit, one, float(gemm.k)) >= 1).any():
        return
    need = unit.operand_bytes * min(gemm.k, 256) * 2 + 4
    raise InfeasibleError(
        f"no plan fits gemm {gemm.m} x {gemm.n} x {gemm.k}: the smallest block needs {need:.0f} bytes, the largest "
        f"device offers {profiles.memory_bytes.max():.0f} bytes; add devices with more memory or check the column "
        "memory_bytes"
    )
