"""Emulated devices in an event loop of their own, as another process would have them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from cleave.emulate.arithmetic import SharedThreads, Zeros
from cleave.emulate.devices import DeviceProfile
from cleave.emulate.fleet import Activity, EmulatedFleet, Terms
from cleave.emulate.pacing import KeepingUp
from cleave.transport.address import parse_address

FAST = DeviceProfile(
    name="d", flops_per_s=5e9, down_bytes_per_s=1e8, up_bytes_per_s=1e8, latency_s=2e-3, memory_bytes=64_000_000
)


def devices(count: int, profile: DeviceProfile = FAST) -> list[DeviceProfile]:
    return [replace(profile, name=f"{profile.name}{i}") for i in range(count)]


def activity_of(profiles: Sequence[DeviceProfile]) -> Activity:
    return Activity(devices=len(profiles), keeping_up=KeepingUp())


@contextmanager
def emulated(url: str, profiles: Sequence[DeviceProfile], *, computes: bool = True) -> Iterator[Activity]:
    activity = activity_of(profiles)
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        answers = SharedThreads(2) if computes else Zeros()
        fleet = EmulatedFleet(profiles, Terms(address=parse_address(url)), answers, activity)
        work = asyncio.ensure_future(fleet.run())
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(work.cancel))
        with suppress(asyncio.CancelledError):
            await work
        answers.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        yield activity
    finally:
        if thread.is_alive():
            stop[0]()
        thread.join()
