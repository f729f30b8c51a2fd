"""Laws of the ledger: every element is taken once, nothing held is sent again, no cap is exceeded, nothing is lost.

A twin replays the ledger's commands as devices would feel them and knows nothing of how they were decided; a driver
does with orphans, hedges and deadlines what a server might do, well or badly.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from cleave.core.cost.gemm import Pace
from cleave.core.schedule.ledger import DEADLINE_S, IN_FLIGHT, LATE_S, TICK_S, Ledger
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
    DeviceLeft,
    DeviceMoved,
    Event,
    Forget,
    Hedge,
    Late,
    Operand,
    OperandId,
    OperandsReleased,
    Orphan,
    Overdue,
    PaceMeasured,
    Refuse,
    RegionsAbandoned,
    Resend,
    ResultArrived,
    Start,
    Task,
    TaskFailed,
    TaskId,
    TasksSubmitted,
    Tick,
)

NAMES = [DeviceId(name) for name in ("ann", "bob", "eve", "dan")]
LAST = DeviceId("zed")
"""Comes when all is over, and can do anything."""
OPERANDS = [
    Operand(id=OperandId(i), bytes=size, wire_bytes=size) for i, size in enumerate([1, 2, 3, 5, 8, 13, 21, 34], 100)
]
PACE = Pace(flops_per_s=100.0, down_bytes_per_s=100.0, up_bytes_per_s=100.0, latency_s=0.0137)
MISSING, TAKEN, ORPHANED = 0, 1, 2

Cells = NDArray[np.int64]
T = TypeVar("T")


def region_of(task: Task) -> TaskId:
    return task.id if task.region is None else task.region


def span(part: Rectangle) -> tuple[slice, slice]:
    return slice(part.top, part.bottom), slice(part.left, part.right)


class Stay:
    """One device from its coming to its going, as it would feel it."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.held: dict[OperandId, int] = {}
        self.lacking: set[OperandId] = set()
        """What did not go out whole, until it is said what becomes of it."""
        self.waiting: list[Task] = []
        self.running: dict[TaskId, Task] = {}
        self.ghosts: dict[TaskId, Task] = {}
        self.owed: dict[TaskId, NDArray[np.bool_]] = {}
        self.sent_with: dict[TaskId, tuple[OperandId, ...]] = {}
        self.past: set[TaskId] = set()
        """Cancelled, and the cancellation sent."""
        self.is_late = False

    @property
    def placed(self) -> list[Task]:
        return [*self.running.values(), *self.ghosts.values()]

    @property
    def live(self) -> list[Task]:
        return [*self.running.values(), *self.waiting]

    @property
    def needed(self) -> set[OperandId]:
        return {operand.id for task in self.placed for operand in task.operands}

    @property
    def live_needs(self) -> set[OperandId]:
        return {operand.id for task in self.running.values() for operand in task.operands}

    @property
    def used_bytes(self) -> int:
        return sum(self.held.values()) + sum(task.result_bytes for task in self.placed)

    def can_ever_fit(self, task: Task) -> bool:
        return sum(operand.bytes for operand in task.operands) + task.result_bytes <= self.memory_bytes

    def could_start(self) -> bool:
        """Whether the next in line fits beside what is pinned."""
        if not self.waiting or len(self.placed) >= IN_FLIGHT:
            return False
        together = [*self.placed, min(self.waiting, key=urgency)]
        pinned = {operand.id: operand.bytes for task in together for operand in task.operands}
        return sum(pinned.values()) + sum(task.result_bytes for task in together) <= self.memory_bytes

    def drop(self, task: Task) -> None:
        for tasks in (self.running, self.ghosts):
            tasks.pop(task.id, None)
        del self.owed[task.id], self.sent_with[task.id]


def urgency(task: Task) -> tuple[int, TaskId]:
    """Ids are given in order of submission."""
    return task.priority, task.id


class Twin:
    """What the commands imply: what each device holds and runs, and what became of each element of each region."""

    def __init__(self) -> None:
        self.stays: dict[DeviceId, Stay] = {}
        self.regions: dict[TaskId, Cells] = {}
        """Those that are unfinished."""
        self.started: set[TaskId] = set()
        self.useless: dict[TaskId, Task] = {}
        """Running tasks that can bring nothing more: each is to be cancelled in the same breath."""
        self.orphaned: list[tuple[TaskId, Rectangle]] = []
        self.hedged: list[tuple[TaskId, Rectangle]] = []
        self.dead: set[OperandId] = set()
        """Released, and nobody asked for them since."""

    # -------------------------------------------------------------------------------------------- what events mean

    def leave(self, name: DeviceId) -> None:
        self.stays.pop(name, None)

    def submit(self, task: Task) -> None:
        self.dead -= {operand.id for operand in task.operands}
        if task.region is None:
            self.regions[task.id] = np.full((task.rows, task.cols), MISSING, dtype=np.int64)
        elif not self.is_wanted(task):
            return
        stay = self.stays.get(task.device)
        if stay is not None and stay.can_ever_fit(task):
            stay.waiting.append(task)

    def cancel_sent(self, name: DeviceId, id: TaskId, unsent: Iterable[OperandId]) -> None:
        stay = self.stays.get(name)
        if stay is None or id not in stay.ghosts:
            return
        stay.drop(stay.ghosts[id])
        stay.past.add(id)
        for operand in unsent:
            del stay.held[operand]
            stay.lacking.add(operand)

    def abandon(self, id: TaskId) -> None:
        if self.regions.pop(id, None) is not None:
            self.withdraw_useless()

    def fail(self, task: Task) -> None:
        self.useless[task.id] = task

    # -------------------------------------------------------------------------------------------- what commands mean

    def replay(self, command: Command) -> None:
        match command:
            case Start(task, missing):
                self._start(task, missing)
            case Cancel(task):
                assert self.useless.pop(task.id) == task, "what can still bring something is not cancelled"
                stay = self.stays[task.device]
                stay.ghosts[task.id] = stay.running.pop(task.id)
            case Resend(device, operands):
                self._resend(self.stays[device], operands)
            case Forget(device, operands):
                self._forget(self.stays[device], operands)
            case Accept(task, part, fresh, finished):
                self._accept(task, part, fresh, finished)
            case Orphan(task, missing, finished):
                self._orphan(task, missing, finished)
            case Hedge(task, missing):
                assert missing
                assert self.stays[task.device].is_late
                assert task.id in self.stays[task.device].running
                self.hedged += [(region_of(task), part.moved(task.top, task.left)) for part in missing]
            case Late(device):
                assert not self.stays[device].is_late
                assert self.stays[device].running
                self.stays[device].is_late = True
            case Back(device):
                assert self.stays[device].is_late
                self.stays[device].is_late = False
            case Overdue(device, task, waited_s, expected_s):
                assert task.id in self.stays[device].running
                assert waited_s > DEADLINE_S + expected_s
            case Refuse():
                pass
        for stay in self.stays.values():
            assert stay.used_bytes <= stay.memory_bytes, "no cap is ever exceeded; ghosts count"

    def settle(self) -> None:
        """What holds once all commands of an event are done."""
        assert not self.useless, "a task that can bring nothing is cancelled at once"
        live = [task for stay in self.stays.values() for task in stay.live]
        for id, cells in self.regions.items():
            covered = np.zeros_like(cells)
            healthy = np.zeros_like(cells)
            for task in live:
                if region_of(task) == id:
                    covered[span(task.area)] += 1
                    healthy[span(task.area)] += not self.stays[task.device].is_late
            assert (covered[cells == MISSING] > 0).all(), "someone has what is missing"
            for region, part in self.orphaned:
                assert region != id or not covered[span(part)].any(), "nobody has what is orphaned"
            for region, part in self.hedged:
                if region == id:
                    assert (cells[span(part)] == MISSING).all()
                    assert not healthy[span(part)].any(), "what a healthy device has is not hedged"
        for stay in self.stays.values():
            assert not stay.lacking, "what was unsent is sent again or forgotten"
        self.orphaned.clear()
        self.hedged.clear()

    def _start(self, task: Task, missing: tuple[OperandId, ...]) -> None:
        stay = self.stays[task.device]
        assert task.id not in self.started, "no task runs twice"
        self.started.add(task.id)
        assert task == min(stay.waiting, key=urgency), "the most urgent starts first"
        stay.waiting.remove(task)
        stay.running[task.id] = task
        assert len(stay.placed) <= IN_FLIGHT
        lacking = [operand for operand in task.operands if operand.id not in stay.held]
        assert [operand.id for operand in lacking] == list(missing), "what it lacks is sent, what it holds is not"
        stay.held.update({operand.id: operand.bytes for operand in lacking})
        stay.owed[task.id] = np.ones((task.rows, task.cols), dtype=np.bool_)
        stay.sent_with[task.id] = missing

    def _resend(self, stay: Stay, operands: tuple[OperandId, ...]) -> None:
        assert len(set(operands)) == len(operands) > 0
        assert stay.live_needs.issuperset(operands), "only what a task needs is sent again"
        for operand in operands:
            stay.lacking.remove(operand)
            stay.held[operand] = next(known.bytes for known in OPERANDS if known.id == operand)

    def _forget(self, stay: Stay, operands: tuple[OperandId, ...]) -> None:
        assert len(set(operands)) == len(operands) > 0
        assert stay.live_needs.isdisjoint(operands), "what a running task needs is not forgotten"
        for operand in operands:
            if operand in stay.lacking:
                stay.lacking.remove(operand)
            else:
                del stay.held[operand]

    def _accept(self, task: Task, part: Rectangle, fresh: tuple[Rectangle, ...], finished: bool) -> None:
        stay, id = self.stays[task.device], region_of(task)
        assert task.id in stay.running, "a cancelled task is never answered"
        cells = self.regions[id]
        wanted = np.zeros_like(cells)
        wanted[span(part.moved(task.top, task.left))] = 1
        wanted[cells != MISSING] = 0
        for piece in fresh:
            at = span(piece.moved(task.top, task.left))
            assert cells[at].size == piece.area > 0
            assert (wanted[at] == 1).all(), "every element once, and only what came"
            wanted[at] = 0
            cells[at] = TAKEN
        assert not wanted.any(), "all that is new is taken"
        self.returned(task, part)
        assert finished == (cells != MISSING).all()
        if finished:
            del self.regions[id]
        self.withdraw_useless()

    def _orphan(self, task: Task, missing: tuple[Rectangle, ...], finished: bool) -> None:
        cells = self.regions[region_of(task)]
        assert missing
        for part in missing:
            at = span(part.moved(task.top, task.left))
            assert 0 <= part.top < part.bottom <= task.rows
            assert 0 <= part.left < part.right <= task.cols
            assert (cells[at] == MISSING).all(), "what came, or was orphaned before, is not orphaned"
            cells[at] = ORPHANED
            self.orphaned.append((region_of(task), part.moved(task.top, task.left)))
        stay = self.stays.get(task.device)
        if stay is not None and task in stay.waiting:  # its line was moved
            stay.waiting.remove(task)
        assert finished == (cells != MISSING).all()
        if finished:
            del self.regions[region_of(task)]

    # -------------------------------------------------------------------------------------------- bookkeeping

    def returned(self, task: Task, part: Rectangle) -> None:
        stay = self.stays[task.device]
        stay.owed[task.id][span(part)] = False
        if not stay.owed[task.id].any():
            stay.drop(task)

    def is_wanted(self, task: Task) -> bool:
        cells = self.regions.get(region_of(task))
        return cells is not None and bool((cells[span(task.area)] == MISSING).any())

    def withdraw_useless(self) -> None:
        for stay in self.stays.values():
            stay.waiting = [task for task in stay.waiting if self.is_wanted(task)]
            self.useless.update({id: task for id, task in stay.running.items() if not self.is_wanted(task)})

    def owes(self, name: DeviceId, task: Task, part: Rectangle) -> bool:
        inside = 0 <= part.top < part.bottom <= task.rows and 0 <= part.left < part.right <= task.cols
        owed = self.stays[name].owed.get(task.id) if name in self.stays else None
        return inside and owed is not None and bool(owed[span(part)].all())

    def running(self) -> list[Task]:
        return [task for stay in self.stays.values() for task in stay.running.values()]


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.twin = Ledger(), Twin()
        self.now, self.ticked = 0.0, 0.0
        self.tasks: list[Task] = []
        self.cancels: list[tuple[Task, tuple[OperandId, ...]]] = []
        """To be sent some time, with what was sent for them; of devices that left, too."""
        self.answers: list[Cells] = []
        """How often each element of each product was taken."""
        self.places: dict[TaskId, tuple[int, int, int]] = {}
        """region -> product, and where it lies in it"""
        self.parked: list[tuple[Task, Rectangle]] = []
        self.given_up: set[int] = set()
        self.depth = 0
        self.data: st.DataObject | None = None

    def draw(self, strategy: st.SearchStrategy[T], otherwise: T) -> T:
        return otherwise if self.data is None else self.data.draw(strategy)

    # -------------------------------------------------------------------------------------------- the driver

    def tell(self, event: Event) -> list[Command]:
        sent = {id: missing for stay in self.twin.stays.values() for id, missing in stay.sent_with.items()}
        if isinstance(event, TasksSubmitted) and not self.twin.regions.keys() - {task.id for task in event.tasks}:
            self.ticked = self.now
        commands = self.ledger.handle(event, self.now)
        for command in commands:
            self.twin.replay(command)
            if isinstance(command, Accept):
                product, top, left = self.places[region_of(command.task)]
                for fresh in command.fresh:
                    at = span(fresh.moved(top + command.task.top, left + command.task.left))
                    self.answers[product][at] += 1
            elif isinstance(command, Start):
                sent[command.task.id] = command.missing
            elif isinstance(command, Cancel):
                self.cancels.append((command.task, sent[command.task.id]))
        self.note_moved_lines()
        self.twin.settle()
        self.ledger.check()
        self.depth += 1
        for command in commands:
            if isinstance(command, Orphan):
                for part in command.missing:
                    self.plan_again(command.task, part)
        for command in commands:
            if isinstance(command, Hedge):
                for part in command.missing:
                    self.hedge(command.task, part)
        self.depth -= 1
        return commands

    def note_moved_lines(self) -> None:
        """Of a late device's line, what others have all of vanishes without a word; but only with all of the line."""
        for name, stay in self.twin.stays.items():
            if stay.is_late and self.ledger.unfinished(name) == len(stay.running):
                stay.waiting = []

    def new_task(self, device: DeviceId, rows: int, cols: int, *, of: Task | None = None, at: Rectangle) -> Task:
        small = [OPERANDS[0]]
        operands = st.lists(st.sampled_from(OPERANDS), min_size=1, max_size=3, unique=True)
        task = Task(
            id=TaskId(len(self.tasks) + 1),
            device=device,
            priority=self.draw(st.integers(0, 3), 0),
            operands=tuple(self.draw(operands if of is None else st.just(list(of.operands)) | operands, small)),
            rows=rows,
            cols=cols,
            result_bytes=self.draw(st.integers(0, 20), 0),
            flops=self.draw(st.sampled_from([0.0, 1.0, 10.0, 50.0]), 1.0),
            up_bytes=rows * cols,
            region=None if of is None else region_of(of),
            top=0 if of is None else of.top + at.top,
            left=0 if of is None else of.left + at.left,
        )
        self.tasks.append(task)
        return task

    def submit(self, tasks: Sequence[Task]) -> list[Command]:
        for task in tasks:
            self.twin.submit(task)
        return self.tell(TasksSubmitted(tuple(tasks)))

    def plan_again(self, lost: Task, part: Rectangle) -> None:
        """As regions of their own, in one or several pieces, here or there; or later."""
        there = sorted(self.twin.stays)
        if not there or self.depth > 3 or self.draw(st.booleans(), True):
            self.parked.append((lost, part))
            return
        product, top, left = self.places[region_of(lost)]
        new: list[Task] = []
        for piece in self.pieces(part):
            task = self.new_task(self.draw(st.sampled_from(there), there[0]), piece.rows, piece.cols, at=piece)
            self.places[task.id] = (product, top + lost.top + piece.top, left + lost.left + piece.left)
            new.append(task)
        self.submit(new)

    def hedge(self, late: Task, part: Rectangle) -> None:
        """In one or several pieces, on whoever is not late, or is gone by now; or not at all."""
        others = [name for name, stay in self.twin.stays.items() if not stay.is_late]
        others += [name for name in NAMES if name not in self.twin.stays][:1]
        if not others or self.depth > 3 or self.draw(st.integers(0, 3), 0) == 3:
            return
        self.submit(
            [
                self.new_task(self.draw(st.sampled_from(others), others[0]), piece.rows, piece.cols, of=late, at=piece)
                for piece in self.pieces(part)
            ]
        )

    def pieces(self, part: Rectangle) -> list[Rectangle]:
        row = self.draw(st.integers(part.top, part.bottom), part.bottom)
        col = self.draw(st.integers(part.left, part.right), part.right)
        cut = [
            Rectangle(top, bottom, left, right)
            for top, bottom in pairwise((part.top, row, part.bottom))
            for left, right in pairwise((part.left, col, part.right))
        ]
        return [piece for piece in cut if piece.area > 0]

    # -------------------------------------------------------------------------------------------- devices

    @initialize(memory=st.lists(st.integers(60, 250), min_size=2, max_size=4))
    def some_are_there(self, memory: list[int]) -> None:
        for name, size in zip(NAMES, memory, strict=False):
            self.joins(name, size)

    @rule(name=st.sampled_from(NAMES), memory=st.integers(1, 150) | st.integers(60, 250))
    def joins(self, name: DeviceId, memory: int) -> None:
        if name not in self.twin.stays:
            self.twin.stays[name] = Stay(memory)
            assert self.tell(DeviceJoined(name, memory, PACE)) == []

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def leaves(self, name: DeviceId, data: st.DataObject) -> None:
        self.data = data
        self.part(name)

    def part(self, name: DeviceId) -> None:
        self.twin.leave(name)
        assert all(isinstance(command, Orphan) for command in self.tell(DeviceLeft(name)))

    @rule(name=st.sampled_from(NAMES))
    def answers_a_probe(self, name: DeviceId) -> None:
        assert all(isinstance(command, Back) for command in self.tell(DeviceAnswered(name)))

    @rule(name=st.sampled_from(NAMES), rate=st.sampled_from([30.0, 100.0, 300.0]))
    def is_measured(self, name: DeviceId, rate: float) -> None:
        assert self.tell(PaceMeasured(name, Pace(rate, rate, rate, 0.0071))) == []

    # -------------------------------------------------------------------------------------------- tasks

    @rule(data=st.data(), count=st.integers(1, 8))
    def products_come(self, data: st.DataObject, count: int) -> None:
        self.data = data
        new: list[Task] = []
        for _ in range(count):
            rows, cols = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
            name = data.draw(st.sampled_from(sorted(self.twin.stays) or NAMES) | st.sampled_from(NAMES))
            task = self.new_task(name, rows, cols, at=Rectangle(0, rows, 0, cols))
            self.places[task.id] = (len(self.answers), 0, 0)
            self.answers.append(np.zeros((rows, cols), dtype=np.int64))
            new.append(task)
        there = self.twin.stays
        hopeless = [task.id for task in new if task.device not in there or not there[task.device].can_ever_fit(task)]
        commands = self.submit(new)
        assert [command.task.id for command in commands if isinstance(command, Orphan)] == hopeless

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def what_was_parked_is_planned(self, data: st.DataObject) -> None:
        self.data = data
        parked, self.parked = self.parked, []
        for lost, part in parked:
            self.plan_again(lost, part)

    @precondition(lambda self: self.twin.regions)
    @rule(data=st.data())
    def a_product_is_given_up(self, data: st.DataObject) -> None:
        """With all that became of it, and something that is long gone."""
        self.data = data
        product = self.places[data.draw(st.sampled_from(sorted(self.twin.regions)))][0]
        self.given_up.add(product)
        self.parked = [(lost, part) for lost, part in self.parked if self.places[region_of(lost)][0] != product]
        regions = [id for id, place in self.places.items() if place[0] == product]
        for id in regions:
            self.twin.abandon(id)
        commands = self.tell(RegionsAbandoned(tuple(regions)))
        assert all(isinstance(command, Cancel | Start | Forget) for command in commands)

    @rule(operands=st.lists(st.sampled_from(OPERANDS), min_size=1, max_size=4, unique=True))
    def operands_are_released(self, operands: list[Operand]) -> None:
        stays = self.twin.stays.values()
        wanted = {operand.id for stay in stays for task in stay.waiting for operand in task.operands}
        released = {operand.id for operand in operands}
        self.twin.dead |= released - wanted
        self.tell(OperandsReleased(tuple(sorted(released))))

    # -------------------------------------------------------------------------------------------- results

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def any_result_arrives(self, data: st.DataObject) -> None:
        """From anyone, of any task, of any rectangle: far too much, twice, stale, empty, outside, inside out."""
        self.data = data
        task = data.draw(st.sampled_from(self.twin.running() or self.tasks) | st.sampled_from(self.tasks))
        name = data.draw(st.just(task.device) | st.sampled_from(NAMES))
        top, left = data.draw(st.integers(-1, task.rows)), data.draw(st.integers(-1, task.cols))
        height, width = data.draw(st.integers(-2, 4)), data.draw(st.integers(-2, 4))
        self.result(name, task, Rectangle(top, top + height, left, left + width))

    @precondition(lambda self: self.twin.running())
    @rule(data=st.data(), repeat=st.booleans())
    def a_right_result_arrives(self, data: st.DataObject, repeat: bool) -> None:
        self.data = data
        running = self.twin.running()
        task = data.draw(st.sampled_from(self.contested() or running) | st.sampled_from(running))
        most = self.largest_owed(task, data.draw(st.integers(0, 24)))
        height, width = data.draw(st.integers(1, most.rows)), data.draw(st.integers(1, most.cols))
        part = most._replace(bottom=most.top + height, right=most.left + width)
        self.result(task.device, task, part)
        if repeat and task.id not in self.twin.stays[task.device].ghosts:
            assert not self.result(task.device, task, part)

    @precondition(lambda self: self.twin.running())
    @rule(data=st.data())
    def the_rest_of_a_task_arrives(self, data: st.DataObject) -> None:
        self.data = data
        self.finish(data.draw(st.sampled_from(self.twin.running())))

    @precondition(lambda self: self.cancels)
    @rule(data=st.data())
    def a_result_of_a_cancelled_task_arrives(self, data: st.DataObject) -> None:
        self.data = data
        task, _ = data.draw(st.sampled_from(self.cancels))
        assert not self.result(task.device, task, task.whole)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def a_task_fails(self, data: st.DataObject) -> None:
        self.data = data
        task = data.draw(st.sampled_from(self.twin.running() or self.tasks) | st.sampled_from(self.tasks))
        name = data.draw(st.just(task.device) | st.sampled_from(NAMES))
        stay = self.twin.stays.get(name)
        is_its_own = stay is not None and task.id in stay.running
        if is_its_own:
            self.twin.fail(task)
        commands = self.tell(TaskFailed(name, task.id))
        assert [command.task.id for command in commands if isinstance(command, Cancel)] == [task.id] * is_its_own
        assert any(isinstance(command, Refuse) for command in commands) == (not is_its_own)

    @precondition(lambda self: self.cancels)
    @rule(data=st.data())
    def a_cancellation_is_sent(self, data: st.DataObject) -> None:
        self.data = data
        index = data.draw(st.integers(0, len(self.cancels) - 1))
        task, sent = self.cancels.pop(index)
        unsent = tuple(data.draw(st.lists(st.sampled_from(sent), unique=True))) if sent else ()
        self.bury(task, unsent)

    def bury(self, task: Task, unsent: tuple[OperandId, ...]) -> None:
        """The device may have left since, and may have come again."""
        stay = self.twin.stays.get(task.device)
        is_there = stay is not None and task.id in stay.ghosts
        running = stay.running.values() if stay is not None else ()
        live = {operand.id for other in running for operand in other.operands}
        self.twin.cancel_sent(task.device, task.id, unsent)
        commands = self.tell(CancelSent(task.device, task.id, unsent))
        resent = {operand for command in commands if isinstance(command, Resend) for operand in command.operands}
        if is_there:
            assert resent >= set(unsent) & live, "what was unsent and is needed is sent again"
        else:
            assert commands == []

    def result(self, name: DeviceId, task: Task, part: Rectangle) -> bool:
        """Whether something of it was new."""
        stay = self.twin.stays.get(name)
        is_owed = self.twin.owes(name, task, part)
        is_running = stay is not None and task.id in stay.running
        cells = self.twin.regions.get(region_of(task))
        area = part.moved(task.top, task.left)
        is_new = is_owed and is_running and cells is not None and bool((cells[span(area)] == MISSING).any())
        if is_owed and is_running and not is_new:
            self.twin.returned(task, part)
        is_fault = not (is_owed or (stay is not None and task.id in stay.past))
        commands = self.tell(ResultArrived(name, task.id, part))
        first = commands[0]
        if is_new:
            assert isinstance(first, Accept)
            assert (first.task, first.part) == (task, part)
        else:
            assert isinstance(first, Refuse)
            assert (first.device, first.is_fault) == (name, is_fault)
        return is_new

    def contested(self) -> list[Task]:
        """Running tasks of regions that others run a part of, too."""
        regions = Counter(map(region_of, self.twin.running()))
        return [task for task in self.twin.running() if regions[region_of(task)] > 1]

    def largest_owed(self, task: Task, start: int) -> Rectangle:
        """A rectangle grown from some owed element, right and then down."""
        owed = self.twin.stays[task.device].owed[task.id]
        elements: list[list[int]] = np.argwhere(owed).tolist()
        top, left = elements[start % len(elements)]
        right, bottom = left, top
        while right < task.cols and owed[top, right]:
            right += 1
        while bottom < task.rows and owed[bottom, left:right].all():
            bottom += 1
        return Rectangle(top, bottom, left, right)

    def finish(self, task: Task) -> None:
        stay = self.twin.stays[task.device]
        while task.id in stay.running:
            self.result(task.device, task, self.largest_owed(task, 0))

    # -------------------------------------------------------------------------------------------- time

    @rule(data=st.data(), count=st.sampled_from([1, 5, 20, 80]), step=st.sampled_from([0.05, TICK_S, 2 * TICK_S]))
    def time_passes(self, data: st.DataObject, count: int, step: float) -> None:
        self.data = data
        for _ in range(count):
            self.tick(step)

    @precondition(lambda self: len(self.twin.stays) > 1 and self.twin.running())
    @rule(data=st.data())
    def time_passes_until_something_is_hedged(self, data: st.DataObject) -> None:
        self.data = data
        for _ in range(80):
            if any(isinstance(command, Hedge) for command in self.tick(TICK_S)):
                break

    @rule(data=st.data(), step=st.sampled_from([0.3, 1.0, 7.0, 60.0, 5000.0]))
    def the_server_stalls(self, data: st.DataObject, step: float) -> None:
        """However long it took, for devices it was no longer than two ticks."""
        self.data = data
        other = copy.deepcopy(self.ledger).handle(Tick(), max(self.now, self.ticked + 2 * TICK_S))
        commands = self.tick(max(self.now + step - self.ticked, 0.0) if self.now > self.ticked else step)
        for kind in (Late, Overdue):
            blamed, expected = ([c.device for c in some if isinstance(c, kind)] for some in (commands, other))
            assert blamed == expected

    def tick(self, step: float) -> list[Command]:
        self.now = self.now + step
        self.ticked = self.now
        commands = self.tell(Tick())
        for command in commands:
            if isinstance(command, Overdue) and self.draw(st.integers(0, 3), 1):
                self.part(command.device)
        return commands

    # -------------------------------------------------------------------------------------------- laws

    @invariant()
    def the_twin_agrees(self) -> None:
        assert self.ledger.is_busy == bool(self.twin.regions)
        for name, stay in self.twin.stays.items():
            assert set(self.ledger.tasks(name)) == {task.id for task in stay.placed}
            assert self.ledger.unfinished(name) == len(stay.live)
            held = {operand.id for operand in OPERANDS if self.ledger.holds(name, operand.id)}
            assert held == set(stay.held)
            needed = {operand.id for operand in OPERANDS if self.ledger.needs(name, operand.id)}
            assert needed == {operand.id for task in stay.running.values() for operand in task.operands}
            assert held & self.twin.dead <= stay.needed, "released operands go with the last task that needs them"

    @invariant()
    def what_is_next_in_line_starts_when_something_ends_and_there_is_room(self) -> None:
        assert not any(stay.could_start() for stay in self.twin.stays.values())

    def teardown(self) -> None:
        """Once everyone did what is left to do, everything is there once, and nothing remains."""
        self.data = None
        self.twin.stays[LAST] = Stay(10**6)
        self.tell(DeviceJoined(LAST, 10**6, PACE))
        while self.cancels or self.twin.regions or self.parked:
            while self.cancels:
                task, sent = self.cancels.pop()
                self.bury(task, sent)
            for task in self.twin.running():
                if task.device in self.twin.stays and task.id in self.twin.stays[task.device].running:
                    self.finish(task)
            parked, self.parked = self.parked, []
            new: list[Task] = []
            for lost, part in parked:
                product, top, left = self.places[region_of(lost)]
                task = self.new_task(LAST, part.rows, part.cols, at=part)
                self.places[task.id] = (product, top + lost.top + part.top, left + lost.left + part.left)
                new.append(task)
            self.submit(new)
        for product, answers in enumerate(self.answers):
            assert (answers <= 1 if product in self.given_up else answers == 1).all()
        assert not self.ledger.is_busy
        assert all(self.ledger.unfinished(name) == 0 for name in self.twin.stays)
        self.tell(OperandsReleased(tuple(operand.id for operand in OPERANDS)))
        assert not any(stay.held or stay.placed for stay in self.twin.stays.values())


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


# ------------------------------------------------------------------------------------------------ examples

ANN, BOB, EVE, DAN = NAMES
WHOLE, TOP, BOTTOM = Rectangle(0, 2, 0, 3), Rectangle(0, 1, 0, 3), Rectangle(1, 2, 0, 3)
QUICK = Pace(flops_per_s=1e9, down_bytes_per_s=1e9, up_bytes_per_s=1e9, latency_s=0.01)


def operand(number: int, size: int) -> Operand:
    return Operand(id=OperandId(number), bytes=size, wire_bytes=size)


X, W = operand(1, 10), operand(2, 20)


def task(
    number: int,
    *operands: Operand,
    device: DeviceId = ANN,
    priority: int = 1,
    result_bytes: int = 4,
    seconds: float = 0.0,
    of: int | None = None,
    at: Rectangle = WHOLE,
    is_bound: bool = False,
) -> Task:
    """Two rows of three; or a hedge of a region, or of a part of it. Takes a quick device so many seconds."""
    return Task(
        id=TaskId(number),
        device=device,
        priority=priority,
        operands=operands or (X,),
        rows=at.rows,
        cols=at.cols,
        result_bytes=result_bytes,
        flops=seconds * 1e9,
        region=None if of is None else TaskId(of),
        top=at.top,
        left=at.left,
        is_bound=is_bound,
    )


class Server:
    """A ledger with a clock; each example advances it."""

    def __init__(self, **memory_bytes: int) -> None:
        self.ledger, self.now = Ledger(), 0.0
        for name, size in memory_bytes.items():
            assert self.tell(DeviceJoined(DeviceId(name), size, QUICK)) == []

    def tell(self, event: Event) -> list[Command]:
        commands = self.ledger.handle(event, self.now)
        self.ledger.check()
        return commands

    def submit(self, *tasks: Task) -> list[Command]:
        return self.tell(TasksSubmitted(tasks))

    def result(self, task: Task, part: Rectangle | None = None) -> list[Command]:
        return self.tell(ResultArrived(task.device, task.id, part or task.whole))

    def wait(self, seconds: float) -> list[Command]:
        """Tick after tick; what was said on the way, deadlines once."""
        said: list[Command] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + TICK_S, end)
            said += self.tell(Tick())
            if any(isinstance(command, Overdue) for command in said):
                return said
        return said


def taken(task: Task, part: Rectangle = WHOLE, *, finished: bool = True) -> Accept:
    return Accept(task, part, (part,), finished)


def only(commands: list[Command], kind: type[T]) -> T:
    (found,) = (command for command in commands if isinstance(command, kind))
    return found


# ------------------------------------------------------------------------------------------------ room and turn


def test_an_operand_is_sent_once_and_then_shared() -> None:
    server = Server(ann=100)
    one, two = task(1, X, W), task(2, W)
    assert server.submit(one, two) == [Start(one, (X.id, W.id)), Start(two, ())]
    assert server.result(one) == [taken(one)]
    three = task(3, X, W)
    assert server.submit(three) == [Start(three, ())], "it stays after its task"


def test_the_more_urgent_of_those_that_wait_starts_first() -> None:
    server = Server(ann=100)
    running = [task(number, X) for number in range(IN_FLIGHT)]
    assert len(server.submit(*running)) == IN_FLIGHT
    later, sooner = task(50, X, priority=2), task(51, X, priority=0)
    assert server.submit(later, sooner) == []
    assert server.result(running[0]) == [taken(running[0]), Start(sooner, ())]


def test_the_least_recently_used_operand_makes_room() -> None:
    server = Server(ann=34)
    old, new = operand(3, 10), operand(4, 10)
    for number, needed in ((1, old), (2, new), (3, old)):  # `old` was used last
        server.submit(done := task(number, needed))
        server.result(done)
    big = task(4, operand(5, 20))
    assert server.submit(big) == [Forget(ANN, (new.id,)), Start(big, (OperandId(5),))]


def test_a_task_waits_until_what_is_pinned_leaves_room_for_it() -> None:
    server = Server(ann=40)
    first, second = task(1, W), task(2, operand(3, 20))
    assert server.submit(first, second) == [Start(first, (W.id,))]
    assert server.result(first) == [taken(first), Forget(ANN, (W.id,)), Start(second, (OperandId(3),))]


def test_a_released_operand_goes_when_the_last_task_that_needs_it_ends() -> None:
    server = Server(ann=100)
    one, two = task(1, X, W), task(2, X)
    server.submit(one, two)
    assert server.tell(OperandsReleased((X.id,))) == []
    assert server.result(one) == [taken(one)]
    assert server.result(two) == [taken(two), Forget(ANN, (X.id,))]
    assert server.tell(OperandsReleased((W.id,))) == [Forget(ANN, (W.id,))]


def test_a_withdrawn_task_no_longer_bars_the_way_of_those_behind_it() -> None:
    server = Server(ann=40)
    running, large, small = task(1, X), task(2, operand(3, 36)), task(3, X)
    assert server.submit(running, large, small) == [Start(running, (X.id,))], "in line, nobody overtakes"
    assert server.tell(RegionsAbandoned((large.id,))) == [Start(small, ())]


def test_a_device_that_has_nothing_to_do_has_no_backlog() -> None:
    server = Server(ann=100)
    server.submit(long := task(1, X, seconds=100.0))
    assert server.ledger.backlog_s(ANN, server.now) == pytest.approx(100.0, rel=0.01)
    assert server.tell(RegionsAbandoned((long.id,))) == [Cancel(long)]
    server.tell(CancelSent(ANN, long.id))
    assert server.ledger.tasks(ANN) == {}.keys()
    assert server.ledger.backlog_s(ANN, server.now) == 0.0


# ------------------------------------------------------------------------------------------------ departure


def test_a_lost_devices_blocks_are_orphaned_at_once_and_what_is_finished_is_kept() -> None:
    server = Server(ann=34, bob=100)
    begun, waiting, elsewhere = task(1, X, W), task(2, operand(3, 25)), task(3, X, device=BOB)
    server.submit(begun, waiting, elsewhere)
    assert server.result(begun, TOP) == [taken(begun, TOP, finished=False)]
    assert server.tell(DeviceLeft(ANN)) == [Orphan(begun, (BOTTOM,), True), Orphan(waiting, (WHOLE,), True)]
    assert server.tell(DeviceLeft(ANN)) == []
    assert server.result(elsewhere) == [taken(elsewhere)]
    assert not server.ledger.is_busy


def test_what_surrounds_a_rectangle_is_still_missing() -> None:
    server = Server(ann=34)
    server.submit(one := task(1, X))
    server.result(one, Rectangle(0, 1, 1, 2))
    orphan = only(server.tell(DeviceLeft(ANN)), Orphan)
    assert set(orphan.missing) == {Rectangle(0, 1, 0, 1), Rectangle(0, 1, 2, 3), Rectangle(1, 2, 0, 3)}


def test_a_task_for_a_device_that_is_gone_or_too_small_is_an_orphan_at_once() -> None:
    server = Server(ann=33)
    gone, large, fine = task(1, X, device=BOB), task(2, X, W), task(3, X)
    assert server.submit(gone, large, fine) == [
        Start(fine, (X.id,)),
        Orphan(gone, (WHOLE,), True),
        Orphan(large, (WHOLE,), True),
    ]


def test_a_device_that_returns_starts_with_nothing() -> None:
    server = Server(ann=100)
    server.submit(one := task(1, X))
    server.tell(RegionsAbandoned((one.id,)))
    server.tell(DeviceLeft(ANN))
    assert not server.ledger.holds(ANN, X.id)
    server.tell(DeviceJoined(ANN, 100, QUICK))
    assert server.tell(CancelSent(ANN, one.id, (X.id,))) == [], "that was about its former stay"
    again = task(2, X)
    assert server.submit(again) == [Start(again, (X.id,))]


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_result_is_taken_once_and_only_from_the_one_who_has_the_task() -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X))
    for name, part in ((BOB, WHOLE), (EVE, WHOLE), (ANN, Rectangle(0, 3, 0, 3)), (ANN, Rectangle(1, 1, 0, 3))):
        assert only(server.tell(ResultArrived(name, one.id, part)), Refuse).is_fault
    assert server.result(one) == [taken(one)]
    assert only(server.result(one), Refuse).is_fault


def test_a_rectangle_turned_inside_out_is_refused() -> None:
    server = Server(ann=100)
    server.submit(one := task(1, X))
    assert only(server.result(one, Rectangle(2, 0, 3, 0)), Refuse).is_fault
    assert server.result(one) == [taken(one)]


def test_a_failed_task_comes_back_and_the_device_goes_on() -> None:
    server = Server(ann=100)
    one, two = task(1, X), task(2, X)
    server.submit(one, two)
    assert server.tell(TaskFailed(ANN, one.id)) == [Cancel(one), Orphan(one, (WHOLE,), True)]
    assert server.tell(CancelSent(ANN, one.id)) == []
    assert server.result(two) == [taken(two)]


def test_who_speaks_of_a_cancelled_task_is_merely_too_late() -> None:
    server = Server(ann=100)
    server.submit(one := task(1, X), task(2, X))
    server.tell(RegionsAbandoned((one.id,)))
    assert not only(server.result(one), Refuse).is_fault
    assert not only(server.tell(TaskFailed(ANN, one.id)), Refuse).is_fault
    server.tell(CancelSent(ANN, one.id))  # sent, but the device's word may have crossed it
    assert not only(server.result(one), Refuse).is_fault
    assert not only(server.tell(TaskFailed(ANN, one.id)), Refuse).is_fault


# ------------------------------------------------------------------------------------------------ ghosts


def test_a_cancelled_task_keeps_its_place_until_the_cancellation_is_sent() -> None:
    server = Server(ann=40)
    first, second = task(1, W), task(2, operand(3, 20))
    server.submit(first, second)
    assert server.tell(RegionsAbandoned((first.id,))) == [Cancel(first)]
    assert server.tell(CancelSent(ANN, first.id)) == [Forget(ANN, (W.id,)), Start(second, (OperandId(3),))]


def test_what_was_unsent_is_forgotten_and_sent_with_who_needs_it_next() -> None:
    server = Server(ann=100)
    server.submit(one := task(1, X, W))
    server.tell(RegionsAbandoned((one.id,)))
    assert server.tell(CancelSent(ANN, one.id, (W.id,))) == [Forget(ANN, (W.id,))]
    two = task(2, X, W)
    assert server.submit(two) == [Start(two, (W.id,))]


def test_what_was_unsent_and_another_runs_on_is_sent_again() -> None:
    server = Server(ann=100)
    one, two = task(1, X, W), task(2, W)
    assert server.submit(one, two) == [Start(one, (X.id, W.id)), Start(two, ())]
    server.tell(RegionsAbandoned((one.id,)))
    assert server.tell(CancelSent(ANN, one.id, (X.id, W.id))) == [Resend(ANN, (W.id,)), Forget(ANN, (X.id,))]
    assert server.result(two) == [taken(two)]
    assert server.ledger.holds(ANN, W.id)


def test_what_was_unsent_is_not_sent_again_for_those_who_are_cancelled_too() -> None:
    """A slow device whose six tasks on W are all abandoned while W is on its way should not get W after all."""
    server = Server(ann=100)
    one, two = task(1, W), task(2, W)
    server.submit(one, two)
    assert server.tell(RegionsAbandoned((one.id, two.id))) == [Cancel(one), Cancel(two)]
    assert not any(isinstance(command, Resend) for command in server.tell(CancelSent(ANN, one.id, (W.id,))))
    server.tell(CancelSent(ANN, two.id))
    three = task(3, W)
    assert server.submit(three) == [Start(three, (W.id,))], "it never got there"


# ------------------------------------------------------------------------------------------------ hedges


def hedged(*pieces: Task, seconds: float = 0.0) -> tuple[Server, Task]:
    """Ann is late with a task; the others got these hedges of it."""
    server = Server(ann=100, bob=100, eve=100)
    server.submit(slow := task(1, X, seconds=seconds))
    assert server.wait(LATE_S + 5 * (seconds + 0.01)) == [Late(ANN), Hedge(slow, (WHOLE,))]
    assert [c.task for c in server.submit(*pieces) if isinstance(c, Start)] == list(pieces)
    return server, slow


def test_the_first_result_wins_and_the_others_are_cancelled() -> None:
    quick = task(2, X, device=BOB, of=1)
    server, slow = hedged(quick)
    assert server.result(quick) == [taken(quick), Cancel(slow)]
    assert not server.ledger.is_busy
    server, slow = hedged(quick)
    assert server.result(slow) == [taken(slow), Cancel(quick), Back(ANN)]
    assert not only(server.result(quick), Refuse).is_fault


def test_a_hedge_and_a_straggler_that_overlap_are_accepted_to_the_element() -> None:
    left = Rectangle(0, 2, 0, 2)
    quick = task(2, X, device=BOB, of=1, at=left)
    server, slow = hedged(quick)
    assert server.result(slow, TOP) == [taken(slow, TOP, finished=False)]
    accept = only(server.result(quick), Accept)
    assert accept.fresh == (Rectangle(1, 2, 0, 2),)
    assert not accept.finished
    accept, *rest = server.result(slow, BOTTOM)
    assert accept == Accept(slow, BOTTOM, (Rectangle(1, 2, 2, 3),), True)
    assert rest == [Back(ANN)]


def test_who_brings_what_another_brought_before_is_refused_without_blame() -> None:
    quick = task(2, X, device=BOB, of=1, at=TOP)
    server, slow = hedged(quick)
    assert server.result(quick) == [taken(quick, quick.whole, finished=False)]
    assert not only(server.result(slow, TOP), Refuse).is_fault
    assert server.result(slow, BOTTOM) == [taken(slow, BOTTOM), Back(ANN)]


def test_a_straggler_whose_rest_others_brought_is_cancelled() -> None:
    quick = task(2, X, device=BOB, of=1, at=BOTTOM)
    server, slow = hedged(quick)
    server.result(slow, TOP)
    assert server.result(quick) == [taken(quick, quick.whole), Cancel(slow)]


def test_the_hedges_device_leaves_and_the_straggler_stays() -> None:
    quick = task(2, X, device=BOB, of=1)
    server, slow = hedged(quick)
    assert server.tell(DeviceLeft(BOB)) == [], "the straggler still has it"
    assert server.wait(1.0) == [Hedge(slow, (WHOLE,))], "and others may have it too"
    assert server.result(slow) == [taken(slow), Back(ANN)]


def test_the_straggler_leaves_and_the_hedge_stays() -> None:
    quick = task(2, X, device=BOB, of=1, at=TOP)
    server, slow = hedged(quick)
    assert server.tell(DeviceLeft(ANN)) == [Orphan(slow, (BOTTOM,), False)], "the top is in good hands"
    assert server.result(quick) == [taken(quick, quick.whole)]


def test_both_leave() -> None:
    quick = task(2, X, device=BOB, of=1, at=TOP)
    for first, second in ((ANN, BOB), (BOB, ANN)):
        server, slow = hedged(quick)
        commands = server.tell(DeviceLeft(first)) + server.tell(DeviceLeft(second))
        lost = [part.moved(c.task.top, 0) for c in commands if isinstance(c, Orphan) for part in c.missing]
        assert sum(part.area for part in lost) == WHOLE.area
        assert all(one.bottom <= other.top or other.bottom <= one.top for one, other in combinations(lost, 2))
        assert [c.finished for c in commands if isinstance(c, Orphan)][-1]
        assert not server.ledger.is_busy
        assert {c.task.id for c in commands if isinstance(c, Orphan)} <= {slow.id, quick.id}


def test_a_hedge_for_a_region_that_is_complete_is_dropped() -> None:
    server, slow = hedged()
    server.result(slow)
    assert server.submit(task(2, X, device=BOB, of=1)) == []
    assert server.ledger.unfinished(BOB) == 0


def test_a_hedge_for_a_part_that_came_meanwhile_is_dropped() -> None:
    server, slow = hedged()
    server.result(slow, TOP)
    rest = task(3, X, device=EVE, of=1, at=BOTTOM)
    assert server.submit(task(2, X, device=BOB, of=1, at=TOP), rest) == [Start(rest, (X.id,))]
    assert server.ledger.unfinished(BOB) == 0


def test_a_hedge_that_fails_is_no_orphan() -> None:
    quick = task(2, X, device=BOB, of=1)
    server, _ = hedged(quick)
    assert server.tell(TaskFailed(BOB, quick.id)) == [Cancel(quick)]


def test_a_hedge_that_is_late_is_hedged_in_its_turn() -> None:
    quick = task(2, X, device=BOB, of=1)
    server, _ = hedged(quick)
    said = server.wait(0.75)
    assert Late(BOB) in said
    assert {part for command in said if isinstance(command, Hedge) for part in command.missing} == {WHOLE}


@pytest.mark.parametrize("names", [("ann", "bob", "eve"), ("bob", "ann", "eve")])
@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.3, 0.4])
def test_at_any_moment_an_element_is_hedged_once_however_many_are_late_with_it(
    names: tuple[str, ...], seconds: float
) -> None:
    """Whoever of them joined first, and whenever the second is late, too."""
    server = Server(**dict.fromkeys(names, 100))
    server.submit(task(1, X, device=ANN, seconds=0.1))
    assert only(server.wait(1.0), Hedge).missing == (WHOLE,)
    server.submit(task(2, X, device=BOB, of=1, seconds=seconds))
    hedged_elements: list[int] = []
    for _ in range(40):
        said = server.wait(TICK_S)
        hedged_elements.append(sum(part.area for c in said if isinstance(c, Hedge) for part in c.missing))
    assert max(hedged_elements) == WHOLE.area


# ------------------------------------------------------------------------------------------------ lateness


def test_a_late_devices_line_is_moved_but_what_it_runs_stays_with_it() -> None:
    server = Server(ann=40, bob=100)
    running, waiting = task(1, W), task(2, operand(3, 20))
    server.submit(running, waiting)
    assert server.wait(1.0) == [Late(ANN), Orphan(waiting, (WHOLE,), True), Hedge(running, (WHOLE,))]
    assert server.ledger.unfinished(ANN) == 1


def test_a_late_device_that_answers_is_back() -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X))
    server.wait(1.0)
    assert server.tell(DeviceAnswered(ANN)) == [], "a sign of life is not the result"
    assert server.result(slow) == [taken(slow), Back(ANN)]
    assert server.tell(DeviceAnswered(ANN)) == [], "once"


def test_a_late_device_whose_task_was_taken_from_it_is_back_with_its_next_sign_of_life() -> None:
    quick = task(2, X, device=BOB, of=1)
    server, slow = hedged(quick)
    server.result(quick)
    server.tell(CancelSent(ANN, slow.id))
    assert server.tell(DeviceAnswered(ANN)) == [Back(ANN)]


def test_who_is_quick_enough_is_never_late() -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X, seconds=2.0))
    assert server.wait(2.0 + LATE_S + 3 * 2.0) == []
    assert server.result(slow) == [taken(slow)]


def test_tasks_in_turn_are_expected_in_turn() -> None:
    server = Server(ann=100, bob=100)
    tasks = [task(number, X, seconds=1.0) for number in range(IN_FLIGHT)]
    server.submit(*tasks)
    for one in tasks:
        assert server.wait(1.01) == []
        assert server.result(one) == [taken(one)]


@pytest.mark.parametrize("stall_s", [1.0, 60.0, 1e5])
def test_while_the_server_stands_still_nobody_is_late(stall_s: float) -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X))
    assert server.wait(0.2) == []
    server.now += stall_s
    assert server.tell(Tick()) == [], "a stall counts as two ticks"
    assert server.tell(Tick()) == []
    assert server.wait(1.0)[0] == Late(ANN)
    overdue = server.wait(DEADLINE_S)[-1]
    assert isinstance(overdue, Overdue)
    assert overdue.task == slow


def test_the_first_task_after_a_pause_is_not_late_for_the_pause() -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X))
    server.wait(0.1)
    server.result(one)
    server.now += 1000.0  # nothing is unfinished, nobody ticks
    server.submit(task(2, X))
    assert server.wait(LATE_S) == []
    assert server.wait(LATE_S)[0] == Late(ANN), "nor is it given the pause as a present"


def test_who_lets_a_deadline_pass_is_overdue() -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X, seconds=0.5))
    said = server.wait(100.0)
    overdue = said[-1]
    assert isinstance(overdue, Overdue)
    assert (overdue.device, overdue.task) == (ANN, slow)
    assert overdue.expected_s == pytest.approx(0.51)
    assert overdue.waited_s == pytest.approx(0.51 + DEADLINE_S + 10 * 0.51, abs=2 * TICK_S)
    assert said[0] == Late(ANN), "it was late long before"


def test_progress_extends_the_deadline() -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X))
    for col in range(3):
        said = server.wait(0.9 * DEADLINE_S)
        assert not any(isinstance(command, Overdue) for command in said)
        server.result(slow, Rectangle(0, 1, col, col + 1))
    said = server.wait(2 * DEADLINE_S)
    assert isinstance(said[-1], Overdue)
    assert said[-1].waited_s > 3 * 0.9 * DEADLINE_S + DEADLINE_S


def test_what_is_refused_does_not_extend_the_deadline() -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X))
    server.wait(0.9 * DEADLINE_S)
    server.result(slow, Rectangle(0, 3, 0, 3))
    server.tell(DeviceAnswered(ANN))
    assert isinstance(server.wait(0.2 * DEADLINE_S)[-1], Overdue)


def test_the_clock_of_a_less_urgent_task_waits_for_more_urgent_ones() -> None:
    server = Server(ann=100, bob=100)
    server.submit(task(1, X, priority=2))
    server.submit(urgent := task(2, X, priority=1, seconds=5.0))
    assert server.wait(5.0) == [], "it would be late by now"
    server.result(urgent)
    assert server.wait(1.0)[0] == Late(ANN)


def test_a_sole_device_that_is_late_keeps_what_it_has() -> None:
    server = Server(ann=40)
    running, waiting = task(1, W), task(2, operand(3, 20))
    server.submit(running, waiting)
    assert server.wait(1.0) == [Late(ANN)]
    assert server.wait(1.0) == []
    assert server.ledger.unfinished(ANN) == 2
    server.tell(DeviceJoined(BOB, 100, QUICK))
    assert server.wait(0.1) == [Orphan(waiting, (WHOLE,), True), Hedge(running, (WHOLE,))], "until another comes"


def test_when_all_are_late_nothing_is_moved() -> None:
    server = Server(ann=100, bob=100)
    server.submit(task(1, X), task(2, X, device=BOB))
    said = server.wait(1.0)
    assert {command.device for command in said if isinstance(command, Late)} == {ANN, BOB}
    assert sum(isinstance(command, Hedge) for command in said) <= 1, "before the last was found late"
    assert server.wait(3.0) == []


def test_a_cancelled_task_makes_nobody_late() -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X), task(2, X, device=BOB, seconds=50.0))
    server.tell(RegionsAbandoned((one.id,)))
    assert server.wait(20.0) == []


def test_a_result_in_scattered_pieces_is_refused_before_it_costs_the_server_its_time() -> None:
    ledger = Ledger()
    task = Task(id=TaskId(1), device=ANN, priority=0, operands=(), rows=400, cols=1, result_bytes=0)
    ledger.handle(DeviceJoined(ANN, 10, PACE), 0.0)
    ledger.handle(TasksSubmitted((task,)), 0.0)
    answers = [ledger.wanted(ANN, task.id, Rectangle(row, row + 1, 0, 1)) for row in range(1, 3)]
    assert answers == [task, task]
    refused = 0
    for row in range(1, 400, 2):
        commands = ledger.handle(ResultArrived(ANN, task.id, Rectangle(row, row + 1, 0, 1)), 0.0)
        refused += any(isinstance(command, Refuse) and command.is_fault for command in commands)
    assert refused > 100
    ledger.check()


def test_a_device_whose_bytes_move_gets_more_time() -> None:
    ledger = Ledger()
    task = Task(id=TaskId(1), device=ANN, priority=0, operands=(), rows=4, cols=1, result_bytes=0)
    ledger.handle(DeviceJoined(ANN, 10, PACE), 0.0)
    ledger.handle(TasksSubmitted((task,)), 0.0)
    now = 0.0
    while not any(isinstance(command, Overdue) for command in ledger.handle(Tick(), now)):
        now += TICK_S
    ledger.handle(DeviceMoved(ANN), now)
    assert not any(isinstance(command, Overdue) for command in ledger.handle(Tick(), now + TICK_S))


# ------------------------------------------------------------------------------------------------ bound to a device


def test_tasks_bound_to_a_late_device_stay_there_and_others_move() -> None:
    server = Server(ann=40, bob=100)
    running, waiting = task(1, W, is_bound=True), task(2, operand(3, 20), is_bound=True)
    free = task(3, operand(4, 20))
    server.submit(running, waiting, free)
    assert server.wait(1.0) == [Late(ANN), Orphan(free, (WHOLE,), True)]
    assert server.ledger.unfinished(ANN) == 2
    assert Start(waiting, (OperandId(3),)) in server.result(running), "and go on where they were"


def test_bound_tasks_of_a_device_that_leaves_are_orphans() -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X, is_bound=True))
    assert server.tell(DeviceLeft(ANN)) == [Orphan(one, (WHOLE,), True)]


def test_a_bound_task_that_lets_its_deadline_pass_ends_its_devices_stay() -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X, is_bound=True))
    assert only(server.wait(60.0), Overdue).task == one


MADE = Operand(id=OperandId(7), bytes=70, is_made=True)


def test_what_a_device_makes_is_not_sent() -> None:
    server = Server(ann=100)
    assert server.submit(one := task(1, X, MADE, is_bound=True)) == [Start(one, (X.id,))]


def test_who_waits_for_the_room_of_what_a_device_made_starts_when_it_is_released() -> None:
    server = Server(ann=100)
    first, second = task(1, X, MADE, is_bound=True), task(2, operand(3, 40), is_bound=True)
    server.submit(first, second)
    done = server.ledger.handle(ResultArrived(ANN, first.id, WHOLE), server.now)
    assert not [command for command in done if isinstance(command, Start)], "what it made is kept"
    assert Start(second, (OperandId(3),)) in server.tell(OperandsReleased((MADE.id,)))


def test_who_fits_starts_where_the_next_in_line_waits_for_room_that_only_others_can_free() -> None:
    """As reading an accumulator does, which stands behind units that need another one."""
    server = Server(ann=100)
    server.submit(first := task(1, X, MADE, is_bound=True))
    server.submit(large := task(2, operand(3, 40), is_bound=True), small := task(3, MADE, priority=2, is_bound=True))
    done = server.ledger.handle(ResultArrived(ANN, first.id, WHOLE), server.now)
    assert Start(small, ()) in done
    assert not [command for command in done if isinstance(command, Start) and command.task == large]
