"""Devices that come and go, each under a new name, leave nothing behind that grows with their number."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

from tests.support.virtual import run
from tests.support.world import ROOMY

from cleave import events
from cleave.core.schedule.members import PastMembers
from cleave.protocol import messages
from cleave.server.admission.tokens import Keys
from cleave.server.cluster import Cluster
from cleave.transport.base import Channel
from cleave.transport.memory import memory_pair

STAYS, PAST = 80, 30


def test_memory_does_not_grow_with_the_number_of_past_devices() -> None:
    async def scene() -> None:
        loop, joined = asyncio.get_running_loop(), list[str]()

        def listen(event: events.AnyEvent) -> None:
            if isinstance(event, events.DeviceJoined):
                joined.append("")

        cluster = Cluster(loop, keys=Keys("token"), listener=listen)
        cluster.engine.roster.past = PastMembers(PAST)

        async def stay(number: int) -> None:
            ours, theirs = memory_pair(guarded=True)
            serving = loop.create_task(cluster.serve(ours))
            await _come_and_go(theirs, f"{'x' * 40}-{number}")
            await serving

        held: list[int] = []
        tracemalloc.start()
        for number in range(3 * STAYS):
            await stay(number)
            if number % STAYS == STAYS - 1:
                cluster.step_ended()
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(joined) == 3 * STAYS
        assert len(cluster.members()) == PAST
        per_stay = (held[2] - held[1]) / STAYS  # a record takes some 1,400 bytes; Python keeps a few small objects
        assert per_stay < 600
        await cluster.close("done", rejoin=False)

    run(scene(), limit_s=1e6)


async def _come_and_go(channel: Channel, name: str) -> None:
    hello = messages.Hello(
        version=messages.VERSION, name=name, token="token", flops_per_s=1e9, memory_bytes=ROOMY, kernel="numpy"
    )
    await channel.send(hello)
    size = 0
    while not size:
        received = await channel.receive()
        if isinstance(received.message, messages.Probe):
            size = received.message.answer
            await asyncio.sleep(1.0 if size else 0.0)  # as over a slow link, which needs no larger probe
            await channel.send(messages.Probed(down_s=0.0, payload=size), bytes(size))
    await channel.send(messages.Leaving(reason="next"))
    while not isinstance((await channel.receive()).message, messages.Bye):
        pass
    await channel.close()
