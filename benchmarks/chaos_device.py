"""A malicious device: `python benchmarks/chaos_device.py URL flood|half-open`. Joins, misbehaves, rejoins."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from cleave.errors import CleaveError
from cleave.protocol import messages
from cleave.transport.address import parse_address
from cleave.transport.base import Channel
from cleave.transport.websocket import dial


async def main(url: str, kind: str) -> None:
    while True:
        with contextlib.suppress(CleaveError):
            channel = await dial(parse_address(url).url)
            await _join(channel)
            await (_flood(channel) if kind == "flood" else asyncio.sleep(3600))
        await asyncio.sleep(0.1)


async def _join(channel: Channel) -> None:
    """Join as a fast device would, so that the planner uses it."""
    await channel.send(
        messages.Hello(version=messages.VERSION, name="chaos", flops_per_s=5e10, memory_bytes=1 << 30, kernel="numpy")
    )
    for _ in range(8):  # the welcome, then the probes
        received = await channel.receive()
        if isinstance(received.message, messages.Probe):
            answer = received.message.answer
            await channel.send(messages.Probed(down_s=received.link_s, payload=answer), bytes(answer))


async def _flood(channel: Channel) -> None:
    """Send unsolicited results as fast as possible."""
    result = messages.Result(
        task=1 << 40,
        first_row=0,
        rows=256,
        first_col=0,
        cols=256,
        format="fp32",
        flops=1.0,
        compute_s=1.0,
        down_bytes=0,
        down_s=0.0,
        payload=4 * 256 * 256,
    )
    while True:
        await channel.send(result, bytes(result.payload))
        await asyncio.sleep(0)  # otherwise it would never notice its disconnection


if __name__ == "__main__":
    os.nice(10)  # its own CPU use is not what is measured
    asyncio.run(main(sys.argv[1], sys.argv[2]))
