"""Admit a device: validate its hello, refuse it with a reason or measure its link, and add it to the roster.

Called by `driver.py` with a guarded channel. Knows no tasks: `connection.py` serves the device from then on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractContextManager
from typing import NamedTuple

from cleave import events
from cleave.core.schedule.members import Member, Roster
from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.server.admission.doorkeeper import WITHIN_S, Doorkeeper
from cleave.server.admission.gate import group_of
from cleave.transport.base import Channel, Received

_PROBES = 3
_FIRST_PROBE, _SMALL_PROBE, _LARGE_PROBE = 128 << 10, 256 << 10, 4 << 20
_MOST_BURST = 4.0  # factor by which a burst may have shortened a probe
_LEAST_MOVING = 1 / 8  # of a probe's time: a latency measured while others kept a process busy may exceed all of it
_PROBE_S, _LONG_PROBE_S = 0.05, 0.5  # for which a probe should keep a link busy, and beyond which none follows
_PROBES_AT_ONCE, _PROBES_PER_S = 16.0, 0.5
"""Large probes that newcomers may get: in a burst, and in the long run."""
_LEAST_FLOPS_PER_S = 1e3
_PAYLOAD_BYTES = 16 << 20
"""Largest payload a device may announce, which bounds the memory of its connection."""
_COMPUTES_NOTHING = (
    "this device returns zeros instead of computing (--compute none), which only a server started with --scale-test "
    "accepts; start one, or use --compute real"
)
_QUARANTINED = (
    "this device is in quarantine, because its results were wrong or because whoever runs the server banned it; check "
    "its memory and processor, or ask them"
)
PAUSED = "paused by whoever runs the server"

log = logging.getLogger(__name__)


class ProbeBudget:
    """Bound what measuring links costs, however many devices come and go: most get a small probe then.

    It takes a large one to measure a fast link. Where there was none, work soon corrects the guess.
    """

    def __init__(self) -> None:
        self._left, self._at_s = _PROBES_AT_ONCE, 0.0

    def take(self, now_s: float) -> int:
        """Return the most bytes to send a newcomer at once."""
        self._left = min(_PROBES_AT_ONCE, self._left + (now_s - self._at_s) * _PROBES_PER_S)
        self._at_s = now_s
        if self._left < 1:
            return _SMALL_PROBE
        self._left -= 1
        return _LARGE_PROBE


async def welcome(
    channel: Channel,
    roster: Roster,
    doorkeeper: Doorkeeper,
    probes: ProbeBudget,
    lock: AbstractContextManager[object],
    own: str = "",
    *,
    is_scale_test: bool = False,
) -> Member | None:
    """Add a device to the roster, under `lock`; return None if it was refused. `own` names the server's own device.

    A scale test also admits devices that compute nothing.

    A refusal says what is wrong with the hello and nothing about the run.
    """
    async with asyncio.timeout(WITHIN_S):
        hello = (await channel.receive()).message
        if not isinstance(hello, messages.Hello):
            raise ProtocolError(f"expected hello, got {hello.type_name()}")
        key = None if own else await doorkeeper.identify(hello.token, channel.address)
    async with asyncio.timeout(WITHIN_S):
        reason = _objection(hello, is_known=own != "" or key is not None, is_scale_test=is_scale_test)
        if reason:
            await _refuse(channel, reason)
            return None
        with roster.reserved(own or hello.name, own=bool(own)) as name:
            if roster.is_quarantined(name, channel.address, key):
                await _refuse(channel, _QUARANTINED)
                return None
            if roster.is_held(name, channel.address, key):
                await channel.send(messages.Bye(reason=PAUSED, rejoin=True))
                return None
            party = "" if own or doorkeeper.keys.is_lent(key) else key or group_of(channel.address)
            pause_s = roster.pause_s(name, channel.address, party, asyncio.get_running_loop().time())
            if pause_s:
                again = f"this device, or one with its token, held up the others; it may rejoin in {pause_s:.0f} s"
                await channel.send(messages.Bye(reason=again, rejoin=True))
                return None
            channel.allow(_PAYLOAD_BYTES)
            await channel.send(messages.Welcome(version=hello.version, name=name))
            latency_s, down, up = await _probe(channel, probes.take(asyncio.get_running_loop().time()))
            with lock:
                return roster.add(
                    name=name,
                    kernel=hello.kernel[:40],
                    memory_bytes=hello.memory_bytes,
                    flops_per_s=hello.flops_per_s,
                    latency_s=latency_s,
                    down_bytes_per_s=down,
                    up_bytes_per_s=up,
                    address=channel.address,
                    key=key,
                    level="own" if key is None else doorkeeper.keys.level(key),
                    party=party,
                )


async def _refuse(channel: Channel, reason: str) -> None:
    await channel.send(messages.Refused(reason=reason))
    log.info("refused a device: %s", reason)


def joined(member: Member) -> events.DeviceJoined:
    return events.DeviceJoined(
        device=member.name,
        flops_per_s=member.flops.value,
        down_bytes_per_s=member.down.value,
        up_bytes_per_s=member.up.value,
        latency_s=member.latency_s,
        memory_bytes=member.memory_bytes,
        kernel=member.kernel,
    )


def _objection(hello: messages.Hello, *, is_known: bool, is_scale_test: bool) -> str:
    computes_nothing = hello.version == messages.SCALE_TEST_VERSION
    if computes_nothing and not is_scale_test:
        return _COMPUTES_NOTHING
    if hello.version != messages.VERSION and not computes_nothing:
        return f"this server speaks protocol version {messages.VERSION}, not {hello.version}; install the same release"
    if not is_known:
        return "wrong or missing token; copy the whole join command again, or ask the owner of the run for a new one"
    if not (_LEAST_FLOPS_PER_S <= hello.flops_per_s < 1e18 and 0 < hello.memory_bytes < 1 << 50):
        return "expected positive and plausible flops_per_s and memory_bytes; measure again"
    return ""


async def _probe(channel: Channel, most_bytes: int) -> tuple[float, float, float]:
    """Measure latency in seconds, and bytes per second down and up, with a few small exchanges."""
    latency_s, down, up = float("inf"), 0.0, 0.0
    for _ in range(_PROBES):
        started = time.perf_counter()
        await channel.send(messages.Probe(answer=0))
        await _probed(channel)
        latency_s = min(latency_s, time.perf_counter() - started)
    size_down = size_up = wants_down = wants_up = _FIRST_PROBE
    while True:  # grow each direction until it takes long enough to tell its rate
        size_down, size_up = wants_down or size_down, wants_up or size_up
        rates = await _exchange(channel, wants_down, wants_up, latency_s)
        down, up = rates.down or down, rates.up or up
        wants_down, wants_up = (
            4 * size if size and size / rate < _PROBE_S and size < most_bytes else 0
            for size, rate in ((wants_down, down), (wants_up, up))
        )
        if rates.took_s > _LONG_PROBE_S or not (wants_down or wants_up):
            break
    # a process that was kept waiting makes a link look slow: unless a link is too fast to tell, or slow, look again
    size_down, size_up = (size if size < most_bytes else 0 for size in (size_down, size_up))
    if rates.took_s <= _LONG_PROBE_S and (size_down or size_up):
        again = await _exchange(channel, size_down, size_up, latency_s, known_up=up)
        down, up = max(down, again.down), max(up, again.up)
    return latency_s, min(down, 20e9), min(up, 20e9)


class _Exchange(NamedTuple):
    """Bytes per second of one exchange, 0 for a direction that was left out, and the seconds of all of it."""

    down: float
    up: float
    took_s: float


async def _exchange(
    channel: Channel, down_bytes: int, up_bytes: int, latency_s: float, known_up: float = 0.0
) -> _Exchange:
    """Measure both ways at once; an answer slower than `known_up` does not excuse a slow download."""
    started = time.perf_counter()
    await channel.send(messages.Probe(answer=up_bytes, payload=down_bytes), bytes(down_bytes))
    answer = await _probed(channel)
    whole_s = time.perf_counter() - started
    assert isinstance(answer.message, messages.Probed)
    up = Arrival(up_bytes, answer.link_s, answer.arrival_s)
    return rates(down_bytes, answer.message.down_s, up, whole_s, latency_s, known_up)


class Arrival(NamedTuple):
    """Bytes that arrived, the seconds they were seen to take, and those they take at the link's sustained rate."""

    size_bytes: int
    link_s: float
    arrival_s: float


def rates(
    down_bytes: int, claimed_s: float, up: Arrival, whole_s: float, latency_s: float, known_up: float = 0.0
) -> _Exchange:
    """Tell rates from an exchange of `whole_s`, of which the device claims to have received for `claimed_s`."""
    took_s = max(whole_s - latency_s, whole_s * _LEAST_MOVING, 1e-6)
    claimed_s = max(claimed_s, 0.0)
    # a burst, or bytes found in a buffer, may make one way look shorter than the link's rate says, but nothing makes
    # both ways together shorter than they were
    returning_s = min(up.link_s, up.size_bytes / known_up) if known_up else up.link_s
    down_s = max(min(claimed_s, _MOST_BURST * took_s), took_s - returning_s, 1e-7)
    up_s = max(up.arrival_s, took_s - claimed_s, 1e-7)
    return _Exchange(down_bytes / down_s, up.size_bytes / up_s, took_s)


async def _probed(channel: Channel) -> Received:
    received = await channel.receive()
    if not isinstance(received.message, messages.Probed):
        raise ProtocolError(f"expected probed, got {received.message.type_name()}")
    return received
