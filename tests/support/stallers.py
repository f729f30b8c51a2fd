"""Devices that stop a run rather than leave it: every manner of holding up the others, from a given moment on."""

from __future__ import annotations

import asyncio
from typing import Literal, get_args

from tests.support.doomed import DoomedChannel, Moment
from tests.support.world import Device, World

from cleave.transport.base import Channel
from cleave.transport.faulty import Fault
from cleave.transport.memory import MemoryChannel

Manner = Literal[
    "silent",  # receives, sends nothing
    "frozen",  # neither receives nor sends, like a stopped process
    "pings",  # answers heartbeats, returns nothing
    "noise",  # answers heartbeats with 100 kB, returns nothing
    "drip",  # one row of a result every 8 s
    "tardy",  # right results, each 8 s late, claiming no time at all
    "claims slow",  # right results, claiming 1e30 s for each
    "claims fast",  # right results, claiming 1e-30 s for each
    "deaf",  # never reads, pings all the time
]
MANNERS: tuple[Manner, ...] = get_args(Manner)
_LATE_S = 8.0
_PING_S = 1.0
_FAULTS: dict[Manner, tuple[Fault, ...]] = {
    "silent": (Fault(kind="stall", phase="idle"),),
    "frozen": (Fault(kind="half-open", phase="idle"),),
    "pings": (Fault(kind="withhold", phase="idle", manner="bare"),),
    "noise": (Fault(kind="withhold", phase="idle", manner="padded"),),
    "drip": (Fault(kind="drip", phase="idle", manner="rows", seconds=_LATE_S),),
    "tardy": (
        Fault(kind="drip", phase="idle", manner="whole", seconds=_LATE_S),
        Fault(kind="misreport", phase="idle", manner="zero"),
    ),
    "claims slow": (Fault(kind="misreport", phase="idle", manner="slow"),),
    "claims fast": (Fault(kind="misreport", phase="idle", manner="fast"),),
    "deaf": (Fault(kind="deaf", phase="idle"), Fault(kind="withhold", phase="idle", manner="bare")),
}


class Staller(DoomedChannel):
    def __init__(self, inner: Channel, moment: Moment, manner: Manner) -> None:
        super().__init__(inner, moment, self._begin)
        self._manner: Manner = manner
        self._pinging: asyncio.Task[None] | None = None

    async def _begin(self) -> bool:
        for fault in _FAULTS[self._manner]:
            await self._inject(fault, None, b"")
        if self._manner == "deaf":
            self._pinging = asyncio.get_running_loop().create_task(self._ping())
        return True

    async def _ping(self) -> None:
        """Stand in for the pings of a WebSocket, which a channel in memory does not have."""
        assert isinstance(self._inner, MemoryChannel)
        server = self._inner._peer  # pyright: ignore[reportPrivateUsage]
        while server is not None and not server._closed.is_set():  # pyright: ignore[reportPrivateUsage]
            server._heard_s = asyncio.get_running_loop().time()  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(_PING_S)


async def join(
    world: World, name: str, moment: Moment, manner: Manner, *, flops_per_s: float = 1e10, token: str = ""
) -> Device:
    """Join a device that works until the moment, and holds up the others from then on."""
    before = len(world.joined())
    device = world.dial(name, wrap=lambda inner: Staller(inner, moment, manner), flops_per_s=flops_per_s, token=token)
    await world.until(lambda: len(world.joined()) > before)
    return device
