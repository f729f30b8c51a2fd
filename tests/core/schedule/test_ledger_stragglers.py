"""Examples of stragglers: lateness, deadlines, hedges, and tasks bound to their device."""

from __future__ import annotations

from itertools import combinations

import pytest
from tests.support.ledgers import (
    ANN,
    BOB,
    BOTTOM,
    EVE,
    PACE,
    QUICK,
    TOP,
    WHOLE,
    Server,
    W,
    X,
    only,
    operand,
    taken,
    task,
)

from cleave.core.schedule.device_queue import IN_FLIGHT
from cleave.core.schedule.lateness import LATE_S, MOST_TIMES, MOVED_S, OVERDUE, STALLED, lost_s
from cleave.core.schedule.ledger import TICK_S, Ledger
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    Accept,
    Back,
    Cancel,
    CancelSent,
    Command,
    DeviceAdded,
    DeviceAnswered,
    DeviceMoved,
    DeviceRemoved,
    GroupsAbandoned,
    Hedge,
    Late,
    OperandId,
    Orphan,
    Overdue,
    Refuse,
    ResultArrived,
    Stalled,
    Start,
    Task,
    TaskFailed,
    TaskId,
    TasksSubmitted,
    Tick,
)

DEADLINE_S = OVERDUE.base_s

# ------------------------------------------------------------------------------------------------ lateness


def test_a_late_device_loses_its_waiting_tasks_and_keeps_its_running_ones() -> None:
    server = Server(ann=40, bob=100)
    running, waiting = task(1, W), task(2, operand(3, 20))
    server.submit(running, waiting)
    assert server.wait(1.0) == [Late(ANN), Orphan(waiting, (WHOLE,), True), Hedge(running, (WHOLE,))]
    assert server.ledger.unfinished(ANN) == 1


def test_a_late_device_recovers_with_its_result_not_with_a_heartbeat() -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X))
    server.wait(1.0)
    assert server.tell(DeviceAnswered(ANN)) == [], "a heartbeat is not the result"
    assert server.result(slow) == [taken(slow), Back(ANN)]
    assert server.tell(DeviceAnswered(ANN)) == [], "reported once"


def test_a_late_device_whose_task_was_cancelled_recovers_with_its_next_heartbeat() -> None:
    quick = task(2, X, device=BOB, of=1)
    server, slow = hedged(quick)
    server.result(quick)
    server.tell(CancelSent(ANN, slow.id))
    assert server.tell(DeviceAnswered(ANN)) == [Back(ANN)]


def test_a_device_within_its_slack_is_not_late() -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X, seconds=2.0))
    assert server.wait(2.0 + LATE_S + 3 * 2.0) == []
    assert server.result(slow) == [taken(slow)]


def test_tasks_that_run_in_turn_are_expected_in_turn() -> None:
    server = Server(ann=100, bob=100)
    tasks = [task(number, X, seconds=1.0) for number in range(IN_FLIGHT)]
    server.submit(*tasks)
    for one in tasks:
        assert server.wait(1.01) == []
        assert server.result(one) == [taken(one)]


@pytest.mark.parametrize("stall_s", [1.0, 60.0, 1e5])
def test_no_device_is_late_because_the_server_stalled(stall_s: float) -> None:
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


@pytest.mark.parametrize("stall_s", [1.0, 1e5])
def test_tasks_that_start_after_a_stall_get_no_extra_time_for_it(stall_s: float) -> None:
    """Even if events are handled before the tick that ends the stall."""
    server = Server(ann=100, bob=100)
    server.submit(task(1, X, device=BOB, seconds=1e4))
    server.wait(0.2)
    server.now += stall_s
    server.submit(task(2, X))
    assert server.tell(Tick()) == []
    assert server.wait(0.9 * LATE_S) == []
    assert server.wait(LATE_S)[0] == Late(ANN)


def test_idle_time_counts_neither_against_the_next_task_nor_for_it() -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X))
    server.wait(0.1)
    server.result(one)
    server.now += 1000.0  # nothing is unfinished, nobody ticks
    server.submit(task(2, X))
    assert server.wait(LATE_S) == []
    assert server.wait(LATE_S)[0] == Late(ANN), "it is not given the pause as extra time"


def test_a_device_that_misses_a_deadline_is_overdue() -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X, seconds=0.5))
    said = server.wait(100.0)
    overdue = said[-1]
    assert isinstance(overdue, Overdue)
    assert (overdue.device, overdue.task) == (ANN, slow)
    assert overdue.expected_s == pytest.approx(0.51)
    assert overdue.waited_s == pytest.approx(0.51 + DEADLINE_S + 10 * 0.51, abs=2 * TICK_S)
    assert said[0] == Late(ANN), "it was late long before"


def test_progress_extends_the_deadline_by_its_share_of_the_result() -> None:
    """One element every eight seconds keeps no device connected for longer than its share allows."""
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X))
    server.wait(0.8 * DEADLINE_S)
    server.result(slow, Rectangle(0, 1, 0, 1))
    overdue = only(server.wait(0.8 * DEADLINE_S), Overdue)
    assert overdue.waited_s == pytest.approx(0.01 + 10.1 * (1 + 2 / 6), abs=2 * TICK_S)
    assert overdue.waited_s < lost_s(0.01, moves_bytes=True, slack=OVERDUE)


@pytest.mark.parametrize("is_bound", [False, True])
def test_bytes_that_move_keep_no_device_for_ever(is_bound: bool) -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X, is_bound=is_bound))
    said: list[Command] = []
    while not any(isinstance(command, Overdue) for command in said):
        server.tell(DeviceMoved(ANN))
        said += server.wait(2.0)
        assert server.now < 100.0, "a device that only moves bytes is disconnected"
    overdue = next(command for command in said if isinstance(command, Overdue))
    assert overdue.task == slow
    assert overdue.waited_s == pytest.approx(lost_s(0.01, moves_bytes=True, slack=OVERDUE), abs=2 * TICK_S)


def test_the_only_device_is_given_time_as_long_as_results_arrive() -> None:
    server = Server(ann=100)
    server.submit(slow := task(1, X))
    for col in range(3):
        for row in range(2):
            assert not any(isinstance(command, Overdue) for command in server.wait(0.9 * DEADLINE_S))
            if (row, col) != (1, 2):
                server.result(slow, Rectangle(row, row + 1, col, col + 1))
    assert server.now > 5 * DEADLINE_S
    assert isinstance(server.wait(0.2 * DEADLINE_S)[-1], Overdue), "without progress, the run waits for another"


def test_the_only_device_is_disconnected_if_it_only_moves_bytes() -> None:
    server = Server(ann=100)
    server.submit(task(1, X))
    said: list[Command] = []
    while not any(isinstance(command, Overdue) for command in said):
        server.tell(DeviceMoved(ANN))
        said += server.wait(2.0)
        assert server.now < 100.0
    assert server.now > 2 * DEADLINE_S


def test_the_only_devices_privilege_ends_when_another_joins() -> None:
    server = Server(ann=100)
    server.submit(slow := task(1, X))
    for col in range(3):
        server.wait(0.9 * DEADLINE_S)
        server.result(slow, Rectangle(0, 1, col, col + 1))
    server.tell(DeviceAdded(BOB, 100, QUICK))
    assert isinstance(server.wait(TICK_S)[-1], Overdue)


def test_a_cancellation_that_cannot_be_sent_makes_its_device_overdue() -> None:
    """Otherwise a device that never reads keeps its slots and its place for ever."""
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X), task(2, X, device=BOB, seconds=1e3))
    server.tell(GroupsAbandoned((one.group,)))
    assert server.wait(0.9 * DEADLINE_S) == []
    assert only(server.wait(0.3 * DEADLINE_S), Overdue).task == one


def test_refused_results_and_heartbeats_do_not_extend_the_deadline() -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X))
    server.wait(0.9 * DEADLINE_S)
    server.result(slow, Rectangle(0, 3, 0, 3))
    server.tell(DeviceAnswered(ANN))
    assert isinstance(server.wait(0.2 * DEADLINE_S)[-1], Overdue)


def test_a_less_urgent_task_is_also_allowed_the_time_of_more_urgent_ones() -> None:
    server = Server(ann=100, bob=100)
    server.submit(task(1, X, priority=2))
    server.submit(urgent := task(2, X, priority=1, seconds=5.0))
    assert server.wait(5.0) == [], "it would be late by now"
    server.result(urgent)
    assert server.wait(1.0)[0] == Late(ANN)


def test_a_late_device_keeps_its_tasks_until_a_healthy_one_joins() -> None:
    server = Server(ann=40)
    running, waiting = task(1, W), task(2, operand(3, 20))
    server.submit(running, waiting)
    assert server.wait(1.0) == [Late(ANN)]
    assert server.wait(1.0) == []
    assert server.ledger.unfinished(ANN) == 2
    server.tell(DeviceAdded(BOB, 100, QUICK))
    assert server.wait(0.1) == [Orphan(waiting, (WHOLE,), True), Hedge(running, (WHOLE,))], "bob can take them now"


def test_nothing_moves_while_all_devices_are_late() -> None:
    server = Server(ann=100, bob=100)
    server.submit(task(1, X), task(2, X, device=BOB))
    assert server.wait(1.0) == [Late(ANN), Late(BOB)]
    assert server.wait(3.0) == []


def test_a_device_that_recovers_takes_work_from_those_still_late() -> None:
    server = Server(ann=100, bob=100)
    server.submit(slow := task(1, X), other := task(2, X, device=BOB))
    server.wait(1.0)
    assert server.result(other) == [taken(other), Back(BOB)]
    assert server.wait(TICK_S) == [Hedge(slow, (WHOLE,))]


def test_tasks_submitted_to_a_late_device_are_handed_back_at_the_next_tick() -> None:
    server = Server(ann=40, bob=100)
    server.submit(task(1, W))
    server.wait(1.0)
    assert server.submit(waiting := task(2, operand(3, 20))) == []
    assert server.wait(TICK_S) == [Orphan(waiting, (WHOLE,), True)]


def test_the_set_of_late_devices_stays_up_to_date() -> None:
    server = Server(ann=100, bob=100)
    late = server.ledger.late
    server.submit(slow := task(1, X))
    assert late == set()
    server.wait(1.0)
    assert late == {ANN}, "a live view"
    server.result(slow)
    assert late == set()
    server.submit(task(2, X))
    server.wait(1.0)
    server.tell(DeviceRemoved(ANN))
    assert late == set(), "a departed device is not late"


def test_a_cancelled_task_makes_no_device_late() -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X), task(2, X, device=BOB, seconds=50.0))
    server.tell(GroupsAbandoned((one.group,)))
    assert server.wait(5.0) == []
    server.tell(CancelSent(ANN, one.id))
    assert server.wait(20.0) == []


def test_a_result_in_too_many_scattered_pieces_is_refused() -> None:
    ledger = Ledger()
    task = Task(id=TaskId(1), device=ANN, priority=0, operands=(), rows=400, cols=1, result_bytes=0)
    ledger.handle(DeviceAdded(ANN, 10, PACE), 0.0)
    ledger.handle(TasksSubmitted((task,)), 0.0)
    answers = [ledger.wanted(ANN, task.id, Rectangle(row, row + 1, 0, 1)) for row in range(1, 3)]
    assert answers == [task, task]
    refused = 0
    for row in range(1, 400, 2):
        commands = ledger.handle(ResultArrived(ANN, task.id, Rectangle(row, row + 1, 0, 1)), 0.0)
        refused += any(isinstance(command, Refuse) and command.is_fault for command in commands)
    assert refused > 100
    ledger.check()


def test_a_device_whose_bytes_keep_moving_gets_more_time() -> None:
    ledger = Ledger()
    task = Task(id=TaskId(1), device=ANN, priority=0, operands=(), rows=4, cols=1, result_bytes=0)
    ledger.handle(DeviceAdded(ANN, 10, PACE), 0.0)
    ledger.handle(TasksSubmitted((task,)), 0.0)
    now = 0.0
    while not any(isinstance(command, Overdue) for command in ledger.handle(Tick(), now)):
        now += TICK_S
    ledger.handle(DeviceMoved(ANN), now)
    assert not any(isinstance(command, Overdue) for command in ledger.handle(Tick(), now + TICK_S))


# ------------------------------------------------------------------------------------------------ hedges


def hedged(*pieces: Task, seconds: float = 0.0) -> tuple[Server, Task]:
    """A server, the task ann is late with, and the hedges of it that the others run."""
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


def test_overlapping_results_of_hedge_and_straggler_are_accepted_element_by_element() -> None:
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


def test_a_part_that_another_device_returned_first_is_refused_without_blame() -> None:
    quick = task(2, X, device=BOB, of=1, at=TOP)
    server, slow = hedged(quick)
    assert server.result(quick) == [taken(quick, quick.whole, finished=False)]
    assert not only(server.result(slow, TOP), Refuse).is_fault
    assert server.result(slow, BOTTOM) == [taken(slow, BOTTOM), Back(ANN)]


def test_a_straggler_is_cancelled_once_others_returned_its_remaining_part() -> None:
    quick = task(2, X, device=BOB, of=1, at=BOTTOM)
    server, slow = hedged(quick)
    server.result(slow, TOP)
    assert server.result(quick) == [taken(quick, quick.whole), Cancel(slow)]


def test_the_straggler_continues_when_the_hedging_device_leaves() -> None:
    quick = task(2, X, device=BOB, of=1)
    server, slow = hedged(quick)
    assert server.tell(DeviceRemoved(BOB)) == [], "the straggler still runs it"
    assert server.wait(1.0) == [Hedge(slow, (WHOLE,))], "and it is hedged again"
    assert server.result(slow) == [taken(slow), Back(ANN)]


def test_the_hedge_continues_when_the_straggler_leaves() -> None:
    quick = task(2, X, device=BOB, of=1, at=TOP)
    server, slow = hedged(quick)
    assert server.tell(DeviceRemoved(ANN)) == [Orphan(slow, (BOTTOM,), False)], "the hedge covers the top"
    assert server.result(quick) == [taken(quick, quick.whole)]


def test_each_element_is_orphaned_once_when_straggler_and_hedge_leave() -> None:
    quick = task(2, X, device=BOB, of=1, at=TOP)
    for first, second in ((ANN, BOB), (BOB, ANN)):
        server, slow = hedged(quick)
        commands = server.tell(DeviceRemoved(first)) + server.tell(DeviceRemoved(second))
        lost = [part.moved(c.task.top, 0) for c in commands if isinstance(c, Orphan) for part in c.missing]
        assert sum(part.area for part in lost) == WHOLE.area
        assert all(one.bottom <= other.top or other.bottom <= one.top for one, other in combinations(lost, 2))
        assert [c.finished for c in commands if isinstance(c, Orphan)][-1]
        assert not server.ledger.is_busy
        assert {c.task.id for c in commands if isinstance(c, Orphan)} <= {slow.id, quick.id}


def test_a_hedge_for_a_finished_region_is_dropped() -> None:
    server, slow = hedged()
    server.result(slow)
    assert server.submit(task(2, X, device=BOB, of=1)) == []
    assert server.ledger.unfinished(BOB) == 0


def test_a_hedge_for_a_part_that_has_arrived_is_dropped() -> None:
    server, slow = hedged()
    server.result(slow, TOP)
    rest = task(3, X, device=EVE, of=1, at=BOTTOM)
    assert server.submit(task(2, X, device=BOB, of=1, at=TOP), rest) == [Start(rest, (X.id,))]
    assert server.ledger.unfinished(BOB) == 0


def test_a_failed_hedge_is_not_orphaned() -> None:
    quick = task(2, X, device=BOB, of=1)
    server, _ = hedged(quick)
    assert server.tell(TaskFailed(BOB, quick.id)) == [Cancel(quick)]


def test_a_late_hedge_is_hedged_too() -> None:
    quick = task(2, X, device=BOB, of=1)
    server, _ = hedged(quick)
    said = server.wait(0.75)
    assert Late(BOB) in said
    assert {part for command in said if isinstance(command, Hedge) for part in command.missing} == {WHOLE}


@pytest.mark.parametrize("names", [("ann", "bob", "eve"), ("bob", "ann", "eve")])
@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.3, 0.4])
def test_a_tick_hedges_an_element_once_however_many_devices_are_late_with_it(
    names: tuple[str, ...], seconds: float
) -> None:
    """In any order of joining, and whenever the second becomes late."""
    server = Server(**dict.fromkeys(names, 100))
    server.submit(task(1, X, device=ANN, seconds=0.1))
    assert only(server.wait(1.0), Hedge).missing == (WHOLE,)
    server.submit(task(2, X, device=BOB, of=1, seconds=seconds))
    hedged_elements: list[int] = []
    for _ in range(40):
        said = server.wait(TICK_S)
        hedged_elements.append(sum(part.area for c in said if isinstance(c, Hedge) for part in c.missing))
    assert max(hedged_elements) == WHOLE.area


# ------------------------------------------------------------------------------------------------ bound tasks


def test_tasks_bound_to_a_late_device_stay_there_and_others_move() -> None:
    server = Server(ann=40, bob=100)
    running, waiting = task(1, W, is_bound=True), task(2, operand(3, 20), is_bound=True)
    free = task(3, operand(4, 20))
    server.submit(running, waiting, free)
    assert server.wait(1.0) == [Late(ANN), Orphan(free, (WHOLE,), True)]
    assert server.ledger.unfinished(ANN) == 2
    assert Start(waiting, (OperandId(3),)) in server.result(running), "bound tasks stay on their device"


def test_bound_tasks_of_a_departed_device_are_orphaned() -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X, is_bound=True))
    assert server.tell(DeviceRemoved(ANN)) == [Orphan(one, (WHOLE,), True)]


def test_a_bound_task_that_misses_its_deadline_makes_its_device_overdue() -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X, is_bound=True))
    assert only(server.wait(60.0), Overdue).task == one


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_stalled_bound_task_is_reported_in_bounded_time_and_again_until_it_is_abandoned(seconds: float) -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X, is_bound=True, seconds=seconds))
    expected_s = seconds + 0.01
    said = server.wait(lost_s(expected_s) + 2 * TICK_S)
    stalled = only(said, Stalled)
    assert (stalled.task, said[0]) == (one, Late(ANN))
    assert stalled.waited_s == pytest.approx(lost_s(expected_s), abs=2 * TICK_S)
    assert only(server.wait(LATE_S + expected_s + 2 * TICK_S), Stalled).task == one
    server.tell(GroupsAbandoned((one.group,)))
    assert server.wait(3.0) == []


@pytest.mark.parametrize("progress", ["bytes", "results"])
def test_progress_delays_a_stall_but_not_without_end(progress: str) -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X, is_bound=True))
    said: list[Command] = []
    for col in range(3):
        if progress == "bytes":
            server.tell(DeviceMoved(ANN))
        else:
            server.result(one, Rectangle(0, 1, col, col + 1))
        said += server.wait(1.9)
    stalled = [command for command in said if isinstance(command, Stalled)]
    if progress == "bytes":
        assert not stalled
        said += server.wait(MOST_TIMES * STALLED.base_s + 1.0 - server.now)
        stalled = [command for command in said if isinstance(command, Stalled)]
    assert STALLED.base_s < stalled[0].waited_s <= lost_s(0.01, moves_bytes=True) + 2 * TICK_S


def test_nothing_stalls_while_no_other_device_could_do_it() -> None:
    server = Server(ann=100)
    server.submit(task(1, X, is_bound=True))
    assert server.wait(3 * STALLED.base_s) == [Late(ANN)]
    server.tell(DeviceAdded(BOB, 100, QUICK))
    assert isinstance(only(server.wait(TICK_S), Stalled), Stalled)


def test_a_slow_and_steady_device_whose_pace_was_overrated_threefold_is_left_alone() -> None:
    server = Server(ann=100, bob=100)
    server.submit(one := task(1, X, is_bound=True, seconds=10.0))
    for row in range(2):
        for col in range(3):
            said = server.wait(5.0)
            assert not any(isinstance(command, Stalled | Overdue) for command in said)
            server.result(one, Rectangle(row, row + 1, col, col + 1))
    assert server.now == pytest.approx(30.0)
    assert MOVED_S < 10.0
