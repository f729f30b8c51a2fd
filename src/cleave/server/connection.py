"""One device's connection, from hello to last byte: commands out, results in, heartbeats in between.

Decides nothing. Messages received become events for the engine; commands become messages in the device's outbox, most
urgent first. A device that breaks the protocol, stalls or vanishes ends its own connection and no other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from cleave import events
from cleave.core.cost.rates import Pace
from cleave.core.cost.wire import encoded_bytes
from cleave.core.schedule.ledger import Ledger
from cleave.core.schedule.members import Member, Observation, Roster
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    CancelSent,
    DeviceAnswered,
    DeviceId,
    DeviceMoved,
    OperandId,
    PaceMeasured,
    Task,
    TaskFailed,
    TaskId,
)
from cleave.errors import CleaveError, ConnectionLost, ProtocolError
from cleave.protocol import messages
from cleave.server.admission.tokens import Keys
from cleave.server.contract import Arrived, EngineEvent, run_of
from cleave.server.heartbeats import HEARTBEAT_S, Heartbeats
from cleave.server.operands import Operands
from cleave.server.outbox import URGENT, Meter, Outbox, Sending
from cleave.transport.base import Channel, Received

_GOODBYE_S = 2.0
_IDLE_BEATS = 3
"""A device without work gets one heartbeat in this many: thousands of idle devices should cost next to nothing."""
_SILENCE_S = 10.0
_MOST_FAILURES = 3
_MOST_UNCHECKED = 16
"""Results of one device waiting to be checked at which reading from it pauses."""
_IDLE_S = 30.0
"""Time without work, while others had some, after which a device is told why."""
_PROGRESS_BYTES = 64 << 10
"""Bytes between two heartbeats that prove progress: more than the heartbeats themselves take."""

Post = Callable[[EngineEvent], None]
log = logging.getLogger(__name__)


class Disconnected(CleaveError):
    """The server ended the connection."""

    def __init__(self, reason: str, *, rejoin: bool, is_fault: bool = True) -> None:
        super().__init__(reason)
        self.rejoin, self.is_fault = rejoin, is_fault


class Connection:
    def __init__(
        self,
        channel: Channel,
        member: Member,
        *,
        post: Post,
        operands: Operands,
        keys: Keys,
        ledger: Ledger,
        roster: Roster,
        lock: threading.RLock,
        heartbeats: Heartbeats,
        runs_so_far: Callable[[], int],
        listener: events.Listener,
    ) -> None:
        """Only reads the ledger and the roster, except that latencies measured by heartbeats go to the roster."""
        self.channel, self.member, self.device = channel, member, DeviceId(member.name)
        self._post, self._operands, self._keys = post, operands, keys
        self._ledger, self._roster, self._runs_so_far, self._listener = ledger, roster, runs_so_far, listener
        self._lock, self._heartbeats = lock, heartbeats
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox()
        self._ending: asyncio.Future[str] = self._loop.create_future()
        self._unchecked = 0
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._probed_at: float | None = None
        """When the heartbeat was sent that it has not answered yet."""
        self._beats, self._beaten, self._silent_s = 0, self._loop.time(), 0.0
        self._told_pace: Pace | None = None
        self._moved_bytes = channel.moved_bytes
        self._idle_since, self._was_told_idle = self._loop.time(), False
        self._tasks_then, self._runs_then = member.tasks, runs_so_far()

    # -------------------------------------------------------------------------------------------- commands

    def start(self, task: Task, missing: tuple[OperandId, ...]) -> None:
        strips = [(operand, self._operands.strips(operand)) for operand in missing]
        sending = Sending(run_of(task).describe(task), strips, lambda operand: self._ledger.needs(self.device, operand))
        self._outbox.sending[task.id] = sending

        def sent() -> None:
            del self._outbox.sending[task.id]
            if sending.is_cancelled:
                self._post(CancelSent(self.device, task.id, tuple(sending.unsent)))

        self._outbox.put(task.priority, sending, sent)

    def cancel(self, task: Task) -> None:
        if task.id in self._outbox.sending:
            self._outbox.sending[task.id].is_cancelled = True
        else:
            cancel = messages.CancelTasks(tasks=(task.id,))
            self._outbox.put(URGENT, [(cancel, b"")], lambda: self._post(CancelSent(self.device, task.id)))

    def resend(self, operands: tuple[OperandId, ...]) -> None:
        self.forget(operands)
        strips = [self._operands.strips(operand) for operand in operands]
        self._outbox.put(URGENT, itertools.chain.from_iterable(strips))

    def forget(self, operands: tuple[OperandId, ...]) -> None:
        self._outbox.put_urgent(messages.Drop(operands=operands))

    def disconnect(self, reason: str, *, rejoin: bool, is_fault: bool = True) -> None:
        if not self._ending.done():
            self._ending.set_exception(Disconnected(reason, rejoin=rejoin, is_fault=is_fault))

    def result_checked(self) -> None:
        """Count a result as checked; resume reading if it was paused."""
        self._unchecked -= 1
        if self._unchecked < _MOST_UNCHECKED:
            self._may_read.set()

    # -------------------------------------------------------------------------------------------- lifecycle

    async def serve(self) -> str:
        """Serve until the device leaves, and return its reason; any other end of the connection raises."""
        stages = [
            asyncio.ensure_future(self._outbox.send_all(self.channel, self.member)),
            asyncio.ensure_future(self._receive_all()),
        ]
        self._heartbeats.add(self.device, self._beat)
        try:
            done, _ = await asyncio.wait([self._ending, *stages], return_when=asyncio.FIRST_COMPLETED)
            return next(one for one in (self._ending, *stages) if one in done).result()
        finally:
            self._heartbeats.remove(self.device)
            self._ending.cancel()
            for stage in stages:
                stage.cancel()
            await asyncio.gather(*stages, return_exceptions=True)

    async def say_goodbye(self, reason: str, *, rejoin: bool) -> None:
        with suppress(ConnectionLost, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self.channel.send(messages.Bye(reason=reason, rejoin=rejoin))

    async def _receive_all(self) -> str:
        meter = Meter(self._loop.time)
        while True:
            await self._may_read.wait()
            received = await self.channel.receive()
            await meter.count()
            match received.message:
                case messages.Result() as result:
                    self._take(result, received)
                case messages.Failed(task=task, reason=reason):
                    log.warning("%s failed task %d: %s", self.device, task, reason)
                    self.member.failures += 1
                    if self.member.failures == _MOST_FAILURES:
                        raise CleaveError(f"failed {_MOST_FAILURES} tasks in a row, the last: {reason[:100]}")
                    self._post(TaskFailed(self.device, TaskId(task)))
                case messages.Probed() if self._probed_at is not None:
                    with self._lock:
                        self.member.heard(time.perf_counter() - self._probed_at)
                        self._roster.measured(self.device)
                    self._probed_at = None
                    if self.device in self._ledger.late:
                        self._post(DeviceAnswered(self.device))
                case messages.Leaving(reason=reason):
                    return reason[:100]
                case other:
                    raise ProtocolError(f"expected a result, failed, probed or leaving, got {other.type_name()}")

    def _take(self, result: messages.Result, received: Received) -> None:
        if min(result.rows, result.cols, result.first_row + 1, result.first_col + 1) < 1:
            raise ProtocolError(f"expected a rectangle of at least 1 x 1, got {result.rows} x {result.cols}")
        expected = encoded_bytes(result.format, result.rows, result.cols)
        if result.payload != expected:
            raise ProtocolError(
                f"expected {expected} bytes for {result.rows} x {result.cols} in {result.format}, got {result.payload}"
            )
        top, left = result.first_row, result.first_col
        seen = Observation(
            flops=result.flops,
            compute_s=result.compute_s,
            down_bytes=result.down_bytes,
            down_s=result.down_s,
            up_bytes=received.sustained.size_bytes,
            up_s=received.sustained.seconds,
            payload_bytes=result.payload,
        )
        part = Rectangle(top, top + result.rows, left, left + result.cols)
        self._post(Arrived(self.device, TaskId(result.task), part, result.format, received.payload, seen))

    def wait_for_check(self) -> None:
        """Count a result that waits to be checked; pause reading at _MOST_UNCHECKED."""
        self._unchecked += 1
        if self._unchecked >= _MOST_UNCHECKED:
            self._may_read.clear()

    def _beat(self) -> None:
        """Report pace and progress; disconnect a device that is silent or whose token was revoked; probe it again."""
        member = self.member
        if member.key is not None and not self._keys.is_valid(member.key):
            self.disconnect("the token it joined with was revoked", rejoin=False)
            return
        self._beats += 1
        if self._beats < (1 if self._ledger.unfinished(self.device) else _IDLE_BEATS):
            return
        self._judge_silence(self._beats * HEARTBEAT_S)
        self._beats = 0
        if member.pace != self._told_pace:
            self._told_pace = member.pace
            self._post(PaceMeasured(self.device, member.pace))
        moved = self.channel.moved_bytes
        if moved - self._moved_bytes > _PROGRESS_BYTES:
            self._moved_bytes = moved
            self._post(DeviceMoved(self.device))
        if self._probed_at is None:
            self._probed_at = time.perf_counter()
            self._outbox.put_urgent(
                messages.Probe(answer=0, done_flops=member.done_flops, verified_flops=member.verified_flops)
            )
        self._explain_idleness()

    def _judge_silence(self, beat_s: float) -> None:
        """Disconnect a device that was sent a heartbeat and has sent or taken no byte for too long.

        At most one heartbeat each: time in which the server itself was stopped counts against nobody. That is also why
        the silence is read before the clock: the server may be stopped in between.
        """
        quiet_s = self.channel.silent_s
        before, self._beaten = self._beaten, self._loop.time()
        has_spoken = self._probed_at is None or quiet_s <= self._beaten - before or not self._may_read.is_set()
        self._silent_s = 0.0 if has_spoken else self._silent_s + beat_s
        if self._silent_s >= _SILENCE_S:
            self.disconnect(f"silent for {self._silent_s:.0f} s", rejoin=True)

    def _explain_idleness(self) -> None:
        """Tell a device why it has no work: plans leave out devices that would make the others wait."""
        member, now = self.member, self._loop.time()
        if self._ledger.unfinished(self.device) or member.tasks != self._tasks_then:
            self.forget_idleness()
        has_missed_some = self._runs_so_far() - self._runs_then > 1
        if now - self._idle_since > _IDLE_S and has_missed_some and not self._was_told_idle:
            reason = (
                f"at {member.flops.value / 1e9:.1f} GFLOP/s, {member.down.value / 1e6:.1f} MB/s down and "
                f"{member.up.value / 1e6:.1f} MB/s up, a step is faster without this device, so it stands by as a "
                "reserve; a larger batch or a faster link would give it work"
            )
            self._listener(events.DeviceIdle(device=self.device, reason=reason))
            self.tell_idle(reason)

    def forget_idleness(self) -> None:
        """Start over: the device has work, or may get some."""
        self._idle_since, self._was_told_idle, self.member.idle_reason = self._loop.time(), False, ""
        self._tasks_then, self._runs_then = self.member.tasks, self._runs_so_far()

    def tell_idle(self, reason: str) -> None:
        """Tell the device why it has no work."""
        self._was_told_idle, self.member.idle_reason = True, reason
        self._outbox.put_urgent(messages.Idle(reason=reason))
