"""The asyncio shell of the ledger: one connection a device, commands out, results in.

It decides nothing. Commands become messages in each device's line (`lines.py`), the most urgent first; messages that
came become events, results after they were inspected. A device that breaks the protocol, lies, stalls or vanishes is
parted with, and what was left of its tasks goes back to the cluster; no other device notices. All of it lives in the
server's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, cast

from cleave import events
from cleave.core.schedule.ledger import TICK_S, Ledger
from cleave.core.schedule.members import Member, Roster
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    Accept,
    Back,
    Cancel,
    CancelSent,
    Command,
    DeviceAnswered,
    DeviceId,
    DeviceJoined,
    DeviceMoved,
    Event,
    Forget,
    Hedge,
    Late,
    OperandId,
    Orphan,
    Overdue,
    PaceMeasured,
    Refuse,
    Resend,
    ResultArrived,
    Start,
    Task,
    TaskFailed,
    TaskId,
    Tick,
)
from cleave.errors import CleaveError, ConnectionLost, ProtocolError, WrongResult
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Matrix, encoded_bytes
from cleave.server.admission.handshake import joined, welcome
from cleave.server.admission.tokens import Keys
from cleave.server.operands import Staging
from cleave.server.outbox import Line, Meter, Sending, send_all
from cleave.transport.base import Channel, Received

_GOODBYE_S = 2.0
_SILENCE_S = 10.0
_MOST_FAILURES = 3
_MOST_REFUSED = 16
_PROGRESS_BYTES = 64 << 10
"""Either way: more than signs of life take. Much slower links than thought, and this server itself, are at work too."""
_AT_ONCE = -1  # before every task

log = logging.getLogger(__name__)


class Assignment(Protocol):
    """What a task's `work` is."""

    @property
    def owner(self) -> Work: ...


class Work(Protocol):
    """What the dispatcher asks of whoever gave it tasks to hand out."""

    def describe(self, task: Task) -> messages.Run: ...

    def inspect(self, task: Task, part: Rectangle, result: messages.Result, payload: Buffer, harder: bool) -> Matrix:
        """The numbers of a result, found right; WrongResult if they are not."""
        ...

    def accept(self, accept: Accept, values: Matrix) -> None: ...

    def reject(self, task: Task, device: DeviceId, reason: str) -> None: ...

    def redo(self, orphans: list[Orphan], device: DeviceId | None) -> None:
        """Plan again what nobody has; `device` is who left it."""
        ...

    def hedge(self, hedges: list[Hedge]) -> None: ...


class _Parted(CleaveError):
    """The server ends a device's stay."""

    def __init__(self, reason: str, *, rejoin: bool) -> None:
        super().__init__(reason)
        self.rejoin = rejoin


class Dispatcher:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        ledger: Ledger,
        roster: Roster,
        staging: Staging,
        keys: Keys,
        fleet_changed: Callable[[], None],
        left: Callable[[DeviceId], None],
        listener: events.Listener,
    ) -> None:
        self._ledger, self._roster, self._staging, self._keys = ledger, roster, staging, keys
        self._loop, self._listener = loop, listener
        self._fleet_changed, self._left = fleet_changed, left
        self._lines: dict[DeviceId, Line] = {}
        self._channels: dict[DeviceId, Channel] = {}
        self._parting: dict[DeviceId, asyncio.Future[str]] = {}
        self._values: Matrix | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._goodbye: tuple[str, bool] | None = None
        self._gone_down = self._gone_up = 0

    # -------------------------------------------------------------------------------------------- the ledger's shell

    def handle(self, event: Event, device: DeviceId | None = None) -> None:
        """Let the ledger decide on an event, and do what it says; `device` is who is to blame for orphans."""
        orphans: list[Orphan] = []
        hedges: list[Hedge] = []
        for command in self._ledger.handle(event, self._loop.time()):
            self._act(command, orphans, hedges)
        for owner in {id(_owner(orphan.task)): _owner(orphan.task) for orphan in orphans}.values():
            owner.redo([orphan for orphan in orphans if _owner(orphan.task) is owner], device)
        if hedges:
            _owner(hedges[0].task).hedge(hedges)
        if self._ticking is None and self._ledger.is_busy:
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self.handle(Tick())

    def _act(self, command: Command, orphans: list[Orphan], hedges: list[Hedge]) -> None:
        match command:
            case Start(task, missing):
                self._send(task, missing)
            case Cancel(task):
                self._cancel(task)
            case Resend(device, operands):
                self._lines[device].put_first(messages.Drop(operands=operands))
                strips = [self._staging.strips(operand) for operand in operands]
                self._lines[device].put(_AT_ONCE, itertools.chain.from_iterable(strips))
            case Forget(device, operands):
                self._lines[device].put_first(messages.Drop(operands=operands))
            case Accept():
                assert self._values is not None
                _owner(command.task).accept(command, self._values)
            case Refuse(device, reason, is_fault):
                self._refuse(device, reason, is_fault)
            case Orphan():
                orphans.append(command)
            case Hedge():
                hedges.append(command)
            case Late(device):
                self._listener(events.DeviceLate(device=device))
                self._set_late(device, True)
            case Back(device):
                self._set_late(device, False)
            case Overdue(device, _, waited_s, expected_s):
                reason = f"a task took {waited_s:.1f} s, where {expected_s:.2f} s were expected, and nothing moved"
                self.part(device, reason, rejoin=True)

    def _send(self, task: Task, missing: tuple[OperandId, ...]) -> None:
        line = self._lines[task.device]
        strips = [(operand, self._staging.strips(operand)) for operand in missing]
        sending = Sending(_owner(task).describe(task), strips, lambda operand: self._ledger.needs(task.device, operand))
        line.sending[task.id] = sending

        def sent() -> None:
            del line.sending[task.id]
            if sending.is_cancelled:
                self.handle(CancelSent(task.device, task.id, tuple(sending.unsent)))

        line.put(task.priority, sending, sent)

    def _cancel(self, task: Task) -> None:
        line = self._lines[task.device]
        if task.id in line.sending:
            line.sending[task.id].is_cancelled = True
        else:
            cancel = messages.Cancel(tasks=(task.id,))
            line.put(_AT_ONCE, [(cancel, b"")], lambda: self.handle(CancelSent(task.device, task.id)))

    def _set_late(self, device: DeviceId, is_late: bool) -> None:
        self._roster.set_late(device, is_late)
        self._fleet_changed()

    def _refuse(self, device: DeviceId, reason: str, is_fault: bool) -> None:
        log.info("refused from %s: %s", device, reason)
        member = self._roster.members.get(device)
        if is_fault and member is not None:
            member.refused += 1
            if member.refused > _MOST_REFUSED:
                self.part(device, f"{member.refused} results that nobody asked for, the last: {reason}", rejoin=True)

    def part(self, device: str, reason: str, *, rejoin: bool) -> None:
        """End a device's stay from outside of it."""
        parting = self._parting.get(DeviceId(device))
        if parting is not None and not parting.done():
            parting.set_exception(_Parted(reason, rejoin=rejoin))

    # -------------------------------------------------------------------------------------------- one connection

    async def serve(self, channel: Channel, own: str = "") -> None:
        """A device's whole stay, from its hello to its last byte; `own` names one that this server itself is."""
        member: Member | None = None
        reason, rejoin, is_fault = "the connection closed", True, False
        try:
            member = await welcome(channel, self._roster, self._keys, own)
            if member is not None:
                reason = await self._stay(channel, member)
        except ConnectionLost as fault:
            reason = str(fault)
        except _Parted as fault:
            reason, rejoin, is_fault = str(fault), fault.rejoin, True
        except (CleaveError, TimeoutError) as fault:
            reason, is_fault = str(fault) or "no hello within the time allowed", True
            log.info("a connection ended: %s", reason)
        except Exception as fault:
            log.exception("the server itself failed")
            reason = f"the server itself failed: {fault!r}"
        finally:
            if member is not None:
                if is_fault and not member.has_helped:
                    self._roster.send_away(member.name, self._loop.time())
                self._remove(member, self._goodbye[0] if self._goodbye else reason)
                await _say_goodbye(channel, *(self._goodbye or (reason, rejoin)))
            await channel.close(reason)

    async def _stay(self, channel: Channel, member: Member) -> str:
        name = DeviceId(member.name)
        line = self._lines[name] = Line()
        self._channels[name] = channel
        member.moved_bytes = channel.moved_bytes
        parting = self._parting[name] = self._loop.create_future()
        self._listener(joined(member))
        stages = [
            asyncio.ensure_future(send_all(channel, line, member)),
            asyncio.ensure_future(self._receive(channel, member)),
        ]
        try:
            self.handle(DeviceJoined(name, member.memory_bytes, member.pace))
            self._fleet_changed()
            done, _ = await asyncio.wait([parting, *stages], return_when=asyncio.FIRST_COMPLETED)
            return next(one for one in (parting, *stages) if one in done).result()
        finally:
            parting.cancel()
            for stage in stages:
                stage.cancel()
            await asyncio.gather(*stages, return_exceptions=True)

    async def close(self, reason: str, *, rejoin: bool) -> None:
        """Say goodbye to every device."""
        self._goodbye = (reason, rejoin)
        if self._ticking is not None:
            self._ticking.cancel()
        await asyncio.gather(*(_say_goodbye(channel, reason, rejoin) for channel in self._channels.values()))

    async def _receive(self, channel: Channel, member: Member) -> str:
        name, meter = DeviceId(member.name), Meter(self._loop.time)
        while True:
            received = await channel.receive()
            await meter.count()
            match received.message:
                case messages.Result() as result:
                    self._take(member, result, received)
                case messages.Failed(task=task, reason=reason):
                    log.warning("%s could not do task %d: %s", name, task, reason)
                    member.failures += 1
                    if member.failures == _MOST_FAILURES:
                        raise CleaveError(f"could not do {_MOST_FAILURES} tasks in a row, the last: {reason[:100]}")
                    self.handle(TaskFailed(name, TaskId(task)), name)
                case messages.Probed() if member.probed_at is not None:
                    member.heard(time.perf_counter() - member.probed_at)
                    member.probed_at = None
                    self.handle(DeviceAnswered(name))
                case messages.Leaving(reason=reason):
                    return f"left: {reason[:100]}"
                case other:
                    raise ProtocolError(f"a device does not send {type(other).__name__.lower()} here")

    def _take(self, member: Member, result: messages.Result, received: Received) -> None:
        """A result: is it one that was asked for, is it right, and then: who needs it."""
        _check(result)
        name, id = DeviceId(member.name), TaskId(result.task)
        part = Rectangle(
            result.first_row, result.first_row + result.rows, result.first_col, result.first_col + result.cols
        )
        task = self._ledger.wanted(name, id, part)
        if isinstance(task, Refuse):
            self._refuse(name, task.reason, task.is_fault)
            return
        try:
            self._values = _owner(task).inspect(task, part, result, received.payload, member.trust.is_suspect)
        except WrongResult as fault:
            self._blame(member, str(fault))
            _owner(task).reject(task, name, str(fault))
            self.handle(TaskFailed(name, id), name)
            if member.trust.is_lost:
                raise _Parted(f"quarantined: {member.wrong} of its results were wrong", rejoin=False) from None
            return
        share = part.area / task.whole.area
        member.done_flops += task.flops * share
        if not task.is_bound:  # what is bound was not checked, only perhaps will be audited
            member.trust.right(share)
            member.verified_flops += task.flops * share
        member.failures = member.refused = member.bad_stays = 0
        member.has_helped = True
        self._measure(member, task, result, received)
        self.handle(ResultArrived(name, id, part))
        self._values = None
        if id not in self._ledger.tasks(name):
            member.tasks += 1

    def _blame(self, member: Member, reason: str) -> None:
        member.wrong += 1
        member.trust.wrong()
        log.warning("a wrong result from %s: %s", member.name, reason)
        self._listener(events.ResultRefused(device=member.name, reason=reason))

    def _measure(self, member: Member, task: Task, result: messages.Result, received: Received) -> None:
        """Learn from work what the probe could only guess."""
        member.flops.add(result.flops * task.effort, result.compute_s)
        member.down.add(result.down_bytes, result.down_s)
        member.up.add(result.payload, received.link_s)
        member.up_bytes += result.payload
        if 0 <= result.compute_s < math.inf:
            member.compute_s += result.compute_s

    def _remove(self, member: Member, reason: str) -> None:
        name = DeviceId(member.name)
        lost = self._ledger.unfinished(name)
        channel = self._channels.pop(name)
        self._gone_down += channel.sent_bytes
        self._gone_up += channel.received_bytes
        del self._lines[name], self._parting[name]
        self._roster.remove(member.name)
        self._listener(events.DeviceLeft(device=member.name, reason=reason, lost_tasks=lost))
        self._left(name)

    # -------------------------------------------------------------------------------------------- from time to time

    def heartbeat(self) -> None:
        """Tell the ledger who is at work; part with who is silent or has no valid token; ask the others to speak."""
        for name, line in self._lines.items():
            member, silent_s = self._roster.members[name], self._channels[name].silent_s
            self.handle(PaceMeasured(name, member.pace))
            moved = self._channels[name].moved_bytes
            if member.key is None or moved - member.moved_bytes > _PROGRESS_BYTES:
                member.moved_bytes = moved
                self.handle(DeviceMoved(name))
            if silent_s > _SILENCE_S:
                self.part(name, f"no sign of life for {silent_s:.0f} s", rejoin=True)
            elif member.key is not None and not self._keys.is_valid(member.key):
                self.part(name, "the token it joined with was revoked", rejoin=False)
            elif member.probed_at is None:
                member.probed_at = time.perf_counter()
                line.put_first(messages.Probe(answer=0))

    def tell_idle(self, device: str, reason: str) -> None:
        self._listener(events.DeviceIdle(device=device, reason=reason))
        self._lines[DeviceId(device)].put_first(messages.Idle(reason=reason))

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


async def _say_goodbye(channel: Channel, reason: str, rejoin: bool) -> None:
    with suppress(ConnectionLost, TimeoutError):
        async with asyncio.timeout(_GOODBYE_S):
            await channel.send(messages.Bye(reason=reason, rejoin=rejoin))


def _owner(task: Task) -> Work:
    return cast("Assignment", task.work).owner
