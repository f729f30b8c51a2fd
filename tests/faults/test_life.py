"""Laws of a fleet over time: servers alone, devices too slow or too small, revoked tokens, liars, stragglers."""

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
    """Join like `device/join`, but without measuring: in virtual time, multiplying takes none."""
    offer = Offer(name="", token="", flops_per_s=1e10, memory_bytes=64_000_000)
    worker = Worker(channel, NumpyKernel(), offer, Contribution())
    await worker.join()
    with suppress(ConnectionLost):
        await worker.run()
    await channel.close()


def test_with_no_device_connected_the_server_computes_if_allowed() -> None:
    async def scene() -> None:
        world = World(stand_in=stand_in)
        await world.products(layer(1))
        assert [event.reason for event in told(world, events.Paused)] == [
            "no device is connected; this server computes until one joins"
        ]
        assert world.here() == {"this server"}
        await world.join("ann")
        await world.until(lambda: "this server" in world.departures())
        await world.products(layer(2))
        assert world.here() == {"ann"}
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_a_device_that_would_hold_up_the_others_is_left_idle_with_a_reason() -> None:
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
        assert " 0.0 GFLOP/s" in idle.reason
        assert " 20000.0 MB/s" in idle.reason
        assert "reserve" in idle.reason
        assert next(member for member in world.cluster.here() if member.name == "slow").tasks == 0
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_revoking_a_token_disconnects_the_devices_that_joined_with_it(tmp_path: Any) -> None:
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
def test_a_liar_among_five_devices_is_caught_every_time_and_quarantined(manner: str) -> None:
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


def test_a_liar_under_another_devices_name_and_address_keeps_only_itself_out() -> None:
    async def scene() -> None:
        world = World(keys=Keys("liar's", "ann's"))
        await world.join("bob", token="ann's")
        await world.join("ann", (Fault(kind="lie", phase="joining", manner="random"),), token="liar's")
        for number in range(6):
            await world.products(layer(number))
        assert "quarantined" in world.departures()["ann"]
        back = world.dial("ann", token="liar's")
        await back.task
        assert "quarantine" in back.ended
        await world.join("ann", token="ann's")
        await world.products(layer(6))
        assert world.here() == {"bob", "ann"}
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_a_straggler_is_hedged_and_then_gets_less_work() -> None:
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


def test_a_server_that_computes_itself_needs_no_token() -> None:
    async def scene() -> None:
        world = World(stand_in=stand_in, keys=Keys("secret"))
        for number in range(5):
            await world.products(layer(number))
            await asyncio.sleep(2.0)
        assert world.here() == {"this server"}
        assert not world.departures()
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_the_server_computes_again_after_a_device_joins_and_leaves() -> None:
    async def scene() -> None:
        world = World(stand_in=stand_in)
        await world.products(layer(1))
        world.dial("ann", (Fault(kind="vanish", phase="receiving"),))
        for number in range(4):
            await world.products(layer(number))
        assert world.here() == {"this server"}
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_a_run_survives_more_liars_than_honest_devices() -> None:
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


def test_no_device_can_take_the_servers_own_name() -> None:
    async def scene() -> None:
        world = World()
        taken = await world.join("this server")
        assert taken.name == "this server-2"
        assert world.cluster.devices == 1
        await world.close()

    run(scene(), limit_s=LIMIT_S)


def test_work_waits_for_another_device_when_the_only_one_is_too_small() -> None:
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


def test_a_device_disconnected_before_helping_waits_longer_each_time() -> None:
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
                assert "may rejoin in" in flooder.ended
                await asyncio.sleep(0.5)
            waits.append(world.loop.time() - started)
        assert waits[0] < waits[1] - 1.0 < waits[2] - 2.0, waits
        await world.products(layer(1))
        await world.close()

    run(scene(), limit_s=LIMIT_S)
