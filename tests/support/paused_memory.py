"""Print the resident bytes of a device before it has operands, with them, and while it is paused, as JSON.

A process of its own (`python -m tests.support.paused_memory`), as it sets how memory is allocated like `cleave join`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import psutil

from cleave.device.join import serve
from cleave.device.kernels import NumpyKernel
from cleave.device.terms import Conditions, Terms
from cleave.device.volunteer import Volunteer
from cleave.device.worker import Contribution, Offer
from cleave.protocol import messages
from cleave.protocol.numbers import NumpyCodec
from cleave.transport.address import parse_address
from cleave.transport.allocation import keep_freed_memory
from cleave.transport.base import Channel
from cleave.transport.memory import memory_pair
from cleave.transport.shaped import Link

_DEADLINE_S = 120.0
_SHAPES = [(2000, 2000)] * 6 + [(500, 1000)] * 50
"""Operands of 16 MB, which are mapped, and of 2 MB, which are on the heap."""


async def measure() -> list[int]:
    server, device = memory_pair()
    now = Conditions(hour=0.0, on_batteries=False)
    paused = asyncio.Event()
    volunteer = Volunteer(Terms(run_on_batteries=False), lambda: now, lambda share: 1 << 30)
    offer = Offer(name="ann", token="", flops_per_s=1e9, memory_bytes=1 << 30)

    async def connect(url: str, link: Link | None) -> Channel:
        return device

    def say(text: str) -> None:
        if text.startswith("paused"):
            paused.set()

    address = parse_address("127.0.0.1:7077")
    serving = asyncio.ensure_future(serve(address, NumpyKernel(), offer, Contribution(), say, 60.0, volunteer, connect))
    async with asyncio.timeout(_DEADLINE_S):
        await server.receive()
        await server.send(messages.Welcome(version=messages.VERSION, name="ann"))
        resident = [_resident_bytes()]
        for number, (rows, cols) in enumerate(_SHAPES):
            await _store(server, number, rows, cols)
        await server.send(messages.Probe(answer=0))
        await server.receive()
        resident.append(_resident_bytes())
        now = replace(now, on_batteries=True)
        await paused.wait()
        resident.append(_resident_bytes())
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    return resident


async def _store(server: Channel, number: int, rows: int, cols: int) -> None:
    payload = NumpyCodec().encode(np.ones((rows, cols), dtype=np.float32), "fp32")
    await server.send(
        messages.Store(
            operand=number, rows=rows, cols=cols, format="fp32", first_row=0, strip_rows=rows, payload=len(payload)
        ),
        payload.data,
    )


def _resident_bytes() -> int:
    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    keep_freed_memory(one_arena=True)
    sys.stdout.write(json.dumps(asyncio.run(measure())))
