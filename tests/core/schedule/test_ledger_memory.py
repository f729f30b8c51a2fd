"""Examples of turns and memory: when tasks start, which operands are sent, evicted, dropped and sent again."""

from __future__ import annotations

import pytest
from tests.support.ledgers import ANN, BOB, MADE, WHOLE, Server, W, X, operand, taken, task

from cleave.core.schedule.device_queue import IN_FLIGHT
from cleave.core.schedule.tasks import (
    Cancel,
    CancelSent,
    DeviceRemoved,
    Forget,
    GroupsAbandoned,
    OperandId,
    OperandsReleased,
    Resend,
    ResultArrived,
    Start,
)

# ------------------------------------------------------------------------------------------------ turns and memory


def test_an_operand_is_sent_once_and_then_shared() -> None:
    server = Server(ann=100)
    one, two = task(1, X, W), task(2, W)
    assert server.submit(one, two) == [Start(one, (X.id, W.id)), Start(two, ())]
    assert server.result(one) == [taken(one)]
    three = task(3, X, W)
    assert server.submit(three) == [Start(three, ())], "it stays after its task"


def test_the_most_urgent_waiting_task_starts_first() -> None:
    server = Server(ann=100)
    running = [task(number, X) for number in range(IN_FLIGHT)]
    assert len(server.submit(*running)) == IN_FLIGHT
    later, sooner = task(50, X, priority=2), task(51, X, priority=0)
    assert server.submit(later, sooner) == []
    assert server.result(running[0]) == [taken(running[0]), Start(sooner, ())]


def test_the_least_recently_used_operand_is_evicted() -> None:
    server = Server(ann=34)
    old, new = operand(3, 10), operand(4, 10)
    for number, needed in ((1, old), (2, new), (3, old)):  # `old` was used last
        server.submit(done := task(number, needed))
        server.result(done)
    big = task(4, operand(5, 20))
    assert server.submit(big) == [Forget(ANN, (new.id,)), Start(big, (OperandId(5),))]


def test_a_task_waits_until_pinned_operands_leave_room_for_it() -> None:
    server = Server(ann=40)
    first, second = task(1, W), task(2, operand(3, 20))
    assert server.submit(first, second) == [Start(first, (W.id,))]
    assert server.result(first) == [taken(first), Forget(ANN, (W.id,)), Start(second, (OperandId(3),))]


def test_a_released_operand_is_dropped_with_the_last_task_that_needs_it() -> None:
    server = Server(ann=100)
    one, two = task(1, X, W), task(2, X)
    server.submit(one, two)
    assert server.tell(OperandsReleased((X.id,))) == []
    assert server.result(one) == [taken(one)]
    assert server.result(two) == [taken(two), Forget(ANN, (X.id,))]
    assert server.tell(OperandsReleased((W.id,))) == [Forget(ANN, (W.id,))]


def test_a_released_operand_is_dropped_by_all_its_holders() -> None:
    server = Server(ann=100, bob=100, eve=100)
    for number, name in enumerate((ANN, BOB)):
        server.submit(done := task(number, X, W, device=name))
        server.result(done)
    assert set(server.ledger.holders(X.id)) == {ANN, BOB}
    assert server.tell(OperandsReleased((X.id,))) == [Forget(ANN, (X.id,)), Forget(BOB, (X.id,))]
    assert set(server.ledger.holders(X.id)) == set()
    server.tell(DeviceRemoved(ANN))
    assert set(server.ledger.holders(W.id)) == {BOB}


def test_a_waiting_task_that_is_abandoned_no_longer_blocks_those_behind_it() -> None:
    server = Server(ann=40)
    running, large, small = task(1, X), task(2, operand(3, 36)), task(3, X)
    assert server.submit(running, large, small) == [Start(running, (X.id,))], "tasks start in order"
    assert server.tell(GroupsAbandoned((large.group,))) == [Start(small, ())]


def test_an_idle_device_has_no_backlog() -> None:
    server = Server(ann=100)
    server.submit(long := task(1, X, seconds=100.0))
    assert server.ledger.backlog_s(ANN, server.now) == pytest.approx(100.0, rel=0.01)
    assert server.tell(GroupsAbandoned((long.group,))) == [Cancel(long)]
    server.tell(CancelSent(ANN, long.id))
    assert server.ledger.tasks(ANN) == {}.keys()
    assert server.ledger.backlog_s(ANN, server.now) == 0.0


# ------------------------------------------------------------------------------------------------ cancelled tasks


def test_a_cancelled_task_keeps_its_place_until_the_cancellation_is_sent() -> None:
    server = Server(ann=40)
    first, second = task(1, W), task(2, operand(3, 20))
    server.submit(first, second)
    assert server.tell(GroupsAbandoned((first.group,))) == [Cancel(first)]
    assert server.tell(CancelSent(ANN, first.id)) == [Forget(ANN, (W.id,)), Start(second, (OperandId(3),))]


def test_an_unsent_operand_is_dropped_and_sent_with_the_next_task_that_needs_it() -> None:
    server = Server(ann=100)
    server.submit(one := task(1, X, W))
    server.tell(GroupsAbandoned((one.group,)))
    assert server.tell(CancelSent(ANN, one.id, (W.id,))) == [Forget(ANN, (W.id,))]
    two = task(2, X, W)
    assert server.submit(two) == [Start(two, (W.id,))]


def test_an_unsent_operand_that_another_running_task_needs_is_sent_again() -> None:
    server = Server(ann=100)
    one, two = task(1, X, W), task(2, W)
    assert server.submit(one, two) == [Start(one, (X.id, W.id)), Start(two, ())]
    server.tell(GroupsAbandoned((one.group,)))
    assert server.tell(CancelSent(ANN, one.id, (X.id, W.id))) == [Resend(ANN, (W.id,)), Forget(ANN, (X.id,))]
    assert server.result(two) == [taken(two)]
    assert server.ledger.holds(ANN, W.id)


def test_an_unsent_operand_is_not_sent_again_for_cancelled_tasks() -> None:
    """A slow device whose six tasks on W are all abandoned while W is on its way should not get W after all."""
    server = Server(ann=100)
    one, two = task(1, W), task(2, W)
    server.submit(one, two)
    assert server.tell(GroupsAbandoned((one.group, two.group))) == [Cancel(one), Cancel(two)]
    assert not any(isinstance(command, Resend) for command in server.tell(CancelSent(ANN, one.id, (W.id,))))
    server.tell(CancelSent(ANN, two.id))
    three = task(3, W)
    assert server.submit(three) == [Start(three, (W.id,))], "it never got there"


# ------------------------------------------------------------------------------------------------ made operands


def test_an_operand_made_on_the_device_is_not_sent() -> None:
    server = Server(ann=100)
    assert server.submit(one := task(1, X, MADE, is_bound=True)) == [Start(one, (X.id,))]


def test_a_task_waiting_for_a_made_operands_memory_starts_on_its_release() -> None:
    server = Server(ann=100)
    first, second = task(1, X, MADE, is_bound=True), task(2, operand(3, 40), is_bound=True)
    server.submit(first, second)
    done = server.ledger.handle(ResultArrived(ANN, first.id, WHOLE), server.now)
    assert not [command for command in done if isinstance(command, Start)], "made operands are kept"
    assert Start(second, (OperandId(3),)) in server.tell(OperandsReleased((MADE.id,)))


def test_a_later_task_that_fits_starts_when_only_later_tasks_can_free_the_firsts_memory() -> None:
    """Such as the task that reads an accumulator, queued behind units that need another accumulator."""
    server = Server(ann=100)
    server.submit(first := task(1, X, MADE, is_bound=True))
    server.submit(large := task(2, operand(3, 40), is_bound=True), small := task(3, MADE, priority=2, is_bound=True))
    done = server.ledger.handle(ResultArrived(ANN, first.id, WHOLE), server.now)
    assert Start(small, ()) in done
    assert not [command for command in done if isinstance(command, Start) and command.task == large]
