"""Choose which devices a plan takes: all that make it faster, or those with the least energy or emissions.

The planner makes a step fast. For energy or carbon, devices are ranked by what one more FLOP takes on each, with the
bytes that go with it, and the planner plans for a few numbers of the best, evenly spaced in logarithms, while the work
still fits, then for numbers between the best of these and its neighbors. The plan with the least joules or kgCO2e of
all is taken. The plan for the whole fleet is one of them, so no plan for energy takes more joules than the one for
time. A few prefixes of one ranking are a search, not an optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from typing import Final, Generic, TypeVar

import numpy as np

from cleave.core.carbon.bill import Bill, FleetPower
from cleave.core.carbon.energy import Use, joules_per_flop, kgco2e_per_flop
from cleave.core.carbon.footprint import Footprint
from cleave.core.fleet.profiles import Ints, Profiles
from cleave.core.model.objective import Objective
from cleave.core.plan.usage import Plan, plan_flops, plan_s, use_of
from cleave.errors import InfeasibleError

_TRIED: Final = 5  # numbers of devices, beside the whole fleet
_REFINED: Final = 2  # times that the numbers on either side of the best are tried
AnyPlan = TypeVar("AnyPlan", bound=Plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen(Generic[AnyPlan]):
    """The plan for an objective, the devices it was made for, and its carbon bill."""

    objective: Objective
    plan: AnyPlan
    profiles: Profiles
    """The devices that the planner was given."""
    left_out: dict[str, str]
    """Reason per device that it was not given."""
    bill: Bill
    fastest_s: float
    """Seconds of the plan for time, which has the whole fleet."""
    fastest: Footprint
    """What that would take."""

    @property
    def plan_s(self) -> float:
        return plan_s(self.plan)


def choose_devices(objective: Objective, fleet: FleetPower, plan: Callable[[Profiles], AnyPlan]) -> Chosen[AnyPlan]:
    """Plan with the devices that serve the objective. Raises InfeasibleError if not even the whole fleet can do it."""
    everyone = fleet.profiles
    fastest = plan(everyone)
    use = use_of(fastest, everyone)
    best, best_use, best_of = fastest, use, np.arange(len(everyone))
    if objective != "time":
        ranked = _ranked(objective, fleet, use, plan_flops(fastest))
        cost = {0: inf, len(everyone): _cost(objective, fleet, use)}

        def try_first(count: int) -> None:
            """Plan for so many of the best devices."""
            nonlocal best, best_use, best_of
            some = np.sort(ranked[:count])
            try:
                found = plan(everyone.take(some))
            except InfeasibleError:
                cost[count] = inf
                return
            found_use = use_of(found, everyone)
            cost[count] = _cost(objective, fleet, found_use)
            if cost[count] < _cost(objective, fleet, best_use):
                best, best_use, best_of = found, found_use, some

        for count in _counts(len(everyone)):
            try_first(count)
            if cost[count] == inf:
                break
        for _ in range(_REFINED):
            for count in _between(len(best_of), list(cost)):
                try_first(count)
    reason = f"{objective}: the work takes less of it without this device"
    left_out = np.setdiff1d(np.arange(len(everyone)), best_of).tolist()
    return Chosen(
        objective=objective,
        plan=best,
        profiles=everyone.take(best_of) if left_out else everyone,
        left_out={everyone.names[device]: reason for device in left_out},
        bill=fleet.bill(best_use, plan_flops(best)),
        fastest_s=plan_s(fastest),
        fastest=fleet.footprint(use),
    )


def _counts(devices: int) -> list[int]:
    """Numbers of devices to try, largest first."""
    spaced = np.round(np.geomspace(devices, 1, _TRIED + 1)).astype(np.int64).tolist()
    return sorted({count for count in spaced if count < devices}, reverse=True)


def _between(best: int, tried: list[int]) -> list[int]:
    """Numbers of devices, not tried yet, between the best and the next smaller and larger ones."""
    below, above = max(one for one in tried if one < best), min((one for one in tried if one > best), default=best)
    middles = [round(sqrt(max(other, 1) * best)) for other in (below, above)]
    return sorted({one for one in middles if one not in tried})


def _ranked(objective: Objective, fleet: FleetPower, use: Use, flops: int) -> Ints:
    """Devices, the best for the objective first; bytes per FLOP are those of the plan for time."""
    bytes_per_flop = float(use.down_bytes.sum() + use.up_bytes.sum()) / flops
    per_flop = joules_per_flop if objective == "energy" else kgco2e_per_flop
    return np.argsort(per_flop(fleet.devices, fleet.profiles.flops_per_s, bytes_per_flop), kind="stable")


def _cost(objective: Objective, fleet: FleetPower, use: Use) -> float:
    footprint = fleet.footprint(use)
    return footprint.energy_j if objective == "energy" else footprint.kgco2e
