"""Laws of device memory: it never exceeds its limit, never drops pinned operands, and knows what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cleave.core.schedule.device_memory import DeviceMemory, Holders
from cleave.core.schedule.tasks import DeviceId, Operand, OperandId, Task, TaskId

OPERANDS = [Operand(id=OperandId(i), bytes=size) for i, size in enumerate([0, 1, 2, 3, 5, 8, 13, 21], start=100)]
ANN, BOB = DeviceId("ann"), DeviceId("bob")
SIZES = {operand.id: operand.bytes for operand in OPERANDS}
some_operands = st.lists(st.sampled_from(OPERANDS), min_size=1, max_size=4, unique=True)


def task(number: int, *operands: Operand, result_bytes: int = 0) -> Task:
    return Task(
        id=TaskId(number),
        device=ANN,
        priority=0,
        operands=operands,
        rows=1,
        cols=1,
        result_bytes=result_bytes,
    )


def memory_of(memory_bytes: int, holders: Holders | None = None) -> DeviceMemory:
    return DeviceMemory(ANN, memory_bytes, Holders() if holders is None else holders)


class DeviceMemoryMachine(RuleBasedStateMachine):
    """A memory next to a model of it: the held operands, least recently used first, and the running tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.holders = Holders()
        self.memory = memory_of(0, self.holders)
        self.held: list[OperandId] = []
        self.tasks: list[Task] = []
        self.dead: set[OperandId] = set()
        self.absent: set[OperandId] = set()
        """Not sent completely; they keep their memory while tasks pin them."""
        self.count = 0

    @property
    def pinned(self) -> set[OperandId]:
        return {operand.id for task in self.tasks for operand in task.operands}

    @property
    def used_bytes(self) -> int:
        return sum(SIZES[operand] for operand in self.held) + sum(task.result_bytes for task in self.tasks)

    @initialize(memory_bytes=st.integers(0, 80))
    def a_device_joins(self, memory_bytes: int) -> None:
        self.memory = memory_of(memory_bytes, self.holders)
        self.holders.add(OPERANDS[0].id, BOB)  # holds it throughout

    @rule(operands=some_operands, result_bytes=st.integers(0, 12))
    def a_task_is_placed(self, operands: list[Operand], result_bytes: int) -> None:
        self.count += 1
        new = task(self.count, *operands, result_bytes=result_bytes)
        lacking = [operand for operand in operands if operand.id not in self.held]
        missing = [operand for operand in operands if operand.id not in self.held or operand.id in self.absent]
        assert list(self.memory.missing(new)) == missing
        ids = {operand.id for operand in operands}
        pinned_bytes = sum(SIZES[operand] for operand in self.pinned | ids)
        fits = pinned_bytes + sum(t.result_bytes for t in [*self.tasks, new]) <= self.memory.memory_bytes
        dropped = self.memory.place(new)
        assert (dropped is not None) == fits, "all unpinned operands can be evicted"
        if dropped is None:
            return
        assert self.memory.can_ever_fit(new)
        assert (self.pinned | ids).isdisjoint(dropped)
        idle = [operand for operand in self.held if operand not in self.pinned | ids]
        assert list(dropped) == idle[: len(dropped)], "the least recently used operands are evicted"
        if dropped:
            before = self.used_bytes + sum(operand.bytes for operand in lacking) + result_bytes
            short = before - sum(SIZES[operand] for operand in dropped[:-1])
            assert short > self.memory.memory_bytes, "and no more than needed"
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
        gone = self.memory.unplace(ended)
        assert len(set(gone)) == len(gone)
        assert set(gone) <= {operand.id for operand in ended.operands} - self.pinned - self.absent
        released = self.dead & set(self.held) - self.pinned - self.absent
        assert released <= set(gone), "a released operand is dropped with its last task"
        self.forget(gone)

    @rule(operands=some_operands)
    def operands_are_released(self, operands: list[Operand]) -> None:
        ids = {operand.id for operand in operands}
        gone = self.memory.release(operand.id for operand in operands)
        assert set(gone) == ids & set(self.held) - self.pinned
        assert len(set(gone)) == len(gone)
        self.dead |= ids & self.pinned
        self.forget(gone)

    @rule(operands=some_operands)
    def operands_were_not_sent(self, operands: list[Operand]) -> None:
        ids = {operand.id for operand in operands}
        self.memory.discard(ids)
        self.absent |= ids & self.pinned
        self.forget(ids - self.pinned)

    def forget(self, operands: Iterable[OperandId]) -> None:
        """Drop these, and absent operands that no task pins anymore."""
        gone = {*operands, *(self.absent - self.pinned)}
        self.held = [operand for operand in self.held if operand not in gone]
        self.absent -= gone

    @invariant()
    def the_model_agrees(self) -> None:
        self.memory.check(self.tasks)
        assert self.memory.used_bytes == self.used_bytes <= self.memory.memory_bytes
        assert {operand.id for operand in OPERANDS if operand.id in self.memory} == set(self.held) - self.absent
        assert {operand.id for operand in OPERANDS if ANN in self.holders[operand.id]} == set(self.memory)
        assert [operand.id for operand in OPERANDS if BOB in self.holders[operand.id]] == [OPERANDS[0].id]

    def teardown(self) -> None:
        for ended in list(self.tasks):
            self.tasks.remove(ended)
            self.forget(self.memory.unplace(ended))
        self.memory.check([])
        assert set(self.memory.release(list(SIZES))) == set(self.held)
        assert self.memory.used_bytes == 0
        assert list(self.holders) == [OPERANDS[0].id], "operands without holders are forgotten"


TestDeviceMemory = DeviceMemoryMachine.TestCase
TestDeviceMemory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


# ------------------------------------------------------------------------------------------------ examples

X, W = Operand(id=OperandId(1), bytes=10), Operand(id=OperandId(2), bytes=20)


def test_without_room_nothing_changes() -> None:
    memory = memory_of(40)
    one = task(1, W, result_bytes=4)
    assert memory.place(task(0, X)) == ()
    assert memory.unplace(task(0, X)) == ()
    assert memory.place(one) == ()
    assert memory.place(task(2, Operand(id=OperandId(3), bytes=20))) is None
    memory.check([one])
    assert X.id in memory, "nothing is evicted in vain"


def test_operands_of_the_new_task_are_not_evicted_for_it() -> None:
    memory = memory_of(30)
    memory.place(task(1, X))
    memory.unplace(task(1, X))
    assert memory.place(task(2, X, W)) == ()
    memory.check([task(2, X, W)])


def test_a_shared_operand_takes_memory_once_and_stays_until_its_last_task_ends() -> None:
    memory = memory_of(20)
    one, two = task(1, W), task(2, W)
    assert memory.place(one) == ()
    assert memory.place(two) == ()
    assert memory.used_bytes == 20
    assert memory.release([W.id]) == ()
    assert memory.unplace(one) == ()
    assert memory.unplace(two) == (W.id,)
    assert memory.used_bytes == 0


@pytest.mark.parametrize(("memory_bytes", "fits"), [(33, False), (34, True)])
def test_a_task_that_needs_more_than_all_memory_can_never_fit(memory_bytes: int, fits: bool) -> None:
    assert memory_of(memory_bytes).can_ever_fit(task(1, X, W, result_bytes=4)) == fits


def test_a_departed_device_holds_nothing() -> None:
    holders = Holders()
    memory = memory_of(40, holders)
    memory.place(task(1, X, W))
    memory.discard([X.id])
    memory.place(task(2, X))
    holders.add(W.id, BOB)
    memory.clear()
    assert [(operand, *holders[operand]) for operand in holders] == [(W.id, BOB)]


# ------------------------------------------------------------------------------------------------ made operands


MADE = Operand(id=OperandId(9), bytes=12, is_made=True)


def test_a_made_operand_is_never_sent() -> None:
    memory = memory_of(100)
    assert memory.missing(task(1, MADE, X)) == (X,)
    memory.place(task(1, MADE, X))
    assert memory.used_bytes == 22, "but it takes memory"


def test_a_made_operand_is_not_evicted() -> None:
    """It cannot be sent again: a task that needs its memory waits."""
    memory = memory_of(30)
    memory.place(task(1, MADE))
    memory.unplace(task(1, MADE))
    assert MADE.id in memory
    assert memory.place(task(2, W)) is None
    assert memory.place(task(3, X)) == ()
    memory.unplace(task(3, X))
    assert memory.place(task(4, Operand(id=OperandId(4), bytes=18))) == (X.id,), "a sent operand is evicted"
    memory.check([task(4, Operand(id=OperandId(4), bytes=18))])


@pytest.mark.parametrize("is_running", [False, True])
def test_a_made_operand_is_dropped_when_it_is_released(is_running: bool) -> None:
    memory = memory_of(30)
    one = task(1, MADE)
    memory.place(one)
    if is_running:
        assert memory.release([MADE.id]) == ()
        assert memory.unplace(one) == (MADE.id,)
    else:
        memory.unplace(one)
        assert memory.release([MADE.id]) == (MADE.id,)
    assert memory.used_bytes == 0
    assert memory.place(task(2, W)) == ()


def test_an_operand_that_the_device_will_change_is_kept_even_if_it_was_sent_for_something_else() -> None:
    memory = memory_of(10)
    sent, other = Operand(id=OperandId(1), bytes=6), Operand(id=OperandId(2), bytes=6)
    for number, operand in ((1, sent), (2, replace(sent, is_kept=True))):
        one = task(number, operand)
        assert memory.place(one) == ()
        memory.unplace(one)
    assert memory.place(task(3, other)) is None
    assert OperandId(1) in memory
