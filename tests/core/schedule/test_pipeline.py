"""Laws of the pipeline: whichever devices leave or lag, and in whatever order units end, every chunk of every sequence
passes once through every shard, and its gradients are read once."""

from __future__ import annotations

import sys
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.grids import examples

from cleave.core.model.shard import Shard
from cleave.core.schedule.accounts import Account, Seat
from cleave.core.schedule.desks import Desk
from cleave.core.schedule.pipeline import Course, Pipeline, Unit
from cleave.core.schedule.tasks import DeviceId

steady = settings(max_examples=examples(150), deadline=None, derandomize=True)
TENSORS = 3
"""Gradient tensors per shard, read one by one."""


def stage(number: int, slices: int = 1) -> list[Shard]:
    return [Shard(first=number, count=1, index=index, of=slices) for index in range(slices)]


def stages_of(*slices: int) -> list[list[Shard]]:
    return [stage(number, count) for number, count in enumerate(slices)]


def all_desks(pipeline: Pipeline) -> list[tuple[Shard, Desk]]:
    return [(shard, desk) for shard in pipeline.shards for desk in pipeline.desks.at(shard)]


@dataclass
class Table:
    """Stand-in for the devices: records which rows went into which state and which accumulator."""

    pipeline: Pipeline
    sequences: int
    chunks: int
    late: set[DeviceId] = field(default_factory=lambda: set[DeviceId]())
    trained: frozenset[Shard] = frozenset()
    under_way: list[Unit] = field(default_factory=lambda: list[Unit]())
    storing: list[Unit] = field(default_factory=lambda: list[Unit]())
    """Units whose results arrived and are still being stored for the next stage."""
    forward: dict[Seat, list[int]] = field(default_factory=lambda: dict[Seat, list[int]]())
    added: dict[Account, Counter[tuple[int, int]]] = field(
        default_factory=lambda: dict[Account, Counter[tuple[int, int]]]()
    )
    reading: dict[Account, set[int]] = field(default_factory=lambda: dict[Account, set[int]]())
    results: Counter[tuple[str, Shard, int, int]] = field(
        default_factory=lambda: Counter[tuple[str, Shard, int, int]]()
    )
    read: Counter[tuple[Shard, int, int, int]] = field(default_factory=lambda: Counter[tuple[Shard, int, int, int]]())

    def take(self, units: list[Unit]) -> None:
        self.under_way += units
        for shard in self.pipeline.shards:
            for account in self.pipeline.readable(shard):
                part = account.part
                self.reading[account] = set(range(TENSORS)) if part is None else set(part)  # type: ignore[call-overload]
        self.under_way += self.pipeline.settle()

    def finish(self, unit: Unit) -> None:
        self.receive(unit)
        self.store(unit)

    def receive(self, unit: Unit) -> None:
        self.under_way.remove(unit)
        self.storing.append(unit)
        self.pipeline.received(unit)
        seat = unit.seat
        if unit.direction == "forward":
            so_far = self.forward.setdefault(seat, [])
            assert unit.chunk == len(so_far), "forward runs in causal order from the first chunk"
            so_far.append(unit.chunk)
        else:
            assert len(self.forward[seat]) == self.chunks, "backward starts once the whole sequence has gone forward"
            assert not seat.account.is_closed, "nothing is added to an account being read"
            mine = self.added.setdefault(seat.account, Counter())
            done = sum(count for (sequence, _), count in mine.items() if sequence == seat.sequence)
            assert unit.chunk == self.chunks - 1 - done, "backward runs in reverse order"
            mine[seat.sequence, unit.chunk] += 1
        if not unit.is_silent:
            self.results[unit.direction, seat.shard, seat.sequence, unit.chunk] += 1

    def store(self, unit: Unit) -> None:
        self.storing.remove(unit)
        self.take(self.pipeline.stored(unit))

    def read_one(self, account: Account) -> None:
        tensor = min(self.reading[account])
        self.reading[account].discard(tensor)
        for (sequence, chunk), count in self.added[account].items():
            self.read[account.shard, tensor, sequence, chunk] += count
        if not self.reading[account]:
            self.pipeline.read(account)
            del self.reading[account]

    def lose(self, device: DeviceId) -> None:
        left_over = {account: frozenset(wanted) for account, wanted in self.reading.items() if account.device == device}
        lost, units = self.pipeline.leave(device, left_over)
        for account in [account for account in self.reading if account.device == device]:
            del self.reading[account]
        self.forget(lost, units)

    def lag(self, device: DeviceId) -> None:
        self.late.add(device)
        self.forget(*self.pipeline.give_up_seats(device))

    def forget(self, lost: list[Seat], units: list[Unit]) -> None:
        self.under_way = [unit for unit in self.under_way if unit.seat not in lost]
        self.take(units)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    stages = stages_of(*draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    sequences, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    course: Course = draw(st.sampled_from(["forward", "backward", "both"]))
    trained = {shard for shards in stages for shard in shards if draw(st.booleans())}
    late: set[DeviceId] = set()
    pipeline = Pipeline(stages, sequences=sequences, chunks=chunks, course=course, trained=trained, late=late)
    if course == "forward":
        trained = set()
    for shard in pipeline.shards:
        for place, device in enumerate(sorted(draw(st.sets(st.integers(0, 4), min_size=1, max_size=3)))):
            slots = sequences if place == 0 else draw(st.integers(1, 3))  # the device that stays can take all sequences
            pipeline.desks.add(shard, Desk(DeviceId(f"d{device}"), slots, 1.0))
    return Table(pipeline, sequences, chunks, late, frozenset(trained))


def run(table: Table, data: st.DataObject, *, trouble: int) -> None:
    """Run to the end, with some devices lost or late; each shard keeps one device that stays."""
    pipeline = table.pipeline
    safe = {next(iter(pipeline.desks.at(shard))).device for shard in pipeline.shards}
    table.take(pipeline.begin())
    for _ in range(10_000):
        pipeline.check()
        if not table.under_way and not table.storing and not table.reading:
            break
        doomed = sorted({desk.device for _, desk in all_desks(pipeline)} - safe)
        if doomed and trouble and data.draw(st.integers(0, 5)) == 0:
            trouble -= 1
            device = data.draw(st.sampled_from(doomed))
            (table.lose if data.draw(st.booleans()) else table.lag)(device)
            continue
        under_way, storing, accounts = len(table.under_way), len(table.storing), list(table.reading)
        index = data.draw(st.integers(0, under_way + storing + len(accounts) - 1))
        if index < under_way:
            table.receive(next(unit for unit in table.under_way if _is_first(unit, table.under_way, index)))
        elif index < under_way + storing:
            table.store(table.storing[index - under_way])
        else:
            table.read_one(accounts[index - under_way - storing])
    assert not pipeline.is_stuck


def _is_first(unit: Unit, under_way: list[Unit], index: int) -> bool:
    """Whether a unit is of the chosen seat, whose units a device runs in order."""
    return unit.seat is under_way[index].seat


@steady
@given(tables(), st.data())
def test_every_chunk_goes_once_through_every_shard_and_its_gradients_are_read_once(
    table: Table, data: st.DataObject
) -> None:
    run(table, data, trouble=data.draw(st.integers(0, 4)))
    pipeline = table.pipeline
    directions = {"forward": ["forward"], "backward": ["backward"], "both": ["forward", "backward"]}[pipeline.course]
    everything = [
        (direction, shard, sequence, chunk)
        for direction in directions
        for shard in pipeline.shards
        for sequence in range(table.sequences)
        for chunk in range(table.chunks)
    ]
    assert table.results == Counter(everything)
    assert pipeline.is_read
    assert all(pipeline.ended("backward" if direction == "backward" else "forward") for direction in directions)
    assert all(pipeline.is_gathered(shard) for shard in pipeline.shards)
    assert table.read == Counter(
        (shard, tensor, sequence, chunk)
        for shard in pipeline.shards
        if shard in table.trained
        for tensor in range(TENSORS)
        for sequence in range(table.sequences)
        for chunk in range(table.chunks)
    )


@steady
@given(tables())
def test_no_desk_has_more_sequences_open_than_it_has_slots(table: Table) -> None:
    table.take(table.pipeline.begin())
    while table.under_way:
        assert all(desk.open <= desk.slots for _, desk in all_desks(table.pipeline))
        table.finish(table.under_way[0])


@steady
@given(tables(), st.data())
def test_a_stage_ends_for_a_sequence_when_all_its_slices_have(table: Table, data: st.DataObject) -> None:
    pipeline, ends = table.pipeline, "forward" if table.pipeline.course == "forward" else "backward"
    over: Counter[tuple[int, int]] = Counter()
    table.take(pipeline.begin())
    while table.under_way:
        unit = data.draw(st.sampled_from(table.under_way))
        unit = next(other for other in table.under_way if other.seat is unit.seat)
        seat, number = unit.seat, pipeline.stage_of(unit.seat.shard)
        table.finish(unit)
        over[number, seat.sequence] += seat.done[ends] == table.chunks and unit.direction == ends
        slices = sum(pipeline.stage_of(shard) == number for shard in pipeline.shards)
        assert pipeline.is_through_stage(number, seat.sequence) == (over[number, seat.sequence] == slices)


def test_a_chunk_enters_the_next_stage_as_soon_as_it_leaves_this_one() -> None:
    pipeline = Pipeline(stages_of(1, 1), sequences=1, chunks=2, course="both")
    for shard in pipeline.shards:
        pipeline.desks.add(shard, Desk(DeviceId(f"d{shard.first}"), 1, 1.0))
    first, second = pipeline.begin()
    pipeline.received(first)
    assert [unit.seat.shard.first for unit in pipeline.stored(first)] == [1]
    assert second.chunk == 1


def test_a_chunk_waits_for_earlier_chunks_in_whatever_order_they_are_stored() -> None:
    pipeline = Pipeline(stages_of(1, 1), sequences=1, chunks=2, course="both")
    for shard in pipeline.shards:
        pipeline.desks.add(shard, Desk(DeviceId(f"d{shard.first}"), 1, 1.0))
    first, second = pipeline.begin()
    pipeline.received(first)
    pipeline.received(second)
    assert pipeline.stored(second) == []
    assert [unit.chunk for unit in pipeline.stored(first)] == [0, 1]


def test_a_shard_that_no_device_serves_waits_for_a_desk() -> None:
    first, second = stages_of(1, 1)
    pipeline = Pipeline([first, second], sequences=2, chunks=1, course="both", trained={*first, *second})
    for shard in pipeline.shards:
        pipeline.desks.add(shard, Desk(DeviceId(f"d{shard.first}"), 2, 1.0))
    table = Table(pipeline, 2, 1)
    table.take(pipeline.begin())
    table.lose(DeviceId("d1"))
    assert pipeline.unserved == second
    pipeline.desks.add(second[0], Desk(DeviceId("d0"), 2, 1.0))
    table.take(pipeline.settle())
    while table.under_way or table.reading:
        if table.under_way:
            table.finish(table.under_way[0])
        else:
            table.read_one(next(iter(table.reading)))
    assert pipeline.is_read
    assert pipeline.ended("backward")


def test_a_pipeline_without_devices_is_stuck() -> None:
    pipeline = Pipeline([stage(0)], sequences=1, chunks=1, course="forward")
    pipeline.desks.add(stage(0)[0], Desk(DeviceId("d"), 1, 1.0))
    table = Table(pipeline, 1, 1)
    table.take(pipeline.begin())
    table.lose(DeviceId("d"))
    assert pipeline.is_stuck


@pytest.mark.parametrize("is_late", [False, True])
def test_a_late_device_is_chosen_last_as_soon_as_it_is_late(is_late: bool) -> None:
    late: set[DeviceId] = set()
    pipeline = Pipeline([stage(0)], sequences=1, chunks=1, course="forward", late=late)
    pipeline.desks.add(stage(0)[0], Desk(DeviceId("fast"), 1, 9.0))
    pipeline.desks.add(stage(0)[0], Desk(DeviceId("slow"), 1, 1.0))
    if is_late:
        late.add(DeviceId("fast"))
    (unit,) = pipeline.begin()
    assert unit.seat.device == ("slow" if is_late else "fast")


def test_sequences_go_to_devices_in_proportion_to_their_speed() -> None:
    pipeline = Pipeline([stage(0)], sequences=12, chunks=1, course="forward")
    for device, speed in (("fast", 3.0), ("slow", 1.0), ("usual", 2.0)):
        pipeline.desks.add(stage(0)[0], Desk(DeviceId(device), 12, speed))
    assert Counter(unit.seat.device for unit in pipeline.begin()) == {"fast": 6, "usual": 4, "slow": 2}


def _calls_per_unit(stages: int, devices: int, slices: int = 1) -> float:
    """Function calls per unit, ours and Python's own, when all devices of a stage share its rows."""
    pipeline = Pipeline(stages_of(*[slices] * stages), sequences=8, chunks=4, course="both")
    for shard in pipeline.shards:
        for number in range(devices):
            pipeline.desks.add(shard, Desk(DeviceId(f"d{shard.first}.{shard.index}.{number}"), 1, 1.0))
    units, done, calls = deque(pipeline.begin()), 0, 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    while units:
        unit = units.popleft()
        sys.setprofile(count)
        pipeline.received(unit)
        units += pipeline.stored(unit)
        pipeline.readable(unit.seat.shard)
        assert not pipeline.is_stuck or not units
        sys.setprofile(None)
        done += 1
    assert done == 2 * 8 * 4 * stages * slices
    return calls / done


def test_the_cost_of_a_unit_does_not_grow_with_stages_slices_or_devices() -> None:
    few = _calls_per_unit(stages=2, devices=8)
    assert _calls_per_unit(stages=40, devices=8) < 1.3 * few
    assert _calls_per_unit(stages=2, devices=400) < 1.3 * few
    assert _calls_per_unit(stages=2, devices=8, slices=16) < 1.3 * few
