"""Work of devices computed again by the server, where it cannot be checked otherwise.

What is audited is an account: all that one device did in one column of a pass. Whether it is, is drawn when its first
result comes, and no message tells; from then on the messages that led to its results are kept beside them. When the
account has been read, or the pass is about to end, they are replayed in a thread, one account at a time, and the
results compared. Until all audits of a pass are through nothing of it is handed out; a pass in which one failed is to
begin again, which `passes.py` sees to. What a device would have returned is the affair of who gives `Replay`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cleave import events
from cleave.core.schedule.members import Roster
from cleave.core.schedule.pipeline import Account, Direction, Seat, Unit
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import DeviceId, OperandId
from cleave.core.verify.recompute import Policy, chance, disagreement, least_of
from cleave.core.verify.trust import Trust
from cleave.errors import CleaveError
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Matrix
from cleave.protocol.programs import Backward, Forward
from cleave.server.operands import Staging
from cleave.server.resident_tasks import PassRun
from cleave.server.residents import Resident

Message = tuple[messages.Store | messages.Run | messages.Drop, Buffer]
Replay = Callable[[Iterable[Message]], Iterator[Matrix]]
"""What an honest device returns for each `Run` among these messages, whole, and rounded as asked."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    unit: Unit
    message: messages.Run
    operands: tuple[OperandId, ...]
    values: Matrix


@dataclass(slots=True, eq=False)
class _Case:
    """An account that is audited: what its device was told, and what it returned."""

    account: Account
    held: Resident
    standing: _Standing
    units: list[_Done] = field(default_factory=lambda: list[_Done]())
    brought: dict[OperandId, tuple[Message, ...]] = field(
        default_factory=lambda: dict[OperandId, tuple[Message, ...]]()
    )
    reads: dict[int, messages.Run] = field(default_factory=lambda: dict[int, messages.Run]())
    gradients: list[tuple[int, Rectangle, Matrix]] = field(
        default_factory=lambda: list[tuple[int, Rectangle, Matrix]]()
    )
    is_queued: bool = False
    is_dropped: bool = False
    """Nobody wants to know any more."""


@dataclass(slots=True, eq=False)
class _Standing:
    """What audits found of a device. Results that nobody looked at clear nobody, so this trust is its own."""

    shown: Trust
    """That of the roster, which outlives a stay."""
    found: Trust = field(default_factory=Trust)
    proven: set[Direction] = field(default_factory=lambda: set[Direction]())
    """What it was last found to do right."""


class _Dropped(Exception):  # not a fault: it only ends a replay
    pass


class Audits:
    """Of the one pass that is under way; lives in the event loop. Without a replay there are none."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        policy: Policy,
        replay: Replay | None,
        staging: Staging,
        roster: Roster,
        listener: events.Listener,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._loop, self._staging, self._roster, self._listener = loop, staging, roster, listener
        self._policy: Policy = policy
        self._replay = replay
        self._rng = rng or np.random.default_rng()
        self._cases: dict[Account, _Case | None] = {}
        """None: it is not audited, or that is over."""
        self._queue: deque[_Case] = deque()
        self._running: _Case | None = None
        self._standings: dict[int, _Standing] = {}
        """By the identity of the roster's trust."""
        self.units = self.wrong = 0
        """Units that were computed again, and accounts that were found wrong."""
        self.busy_s = 0.0
        self.ended: Callable[[DeviceId | None], None] = lambda wrong: None
        """Another audit is through: all is right so far, or the one who was found wrong."""
        self.failed: Callable[[CleaveError], None] = lambda fault: None
        """An audit could not be made."""
        self.part: Callable[[str, str], None] = lambda device, reason: None
        """Quarantine a device."""

    # -------------------------------------------------------------------------------------------- what is kept

    def wants(self, run: PassRun, account: Account) -> bool:
        if self._replay is None:
            return False
        if account not in self._cases:
            self._cases[account] = self._chosen(run, account)
        return self._cases[account] is not None

    def keep_unit(self, run: PassRun, unit: Unit, message: messages.Run, values: Matrix) -> None:
        case = self._cases[unit.seat.account]
        assert case is not None, "it is wanted"
        operands = tuple(operand.id for operand in run.brought(unit))
        for operand in operands:
            if operand not in case.brought:  # as bytes: tensors that are held would stay on devices
                case.brought[operand] = tuple(self._staging.strips(operand))
        case.units.append(_Done(unit, message, operands, values))

    def keep_gradient(
        self, account: Account, index: int, message: messages.Run, part: Rectangle, values: Matrix
    ) -> None:
        case = self._cases[account]
        assert case is not None, "it is wanted"
        case.reads[index] = message
        case.gradients.append((index, part, values))

    def _chosen(self, run: PassRun, account: Account) -> _Case | None:
        member = self._roster.members.get(account.device)
        if member is None or member.key is None:  # the server itself
            return None
        standing = self._standings.setdefault(id(member.trust), _Standing(member.trust))
        is_proven = ("backward" if run.goes_back else "forward") in standing.proven
        likely = chance(self._policy, standing.found, is_proven=is_proven)
        if account.device in run.barred and self._policy != "none":
            likely = 1.0  # it is here again because nobody else can do it
        return _Case(account, run.residents[account.column], standing) if self._rng.random() < likely else None

    # -------------------------------------------------------------------------------------------- in turn

    @property
    def are_open(self) -> bool:
        return any(case is not None for case in self._cases.values())

    def close(self, account: Account) -> None:
        """Nothing will be added to it."""
        case = self._cases.get(account)
        if case is not None and not case.is_queued:
            case.is_queued = True
            self._queue.append(case)
            self._go_on()

    def settle(self) -> bool:
        """The pass is over: audit what is left, of devices that went away too. Whether there is nothing."""
        for account in list(self._cases):
            self.close(account)
        return not self.are_open

    def drop(self) -> None:
        """The pass begins again, or is at its end."""
        for case in self._cases.values():
            if case is not None:
                case.is_dropped = True
        self._cases.clear()
        self._queue.clear()

    def _go_on(self) -> None:
        if self._running is None and self._queue:
            case = self._running = self._queue.popleft()
            judging = self._loop.run_in_executor(None, self._judge, case)
            judging.add_done_callback(lambda judged: self._judged(case, judged))

    def _judged(self, case: _Case, judged: asyncio.Future[str]) -> None:
        self._running = None
        fault = None if judged.cancelled() else judged.exception()
        if not case.is_dropped and not judged.cancelled():
            if fault is not None:
                log.error("an audit of %s could not be made", case.account.device, exc_info=fault)
                self.failed(CleaveError(f"work of {case.account.device} could not be audited: {fault!r}"))
            else:
                self._cases[case.account] = None
                self._conclude(case, judged.result())
        self._go_on()

    def _conclude(self, case: _Case, reason: str) -> None:
        device = case.account.device
        self.units += len(case.units)
        self._listener(events.Audited(device=device, units=len(case.units), is_right=not reason))
        if not reason:
            case.standing.found.right()
            case.standing.proven |= {done.unit.direction for done in case.units}
            self.ended(None)
            return
        self.wrong += 1
        self._blame(device, case.standing, reason)
        self.ended(device)

    def _blame(self, device: DeviceId, standing: _Standing, reason: str) -> None:
        """Here or gone: who returns from its address brings its trust along."""
        standing.found.wrong()
        standing.proven.clear()
        trust = standing.shown
        trust.wrong()
        trust.suspicion = max(trust.suspicion, standing.found.suspicion)
        log.warning("an audit found %s wrong: %s", device, reason)
        self._listener(events.ResultRefused(device=device, reason=reason))
        for members, is_here in ((self._roster.members, True), (self._roster.past, False)):
            member = members.get(device)
            if member is not None and member.trust is trust:
                member.wrong += 1
                if trust.is_lost and is_here:
                    self.part(device, f"quarantined: {member.wrong} of its results were wrong")

    # -------------------------------------------------------------------------------------------- in a thread

    def _judge(self, case: _Case) -> str:
        """Why the account is wrong, or nothing."""
        assert self._replay is not None, "else nothing is wanted"
        started = time.perf_counter()
        try:
            order = _in_order(case.units)
            results = self._replay(self._inbox(case, order))
            for done, expected in zip(order, results, strict=False):  # gradients follow
                off = disagreement(done.values, expected, done.message.format) if _is_seen(done.message) else 0.0
                if off > 1:
                    return f"{_named(done.unit)}, computed again, is {off:.3g} times off what rounding explains"
            gradients = dict(zip(case.reads, results, strict=True))
            return next((found for found in self._wrong_gradients(case, gradients)), "")
        finally:
            self.busy_s += time.perf_counter() - started

    def _wrong_gradients(self, case: _Case, expected: dict[int, Matrix]) -> Iterator[str]:
        if not expected:
            return
        format = next(iter(case.reads.values())).format
        least = least_of(expected.values(), format)
        for index, part, values in case.gradients:
            whole = expected[index]
            off = disagreement(values, whole[part.top : part.bottom, part.left : part.right], format, least=least)
            if off > 1:
                view, _ = case.held.trained[index]
                yield (
                    f"the gradient of parameter {view.parameter} in stage {case.account.column.stage}, computed again, "
                    f"is {off:.3g} times off what rounding explains"
                )

    def _inbox(self, case: _Case, order: list[_Done]) -> Iterator[Message]:
        """Sequence after sequence, so that what only one of them needs is there for one."""
        for operand in case.held.operands:
            yield from self._staging.strips(operand.id)
        for _, units in itertools.groupby(order, lambda done: id(done.unit.seat)):
            there: set[int] = set()
            for done in units:
                if case.is_dropped:
                    raise _Dropped
                for operand in done.operands:
                    if operand not in there:
                        there.add(operand)
                        yield from case.brought[operand]
                yield done.message, b""
                assert isinstance(done.message.program, Forward | Backward)
                there.add(done.message.program.state)
            yield messages.Drop(operands=tuple(there)), b""
        for message in case.reads.values():
            yield message, b""


def _in_order(units: list[_Done]) -> list[_Done]:
    """Seat by seat, forward, then backward from the end, as far as nothing is missing between."""
    seats: dict[Seat, list[_Done]] = {}
    for done in units:
        seats.setdefault(done.unit.seat, []).append(done)
    order: list[_Done] = []
    for mine in seats.values():
        forward = sorted((done for done in mine if done.unit.direction == "forward"), key=lambda done: done.unit.chunk)
        back = sorted((done for done in mine if done.unit.direction == "backward"), key=lambda done: -done.unit.chunk)
        there = [done for place, done in enumerate(forward) if done.unit.chunk == place]
        last = len(there) - 1
        order += there + [done for place, done in enumerate(back) if done.unit.chunk == last - place]
    return order


def _is_seen(message: messages.Run) -> bool:
    """Whether its result says more than that it is done."""
    match message.program:
        case Forward(is_silent=is_silent):
            return not is_silent
        case Backward(wants_dx=wants_dx):
            return wants_dx
        case _:
            return True


def _named(unit: Unit) -> str:
    where = f"sequence {unit.seat.sequence}, chunk {unit.chunk} in stage {unit.seat.column.stage}"
    return f"the {'result' if unit.direction == 'forward' else 'input gradient'} of {where}"
