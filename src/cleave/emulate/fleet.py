"""Emulated devices at work: each dials the server, joins, works and leaves as its stays say, all in one event loop.

Each is an ordinary worker over an ordinary WebSocket. What is emulated wraps both: bytes take the time of the device's
link (`transport/paced.py`, with one medium for all that share it), computing that of its profile (`pacing.py`). When
devices come and go is decided elsewhere (`sim/churn.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cleave.device.join import gave_up
from cleave.device.kernels import Kernel
from cleave.device.worker import Contribution, Offer, Refusal, Worker
from cleave.emulate.devices import DeviceProfile, capacities
from cleave.emulate.pacing import Arithmetic, KeepingUp, PacedProcessor
from cleave.errors import CleaveError, ConnectionLost, InputError
from cleave.protocol import messages
from cleave.transport.address import Address
from cleave.transport.base import Channel
from cleave.transport.shaped import Link, Medium
from cleave.transport.websocket import dial

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
_JOINING = 16
"""Devices that join at the same time: a server bounds strangers, and answers the rest as fast in turns."""
_LAG_S = 0.1

log = logging.getLogger(__name__)

Say = Callable[[str], None]
Connect = Callable[[Link, Medium | None], Awaitable[Channel]]
"""Opens a connection to the server over such a link."""
Stays = Iterable[tuple[float, float]]
"""When a device is connected: from, until, in seconds since the start; in order."""
ALWAYS: Stays = ((0.0, math.inf),)


class Answers(Arithmetic, Protocol):
    """Arithmetic, and the kernel and protocol version of the devices it answers for."""

    @property
    def kernel(self) -> Kernel: ...

    @property
    def version(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class Activity:
    """What a fleet of emulated devices is doing and has done."""

    devices: int
    keeping_up: KeepingUp
    contribution: Contribution = field(default_factory=Contribution)
    connected: int = 0
    most_connected: int = 0
    joins: int = 0
    departures: int = 0
    """Stays that ended as planned."""
    losses: int = 0
    """Connections that ended otherwise."""
    refusals: int = 0
    worst_lag_s: float = 0.0
    """Longest time for which the event loop of this process was busy with something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all emulated devices have in common."""

    address: Address
    token: str = ""
    claim: float = 1.0
    """Factor by which they overstate their FLOP/s."""
    wait_s: float = 30.0
    """Seconds for which the server may be out of reach of all of them."""


class EmulatedFleet:
    """Devices of one process; `run` returns when the server has dismissed all of them."""

    def __init__(
        self,
        devices: Sequence[DeviceProfile],
        terms: Terms,
        answers: Answers,
        activity: Activity,
        say: Say = lambda text: None,
        connect: Connect | None = None,
    ) -> None:
        """`connect` is by default a WebSocket to the server's address."""
        self._devices, self._terms, self._answers, self.activity, self._say = devices, terms, answers, activity, say
        self._connect: Connect = connect or (lambda link, medium: dial(terms.address.url, link, medium))
        self._media = {name: Medium(bytes_per_s) for name, bytes_per_s in capacities(devices).items()}
        self._door = asyncio.Semaphore(_JOINING)
        self._loop = asyncio.get_running_loop()
        self._started_s = self._reached_s = self._loop.time()

    async def run(self, stays: Mapping[str, Stays] | None = None) -> None:
        """Emulate until the server has said goodbye to every device, or its last stay is over.

        Raises ConnectionLost if the server is out of reach for too long, Refusal if it rejects the first device.
        """
        lives = [
            asyncio.ensure_future(self._live(device, ALWAYS if stays is None else stays[device.name]))
            for device in self._devices
        ]
        watching = asyncio.ensure_future(self._watch_lag())
        try:
            done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_EXCEPTION)
            for life in done:
                life.result()
        finally:
            for task in (*lives, watching):
                task.cancel()
            await asyncio.gather(*lives, watching, return_exceptions=True)

    # -------------------------------------------------------------------------------------------- one device

    async def _live(self, device: DeviceProfile, stays: Stays) -> None:
        for begin_s, end_s in stays:
            await asyncio.sleep(self._started_s + begin_s - self._loop.time())
            if await self._stay(device, self._started_s + end_s):
                return

    async def _stay(self, device: DeviceProfile, until_s: float) -> bool:
        """Stay connected until then; return True if the server has dismissed the device for good."""
        pause_s = _FIRST_PAUSE_S
        while self._loop.time() < until_s:
            tasks_before = self.activity.contribution.tasks
            try:
                goodbye = await self._work(device, until_s)
                if goodbye is None:
                    return False
                if not goodbye.rejoin:
                    log.info("%s: the server ended the session: %s", device.name, goodbye.reason)
                    return True
                why = goodbye.reason
            except InputError:
                raise
            except Refusal as refusal:
                self.activity.refusals += 1
                if self.activity.joins == 0:
                    raise
                self._say(f"the server refused {device.name}: {refusal}")
                return True
            except ConnectionLost as fault:
                why = str(fault)
                if self.activity.connected == 0 and self._loop.time() - self._reached_s > self._terms.wait_s:
                    raise gave_up(why, self._terms.wait_s) from None
            except CleaveError as fault:
                why = str(fault)
            log.info("%s: %s", device.name, why)
            if self.activity.contribution.tasks > tasks_before:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return False

    async def _work(self, device: DeviceProfile, until_s: float) -> messages.Bye | None:
        """Join and work until then, or until the server says goodbye; None if the device left by itself."""
        activity = self.activity
        async with self._door:
            channel = await self._connect(link_of(device), self._media.get(device.medium))
            try:
                worker = self._worker(channel, device)
                await worker.join()
            except BaseException:
                await channel.close()
                raise
        activity.joins += 1
        activity.connected += 1
        activity.most_connected = max(activity.most_connected, activity.connected)
        try:
            async with asyncio.timeout_at(until_s if until_s < math.inf else None):
                goodbye = await worker.run()
                activity.losses += goodbye.rejoin
                return goodbye
        except CleaveError:
            activity.losses += 1
            raise
        except TimeoutError:
            activity.departures += 1
            await worker.leave("its owner needs it")
            return None
        except asyncio.CancelledError:
            await worker.leave("stopped by its owner")
            raise
        finally:
            activity.connected -= 1
            self._reached_s = self._loop.time()
            await channel.close()

    def _worker(self, channel: Channel, device: DeviceProfile) -> Worker:
        offer = Offer(
            name=device.name,
            token=self._terms.token,
            flops_per_s=device.flops_per_s * self._terms.claim,
            memory_bytes=device.memory_bytes,
            version=self._answers.version,
        )
        return Worker(
            channel,
            self._answers.kernel,
            offer,
            self.activity.contribution,
            notice=lambda text: log.info("%s: %s", device.name, text),
            processor=PacedProcessor(device, self._answers, self.activity.keeping_up),
        )

    async def _watch_lag(self) -> None:
        """Measure how late timers are: links and processors cannot be emulated more exactly than that."""
        while True:
            due_s = self._loop.time() + _LAG_S
            await asyncio.sleep(_LAG_S)
            self.activity.worst_lag_s = max(self.activity.worst_lag_s, self._loop.time() - due_s)


def link_of(device: DeviceProfile) -> Link:
    return Link(
        down_bytes_per_s=device.down_bytes_per_s,
        up_bytes_per_s=device.up_bytes_per_s,
        latency_s=device.latency_s / 2,
    )
