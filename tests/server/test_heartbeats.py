"""Heartbeats come in time for every device, whatever happens to another one's."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from tests.support.virtual import run

from cleave.core.fleet.profiles import DeviceId
from cleave.server.heartbeats import HEARTBEAT_S, Heartbeats

DEVICES = [DeviceId(f"d{number}") for number in range(300)]


def test_every_device_beats_at_the_same_pace_until_it_is_removed() -> None:
    async def main() -> None:
        heartbeats, beats = Heartbeats(asyncio.get_running_loop()), Counter[DeviceId]()
        for device in DEVICES:
            heartbeats.add(device, lambda device=device: beats.update([device]))
        await asyncio.sleep(10 * HEARTBEAT_S)
        assert {9, 10, 11} >= set(beats.values())
        assert len(beats) == len(DEVICES)
        before = beats[DEVICES[0]]
        heartbeats.remove(DEVICES[0])
        await asyncio.sleep(3 * HEARTBEAT_S)
        assert beats[DEVICES[0]] == before
        assert beats[DEVICES[1]] >= 12

    run(main(), limit_s=60.0)


def test_devices_that_joined_at_once_do_not_beat_at_once() -> None:
    async def main() -> None:
        loop, times = asyncio.get_running_loop(), Counter[float]()
        heartbeats = Heartbeats(loop)
        for device in DEVICES:
            heartbeats.add(device, lambda: times.update([round(loop.time(), 6)]))
        await asyncio.sleep(HEARTBEAT_S)
        assert max(times.values()) < len(DEVICES) / 10

    run(main(), limit_s=60.0)


def test_a_failing_heartbeat_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        heartbeats, beats = Heartbeats(asyncio.get_running_loop()), Counter[DeviceId]()

        def fail() -> None:
            raise ValueError("broken")

        for number, device in enumerate(DEVICES):
            heartbeats.add(device, fail if number % 2 else lambda device=device: beats.update([device]))
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert len(beats) == len(DEVICES) / 2

    run(main(), limit_s=60.0)
    assert "broken" in caplog.text
