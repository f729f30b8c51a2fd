"""What all rivals start from: a setting as a `Case`, constants with sources, an outcome that does not fit."""

from __future__ import annotations

from functools import cache

import numpy as np

from cleave.core.fleet.profiles import Ints, Profiles
from cleave.core.plan.rivals.case import Case
from cleave.facts import table
from cleave.sim.setting import Outcome, Setting


def case_of(setting: Setting) -> Case:
    return Case(
        profiles=setting.profiles,
        shape=setting.model,
        tokens=setting.tokens,
        sequence=setting.sequence,
        wire=setting.wire,
        server=setting.server,
    )


@cache
def fact(name: str) -> float:
    """A constant of `facts/rivals.csv`."""
    (value,) = (float(row["value"]) for row in table("rivals") if row["name"] == name)
    return value


def link_bytes_per_s(profiles: Profiles, devices: Ints) -> float:
    """Rate at which the median of these devices, or of all if that is faster, exchanges bytes with a like one.

    Of all, as a few stages may be on devices that compute fast behind slow links, and a spare need not be like them.
    """
    slower = np.minimum(profiles.down_bytes_per_s, profiles.up_bytes_per_s)
    return float(max(np.median(slower[devices]), np.median(slower)))


def unfit(system: str, why: str, **detail: float) -> Outcome:
    return Outcome(system=system, fits=False, reason=why, detail=detail)
