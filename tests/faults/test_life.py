"""Laws of a fleet over time: who is alone, who is too slow, whose token is revoked, who lies among five."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.support.virtual import run
from tests.support.world import World, layer

from cleave import events
from cleave.device.kernels import NumpyKernel
from cleave.device.worker import Contribution, Offer, Worker
from cleave.errors import ConnectionLost
from cleave.server.admission.tokens import Keys
from cleave.transport.base import Channel
from cleave.transport.faulty import Fault

LIMIT_S = 200.0


def told(world: World, kind: type[Any]) -> list[Any]:
    return [event for event in world.events if isinstance(event, kind)]


async def stand_in(channel: Channel) -> None:
    """As `device/join` does it, but for measuring: here, multiplying takes no time."""
    offer = Offer(name="", token="", flops_per_s=1e10, memory_bytes=64_000_000)
    worker = Worker(channel, NumpyKernel(), offer, Contribution())
    await worker.join()
    with suppress(ConnectionLost):
        await worker.run()
    await channel.close()


def test_with_nobody_there_the_server_computes_if_it_may() -> None:
    async def scene() -> None:
        world = World(stand_in=stand_in)
        await world.products(layer(1))
        assert [event.reason for event in told(world, events.Paused)] == [
            "no device is there; this server computes until one joins"
        ]
        assert world.here() == {"this server"}
        await world.join("ann")
        await world.until(lambda: "this server" in world.departures())
        await world.products(layer(2))
        assert world.here() == {"ann"}
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_a_device_that_would_make_the_others_wait_is_told_so_and_left_idle() -> None:
    async def scene() -> None:
        world = World()
        for name in ("ann", "bob"):
            await world.join(name)
        await world.join("slow", flops_per_s=2e3)
        while not told(world, events.DeviceIdle):
            await world.products(layer(3))
            await asyncio.sleep(1.0)
        (idle,) = told(world, events.DeviceIdle)
        assert idle.device == "slow"
        assert "in reserve" in idle.reason
        assert next(member for member in world.cluster.here() if member.name == "slow").tasks == 0
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_who_joined_by_a_token_that_is_revoked_has_to_go(tmp_path: Any) -> None:
    async def scene() -> None:
        keys = Keys(path=tmp_path / "keys.json")
        key, token = keys.add("device")
        world = World(keys=keys)
        await world.join("ann", token=token)
        keys.revoke(key.id)
        await world.until(lambda: "ann" in world.departures())
        assert "revoked" in world.departures()["ann"]
        await world.close()

    run(scene(), limit_s=LIMIT_S)


@pytest.mark.parametrize("manner", ["random", "one", "scaled", "flipped", "stale", "zeros"])
def test_a_liar_among_five_is_caught_each_time_and_quarantined(manner: str) -> None:
    async def scene() -> None:
        world = World()
        for name in ("ann", "bob", "cid", "dot"):
            await world.join(name)
        await world.join("liar", (Fault(kind="lie", phase="joining", manner=manner),), flops_per_s=3e10)
        for number in range(6):
            await world.products(layer(number))
        wrong = told(world, events.ResultRefused)
        assert {event.device for event in wrong} == {"liar"}
        assert "quarantined" in world.departures()["liar"]
        honest = [member for member in world.cluster.members() if member.name != "liar"]
        assert all(member.wrong == 0 and member.verified_flops > 0 for member in honest)
        back = world.dial("liar")
        await back.task
        assert "quarantine" in back.ended
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_a_straggler_is_hedged_and_gets_less_from_then_on() -> None:
    async def scene() -> None:
        world = World()
        for name in ("ann", "bob"):
            await world.join(name)
        await world.join("slow", (Fault(kind="slow", phase="returning", seconds=4.0),), flops_per_s=3e10)
        taken: list[float] = []
        for number in range(6):
            started = world.loop.time()
            await world.products(layer(number, tokens=900))
            taken.append(world.loop.time() - started)
        assert any(event.device == "slow" for event in told(world, events.DeviceLate))
        assert max(taken) < 4.0, "nobody waits for the straggler"
        assert np.median(taken) < 1.0
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_a_server_that_stands_in_needs_no_token() -> None:
    async def scene() -> None:
        world = World(stand_in=stand_in, keys=Keys("secret"))
        for number in range(5):
            await world.products(layer(number))
            await asyncio.sleep(2.0)
        assert world.here() == {"this server"}
        assert not world.departures()
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_a_device_that_comes_and_goes_leaves_the_server_standing_in() -> None:
    async def scene() -> None:
        world = World(stand_in=stand_in)
        await world.products(layer(1))
        world.dial("ann", (Fault(kind="vanish", phase="receiving"),))
        for number in range(4):
            await world.products(layer(number))
        assert world.here() == {"this server"}
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_more_liars_than_honest_devices_end_no_run() -> None:
    async def scene() -> None:
        world = World()
        for name in ("ann", "bob"):
            await world.join(name)
        for name in ("eve", "mal", "ted"):
            await world.join(name, (Fault(kind="lie", phase="joining", manner="random"),), flops_per_s=3e10)
        for number in range(6):
            await world.products(layer(number))
        assert world.here() == {"ann", "bob"}
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_no_device_is_called_what_the_server_calls_itself() -> None:
    async def scene() -> None:
        world = World()
        taken = await world.join("this server")
        assert taken.name == "this server-2"
        assert world.cluster.devices == 1
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_a_device_too_small_for_anything_makes_work_wait_for_another() -> None:
    async def scene() -> None:
        world = World()
        world.dial("tiny", memory_bytes=500)
        await world.until(lambda: bool(world.joined()))
        work = asyncio.ensure_future(world.products(layer(1)))
        await world.until(lambda: bool(told(world, events.Paused)))
        assert "no plan fits" in told(world, events.Paused)[0].reason
        await world.join("ann")
        await work
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_who_is_sent_away_with_nothing_done_has_to_wait_each_time_longer() -> None:
    async def scene() -> None:
        world = World()
        await world.join("ann")
        waits: list[float] = []
        for _ in range(3):
            started = world.loop.time()
            while True:
                stays = len(world.joined())
                flooder = world.dial("eve", (Fault(kind="flood", phase="joining", after=16, manner="result"),))
                await flooder.task
                if len(world.joined()) > stays:
                    break
                assert "welcome again in" in flooder.ended
                await asyncio.sleep(0.5)
            waits.append(world.loop.time() - started)
        assert waits[0] < waits[1] - 1.0 < waits[2] - 2.0, waits
        await world.products(layer(1))
        await world.close()

    run(scene(), limit_s=LIMIT_S)
