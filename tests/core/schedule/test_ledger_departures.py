"""Examples of departures, failures, abandoned groups and refusals."""

from __future__ import annotations

from dataclasses import replace

from tests.support.ledgers import ANN, BOB, BOTTOM, EVE, QUICK, TOP, WHOLE, Server, W, X, only, operand, taken, task

from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    Cancel,
    CancelSent,
    DeviceAdded,
    DeviceRemoved,
    GroupsAbandoned,
    Orphan,
    Refuse,
    ResultArrived,
    Start,
    TaskFailed,
)

# ------------------------------------------------------------------------------------------------ departures


def test_a_departed_devices_blocks_are_orphaned_at_once_and_finished_parts_are_kept() -> None:
    server = Server(ann=34, bob=100)
    begun, waiting, elsewhere = task(1, X, W), task(2, operand(3, 25)), task(3, X, device=BOB)
    server.submit(begun, waiting, elsewhere)
    assert server.result(begun, TOP) == [taken(begun, TOP, finished=False)]
    assert server.tell(DeviceRemoved(ANN)) == [Orphan(begun, (BOTTOM,), True), Orphan(waiting, (WHOLE,), True)]
    assert server.tell(DeviceRemoved(ANN)) == []
    assert server.result(elsewhere) == [taken(elsewhere)]
    assert not server.ledger.is_busy


def test_the_parts_around_a_returned_rectangle_are_still_missing() -> None:
    server = Server(ann=34)
    server.submit(one := task(1, X))
    server.result(one, Rectangle(0, 1, 1, 2))
    orphan = only(server.tell(DeviceRemoved(ANN)), Orphan)
    assert set(orphan.missing) == {Rectangle(0, 1, 0, 1), Rectangle(0, 1, 2, 3), Rectangle(1, 2, 0, 3)}


def test_a_task_for_a_departed_or_too_small_device_is_an_orphan_at_once() -> None:
    server = Server(ann=33)
    gone, large, fine = task(1, X, device=BOB), task(2, X, W), task(3, X)
    assert server.submit(gone, large, fine) == [
        Start(fine, (X.id,)),
        Orphan(gone, (WHOLE,), True),
        Orphan(large, (WHOLE,), True),
    ]


def test_a_device_that_rejoins_starts_with_nothing() -> None:
    server = Server(ann=100)
    server.submit(one := task(1, X))
    server.tell(GroupsAbandoned((one.group,)))
    server.tell(DeviceRemoved(ANN))
    assert not server.ledger.holds(ANN, X.id)
    server.tell(DeviceAdded(ANN, 100, QUICK))
    assert server.tell(CancelSent(ANN, one.id, (X.id,))) == [], "that was about its former connection"
    again = task(2, X)
    assert server.submit(again) == [Start(again, (X.id,))]


# ------------------------------------------------------------------------------------------------ groups


def test_a_group_is_open_until_its_last_region_is_finished() -> None:
    server = Server(ann=100, bob=100)
    one, two = (replace(task(number, X), group="run") for number in (1, 2))
    server.submit(one, two)
    server.result(one)
    assert server.ledger.is_open("run")
    server.result(two)
    assert not server.ledger.is_open("run")


def test_a_group_whose_work_is_all_orphaned_is_not_open() -> None:
    server = Server(ann=100)
    server.submit(replace(task(1, X), group="run"))
    server.tell(DeviceRemoved(ANN))
    assert not server.ledger.is_open("run")


def test_abandoning_a_group_cancels_its_tasks_and_hedges_and_no_others() -> None:
    server = Server(ann=100, bob=100, eve=100)
    server.submit(slow := replace(task(1, X), group="run"), other := task(3, X, device=EVE, seconds=9.0))
    server.wait(1.0)
    server.submit(hedge := replace(task(2, X, device=BOB, of=1), group="ignored"))
    assert not server.ledger.is_open("ignored"), "a hedge belongs to the group of its region"
    assert server.tell(GroupsAbandoned(("ignored", "unknown"))) == []
    assert server.tell(GroupsAbandoned(("run",))) == [Cancel(slow), Cancel(hedge)]
    assert server.result(other) == [taken(other)]


def test_a_region_without_a_group_cannot_be_abandoned() -> None:
    server = Server(ann=100)
    server.submit(replace(task(1, X), group=None))
    assert not server.ledger.is_open(None)
    assert server.tell(GroupsAbandoned((None,))) == []


# ------------------------------------------------------------------------------------------------ refusals


def test_a_result_is_accepted_once_and_only_from_the_device_that_runs_the_task() -> None:
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


def test_a_failed_task_is_orphaned_and_its_device_continues() -> None:
    server = Server(ann=100)
    one, two = task(1, X), task(2, X)
    server.submit(one, two)
    assert server.tell(TaskFailed(ANN, one.id)) == [Cancel(one), Orphan(one, (WHOLE,), True)]
    assert server.tell(CancelSent(ANN, one.id)) == []
    assert server.result(two) == [taken(two)]


def test_a_message_about_a_cancelled_task_is_late_but_not_a_fault() -> None:
    server = Server(ann=100)
    server.submit(one := task(1, X), task(2, X))
    server.tell(GroupsAbandoned((one.group,)))
    assert not only(server.result(one), Refuse).is_fault
    assert not only(server.tell(TaskFailed(ANN, one.id)), Refuse).is_fault
    server.tell(CancelSent(ANN, one.id))  # a message of the device may have crossed it
    assert not only(server.result(one), Refuse).is_fault
    assert not only(server.tell(TaskFailed(ANN, one.id)), Refuse).is_fault
