"""`cleave join`: dial, work, and come back after every loss of connection until told not to."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

from cleave.device.probe import measure_flops_per_s, usable_memory_bytes
from cleave.device.programs.kernels import Kernel, NumpyKernel
from cleave.device.worker import Contribution, Offer, Refusal, Worker
from cleave.errors import CleaveError, ConnectionLost, InputError
from cleave.transport.base import Channel
from cleave.transport.websocket import dial

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss", "cleave": "ws"}

Say = Callable[[str], None]


def socket_url(address: str) -> str:
    """ws://host:port/ws of what a person typed: a URL of any of the usual schemes, or host:port.

    The fingerprint of a certificate after # stays; it means TLS where no scheme says so.
    """
    parts = urlsplit(address if "://" in address else f"{'wss' if '#' in address else 'ws'}://{address}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in _SCHEMES or not parts.hostname or port is None:
        raise InputError(f"expected the address of a server such as ws://192.168.1.20:7077, got {address!r}")
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, parts.path.rstrip("/") or "/ws", "", parts.fragment))


async def stand_in(channel: Channel) -> None:
    """A device in the server's own process, while no other is there; ends when the channel does."""
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
        pass  # whoever serves it tells why
    finally:
        await channel.close()


async def serve(
    address: str, kernel: Kernel, offer: Offer, contribution: Contribution, say: Say, first_wait_s: float
) -> None:
    """Work for a server until it says goodbye for good, or this task is cancelled.

    A server that was never reached is given up after `first_wait_s`; one that was, never: it may be restarting.
    """
    url = socket_url(address)
    pause_s, given_up_at, known = _FIRST_PAUSE_S, time.monotonic() + first_wait_s, False
    while True:
        try:
            channel = await dial(url)
            worker = Worker(channel, kernel, offer, contribution, say)
            try:
                await worker.join()
                known, done = True, contribution.tasks
                say(f"joined {address} as {worker.name}")
                try:
                    goodbye = await worker.run()
                finally:
                    if contribution.tasks > done:  # a stay in which nothing was done does not shorten the next pause
                        pause_s = _FIRST_PAUSE_S
            except asyncio.CancelledError:
                await worker.leave("stopped by its owner")
                raise
            finally:
                await channel.close()
            if not goodbye.rejoin:
                say(f"the server says goodbye: {goodbye.reason}")
                return
            say(f"the server ends this stay: {goodbye.reason}; joining again in {pause_s:.1f} s")
        except (InputError, Refusal):
            raise
        except ConnectionLost as fault:
            if not known and time.monotonic() + pause_s > given_up_at:
                raise
            say(f"{fault}; trying again in {pause_s:.1f} s")
        except CleaveError as fault:
            say(f"{fault}; joining anew in {pause_s:.1f} s")
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
