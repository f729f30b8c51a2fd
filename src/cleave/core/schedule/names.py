"""Unique device names: the requested one or, if it is taken, the requested one plus the lowest free number.

A device that reconnects under its old name should find it free again, so numbers are reused, lowest first. The
cost does not grow with the number of devices that request the same name.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

_FIRST = 2  # phone, phone-2, phone-3 ...


@dataclass(slots=True)
class _Numbers:
    """Numbers handed out for one requested name: every number below `next` was taken once."""

    next: int = _FIRST
    freed: set[int] = field(default_factory=lambda: set[int]())
    heap: list[int] = field(default_factory=lambda: list[int]())
    """Freed numbers, lowest first."""


class Names:
    def __init__(self) -> None:
        self._numbers: dict[str, _Numbers] = {}

    def free(self, wanted: str, is_taken: Callable[[str], bool]) -> str:
        """A free name; the caller takes it and later reports it `freed`."""
        if not is_taken(wanted):
            return wanted
        numbers = self._numbers.setdefault(wanted, _Numbers())
        while numbers.heap:
            number = heapq.heappop(numbers.heap)
            numbers.freed.remove(number)
            if not is_taken(f"{wanted}-{number}"):  # by a device that requested exactly that name
                return f"{wanted}-{number}"
        while is_taken(f"{wanted}-{numbers.next}"):
            numbers.next += 1
        numbers.next += 1
        return f"{wanted}-{numbers.next - 1}"

    def freed(self, name: str, is_taken: Callable[[str], bool]) -> None:
        """Make a name available again."""
        base, _, digits = name.rpartition("-")
        numbers = self._numbers.get(base)
        if numbers is not None and digits.isascii() and digits.isdigit() and not digits.startswith("0"):
            number = int(digits)
            if _FIRST <= number < numbers.next and number not in numbers.freed:
                numbers.freed.add(number)
                heapq.heappush(numbers.heap, number)
        for wanted in (base, name):
            numbers = self._numbers.get(wanted)
            if numbers is not None and len(numbers.freed) == numbers.next - _FIRST and not is_taken(wanted):
                del self._numbers[wanted]
