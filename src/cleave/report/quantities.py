"""Format numbers for people: three significant digits and a unit."""

from __future__ import annotations

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, unit: str) -> str:
    """Format with an SI prefix: 1234567, "B" -> "1.23 MB"."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{_three_digits(value / size)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def seconds(value: float) -> str:
    """Format a duration in ms, s or h."""
    if value >= 3600:
        return f"{_three_digits(value / 3600)} h"
    if value >= 0.9995:
        return f"{_three_digits(value)} s"
    return f"{_three_digits(value * 1e3)} ms"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: 1 task, 2 tasks."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def parameters(count: float) -> str:
    """Format a number of parameters: 3.54 M parameters."""
    return f"{si(count, '')} parameters".replace("  ", " ")
