"""Law of moving: the seconds that another arrangement takes once, as part of each step it is meant to serve.

Leased weights and their optimizer states are on their devices alone, so they come up before they go down to others, all
links at once each way. Weights that are not trained only go down. Weights that are synchronized travel in every step
anyway, and cost nothing more here. Knows no plans.
"""

from __future__ import annotations

from math import inf

from cleave.core.fleet.profiles import Floats, Profiles

AMORTIZED_STEPS = 32
"""Steps over which a move must pay off: rates may have changed by then, and devices may have left."""


def move_s(up_bytes: Floats, down_bytes: Floats, profiles: Profiles, medium_bytes_per_s: float = inf) -> float:
    """Seconds in which every device first returns so many bytes, then receives so many."""
    up_s = max(float((up_bytes / profiles.up_bytes_per_s).max()), float(up_bytes.sum()) / medium_bytes_per_s)
    down_s = max(float((down_bytes / profiles.down_bytes_per_s).max()), float(down_bytes.sum()) / medium_bytes_per_s)
    return up_s + down_s


def amortized_s(step_s: float, moving_s: float) -> float:
    """Seconds of a step with its part of the move that made it possible."""
    return step_s + moving_s / AMORTIZED_STEPS
