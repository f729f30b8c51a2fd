"""A device's life with one server: dial, join, work, and reconnect until told to stay away.

Behind `cleave join`. Owns retries and their backoff; what happens on a connection is the worker's business.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cleave.device.kernels import Kernel, NumpyKernel
from cleave.device.probe import measure_flops_per_s, usable_memory_bytes
from cleave.device.processor import RestingProcessor, ThreadProcessor
from cleave.device.terms import Objection
from cleave.device.volunteer import Volunteer
from cleave.device.worker import Contribution, Offer, Refusal, Worker
from cleave.errors import CleaveError, ConnectionLost, InputError
from cleave.protocol import messages
from cleave.transport.address import Address
from cleave.transport.base import Channel
from cleave.transport.shaped import Link
from cleave.transport.websocket import dial

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0

Say = Callable[[str], None]
Connect = Callable[[str, Link | None], Awaitable[Channel]]
"""Dials the URL of a server, over no more than that link."""


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
    address: Address,
    kernel: Kernel,
    offer: Offer,
    contribution: Contribution,
    say: Say,
    first_wait_s: float,
    volunteer: Volunteer,
    connect: Connect = dial,
) -> None:
    """Work for a server until it dismisses the device for good or this task is cancelled.

    Give up after `first_wait_s` if the server was never reached; once it was, retry forever, as it may be restarting.
    Dial and stay only while the volunteer's terms hold.
    """
    pause_s, give_up_at, was_reached = _FIRST_PAUSE_S, time.monotonic() + first_wait_s, False
    while True:
        waiting_since_s = time.monotonic()
        room_bytes = await volunteer.until_allowed(say)
        give_up_at += time.monotonic() - waiting_since_s
        tasks_before, joined_s = contribution.tasks, math.inf

        def joined(name: str) -> None:
            nonlocal was_reached, joined_s
            was_reached, joined_s = True, time.monotonic()
            say(f"joined {address.shown} as {name}")

        try:
            lent = replace(
                offer,
                flops_per_s=offer.flops_per_s * volunteer.compute_share,
                memory_bytes=min(offer.memory_bytes, room_bytes),
            )
            try:
                dialing = connect(address.url, volunteer.link)
                goodbye = await _stay(dialing, kernel, lent, contribution, say, volunteer, joined)
            finally:
                # Only completed work resets the backoff, and only of a stay that was longer than the pause before.
                if contribution.tasks > tasks_before and time.monotonic() - joined_s > pause_s:
                    pause_s = _FIRST_PAUSE_S
            if isinstance(goodbye, Objection):
                gc.collect()
                kernel.give_back_memory()
                volunteer.pause(goodbye, say)
                continue
            if not goodbye.rejoin:
                say(f"the server ended this session: {goodbye.reason}")
                return
            say(f"the server closed the connection: {goodbye.reason}; rejoining in {pause_s:.1f} s")
        except (InputError, Refusal):
            raise
        except ConnectionLost as fault:
            if not was_reached and time.monotonic() + pause_s > give_up_at:
                raise gave_up(fault, first_wait_s) from None
            say(f"{fault}; retrying in {pause_s:.1f} s")
        except CleaveError as fault:
            say(f"{fault}; rejoining in {pause_s:.1f} s")
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


async def _stay(
    dialing: Awaitable[Channel],
    kernel: Kernel,
    offer: Offer,
    contribution: Contribution,
    say: Say,
    volunteer: Volunteer,
    joined: Callable[[str], None],
) -> messages.Bye | Objection:
    """Join and work until the server says goodbye or the volunteer's terms no longer hold. Nothing of it is kept."""
    channel = await dialing
    share = volunteer.compute_share
    processor = RestingProcessor(ThreadProcessor(kernel), share) if share < 1 else None
    worker = Worker(channel, kernel, offer, contribution, say, processor)

    async def work() -> messages.Bye:
        await worker.join()
        joined(worker.name)
        return await worker.run()

    working = asyncio.ensure_future(work())
    watching = asyncio.ensure_future(volunteer.until_violated(channel))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        violated = watching.result()
        await worker.leave(f"its owner's terms: {violated.term}")  # before waiting for the product that is running
        return violated
    except asyncio.CancelledError:
        await worker.leave("stopped by its owner")
        raise
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
        await channel.close()


def gave_up(why: object, after_s: float) -> ConnectionLost:
    """The error of a server that was out of reach for so long."""
    return ConnectionLost(f"{why}; gave up after {after_s:.3g} s: start the server, or check the address")
