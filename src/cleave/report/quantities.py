"""Numbers as a person reads them: three digits and a unit."""

from __future__ import annotations

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, unit: str) -> str:
    """1234567, "B" -> "1.23 MB"."""
    for size, prefix in _STEPS:
        if abs(value) >= size * 0.9995:
            return f"{_three(value / size)} {prefix}{unit}"
    return f"{_three(value)} {unit}"


def seconds(value: float) -> str:
    if value >= 3600:
        return f"{_three(value / 3600)} h"
    if value >= 0.9995:
        return f"{_three(value)} s"
    return f"{_three(value * 1e3)} ms"


def _three(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
