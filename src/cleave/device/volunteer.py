"""Obey the volunteer's terms: wait until they hold, and notice within seconds when they do not any more.

Between `terms.py`, which judges, `conditions.py`, which observes, and `join.py`, which dials and leaves. Knows neither
messages nor work.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from cleave.device.terms import Conditions, Objection, Terms, memory_share, objection
from cleave.device.terms_file import TermsFile
from cleave.device.transfers import Transfers
from cleave.errors import InputError
from cleave.transport.base import Channel
from cleave.transport.shaped import Link

_LOOK_S: Final = 1.0
"""Seconds between observations, which may take a second or two themselves: terms are obeyed within 5."""
_SETTLED_S: Final = 10.0
"""Seconds for which terms must hold again before a device rejoins."""


@dataclass(slots=True)
class Volunteer:
    """The terms of this machine, and what is observed of it."""

    terms: Terms
    observe: Callable[[], Conditions]
    """Runs in a thread, and may take a moment."""
    memory_bytes: Callable[[float], int]
    """Maps a share of this machine's memory to the bytes for operands that stay within it."""
    transfers: Transfers | None = None
    """Counts for the daily limit, if there is one."""
    file: TermsFile[Volunteer] | None = None
    """Where the terms come from, if they may change; read in a thread, and during no stay."""
    paused: str = ""
    """Why this machine does not compute now; empty while it may."""
    _told: str = ""
    _room_bytes: int = 0
    """For operands, in the current stay."""

    @property
    def link(self) -> Link | None:
        """What the terms leave of this machine's link; None if they do not limit it."""
        down, up = self.terms.max_bytes_sec_down, self.terms.max_bytes_sec_up
        return Link(down_bytes_per_s=down or math.inf, up_bytes_per_s=up or math.inf) if down or up else None

    @property
    def compute_share(self) -> float:
        """Share of the time in which to compute."""
        return self.terms.cpu_usage_limit / 100

    async def until_allowed(self, say: Callable[[str], None]) -> int:
        """Wait until the terms hold, saying why they do not; return the memory for operands."""
        clock = asyncio.get_running_loop().time
        held_since_s = clock() if self.paused else -math.inf
        while True:
            found = await self._revise(say)
            now = await self._look()
            found = found or objection(self.terms, now, is_computing=not self.paused)
            if found is not None:
                held_since_s = clock()
                self.pause(found, say)
            elif clock() - held_since_s >= _SETTLED_S:
                break
            await asyncio.sleep(_LOOK_S)
        if self.paused:
            say("the terms hold again")
        self.paused = self._told = ""
        self._room_bytes = self.memory_bytes(memory_share(self.terms, now))
        return self._room_bytes

    async def until_violated(self, channel: Channel) -> Objection:
        """Wait until the terms no longer hold during a stay over `channel`, and count what it moves."""
        counted_bytes = 0
        if not self.terms.limits and self.file is None:
            await asyncio.Event().wait()
        try:
            while True:
                if self.file is not None and self.file.has_changed:
                    return Objection("revised", "the terms were changed; rejoining on the new ones")
                counted_bytes += self._count(channel.moved_bytes - counted_bytes)
                now = await self._look()
                found = objection(self.terms, now) or self._other_memory(now)
                if found is not None:
                    return found
                await asyncio.sleep(_LOOK_S)
        finally:
            self._count(channel.moved_bytes - counted_bytes)
            with suppress(OSError):  # the next look objects
                if self.transfers is not None:
                    self.transfers.flush()

    def pause(self, found: Objection, say: Callable[[str], None]) -> None:
        """Note why this machine does not compute; say it unless the last thing said was the same term."""
        self.paused = found.text
        if found.term != self._told:
            say(f"paused: {found.text} ({found.term})")
        self._told = found.term

    async def _revise(self, say: Callable[[str], None]) -> Objection | None:
        """Take the terms as their file has them now; object while they cannot be read."""
        if self.file is None or not self.file.has_changed:
            return None
        try:
            new = await asyncio.to_thread(self.file.read)
        except InputError as fault:
            return Objection("unreadable", str(fault))
        self.terms, self.observe, self.memory_bytes = new.terms, new.observe, new.memory_bytes
        self.transfers = new.transfers
        say(f"your terms: {self.terms}")
        return None

    async def _look(self) -> Conditions:
        if not self.terms.limits:
            return Conditions(hour=0.0)
        now = await asyncio.to_thread(self.observe)
        return now if self.transfers is None else replace(now, moved_bytes=self.transfers.today_bytes())

    def _count(self, moved_bytes: int) -> int:
        if self.transfers is not None:
            self.transfers.add(moved_bytes)
        return moved_bytes

    def _other_memory(self, now: Conditions) -> Objection | None:
        """Object to a stay with more or less memory than this machine may use now: the offer is made on joining."""
        share = memory_share(self.terms, now)
        if self.memory_bytes(share) == self._room_bytes:
            return None
        term = "ram_max_used_busy_frac" if share == self.terms.ram_max_used_busy_frac else "ram_max_used_idle_frac"
        return Objection(term, f"this machine may use {share:.0%} of its memory from now on; rejoining with as much")
