"""Laws of a batch's way through columns: whoever leaves or lags, and in whatever order units end, every chunk of every
sequence goes once through every column, and its gradients are read once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.schedule.pipeline import Account, Column, Course, Desk, Flow, Seat, Unit
from cleave.core.schedule.tasks import DeviceId

steady = settings(max_examples=150, deadline=None, derandomize=True)
TENSORS = 3
"""Of each column, read one by one."""


@dataclass
class Table:
    """Plays the devices: keeps, as they would, which rows went into which state and which accumulator."""

    flow: Flow
    sequences: int
    chunks: int
    under_way: list[Unit] = field(default_factory=lambda: list[Unit]())
    forward: dict[Seat, list[int]] = field(default_factory=lambda: dict[Seat, list[int]]())
    added: dict[Account, Counter[tuple[int, int]]] = field(
        default_factory=lambda: dict[Account, Counter[tuple[int, int]]]()
    )
    reading: dict[Account, set[int]] = field(default_factory=lambda: dict[Account, set[int]]())
    results: Counter[tuple[str, Column, int, int]] = field(
        default_factory=lambda: Counter[tuple[str, Column, int, int]]()
    )
    read: Counter[tuple[Column, int, int, int]] = field(default_factory=lambda: Counter[tuple[Column, int, int, int]]())

    def take(self, units: list[Unit]) -> None:
        self.under_way += units
        for column in self.flow.columns:
            for account in self.flow.readable(column):
                part = account.part
                mine = [other for other in self.flow.accounts[column] if other.device == account.device]
                assert sum(not other.is_closed for other in mine) == 0, "one account of a column at a time"
                self.reading[account] = set(range(TENSORS)) if part is None else set(part)  # type: ignore[call-overload]
        self.under_way += self.flow.settle()

    def finish(self, unit: Unit) -> None:
        self.under_way.remove(unit)
        seat = unit.seat
        if unit.direction == "forward":
            so_far = self.forward.setdefault(seat, [])
            assert unit.chunk == len(so_far), "forward in causal order, each from the first chunk"
            so_far.append(unit.chunk)
        else:
            assert len(self.forward[seat]) == self.chunks, "backward when all of it has gone forward"
            mine = self.added.setdefault(seat.account, Counter())
            done = sum(count for (sequence, _), count in mine.items() if sequence == seat.sequence)
            assert unit.chunk == self.chunks - 1 - done, "backward in reverse"
            mine[seat.sequence, unit.chunk] += 1
        if not unit.is_silent:
            self.results[unit.direction, seat.column, seat.sequence, unit.chunk] += 1
        self.take(self.flow.done(unit))

    def read_one(self, account: Account) -> None:
        tensor = min(self.reading[account])
        self.reading[account].discard(tensor)
        for (sequence, chunk), count in self.added[account].items():
            self.read[account.column, tensor, sequence, chunk] += count
        if not self.reading[account]:
            account.is_read = True
            del self.reading[account]

    def lose(self, device: DeviceId) -> None:
        left_over = {account: frozenset(wanted) for account, wanted in self.reading.items() if account.device == device}
        lost, units = self.flow.leave(device, left_over)
        for account in [account for account in self.reading if account.device == device]:
            del self.reading[account]
        self.forget(lost, units)

    def forget(self, lost: list[Seat], units: list[Unit]) -> None:
        self.under_way = [unit for unit in self.under_way if unit.seat not in lost]
        self.take(units)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    stages = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    sequences, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    course: Course = draw(st.sampled_from(["forward", "backward", "both"]))
    trained = {stage for stage in range(len(stages)) if draw(st.booleans())}
    flow = Flow(stages, sequences=sequences, chunks=chunks, course=course, trained=trained)
    for column in flow.columns:
        for device in draw(st.sets(st.integers(0, 4), min_size=1, max_size=3)):
            flow.desks[column].append(Desk(DeviceId(f"d{device}"), draw(st.integers(1, 3)), 1.0))
    return Table(flow, sequences, chunks)


def run(table: Table, data: st.DataObject, *, trouble: int) -> None:
    """To the end, with some devices lost or late on the way; each column keeps one that stays."""
    flow = table.flow
    safe = {column: desks[0].device for column, desks in flow.desks.items()}
    for column, desks in flow.desks.items():
        desks[0].slots = table.sequences  # whoever stays can take all
        assert safe[column]
    table.take(flow.begin())
    for _ in range(10_000):
        flow.check()
        if not table.under_way and not table.reading:
            break
        doomed = sorted({desk.device for desks in flow.desks.values() for desk in desks} - set(safe.values()))
        if doomed and trouble and data.draw(st.integers(0, 5)) == 0:
            trouble -= 1
            device = data.draw(st.sampled_from(doomed))
            if data.draw(st.booleans()):
                table.lose(device)
            else:
                for desks in flow.desks.values():
                    for desk in desks:
                        desk.is_late = desk.is_late or desk.device == device
                table.forget(*flow.give_up_seats(device))
            continue
        accounts = list(table.reading)
        index = data.draw(st.integers(0, len(table.under_way) + len(accounts) - 1))
        if index < len(table.under_way):
            table.finish(next(unit for unit in table.under_way if _is_first(unit, table.under_way, index)))
        else:
            table.read_one(accounts[index - len(table.under_way)])
    assert not flow.is_stuck


def _is_first(unit: Unit, under_way: list[Unit], index: int) -> bool:
    """A device does what it was given of a seat in order."""
    return unit.seat is under_way[index].seat


@steady
@given(tables(), st.data())
def test_every_chunk_goes_once_through_every_column_and_its_gradients_are_read_once(
    table: Table, data: st.DataObject
) -> None:
    run(table, data, trouble=data.draw(st.integers(0, 4)))
    flow = table.flow
    directions = {"forward": ["forward"], "backward": ["backward"], "both": ["forward", "backward"]}[flow.course]
    everything = [
        (direction, column, sequence, chunk)
        for direction in directions
        for column in flow.columns
        for sequence in range(table.sequences)
        for chunk in range(table.chunks)
    ]
    assert table.results == Counter(everything)
    assert flow.is_read
    assert all(flow.ended("backward" if direction == "backward" else "forward") for direction in directions)
    assert table.read == Counter(
        (column, tensor, sequence, chunk)
        for column in flow.columns
        if column.stage in flow.trained
        for tensor in range(TENSORS)
        for sequence in range(table.sequences)
        for chunk in range(table.chunks)
    )


@steady
@given(tables())
def test_no_desk_has_more_sequences_open_than_it_has_slots(table: Table) -> None:
    table.take(table.flow.begin())
    while table.under_way:
        assert all(desk.open <= desk.slots for desks in table.flow.desks.values() for desk in desks)
        table.finish(table.under_way[0])


def test_stages_overlap_as_soon_as_a_chunk_is_through() -> None:
    flow = Flow([1, 1], sequences=1, chunks=2, course="both")
    for column in flow.columns:
        flow.desks[column].append(Desk(DeviceId(f"d{column.stage}"), 1, 1.0))
    first, second = flow.begin()
    assert [unit.seat.column.stage for unit in flow.done(first)] == [1]
    assert second.chunk == 1


def test_a_column_nobody_serves_is_told_and_waits_for_a_desk() -> None:
    flow = Flow([1, 1], sequences=2, chunks=1, course="both", trained={0, 1})
    for column in flow.columns:
        flow.desks[column].append(Desk(DeviceId(f"d{column.stage}"), 2, 1.0))
    table = Table(flow, 2, 1)
    table.take(flow.begin())
    table.lose(DeviceId("d1"))
    assert flow.unserved == [Column(1, 0)]
    flow.desks[Column(1, 0)].append(Desk(DeviceId("d0"), 2, 1.0))
    table.take(flow.settle())
    while table.under_way or table.reading:
        if table.under_way:
            table.finish(table.under_way[0])
        else:
            table.read_one(next(iter(table.reading)))
    assert flow.is_read
    assert flow.ended("backward")


def test_nothing_can_go_on_when_nobody_is_left() -> None:
    flow = Flow([1], sequences=1, chunks=1, course="forward")
    flow.desks[Column(0, 0)].append(Desk(DeviceId("d"), 1, 1.0))
    table = Table(flow, 1, 1)
    table.take(flow.begin())
    table.lose(DeviceId("d"))
    assert flow.is_stuck


@pytest.mark.parametrize("late", [False, True])
def test_whoever_is_late_is_asked_last(late: bool) -> None:
    flow = Flow([1], sequences=1, chunks=1, course="forward")
    flow.desks[Column(0, 0)] += [Desk(DeviceId("fast"), 1, 9.0, is_late=late), Desk(DeviceId("slow"), 1, 1.0)]
    (unit,) = flow.begin()
    assert unit.seat.device == ("slow" if late else "fast")
