"""The rivals of the simulator, each in a file with its source, formulas, memory model and manner of recovery."""

from __future__ import annotations

from collections.abc import Mapping

from cleave.sim.baselines import alpa, asteroid, cleave_2d, cloud, dtfm, gpipe, hivemind, swarm
from cleave.sim.setting import System

SYSTEMS: Mapping[str, System] = {
    "dtfm": dtfm.dtfm,
    "alpa": alpa.alpa,
    "swarm": swarm.swarm,
    "hivemind": hivemind.hivemind,
    "gpipe": gpipe.gpipe,
    "asteroid": asteroid.asteroid,
    "cleave-2d": cleave_2d.cleave_2d,
    "a100": cloud.cloud("a100", "a100", 1),
    "a100-8": cloud.cloud("a100-8", "a100", 8),
    "h100": cloud.cloud("h100", "h100", 1),
    "h100-8": cloud.cloud("h100-8", "h100", 8),
}
"""By the names of `sim/names.py`, in their order."""
