"""Pauses before a device may rejoin: who cost the others time without helping waits, twice as long each time.

A bad stay counts against a name at its address and against its party (the token it joined with), so that neither
another connection nor another name helps. Knows no devices, only keys; an empty key never waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

_MAX_PAUSE_S = 300.0
_MAX_KEYS = 8192


@dataclass(slots=True)
class _Standing:
    bad_stays: int = 0
    not_before: float = 0.0


class Pauses:
    def __init__(self) -> None:
        self._standings: OrderedDict[Hashable, _Standing] = OrderedDict()
        """Oldest first; the oldest are forgotten beyond _MAX_KEYS."""

    def bad_stay(self, key: Hashable, now: float) -> None:
        if not key:
            return
        standing = self._standings.setdefault(key, _Standing())
        self._standings.move_to_end(key)
        standing.bad_stays += 1
        standing.not_before = now + min(2.0 ** min(standing.bad_stays, 16), _MAX_PAUSE_S)
        if len(self._standings) > _MAX_KEYS:
            self._standings.popitem(last=False)

    def good_stay(self, key: Hashable) -> None:
        """Make good for one bad stay."""
        standing = self._standings.get(key)
        if standing is not None:
            standing.bad_stays -= 1
            if standing.bad_stays <= 0:
                del self._standings[key]

    def seconds(self, key: Hashable, now: float) -> float:
        standing = self._standings.get(key)
        return 0.0 if standing is None else max(0.0, standing.not_before - now)
