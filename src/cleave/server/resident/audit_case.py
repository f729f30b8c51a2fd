"""An account under audit: what its device was sent, what it returned, and whether an honest device returns the same.

`results.py` adds evidence as results arrive; it is judged off the loop. `audits.py` decides which accounts are audited.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from cleave.core.model.batch import Direction
from cleave.core.schedule.accounts import Account, Seat
from cleave.core.schedule.pipeline import Unit
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import OperandId
from cleave.core.verify.recompute import disagreement, least_of
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Matrix
from cleave.protocol.programs import Backward, Forward
from cleave.server.operands import Operands
from cleave.server.resident.held_shard import HeldShard

Message = tuple[messages.Store | messages.RunTask | messages.Drop, Buffer]
Replay = Callable[[Iterable[Message]], Iterator[Matrix]]
"""Yield what an honest device returns for each `RunTask` in these messages, whole and in the requested format."""


class Dropped(Exception):
    """Ends a replay whose outcome is no longer needed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    unit: Unit
    message: messages.RunTask
    operands: tuple[OperandId, ...]
    values: Matrix


@dataclass(slots=True, eq=False)
class AuditCase:
    """Evidence about one account: added from several threads, judged in one once complete."""

    account: Account
    held: HeldShard
    units: list[_Done] = field(default_factory=lambda: list[_Done]())
    is_queued: bool = False
    is_dropped: bool = False
    _operands: dict[OperandId, tuple[Message, ...]] = field(
        default_factory=lambda: dict[OperandId, tuple[Message, ...]]()
    )
    _reads: dict[int, messages.RunTask] = field(default_factory=lambda: dict[int, messages.RunTask]())
    _gradients: list[tuple[int, Rectangle, Matrix]] = field(
        default_factory=lambda: list[tuple[int, Rectangle, Matrix]]()
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def directions(self) -> set[Direction]:
        return {done.unit.direction for done in self.units}

    def keep_unit(
        self, unit: Unit, message: messages.RunTask, read: Iterable[OperandId], values: Matrix, operands: Operands
    ) -> None:
        """Keep a unit's result, and the operands it read as bytes: referenced tensors would stay on devices."""
        names = tuple(read)
        with self._lock:
            for name in names:
                if name not in self._operands:
                    self._operands[name] = tuple(operands.strips(name))
            self.units.append(_Done(unit, message, names, values))

    def keep_gradient(self, index: int, message: messages.RunTask, part: Rectangle, values: Matrix) -> None:
        with self._lock:
            self._reads[index] = message
            self._gradients.append((index, part, values))

    def judge(self, replay: Replay, operands: Operands) -> str:
        """Replay the account; return what is wrong, empty if nothing is."""
        order = _in_order(self.units)
        results = replay(self._inbox(order, operands))
        try:
            for done, expected in zip(order, results, strict=False):  # gradients follow
                off = disagreement(done.values, expected, done.message.format) if _is_seen(done.message) else 0.0
                if off > 1:
                    return f"{_named(done.unit)} is off by {off:.3g} times what rounding explains, when recomputed"
            gradients = dict(zip(self._reads, results, strict=True))
        except Dropped:
            return ""
        return next(self._wrong_gradients(gradients), "")

    def _wrong_gradients(self, expected: dict[int, Matrix]) -> Iterator[str]:
        if not expected:
            return
        format = next(iter(self._reads.values())).format
        least = least_of(expected.values(), format)
        for index, part, values in self._gradients:
            whole = expected[index]
            off = disagreement(values, whole[part.top : part.bottom, part.left : part.right], format, least=least)
            if off > 1:
                view, _ = self.held.trained[index]
                yield (
                    f"the gradient of parameter {view.parameter} in {self.account.shard} is off by "
                    f"{off:.3g} times what rounding explains, when recomputed"
                )

    def _inbox(self, order: list[_Done], operands: Operands) -> Iterator[Message]:
        """Yield the messages to replay, sequence by sequence, so that only one of them needs memory at a time."""
        for operand in self.held.operands:
            yield from operands.strips(operand.id)
        for _, units in itertools.groupby(order, lambda done: id(done.unit.seat)):
            sent: set[int] = set()
            for done in units:
                if self.is_dropped:
                    raise Dropped
                for operand in done.operands:
                    if operand not in sent:
                        sent.add(operand)
                        yield from self._operands[operand]
                yield done.message, b""
                assert isinstance(done.message.program, Forward | Backward)
                sent.add(done.message.program.state)
            yield messages.Drop(operands=tuple(sent)), b""
        for message in self._reads.values():
            yield message, b""


def _in_order(units: list[_Done]) -> list[_Done]:
    """Order units seat by seat, forward and then backward from the end, up to the first gap."""
    seats: dict[Seat, list[_Done]] = {}
    for done in units:
        seats.setdefault(done.unit.seat, []).append(done)
    order: list[_Done] = []
    for mine in seats.values():
        forward = sorted((done for done in mine if done.unit.direction == "forward"), key=lambda done: done.unit.chunk)
        back = sorted((done for done in mine if done.unit.direction == "backward"), key=lambda done: -done.unit.chunk)
        whole = [done for place, done in enumerate(forward) if done.unit.chunk == place]
        last = len(whole) - 1
        order += whole + [done for place, done in enumerate(back) if done.unit.chunk == last - place]
    return order


def _is_seen(message: messages.RunTask) -> bool:
    """Whether the result carries numbers, not only that the task is done."""
    match message.program:
        case Forward(is_silent=is_silent):
            return not is_silent
        case Backward(wants_dx=wants_dx):
            return wants_dx
        case _:
            return True


def _named(unit: Unit) -> str:
    where = f"sequence {unit.seat.sequence}, chunk {unit.chunk} in {unit.seat.shard}"
    return f"the {'result' if unit.direction == 'forward' else 'input gradient'} of {where}"
