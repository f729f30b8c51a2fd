"""Laws of the ledger: every element of every task is answered once, nothing is sent twice, no cap is ever exceeded.

A model replays the ledger's commands as a device would feel them and knows nothing of how they were decided.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cleave.core.ledger import (
    IN_FLIGHT,
    Accept,
    Command,
    DeviceId,
    DeviceJoined,
    DeviceLeft,
    Event,
    Forget,
    Ledger,
    Operand,
    OperandId,
    OperandsReleased,
    Orphan,
    Refuse,
    ResultArrived,
    Start,
    Task,
    TaskFailed,
    TaskId,
    TasksSubmitted,
)
from cleave.core.rectangles import Rectangle

NAMES = [DeviceId(name) for name in ("ann", "bob", "eve", "dan")]
OPERANDS = [Operand(id=OperandId(i), bytes=size) for i, size in enumerate([1, 2, 3, 5, 8, 13, 21, 34], start=100)]


class Twin:
    """What the commands imply: what each device holds and runs, and how often each element was answered."""

    def __init__(self) -> None:
        self.memory: dict[DeviceId, int] = {}
        self.held: dict[DeviceId, dict[OperandId, int]] = {}
        self.running: dict[DeviceId, list[Task]] = {}
        self.waiting: dict[DeviceId, list[Task]] = {}
        self.answers: dict[TaskId, np.ndarray] = {}
        self.dead: set[OperandId] = set()
        """released when no task waited for them: gone wherever no task runs on them"""

    def join(self, name: DeviceId, memory_bytes: int) -> None:
        self.memory[name] = memory_bytes
        self.held[name], self.running[name], self.waiting[name] = {}, [], []

    def leave(self, name: DeviceId) -> list[Task]:
        del self.memory[name], self.held[name]
        return self.running.pop(name) + self.waiting.pop(name)

    def submit(self, task: Task) -> bool:
        """Whether there is a device that can ever do it."""
        self.answers[task.id] = np.zeros((task.rows, task.cols), dtype=int)
        self.dead -= {operand.id for operand in task.operands}
        fits = sum(operand.bytes for operand in task.operands) + task.result_bytes <= self.memory.get(task.device, -1)
        if fits:
            self.waiting[task.device].append(task)
        return fits

    def replay(self, command: Command) -> None:
        match command:
            case Start(task, missing):
                self._start(task, missing)
            case Forget(device, operands):
                assert len(set(operands)) == len(operands) > 0
                needed = {operand.id for task in self.running[device] for operand in task.operands}
                assert needed.isdisjoint(operands), "what a running task needs is not forgotten"
                for operand in operands:
                    del self.held[device][operand]
            case Accept(task, part, finished):
                self._answer(task, part)
                assert finished == (self.answers[task.id] == 1).all()
                if finished:
                    self.running[task.device].remove(task)
            case Orphan(task, missing):
                for part in missing:
                    self._answer(task, part)
                assert (self.answers[task.id] == 1).all(), "an orphan is all that was not accepted"
            case Refuse():
                pass

    def _start(self, task: Task, missing: tuple[OperandId, ...]) -> None:
        name = task.device
        line = self.waiting[name]
        assert task == min(line, key=lambda other: (other.priority, other.id)), "the most urgent starts first"
        line.remove(task)
        self.running[name].append(task)
        assert len(self.running[name]) <= IN_FLIGHT
        lacking = [operand for operand in task.operands if operand.id not in self.held[name]]
        assert [operand.id for operand in lacking] == list(missing), "what it lacks is sent, what it holds is not"
        self.held[name].update({operand.id: operand.bytes for operand in lacking})
        assert self.used(name) <= self.memory[name]

    def _answer(self, task: Task, part: Rectangle) -> None:
        cells = self.answers[task.id][part.top : part.bottom, part.left : part.right]
        assert cells.size == part.area > 0
        assert (cells == 0).all(), "every element once"
        cells += 1

    def used(self, name: DeviceId) -> int:
        return sum(self.held[name].values()) + sum(task.result_bytes for task in self.running[name])

    def may_accept(self, name: DeviceId, task: Task, part: Rectangle) -> bool:
        inside = 0 <= part.top < part.bottom <= task.rows and 0 <= part.left < part.right <= task.cols
        return (
            inside
            and task in self.running.get(name, [])
            and not self.answers[task.id][part.top : part.bottom, part.left : part.right].any()
        )

    def could_start(self, name: DeviceId) -> bool:
        """Whether the next in line fits beside what running tasks pin."""
        if not self.waiting[name] or len(self.running[name]) >= IN_FLIGHT:
            return False
        following = min(self.waiting[name], key=lambda task: (task.priority, task.id))
        busy = [*self.running[name], following]
        pinned = {operand.id: operand.bytes for task in busy for operand in task.operands}
        return sum(pinned.values()) + sum(task.result_bytes for task in busy) <= self.memory[name]


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.twin = Ledger(), Twin()
        self.tasks: list[Task] = []

    def tell(self, event: Event) -> list[Command]:
        commands = self.ledger.handle(event)
        for command in commands:
            self.twin.replay(command)
        self.ledger.check()
        return commands

    def started(self) -> list[Task]:
        return [task for running in self.twin.running.values() for task in running]

    @initialize(memory=st.lists(st.integers(20, 120), min_size=1, max_size=3))
    def some_are_there(self, memory: list[int]) -> None:
        for name, size in zip(NAMES, memory, strict=False):
            self.joins(name, size)

    @rule(name=st.sampled_from(NAMES), memory=st.integers(1, 150))
    def joins(self, name: DeviceId, memory: int) -> None:
        if name not in self.twin.memory:
            self.twin.join(name, memory)
            assert self.tell(DeviceJoined(name, memory)) == []

    @rule(name=st.sampled_from(NAMES))
    def leaves(self, name: DeviceId) -> None:
        lost = self.twin.leave(name) if name in self.twin.memory else []
        orphans = self.tell(DeviceLeft(name))
        assert {command.task.id for command in orphans if isinstance(command, Orphan)} == {task.id for task in lost}
        assert len(orphans) == len(lost)

    @rule(data=st.data(), count=st.integers(1, 8))
    def tasks_come(self, data: st.DataObject, count: int) -> None:
        new: list[Task] = []
        for _ in range(count):
            task = Task(
                id=TaskId(len(self.tasks) + 1),
                device=data.draw(st.sampled_from(NAMES)),
                priority=data.draw(st.integers(0, 3)),
                operands=tuple(data.draw(st.lists(st.sampled_from(OPERANDS), min_size=1, max_size=4, unique=True))),
                rows=data.draw(st.integers(1, 5)),
                cols=data.draw(st.integers(1, 5)),
                result_bytes=data.draw(st.integers(0, 20)),
            )
            self.tasks.append(task)
            new.append(task)
        hopeless = [task.id for task in new if not self.twin.submit(task)]
        commands = self.tell(TasksSubmitted(tuple(new)))
        assert [command.task.id for command in commands if isinstance(command, Orphan)] == hopeless

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def any_result_arrives(self, data: st.DataObject) -> None:
        """From anyone, of any task, of any rectangle: far too much, twice, empty, outside."""
        task = data.draw(st.sampled_from(self.started() or self.tasks) | st.sampled_from(self.tasks))
        name = data.draw(st.just(task.device) | st.sampled_from(NAMES))
        top, left = data.draw(st.integers(-1, task.rows)), data.draw(st.integers(-1, task.cols))
        height, width = data.draw(st.integers(-1, 3)), data.draw(st.integers(-1, 3))
        self.result(name, task, Rectangle(top, top + height, left, left + width))

    @precondition(lambda self: self.started())
    @rule(data=st.data(), repeat=st.booleans())
    def a_right_result_arrives(self, data: st.DataObject, repeat: bool) -> None:
        task = data.draw(st.sampled_from(self.started()))
        most = self.largest_missing(task, data.draw(st.integers(0, 24)))
        height, width = data.draw(st.integers(1, most.rows)), data.draw(st.integers(1, most.cols))
        part = most._replace(bottom=most.top + height, right=most.left + width)
        assert self.result(task.device, task, part)
        if repeat:
            assert not self.result(task.device, task, part)

    @precondition(lambda self: self.started())
    @rule(data=st.data())
    def the_rest_of_a_task_arrives(self, data: st.DataObject) -> None:
        self.answer(data.draw(st.sampled_from(self.started())))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def a_task_fails(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.started() or self.tasks) | st.sampled_from(self.tasks))
        name = data.draw(st.just(task.device) | st.sampled_from(NAMES))
        mine = task in self.twin.running.get(name, [])
        if mine:
            self.twin.running[name].remove(task)
        commands = self.tell(TaskFailed(name, task.id))
        assert [command.task.id for command in commands if isinstance(command, Orphan)] == [task.id] * mine
        assert any(isinstance(command, Refuse) for command in commands) == (not mine)

    @rule(operands=st.lists(st.sampled_from(OPERANDS), min_size=1, max_size=4, unique=True))
    def operands_are_released(self, operands: list[Operand]) -> None:
        wanted = {operand.id for line in self.twin.waiting.values() for task in line for operand in task.operands}
        released = {operand.id for operand in operands}
        self.twin.dead |= released - wanted
        self.tell(OperandsReleased(tuple(released)))

    def result(self, name: DeviceId, task: Task, part: Rectangle) -> bool:
        expected = self.twin.may_accept(name, task, part)
        commands = self.tell(ResultArrived(name, task.id, part))
        if expected:
            first = commands[0]
            assert isinstance(first, Accept)
            assert (first.task, first.part) == (task, part)
        else:
            (refusal,) = commands
            assert isinstance(refusal, Refuse)
            assert refusal.device == name
        return expected

    def largest_missing(self, task: Task, start: int) -> Rectangle:
        """A rectangle grown from some missing element, right and then down."""
        missing = self.twin.answers[task.id] == 0
        cells = np.argwhere(missing)
        top, left = cells[start % len(cells)].tolist()
        right, bottom = left, top
        while right < task.cols and missing[top, right]:
            right += 1
        while bottom < task.rows and missing[bottom, left:right].all():
            bottom += 1
        return Rectangle(top, bottom, left, right)

    def answer(self, task: Task) -> None:
        while task in self.twin.running[task.device]:
            assert self.result(task.device, task, self.largest_missing(task, 0))

    @invariant()
    def the_twin_agrees(self) -> None:
        assert set(self.ledger.devices) == set(self.twin.memory)
        for name in self.twin.memory:
            assert self.twin.used(name) <= self.twin.memory[name]
            assert not self.twin.could_start(name), "what is next in line starts as soon as there is room"
            running, waiting = self.twin.running[name], self.twin.waiting[name]
            assert self.ledger.unfinished(name) == len(running) + len(waiting)
            held = {operand.id for operand in OPERANDS if self.ledger.holds(name, operand.id)}
            assert held == set(self.twin.held[name])
            needed = {operand.id for task in running for operand in task.operands}
            assert held & self.twin.dead <= needed, "released operands go with the last task that needs them"

    def teardown(self) -> None:
        """Once everything is answered, nothing remains."""
        while started := self.started():
            self.answer(started[0])
        assert all((answers == 1).all() for answers in self.twin.answers.values())
        assert all(self.ledger.unfinished(name) == 0 for name in self.ledger.devices)
        self.tell(OperandsReleased(tuple(operand.id for operand in OPERANDS)))
        assert not any(self.twin.held.values())


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True)


# ------------------------------------------------------------------------------------------------ examples

ANN, BOB, EVE, DAN = NAMES


def task(number: int, *operands: Operand, device: DeviceId = ANN, priority: int = 1, result_bytes: int = 4) -> Task:
    return Task(
        id=TaskId(number),
        device=device,
        priority=priority,
        operands=operands,
        rows=2,
        cols=3,
        result_bytes=result_bytes,
    )


def operand(number: int, size: int) -> Operand:
    return Operand(id=OperandId(number), bytes=size)


def ledger_with(**memory_bytes: int) -> Ledger:
    ledger = Ledger()
    for name, size in memory_bytes.items():
        assert ledger.handle(DeviceJoined(DeviceId(name), size)) == []
    return ledger


WHOLE = Rectangle(0, 2, 0, 3)
X, W = operand(1, 10), operand(2, 20)


def test_an_operand_is_sent_once_and_then_shared() -> None:
    ledger = ledger_with(ann=100)
    one, two = task(1, X, W), task(2, W)
    assert ledger.handle(TasksSubmitted((one, two))) == [Start(one, (X.id, W.id)), Start(two, ())]
    assert ledger.handle(ResultArrived(ANN, one.id, WHOLE)) == [Accept(one, WHOLE, finished=True)]
    three = task(3, X, W)
    assert ledger.handle(TasksSubmitted((three,))) == [Start(three, ())], "it stays after its task"


def test_the_more_urgent_of_those_that_wait_starts_first() -> None:
    ledger = ledger_with(ann=100)
    running = tuple(task(number, X) for number in range(IN_FLIGHT))
    assert len(ledger.handle(TasksSubmitted(running))) == IN_FLIGHT
    later, sooner = task(50, X, priority=2), task(51, X, priority=0)
    assert ledger.handle(TasksSubmitted((later, sooner))) == []
    _, started = ledger.handle(ResultArrived(ANN, running[0].id, WHOLE))
    assert started == Start(sooner, ())


def test_the_least_recently_used_operand_makes_room() -> None:
    ledger = ledger_with(ann=34)
    old, new = operand(3, 10), operand(4, 10)
    for number, needed in ((1, old), (2, new), (3, old)):  # `old` was used last
        done = task(number, needed)
        ledger.handle(TasksSubmitted((done,)))
        ledger.handle(ResultArrived(ANN, done.id, WHOLE))
    big = task(4, operand(5, 20))
    assert ledger.handle(TasksSubmitted((big,))) == [Forget(ANN, (new.id,)), Start(big, (OperandId(5),))]


def test_a_task_waits_until_what_is_pinned_leaves_room_for_it() -> None:
    ledger = ledger_with(ann=40)
    first, second = task(1, W), task(2, operand(3, 20))
    assert ledger.handle(TasksSubmitted((first, second))) == [Start(first, (W.id,))]
    assert ledger.handle(ResultArrived(ANN, first.id, WHOLE)) == [
        Accept(first, WHOLE, finished=True),
        Forget(ANN, (W.id,)),
        Start(second, (OperandId(3),)),
    ]


def test_what_is_left_of_a_leaving_devices_tasks_is_handed_back() -> None:
    ledger = ledger_with(ann=34)
    begun, waiting = task(1, X, W), task(2, operand(3, 25))
    ledger.handle(TasksSubmitted((begun, waiting)))
    top = Rectangle(0, 1, 0, 3)
    assert ledger.handle(ResultArrived(ANN, begun.id, top)) == [Accept(begun, top, finished=False)]
    assert ledger.handle(DeviceLeft(ANN)) == [Orphan(begun, (Rectangle(1, 2, 0, 3),)), Orphan(waiting, (WHOLE,))]
    assert ledger.devices == ()


def test_a_task_for_a_device_that_is_gone_or_too_small_is_an_orphan_at_once() -> None:
    ledger = ledger_with(ann=33)
    gone, large, fine = task(1, X, device=BOB), task(2, X, W), task(3, X)
    assert ledger.handle(TasksSubmitted((gone, large, fine))) == [
        Start(fine, (X.id,)),
        Orphan(gone, (WHOLE,)),
        Orphan(large, (WHOLE,)),
    ]


def test_what_surrounds_a_rectangle_is_still_missing() -> None:
    ledger = ledger_with(ann=34)
    one = task(1, X)
    ledger.handle(TasksSubmitted((one,)))
    ledger.handle(ResultArrived(ANN, one.id, Rectangle(0, 1, 1, 2)))
    (orphan,) = ledger.handle(DeviceLeft(ANN))
    assert isinstance(orphan, Orphan)
    assert set(orphan.missing) == {Rectangle(0, 1, 0, 1), Rectangle(0, 1, 2, 3), Rectangle(1, 2, 0, 3)}


def test_a_result_is_taken_once_and_only_from_the_one_who_has_the_task() -> None:
    ledger = ledger_with(ann=100, bob=100)
    one = task(1, X)
    ledger.handle(TasksSubmitted((one,)))
    for name, part in ((BOB, WHOLE), (EVE, WHOLE), (ANN, Rectangle(0, 3, 0, 3)), (ANN, Rectangle(1, 1, 0, 3))):
        (refusal,) = ledger.handle(ResultArrived(name, one.id, part))
        assert isinstance(refusal, Refuse)
    assert ledger.handle(ResultArrived(ANN, one.id, WHOLE)) == [Accept(one, WHOLE, finished=True)]
    (refusal,) = ledger.handle(ResultArrived(ANN, one.id, WHOLE))
    assert isinstance(refusal, Refuse)


def test_a_failed_task_comes_back_and_the_device_goes_on() -> None:
    ledger = ledger_with(ann=100)
    one, two = task(1, X), task(2, X)
    ledger.handle(TasksSubmitted((one, two)))
    assert ledger.handle(TaskFailed(ANN, one.id)) == [Orphan(one, (WHOLE,))]
    assert ledger.handle(ResultArrived(ANN, two.id, WHOLE)) == [Accept(two, WHOLE, finished=True)]


def test_a_released_operand_goes_when_the_last_task_that_needs_it_ends() -> None:
    ledger = ledger_with(ann=100)
    one, two = task(1, X, W), task(2, X)
    ledger.handle(TasksSubmitted((one, two)))
    assert ledger.handle(OperandsReleased((X.id,))) == []
    assert ledger.handle(ResultArrived(ANN, one.id, WHOLE)) == [Accept(one, WHOLE, finished=True)]
    assert ledger.handle(ResultArrived(ANN, two.id, WHOLE)) == [
        Accept(two, WHOLE, finished=True),
        Forget(ANN, (X.id,)),
    ]
    assert ledger.handle(OperandsReleased((W.id,))) == [Forget(ANN, (W.id,))]
