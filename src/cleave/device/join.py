"""A device's life with one server: dial, join, work, and reconnect until told to stay away.

Behind `cleave join`. Owns retries and their backoff; what happens on a connection is the worker's business.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from cleave.device.kernels import Kernel, NumpyKernel
from cleave.device.probe import measure_flops_per_s, usable_memory_bytes
from cleave.device.worker import Contribution, Offer, Refusal, Worker
from cleave.errors import CleaveError, ConnectionLost, InputError
from cleave.transport.address import Address
from cleave.transport.base import Channel
from cleave.transport.websocket import dial

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0

Say = Callable[[str], None]


async def stand_in(channel: Channel) -> None:
    """Run a device in the server's own process while the fleet is empty; return when the channel closes."""
    kernel = NumpyKernel()
    offer = Offer(
        name="",
        token="",
        flops_per_s=await asyncio.to_thread(measure_flops_per_s, kernel),
        memory_bytes=usable_memory_bytes(None),
    )
    worker = Worker(channel, kernel, offer, Contribution())
    try:
        await worker.join()
        await worker.run()
    except CleaveError:
        pass  # the server's end of the channel reports the reason
    finally:
        await channel.close()


async def serve(
    address: Address, kernel: Kernel, offer: Offer, contribution: Contribution, say: Say, first_wait_s: float
) -> None:
    """Work for a server until it dismisses the device for good or this task is cancelled.

    Give up after `first_wait_s` if the server was never reached; once it was, retry forever, as it may be restarting.
    """
    pause_s, give_up_at, was_reached = _FIRST_PAUSE_S, time.monotonic() + first_wait_s, False
    while True:
        try:
            channel = await dial(address.url)
            worker = Worker(channel, kernel, offer, contribution, say)
            try:
                await worker.join()
                was_reached, tasks_before, joined_s = True, contribution.tasks, time.monotonic()
                say(f"joined {address.shown} as {worker.name}")
                try:
                    goodbye = await worker.run()
                finally:
                    # Only completed work resets the backoff, and only of a stay that was longer than the pause before.
                    if contribution.tasks > tasks_before and time.monotonic() - joined_s > pause_s:
                        pause_s = _FIRST_PAUSE_S
            except asyncio.CancelledError:
                await worker.leave("stopped by its owner")
                raise
            finally:
                await channel.close()
            if not goodbye.rejoin:
                say(f"the server ended this session: {goodbye.reason}")
                return
            say(f"the server closed the connection: {goodbye.reason}; rejoining in {pause_s:.1f} s")
        except (InputError, Refusal):
            raise
        except ConnectionLost as fault:
            if not was_reached and time.monotonic() + pause_s > give_up_at:
                raise
            say(f"{fault}; retrying in {pause_s:.1f} s")
        except CleaveError as fault:
            say(f"{fault}; rejoining in {pause_s:.1f} s")
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
