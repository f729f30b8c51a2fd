"""The asyncio shell of the ledger: one connection a device, commands out, results in.

It decides nothing. Commands become messages in each device's queue, the most urgent first; messages that came become
events. A device that breaks the protocol or vanishes is removed with its reason, and what was left of its tasks goes
back to the cluster; no other device notices. All of it lives in the server's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from cleave import events
from cleave.core.ledger import (
    Accept,
    Command,
    DeviceId,
    DeviceJoined,
    DeviceLeft,
    Event,
    Forget,
    Ledger,
    Orphan,
    Refuse,
    ResultArrived,
    Start,
    TaskFailed,
    TaskId,
)
from cleave.core.rectangles import Rectangle
from cleave.errors import CleaveError, ConnectionLost, ProtocolError
from cleave.server.keys import Keys
from cleave.server.roster import Member, Roster
from cleave.server.staging import Staging
from cleave.transport.base import Channel, Received
from cleave.wire import messages
from cleave.wire.frame import Buffer
from cleave.wire.messages import AnyMessage
from cleave.wire.numbers import encoded_bytes

_HANDSHAKE_S = 10.0
_PROBES = 3
_PROBE_BYTES = 1 << 20
_GOODBYE_S = 2.0
_MOST_FAILURES = 3
_URGENT = -1  # before every task

log = logging.getLogger(__name__)

Outgoing = Iterable[tuple[AnyMessage, Buffer]]
Accepted = Callable[[Accept, messages.Result, Buffer], None]


class _Line:
    """What is to be sent to one device."""

    def __init__(self) -> None:
        self.queue: asyncio.PriorityQueue[tuple[int, int, Outgoing]] = asyncio.PriorityQueue()
        self._order = itertools.count()

    def put(self, priority: int, outgoing: Outgoing) -> None:
        self.queue.put_nowait((priority, next(self._order), outgoing))


class Dispatcher:
    def __init__(
        self,
        *,
        ledger: Ledger,
        roster: Roster,
        staging: Staging,
        keys: Keys,
        describe: Callable[[Start], messages.Run],
        accepted: Accepted,
        orphaned: Callable[[list[Orphan]], None],
        fleet_changed: Callable[[], None],
        listener: events.Listener,
    ) -> None:
        self._ledger, self._roster, self._staging, self._keys = ledger, roster, staging, keys
        self._describe, self._accepted, self._orphaned = describe, accepted, orphaned
        self._fleet_changed, self._listener = fleet_changed, listener
        self._lines: dict[DeviceId, _Line] = {}
        self._channels: dict[DeviceId, Channel] = {}
        self._result: tuple[messages.Result, Buffer] | None = None
        self._goodbye = ""
        self._gone_down = self._gone_up = 0

    def handle(self, event: Event) -> None:
        """Let the ledger decide on an event, and do what it says."""
        orphans: list[Orphan] = []
        for command in self._ledger.handle(event):
            self._act(command, orphans)
        if orphans:
            self._orphaned(orphans)

    def _act(self, command: Command, orphans: list[Orphan]) -> None:
        match command:
            case Start(task, missing):
                run = self._describe(command)
                strips = [self._staging.strips(operand) for operand in missing]
                self._lines[task.device].put(task.priority, _in_turn(run, strips))
            case Forget(device, operands):
                self._lines[device].put(_URGENT, [(messages.Drop(operands=operands), b"")])
            case Accept():
                assert self._result is not None
                self._accepted(command, *self._result)
            case Refuse(device, reason):
                log.info("refused from %s: %s", device, reason)
            case Orphan():
                orphans.append(command)

    # -------------------------------------------------------------------------------------------- one connection

    async def serve(self, channel: Channel) -> None:
        """A device's whole stay, from its hello to its last byte."""
        member: Member | None = None
        reason = "the connection closed"
        try:
            member = await self._welcome(channel)
            if member is None:
                return
            name = DeviceId(member.name)
            line = self._lines[name] = _Line()
            self._channels[name] = channel
            self._listener(_joined(member))
            sender = asyncio.ensure_future(_send(channel, line, member))
            receiver = asyncio.ensure_future(self._receive(channel, member))
            try:
                self.handle(DeviceJoined(name, member.memory_bytes))
                self._fleet_changed()
                done, _ = await asyncio.wait([sender, receiver], return_when=asyncio.FIRST_COMPLETED)
                reason = next(iter(done)).result()
            finally:
                sender.cancel()
                receiver.cancel()
                await asyncio.gather(sender, receiver, return_exceptions=True)
        except ConnectionLost as fault:
            reason = str(fault)
        except (CleaveError, TimeoutError) as fault:
            reason = str(fault) or "no hello within the time allowed"
            log.info("a connection ended: %s", reason)
        finally:
            if member is not None:
                self._remove(member, self._goodbye or reason)
            await channel.close(reason)

    async def close(self, reason: str, *, rejoin: bool) -> None:
        """Say goodbye to every device."""
        self._goodbye = reason

        async def say(channel: Channel) -> None:
            with suppress(ConnectionLost, TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await channel.send(messages.Bye(reason=reason, rejoin=rejoin))

        await asyncio.gather(*map(say, self._channels.values()))

    async def _welcome(self, channel: Channel) -> Member | None:
        async with asyncio.timeout(_HANDSHAKE_S):
            hello = (await channel.receive()).message
            if not isinstance(hello, messages.Hello):
                raise ProtocolError(f"expected hello, got {type(hello).__name__.lower()}")
            reason = self._objection(hello)
            if reason:
                await channel.send(messages.Refused(reason=reason))
                log.info("refused a device: %s", reason)
                return None
            with self._roster.reserved(hello.name) as name:
                await channel.send(messages.Welcome(version=messages.VERSION, name=name))
                latency_s, down, up = await _probe(channel)
        return self._roster.add(
            name=name,
            kernel=hello.kernel[:40],
            memory_bytes=hello.memory_bytes,
            flops_per_s=hello.flops_per_s,
            latency_s=latency_s,
            down_bytes_per_s=down,
            up_bytes_per_s=up,
        )

    def _objection(self, hello: messages.Hello) -> str:
        if hello.version != messages.VERSION:
            return (
                f"this server speaks protocol version {messages.VERSION}, not {hello.version}; install the same release"
            )
        if self._keys.identify(hello.token) is None:
            return "wrong or missing token; ask the owner of the run for it and set --token or CLEAVE_TOKEN"
        if not (0 < hello.flops_per_s < 1e18 and 0 < hello.memory_bytes < 1 << 50):
            return "expected positive flops_per_s and memory_bytes; measure again"
        return ""

    async def _receive(self, channel: Channel, member: Member) -> str:
        name = DeviceId(member.name)
        while True:
            received = await channel.receive()
            match received.message:
                case messages.Result() as result:
                    _check(result)
                    self._measure(member, result, received)
                    member.failures = 0
                    part = Rectangle(
                        result.first_row,
                        result.first_row + result.rows,
                        result.first_col,
                        result.first_col + result.cols,
                    )
                    self._result = result, received.payload
                    self.handle(ResultArrived(name, TaskId(result.task), part))
                    self._result = None
                case messages.Failed(task=task, reason=reason):
                    log.warning("%s could not do task %d: %s", name, task, reason)
                    member.failures += 1
                    if member.failures == _MOST_FAILURES:
                        raise CleaveError(f"could not do {_MOST_FAILURES} tasks in a row, the last: {reason[:100]}")
                    self.handle(TaskFailed(name, TaskId(task)))
                case messages.Probed() if member.probed_at is not None:
                    member.heard(time.perf_counter() - member.probed_at)
                    member.probed_at = None
                case messages.Leaving(reason=reason):
                    return f"left: {reason[:100]}"
                case other:
                    raise ProtocolError(f"a device does not send {type(other).__name__.lower()} here")

    def _measure(self, member: Member, result: messages.Result, received: Received) -> None:
        """Learn from work what the probe could only guess."""
        member.flops.add(result.flops, result.compute_s)
        member.down.add(result.down_bytes, result.down_s)
        member.up.add(result.payload, received.link_s)
        member.up_bytes += result.payload
        if 0 <= result.flops < math.inf and 0 <= result.compute_s < math.inf:
            member.flops_done += result.flops
            member.compute_s += result.compute_s

    def _remove(self, member: Member, reason: str) -> None:
        name = DeviceId(member.name)
        lost = self._ledger.unfinished(name)
        channel = self._channels.pop(name)
        self._gone_down += channel.sent_bytes
        self._gone_up += channel.received_bytes
        self._lines.pop(name, None)
        self._roster.remove(member.name)
        self._listener(events.DeviceLeft(device=member.name, reason=reason, lost_tasks=lost))
        self._fleet_changed()
        self.handle(DeviceLeft(name))

    def probe(self) -> None:
        """Ask every device for a sign of life, whose time is its latency."""
        for name, line in self._lines.items():
            member = self._roster.members[name]
            if member.probed_at is None:
                member.probed_at = time.perf_counter()
                line.put(_URGENT, [(messages.Probe(answer=0), b"")])

    def traffic(self) -> tuple[int, int]:
        """Bytes down and up so far, of devices that left too."""
        channels = list(self._channels.values())
        down, up = sum(c.sent_bytes for c in channels), sum(c.received_bytes for c in channels)
        return self._gone_down + down, self._gone_up + up


def _check(result: messages.Result) -> None:
    """Before anything is decided on a result: its numbers are as many as it says."""
    if min(result.rows, result.cols, result.first_row + 1, result.first_col + 1) < 1:
        raise ProtocolError(f"expected a rectangle of at least 1 x 1, got {result.rows} x {result.cols}")
    expected = encoded_bytes(result.format, result.rows, result.cols)
    if result.payload != expected:
        raise ProtocolError(
            f"expected {expected} bytes for {result.rows} x {result.cols} in {result.format}, got {result.payload}"
        )


async def _send(channel: Channel, line: _Line, member: Member) -> str:
    while True:
        outgoing = (await line.queue.get())[2]
        for message, payload in outgoing:
            await channel.send(message, payload)
            member.down_bytes += len(payload)


def _in_turn(run: messages.Run, operands: list[Iterator[tuple[messages.Store, memoryview]]]) -> Outgoing:
    """The task, then its operands' strips in turn, so that the square that can be computed grows.

    Where b must be whole before a row can be computed (nn), b goes first.
    """
    yield run, b""
    if run.program.layout == "nn":
        operands = list(reversed(operands))
        yield from itertools.chain.from_iterable(operands)
        return
    while operands:
        for strips in list(operands):
            strip = next(strips, None)
            if strip is None:
                operands.remove(strips)
            else:
                yield strip


async def _probe(channel: Channel) -> tuple[float, float, float]:
    """Latency, and bytes per second down and up, from a few small exchanges."""
    latency_s, down, up = float("inf"), 0.0, 0.0
    for _ in range(_PROBES):
        started = time.perf_counter()
        await channel.send(messages.Probe(answer=0))
        await _probed(channel)
        latency_s = min(latency_s, time.perf_counter() - started)
    size = 64 << 10
    while True:  # larger until it takes long enough to tell
        started = time.perf_counter()
        await channel.send(messages.Probe(answer=size // 4, payload=size), bytes(size))
        answer = await _probed(channel)
        took_s = max(time.perf_counter() - started - latency_s, 1e-6)
        assert isinstance(answer.message, messages.Probed)
        up_s = max(answer.link_s, 1e-7)
        down_s = max(min(took_s, max(answer.message.down_s, 0.0)), took_s - up_s, 1e-7)
        down, up = size / down_s, size / 4 / up_s
        if took_s > 0.05 or size >= 4 * _PROBE_BYTES:
            return latency_s, min(down, 20e9), min(up, 20e9)
        size *= 4


async def _probed(channel: Channel) -> Received:
    received = await channel.receive()
    if not isinstance(received.message, messages.Probed):
        raise ProtocolError(f"expected probed, got {type(received.message).__name__.lower()}")
    return received


def _joined(member: Member) -> events.DeviceJoined:
    return events.DeviceJoined(
        device=member.name,
        flops_per_s=member.flops.value,
        down_bytes_per_s=member.down.value,
        up_bytes_per_s=member.up.value,
        latency_s=member.latency_s,
        memory_bytes=member.memory_bytes,
        kernel=member.kernel,
    )
