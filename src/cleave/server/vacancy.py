"""Wait for a device, or stand in for one, while no connected device can do the pending work.

The driver starts and ends it as the engine asks. Knows no tasks: the stand-in joins like any other device.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine

from cleave import events
from cleave.core.schedule.members import STAND_IN
from cleave.errors import FleetGoneError
from cleave.transport.base import Channel
from cleave.transport.memory import memory_pair

StandIn = Callable[[Channel], Coroutine[None, None, None]]
"""Runs a device in the server's own process, at its end of a channel."""
Serve = Callable[[Channel, str], Coroutine[None, None, None]]


class Vacancy:
    """Lives in the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        wait_s: float,
        stand_in: StandIn | None,
        serve: Serve,
        is_empty: Callable[[], bool],
        is_waiting: Callable[[], bool],
        give_up: Callable[[FleetGoneError], None],
        listener: events.Listener,
    ) -> None:
        """`serve` runs a device's connection; `is_empty`: no device is connected; `is_waiting`: work is pending.

        The server stands in only while `may_stand_in`.
        """
        self.may_stand_in = True
        self._loop, self._wait_s, self._stand_in, self._serve = loop, wait_s, stand_in, serve
        self._is_empty, self._is_waiting, self._give_up, self._listener = is_empty, is_waiting, give_up, listener
        self._is_waiting_for_one = False
        self._timer: asyncio.TimerHandle | None = None
        self._standing_in: set[asyncio.Task[None]] = set()

    def wait(self, reason: str) -> None:
        """Start waiting: no connected device can do the pending work."""
        if self._is_waiting_for_one:
            return
        if self._stand_in is not None and self.may_stand_in and self._is_empty():
            if self._standing_in:  # about to join
                return
            self._listener(events.Paused(reason="no device is connected; this server computes until one joins"))
            servers, devices = memory_pair()
            for stay in (self._serve(servers, STAND_IN), self._stand_in(devices)):
                task = self._loop.create_task(stay)
                self._standing_in.add(task)
                task.add_done_callback(self._stood_in)
            return
        self._is_waiting_for_one = True
        if self._wait_s == math.inf:
            self._listener(events.Paused(reason=f"{reason}; waiting for one to join"))
        else:
            self._listener(events.Paused(reason=f"{reason}; waiting up to {self._wait_s:.0f} s for one to join"))
            self._timer = self._loop.call_later(self._wait_s, self._waited, reason)

    def end(self) -> None:
        """Stop waiting: a connected device may do it."""
        self._is_waiting_for_one = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _waited(self, reason: str) -> None:
        self._timer, self._is_waiting_for_one = None, False
        waited = (
            f"{reason}; no suitable device joined within {self._wait_s:.0f} s, so the work stopped; "
            "start devices with cleave join and resume"
        )
        self._give_up(FleetGoneError(waited))

    def _stood_in(self, stay: asyncio.Task[None]) -> None:
        """Wait again if work is still pending: another device may have joined and left meanwhile."""
        self._standing_in.discard(stay)
        if not self._standing_in and self._is_waiting():
            self.wait("no device is connected")
