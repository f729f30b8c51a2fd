"""The carbon bill of a live run, from what its devices did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cleave.core.carbon.bill import Bill, fleet_power
from cleave.core.carbon.energy import Use
from cleave.core.fleet.profiles import Profiles
from cleave.core.schedule.members import Member
from cleave.facts.carbon import carbon_facts
from cleave.server.admission.gate import is_loopback


def run_bill(members: Sequence[Member], wall_s: float) -> Bill | None:
    """Return the bill for what devices did in `wall_s` seconds; None if no device ever joined.

    Devices on the server's own machine draw its power and cross no network, so they add nothing to it. Others do not
    say what they are or where: they count as laptops on the grid of the world.
    """
    if not members:
        return None
    counted = [member for member in members if not _is_here(member)] or list(members)
    is_other = np.array([not _is_here(member) for member in counted], dtype=np.float64)
    flops_per_s, down, up = np.array([member.rates for member in counted]).T
    memory_bytes = np.array([member.memory_bytes for member in counted], dtype=np.float64)
    latency_s = np.array([member.latency_s for member in counted])
    nothing = np.zeros(len(counted))
    profiles = Profiles.prechecked(
        tuple(map(str, range(len(counted)))),
        np.stack([np.maximum(flops_per_s, 1.0), down, up, latency_s, memory_bytes, nothing, nothing]),
    )
    use = Use(
        busy_s=is_other * np.array([member.compute_s for member in counted]),
        down_bytes=is_other * np.array([member.down_bytes for member in counted]),
        up_bytes=is_other * np.array([member.up_bytes for member in counted]),
        wall_s=wall_s,
    )
    return fleet_power(profiles, carbon_facts()).bill(use, sum(member.done_flops for member in members))


def _is_here(member: Member) -> bool:
    return not member.address or is_loopback(member.address)
