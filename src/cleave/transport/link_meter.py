"""Tell a link's sustained rate from when its bytes arrive.

Only bytes that queued behind others say something about a link: it was busy all the time in between. So arrivals count
within a train: pieces of one frame, or frames that follow each other closely. The first bytes of a train do not count,
as links that were idle let a burst through and buffers hold some: a probe of a 40 Mbit/s uplink once read 53. What a
sender did not have yet, or a receiver did not read, is hardly mistaken for a slow link. Knows no sockets and no clock.
"""

from __future__ import annotations

from typing import NamedTuple

BURST_BYTES = 64 << 10
"""Bytes at the start of a train that do not count."""
TELLING_BYTES = 32 << 10
"""Bytes that tell a rate by themselves."""
_CLOSE_S = 1e-3
"""Longest gap before a frame that follows closely."""


class Sustained(NamedTuple):
    """Bytes that a link carried while it was busy, and the seconds they took; zeros if nothing can be said."""

    size_bytes: int
    seconds: float


NOTHING = Sustained(0, 0.0)


class LinkMeter:
    def __init__(self) -> None:
        self._last_s = float("-inf")
        self._train_bytes = 0
        self._size_bytes, self._seconds = 0, 0.0
        self.busy_s = 0.0
        """Seconds so far in which bytes queued behind others, bursts included."""

    def arrived(self, size_bytes: int, now_s: float, *, is_continued: bool) -> None:
        """Count bytes; `is_continued` says that they belong to a frame that had begun to arrive before."""
        gap_s = now_s - self._last_s
        if not (is_continued or gap_s <= _CLOSE_S):
            self._train_bytes = 0
        else:
            self.busy_s += gap_s
            if self._train_bytes >= BURST_BYTES:
                self._size_bytes += size_bytes
                self._seconds += gap_s
        self._train_bytes += size_bytes
        self._last_s = now_s

    def take(self) -> Sustained:
        """Return what was learned since the last call."""
        taken = Sustained(self._size_bytes, self._seconds)
        self._size_bytes, self._seconds = 0, 0.0
        return taken
