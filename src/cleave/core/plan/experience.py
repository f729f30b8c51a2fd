"""What steps took beside what the cost model said, by grain, and what that teaches about the next one.

Rates and fixed costs are learned where they are measured, device by device. What is left is the part of a step that no
term explains: how far the last steps of a grain were off is expected of its next step too, and when that is a lot the
grain is chosen anew, with every grain's own factor. Knows neither clocks nor devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

_LAST = 3
OFF = 1.5
"""Factor between measurement and model at which a choice is made anew."""
_LEAST, _MOST = 0.2, 100.0


@dataclass(slots=True)
class _Grain:
    arrangement: Hashable = None
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))


class Experience:
    def __init__(self) -> None:
        self._grains: dict[str, _Grain] = {}

    def add(self, grain: str, arrangement: Hashable, measured_s: float, modeled_s: float) -> None:
        """Learn from a step; the first of an arrangement only begins it, as it sends weights and warms up caches."""
        if modeled_s <= 0:
            return
        known = self._grains.setdefault(grain, _Grain())
        ratio = min(max(measured_s / modeled_s, _LEAST), _MOST)
        if known.arrangement != arrangement:
            known.arrangement = arrangement
            return
        known.ratios.append(ratio)

    def factor(self, grain: str) -> float:
        """Measured over modeled time of the grain's last steps; 1 if there were none."""
        known = self._grains.get(grain)
        return median(known.ratios) if known is not None and known.ratios else 1.0

    def forget(self) -> None:
        """Start over: other devices, other experience."""
        self._grains.clear()
