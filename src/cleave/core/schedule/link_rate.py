"""A link's sustained rate: the middle of recent measurements.

Bytes also wait while a process at either end is stopped, for 100 ms and more on a busy machine, and the link looks slow
for that long. A mean keeps such a stall for many steps: one made five downlinks read 12-20% low for the rest of a run.
So the slowest and the fastest quarter of recent measurements do not count. Each weighs as many seconds as its bytes
usually take; slow ones in a row, as many as they took, as then the link itself has slowed down. The first few of them
may be small ones that were stopped, so they count several times the usual, but do not decide alone.
"""

from __future__ import annotations

import math
from collections import deque

_MEMORY_S = 2.0
"""Seconds of traffic that count."""
_FIRST_S = _MEMORY_S / 64
"""Weight of a claim or a probe, which gives way to the first work."""
_MOST_S = _MEMORY_S / 6
"""Largest weight: no measurement, true or not, decides alone once there are others."""
_LEAST_S = 4e-3
"""Least weight of a measurement."""
_TELLING_BYTES = 32 << 10
"""Measurements of fewer, if they usually take less than that, are added up first: they tell how long messages wait."""
_SLOW = 1.5
"""Seconds over usual ones of a slow measurement."""
_FEW, _MOST_TIMES = 3, 8
"""The first few slow measurements in a row, and how many times the usual they count at most."""
_MAX_BYTES_PER_S, _MIN_BYTES_PER_S = 20e9, 1e3
"""So that a message that arrives instantly takes some time, and no plan divides by zero, whatever a device reports."""
_MAX_DROP = 4.0
"""Factor by which one measurement can lower a rate."""


class LinkRate:
    """Bytes per second."""

    def __init__(self, first_bytes_per_s: float) -> None:
        self.value = first_bytes_per_s
        self._recent: deque[tuple[float, float]] = deque([(first_bytes_per_s, _FIRST_S)])
        """Rates and weights, oldest first."""
        self._weight_s = _FIRST_S
        self._slow = 0
        """Slow measurements in a row."""
        self._small_bytes = self._small_s = 0.0
        """Measured, but too little to tell by itself."""

    def add(self, size_bytes: float, seconds: float) -> None:
        """Add a measurement; ignore implausible ones."""
        if not (0 < size_bytes < math.inf and 0 < seconds < math.inf):
            return
        telling_bytes = min(_LEAST_S * self.value, _TELLING_BYTES)
        if size_bytes < telling_bytes:
            self._small_bytes += size_bytes
            self._small_s += seconds
            if self._small_bytes < telling_bytes and self._small_s < _MOST_TIMES * _LEAST_S:
                return
            size_bytes, seconds = self._small_bytes, self._small_s
            self._small_bytes = self._small_s = 0.0
        usual_s = max(size_bytes / self.value, _LEAST_S)
        measured = min(max(size_bytes / seconds, _MIN_BYTES_PER_S), _MAX_BYTES_PER_S)
        self._slow = self._slow + 1 if seconds > _SLOW * usual_s else 0
        if self._slow <= 1:
            seconds = usual_s
        elif self._slow <= _FEW:
            seconds = min(seconds, _MOST_TIMES * usual_s)
        weight_s = min(seconds, _MOST_S)
        self._recent.append((max(measured, self.value / _MAX_DROP), weight_s))
        self._weight_s += weight_s
        while self._weight_s - self._recent[0][1] >= _MEMORY_S:
            self._weight_s -= self._recent.popleft()[1]
        self.value = self._middle()

    def limit(self, most_bytes_per_s: float) -> None:
        self._recent = deque((min(rate, most_bytes_per_s), weight_s) for rate, weight_s in self._recent)
        self.value = min(self.value, most_bytes_per_s)

    def _middle(self) -> float:
        """Mean of the middle half of recent rates."""
        begin_s, low_s, high_s = 0.0, 0.25 * self._weight_s, 0.75 * self._weight_s
        amount = counted_s = 0.0
        for rate, weight_s in sorted(self._recent):
            inside_s = min(begin_s + weight_s, high_s) - max(begin_s, low_s)
            if inside_s > 0:
                amount += inside_s * rate
                counted_s += inside_s
            begin_s += weight_s
        return amount / counted_s
