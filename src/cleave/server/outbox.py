"""Outgoing messages of one device and their order, and a limit on the rate of its incoming ones.

Sits between `connection.py` and the channel. Knows priorities and strips, not what a task is for.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from cleave.core.schedule.members import Member
from cleave.core.schedule.tasks import OperandId, TaskId
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.messages import AnyMessage
from cleave.protocol.programs import GemmProgram
from cleave.transport.base import Channel

URGENT = -1
"""Priority ahead of every task."""
_MESSAGES_PER_S, _BURST = 2000.0, 4000.0

Outgoing = Iterable[tuple[AnyMessage, Buffer]]
Strips = Iterator[tuple[messages.Store, memoryview]]
Needed = Callable[[OperandId], bool]
_Entry = tuple[int, int, Outgoing, Callable[[], None]]


class Outbox:
    """Messages by priority, then in order; urgent ones go out even between the strips of an operand."""

    def __init__(self) -> None:
        self.sending: dict[TaskId, Sending] = {}
        """Tasks not yet sent completely."""
        self._urgent: deque[AnyMessage] = deque()
        self._queue: asyncio.PriorityQueue[_Entry] = asyncio.PriorityQueue()
        self._order = itertools.count()

    def put(self, priority: int, outgoing: Outgoing, sent: Callable[[], None] = lambda: None) -> None:
        self._queue.put_nowait((priority, next(self._order), outgoing, sent))

    def put_urgent(self, message: AnyMessage) -> None:
        self._urgent.append(message)
        self.put(URGENT, ())

    async def send_all(self, channel: Channel, member: Member) -> str:
        """Send until the connection ends; count the payload bytes for the member."""
        while True:
            _, _, outgoing, sent = await self._queue.get()
            await self._send_urgent(channel)
            for message, payload in outgoing:
                await channel.send(message, payload)
                member.down_bytes += len(payload)
                await self._send_urgent(channel)
            sent()

    async def _send_urgent(self, channel: Channel) -> None:
        while self._urgent:
            await channel.send(self._urgent.popleft())


class Sending:
    """A task being sent: its header, then its operands' strips in turn, so that the computable square grows.

    Where b must be complete before a row can be computed (nn), b goes first. Once canceled, only operands that other
    tasks of the device need are still sent; `unsent` lists those left out.
    """

    def __init__(self, run: messages.RunTask, operands: list[tuple[OperandId, Strips]], needed: Needed) -> None:
        self._run, self._needed = run, needed
        self._operands = operands
        self._was_announced = False
        self.is_cancelled = False
        self.unsent: list[OperandId] = []

    def __iter__(self) -> Iterator[tuple[AnyMessage, Buffer]]:
        if not self.is_cancelled:
            self._was_announced = True
            yield self._run, b""
        turns = [self._operands]
        if isinstance(self._run.program, GemmProgram) and self._run.program.layout == "nn":
            turns = [[operand] for operand in reversed(self._operands)]
        for operands in turns:
            yield from self._in_turn(list(operands))
        if self.is_cancelled and self._was_announced:
            yield messages.CancelTasks(tasks=(self._run.task,)), b""

    def _in_turn(self, operands: list[tuple[OperandId, Strips]]) -> Iterator[tuple[AnyMessage, Buffer]]:
        while operands:
            for entry in list(operands):
                operand, strips = entry
                is_unwanted = self.is_cancelled and not self._needed(operand)
                strip = None if is_unwanted else next(strips, None)
                if strip is not None:
                    yield strip
                    continue
                operands.remove(entry)
                if is_unwanted:
                    self.unsent.append(operand)


class Meter:
    """Throttle a device that sends more messages than any honest one: its link fills up and it has to wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._seen, self._left = clock, clock(), _BURST

    async def count(self) -> None:
        self._left -= 1
        if self._left > 0:
            return
        now = self._clock()
        self._left = min(_BURST, self._left + (now - self._seen) * _MESSAGES_PER_S)
        self._seen = now
        if self._left < 1:
            await asyncio.sleep((1 - self._left) / _MESSAGES_PER_S + 0.05)
