"""When devices' heartbeats are due: a few timers for any number of devices.

A timer and a task of its own for each of thousands of devices costs more than all they do when nothing happens. So
devices share a timer per phase, and phases spread those that joined at once: one heartbeat of all of them would stall
the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable

from cleave.core.fleet.profiles import DeviceId

HEARTBEAT_S = 2.0
_PHASES = 64

log = logging.getLogger(__name__)


class Heartbeats:
    """Call everything in the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[int, dict[DeviceId, Callable[[], None]]] = {}
        """By phase; only phases with devices have a timer."""

    def add(self, device: DeviceId, beat: Callable[[], None]) -> None:
        """Call `beat` every HEARTBEAT_S until the device is removed; at first after less than that."""
        phase = zlib.crc32(device.encode()) % _PHASES
        if phase in self._due:
            self._due[phase][device] = beat
        else:
            self._due[phase] = {device: beat}
            self._loop.call_later(HEARTBEAT_S * (phase + 1) / _PHASES, self._tick, phase)

    def remove(self, device: DeviceId) -> None:
        self._due.get(zlib.crc32(device.encode()) % _PHASES, {}).pop(device, None)

    def _tick(self, phase: int) -> None:
        due = self._due[phase]
        if not due:
            del self._due[phase]
            return
        self._loop.call_later(HEARTBEAT_S, self._tick, phase)
        for device, beat in list(due.items()):
            try:
                beat()
            except Exception:  # a bug of ours, which must not keep other devices from being noticed
                log.exception("the heartbeat of %s failed", device)
