"""Laws of a shelf: it never holds more than fits, never drops what is pinned, and knows what it lacks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cleave.core.schedule.device_memory import Shelf
from cleave.core.schedule.tasks import DeviceId, Operand, OperandId, Task, TaskId

OPERANDS = [Operand(id=OperandId(i), bytes=size) for i, size in enumerate([0, 1, 2, 3, 5, 8, 13, 21], start=100)]
SIZES = {operand.id: operand.bytes for operand in OPERANDS}
some_operands = st.lists(st.sampled_from(OPERANDS), min_size=1, max_size=4, unique=True)


def task(number: int, *operands: Operand, result_bytes: int = 0) -> Task:
    return Task(
        id=TaskId(number),
        device=DeviceId("ann"),
        priority=0,
        operands=operands,
        rows=1,
        cols=1,
        result_bytes=result_bytes,
    )


class ShelfMachine(RuleBasedStateMachine):
    """Beside a list of what is held, the least recently used first, and one of the tasks that run."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(0)
        self.held: list[OperandId] = []
        self.tasks: list[Task] = []
        self.dead: set[OperandId] = set()
        self.absent: set[OperandId] = set()
        """Not there after all, though room is kept for them while tasks pin them."""
        self.count = 0

    @property
    def pinned(self) -> set[OperandId]:
        return {operand.id for task in self.tasks for operand in task.operands}

    @property
    def used_bytes(self) -> int:
        return sum(SIZES[operand] for operand in self.held) + sum(task.result_bytes for task in self.tasks)

    @initialize(memory_bytes=st.integers(0, 80))
    def a_device_comes(self, memory_bytes: int) -> None:
        self.shelf = Shelf(memory_bytes)

    @rule(operands=some_operands, result_bytes=st.integers(0, 12))
    def a_task_is_placed(self, operands: list[Operand], result_bytes: int) -> None:
        self.count += 1
        new = task(self.count, *operands, result_bytes=result_bytes)
        lacking = [operand for operand in operands if operand.id not in self.held]
        missing = [operand for operand in operands if operand.id not in self.held or operand.id in self.absent]
        assert list(self.shelf.missing(new)) == missing
        ids = {operand.id for operand in operands}
        pinned_bytes = sum(SIZES[operand] for operand in self.pinned | ids)
        fits = pinned_bytes + sum(t.result_bytes for t in [*self.tasks, new]) <= self.shelf.memory_bytes
        dropped = self.shelf.place(new)
        assert (dropped is not None) == fits, "whatever is not pinned makes room"
        if dropped is None:
            return
        assert self.shelf.can_ever_fit(new)
        assert (self.pinned | ids).isdisjoint(dropped)
        idle = [operand for operand in self.held if operand not in self.pinned | ids]
        assert list(dropped) == idle[: len(dropped)], "the least recently used go"
        if dropped:
            before = self.used_bytes + sum(operand.bytes for operand in lacking) + result_bytes
            short = before - sum(SIZES[operand] for operand in dropped[:-1])
            assert short > self.shelf.memory_bytes, "and no more than must"
        self.held = [operand for operand in self.held if operand not in ids and operand not in dropped]
        self.held += [operand.id for operand in operands]
        self.dead -= ids
        self.absent -= ids
        self.tasks.append(new)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def a_task_ends(self, data: st.DataObject) -> None:
        ended = data.draw(st.sampled_from(self.tasks))
        self.tasks.remove(ended)
        gone = self.shelf.unplace(ended)
        assert len(set(gone)) == len(gone)
        assert set(gone) <= {operand.id for operand in ended.operands} - self.pinned - self.absent
        released = self.dead & set(self.held) - self.pinned - self.absent
        assert released <= set(gone), "what is released goes with its last task"
        self.forget(gone)

    @rule(operands=some_operands)
    def operands_are_released(self, operands: list[Operand]) -> None:
        ids = {operand.id for operand in operands}
        gone = self.shelf.release(operand.id for operand in operands)
        assert set(gone) == ids & set(self.held) - self.pinned
        assert len(set(gone)) == len(gone)
        self.dead |= ids & self.pinned
        self.forget(gone)

    @rule(operands=some_operands)
    def operands_did_not_go_out(self, operands: list[Operand]) -> None:
        ids = {operand.id for operand in operands}
        self.shelf.discard(ids)
        self.absent |= ids & self.pinned
        self.forget(ids - self.pinned)

    def forget(self, operands: Iterable[OperandId]) -> None:
        """These go, and with them what was not there and nobody pins any more."""
        gone = {*operands, *(self.absent - self.pinned)}
        self.held = [operand for operand in self.held if operand not in gone]
        self.absent -= gone

    @invariant()
    def the_twin_agrees(self) -> None:
        self.shelf.check(self.tasks)
        assert self.shelf.used_bytes == self.used_bytes <= self.shelf.memory_bytes
        assert {operand.id for operand in OPERANDS if operand.id in self.shelf} == set(self.held) - self.absent

    def teardown(self) -> None:
        for ended in list(self.tasks):
            self.tasks.remove(ended)
            self.forget(self.shelf.unplace(ended))
        self.shelf.check([])
        assert set(self.shelf.release(list(SIZES))) == set(self.held)
        assert self.shelf.used_bytes == 0


TestShelf = ShelfMachine.TestCase
TestShelf.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


# ------------------------------------------------------------------------------------------------ examples

X, W = Operand(id=OperandId(1), bytes=10), Operand(id=OperandId(2), bytes=20)


def test_without_room_nothing_changes() -> None:
    shelf = Shelf(40)
    one = task(1, W, result_bytes=4)
    assert shelf.place(task(0, X)) == ()
    assert shelf.unplace(task(0, X)) == ()
    assert shelf.place(one) == ()
    assert shelf.place(task(2, Operand(id=OperandId(3), bytes=20))) is None
    shelf.check([one])
    assert X.id in shelf, "what would not have helped is not dropped"


def test_operands_of_the_new_task_make_no_room_for_it() -> None:
    shelf = Shelf(30)
    shelf.place(task(1, X))
    shelf.unplace(task(1, X))
    assert shelf.place(task(2, X, W)) == ()
    shelf.check([task(2, X, W)])


def test_a_shared_operand_takes_its_room_once_and_stays_until_the_last_is_done() -> None:
    shelf = Shelf(20)
    one, two = task(1, W), task(2, W)
    assert shelf.place(one) == ()
    assert shelf.place(two) == ()
    assert shelf.used_bytes == 20
    assert shelf.release([W.id]) == ()
    assert shelf.unplace(one) == ()
    assert shelf.unplace(two) == (W.id,)
    assert shelf.used_bytes == 0


@pytest.mark.parametrize(("memory_bytes", "fits"), [(33, False), (34, True)])
def test_a_task_that_needs_more_than_all_there_is_can_never_fit(memory_bytes: int, fits: bool) -> None:
    assert Shelf(memory_bytes).can_ever_fit(task(1, X, W, result_bytes=4)) == fits


# ------------------------------------------------------------------------------------------------ what devices make


MADE = Operand(id=OperandId(9), bytes=12, is_made=True)


def test_what_a_device_makes_is_never_sent() -> None:
    shelf = Shelf(100)
    assert shelf.missing(task(1, MADE, X)) == (X,)
    shelf.place(task(1, MADE, X))
    assert shelf.used_bytes == 22, "but takes its room"


def test_what_a_device_made_makes_no_room_for_others() -> None:
    """It cannot be sent again: who needs the room waits."""
    shelf = Shelf(30)
    shelf.place(task(1, MADE))
    shelf.unplace(task(1, MADE))
    assert MADE.id in shelf
    assert shelf.place(task(2, W)) is None
    assert shelf.place(task(3, X)) == ()
    shelf.unplace(task(3, X))
    assert shelf.place(task(4, Operand(id=OperandId(4), bytes=18))) == (X.id,), "what was sent does"
    shelf.check([task(4, Operand(id=OperandId(4), bytes=18))])


@pytest.mark.parametrize("is_running", [False, True])
def test_what_a_device_made_goes_when_it_is_released(is_running: bool) -> None:
    shelf = Shelf(30)
    one = task(1, MADE)
    shelf.place(one)
    if is_running:
        assert shelf.release([MADE.id]) == ()
        assert shelf.unplace(one) == (MADE.id,)
    else:
        shelf.unplace(one)
        assert shelf.release([MADE.id]) == (MADE.id,)
    assert shelf.used_bytes == 0
    assert shelf.place(task(2, W)) == ()
