"""Laws of a server whose devices send nonsense: only the sender is disconnected, and no exception escapes.

`World.close` fails if one does. The nonsense is mutated golden frames (tests/vectors, tests/support/mutations.py) from
devices that have joined, so that the server listens to them.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from tests.support import mutations
from tests.support.virtual import run
from tests.support.world import World, layer

from cleave.errors import CleaveError
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.messages import AnyMessage, Hello, Probe, Probed, Welcome
from cleave.transport.base import Channel
from cleave.transport.faulty import FaultyChannel

FRAMES = [frame for frame in mutations.golden() if isinstance(messages.decode(frame[0]), messages.FromDevice)]
CONNECTIONS = 60
JOINING = 12
"""Maximum number of messages a device sends until it has joined."""


async def admitted(world: World) -> Channel:
    """A connection whose device has joined but is too slow to get work."""
    channel, before = world.connect(), len(world.joined())
    name = f"eve {before}"  # under its old name, a disconnected device would have to wait
    await channel.send(Hello(version=messages.VERSION, name=name, flops_per_s=1e3, memory_bytes=1 << 20, kernel="no"))
    assert isinstance((await channel.receive()).message, Welcome)
    probing = asyncio.ensure_future(_answer(channel))
    await world.until(lambda: len(world.joined()) > before)
    probing.cancel()
    await asyncio.wait([probing])
    return channel


async def _answer(channel: Channel) -> None:
    while True:
        probe = (await channel.receive()).message
        if isinstance(probe, Probe):
            await channel.send(Probed(down_s=0.01, payload=probe.answer), bytes(probe.answer))


@pytest.mark.parametrize("seed", range(3))
def test_mutated_messages_disconnect_only_their_sender(seed: int) -> None:
    async def main() -> None:
        rng, world = random.Random(seed), World()
        for name in ("ann", "bob"):
            await world.join(name)
        for number in range(CONNECTIONS):
            channel = await admitted(world)
            try:
                for _ in range(200):
                    header, payload = rng.choice(FRAMES)
                    await channel._send(mutations.mutated(header, rng))  # pyright: ignore[reportPrivateUsage]
                    if payload and rng.randrange(2):
                        part = mutations.damaged(payload, rng) or b"\0"
                        await channel._send(part)  # pyright: ignore[reportPrivateUsage]
            except CleaveError:
                pass
            await channel.close()
            if number % 10 == 0:
                await world.products(layer(number))
        await world.products(layer(1))
        assert world.here() >= {"ann", "bob"}
        assert not {"ann", "bob"} & world.departures().keys()
        assert all(world.departures().values())
        await world.close()

    run(main(), limit_s=600)


class Mutating(FaultyChannel):
    """Mutates half of the messages an honest device sends after joining."""

    def __init__(self, inner: Channel, rng: random.Random) -> None:
        super().__init__(inner, (), np.random.default_rng(0))
        self._random, self._honest = rng, JOINING

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        self._honest -= isinstance(message, Hello | Probed)
        if (isinstance(message, Hello | Probed) and self._honest > 0) or self._random.randrange(2):
            await super().send(message, payload)
        else:
            await self._write(mutations.mutated(messages.encode(message), self._random), payload)


@pytest.mark.parametrize("seed", range(12))
def test_mutated_messages_from_a_working_device_harm_no_product(seed: int) -> None:
    async def main() -> None:
        rng, world = random.Random(seed), World()
        for name in ("ann", "bob"):
            await world.join(name)
        world.dial("eve", flops_per_s=4e10, wrap=lambda inner: Mutating(inner, rng))
        await world.until(lambda: "eve" in world.joined())
        for number in range(3):
            await world.products(layer(number))
        assert world.here() >= {"ann", "bob"}
        assert not {"ann", "bob"} & world.departures().keys()
        await world.close()

    run(main(), limit_s=90)
