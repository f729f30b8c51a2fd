"""The way of a batch through columns with resident weights: what can be computed next, and by whom.

A stage is a run of sublayers; a column is a stage, or one slice of it, with the devices that hold its weights. A
sequence takes a **seat** in every column: one device, which keeps its K and V. Its chunks flow forward in causal order
and backward in reverse; a unit is ready as soon as what it reads is there, so stages overlap, and there is no barrier.
Gradients of weights add up on the device in an **account** of the column, read once when all sequences are through.

A device leaves: each of its sequences takes another seat and goes its way there again from its first chunk; results
that are known already are not asked for (silent units). What its account had not returned is lost with it and made
again by those units; what had been returned stays, and is not asked for again.

Knows neither numbers nor bytes nor time: those are of `server/passes.py`, which runs the units and says when they are
done. Not a scheduler of devices either: units are handed to the ledger, which has the last word on when each starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cleave.core.schedule.tasks import DeviceId

Direction = Literal["forward", "backward"]
Course = Literal["forward", "backward", "both"]
"""Forward alone; backward when forward has long been done, whose states must be made again; or one behind the other."""


class Column(NamedTuple):
    stage: int
    slice: int


@dataclass(slots=True, eq=False)
class Desk:
    """A device in a column: how many sequences it can have open at once, and how fast it is beside the others."""

    device: DeviceId
    slots: int
    speed: float
    is_late: bool = False
    open: int = 0


@dataclass(slots=True, eq=False)
class Account:
    """Gradients of a column's weights, as one device adds them up."""

    column: Column
    device: DeviceId
    part: object = None
    """Which part of them is asked for, if some were returned by a device that left: None is all."""
    is_closed: bool = False
    """Being read, or read: nothing may be added."""
    is_read: bool = False
    seats: list[Seat] = field(default_factory=lambda: list[Seat]())


@dataclass(slots=True, eq=False)
class Seat:
    """A sequence's place in a column: what one device has been given of it, and has done."""

    column: Column
    sequence: int
    desk: Desk
    account: Account
    sent: dict[Direction, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    done: dict[Direction, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})

    @property
    def device(self) -> DeviceId:
        return self.desk.device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    seat: Seat
    direction: Direction
    chunk: int
    is_silent: bool
    """Its result is known already, from a device that left."""


class Flow:
    """`begin`, then `done` for every unit; both give the units that became ready."""

    def __init__(
        self, stages: Sequence[int], *, sequences: int, chunks: int, course: Course, trained: Collection[int] = ()
    ) -> None:
        """`stages` are the numbers of their slices, `trained` those with gradients; fill `desks` before `begin`."""
        self._columns = [Column(stage, part) for stage, slices in enumerate(stages) for part in range(slices)]
        self._near = [
            [column for column in self._columns if abs(column.stage - one) <= 1] for one in range(len(stages))
        ]
        """Of each stage, its own columns and those of its neighbours."""
        self._slices, self._chunks, self.course = tuple(stages), chunks, course
        self._sequences = sequences
        self.trained = frozenset(trained) if course != "forward" else frozenset[int]()
        self.desks: dict[Column, list[Desk]] = {column: [] for column in self._columns}
        start = {"forward": chunks if course == "backward" else 0, "backward": 0}
        self._known: dict[Column, list[dict[str, int]]] = {
            column: [dict(start) for _ in range(sequences)] for column in self._columns
        }
        """How many results there are of each sequence, in the order of its direction."""
        each = len(self._columns) * sequences
        self._missing: dict[Direction, int] = {
            "forward": each * (chunks - start["forward"]),
            "backward": each * chunks,
        }
        """Results, of all columns and sequences."""
        self._under_way = 0
        """Units that were given out and are not done."""
        self._seats: dict[tuple[Column, int], Seat] = {}
        self._opened = 0
        self._homeless: list[tuple[Column, int, object]] = []
        self.accounts: dict[Column, list[Account]] = {column: [] for column in self._columns}

    # -------------------------------------------------------------------------------------------- questions

    @property
    def columns(self) -> Sequence[Column]:
        return self._columns

    def is_complete(self, column: Column, sequence: int, direction: Direction, chunk: int) -> bool:
        """Whether every slice of the column's stage has brought this chunk's result."""
        place = chunk if direction == "forward" else self._chunks - 1 - chunk
        return self._everywhere(column.stage, sequence, direction) > place

    def ended(self, direction: Direction) -> bool:
        """Every result of one direction is there."""
        return self._missing[direction] == 0

    def is_over(self, seat: Seat) -> bool:
        """All that was asked of it is done."""
        return seat.done["forward" if self.course == "forward" else "backward"] == self._chunks

    def is_through(self, column: Column, sequence: int) -> bool:
        seat = self._seats.get((column, sequence))
        return seat is not None and self.is_over(seat)

    def is_gathered(self, column: Column) -> bool:
        """All has gone through a column, and every account of it has been read."""
        is_through = all(self.is_through(column, sequence) for sequence in range(self._sequences))
        return is_through and all(account.is_read for account in self.accounts[column])

    @property
    def is_read(self) -> bool:
        """Every account that was to be read has been, and no sequence waits for a seat, to add to one again."""
        accounts = (
            account for column, mine in self.accounts.items() if column.stage in self.trained for account in mine
        )
        return not self._homeless and all(account.is_read for account in accounts)

    def seats(self, device: DeviceId) -> Iterator[Seat]:
        return (seat for seat in self._seats.values() if seat.device == device)

    def check(self) -> None:
        """The invariants; a violation is our own bug."""
        for (column, sequence), seat in self._seats.items():
            known = self._known[column][sequence]
            assert seat.column == column
            assert seat in seat.account.seats
            for direction in ("forward", "backward"):
                assert 0 <= seat.done[direction] <= seat.sent[direction] <= self._chunks
                assert seat.done[direction] <= known[direction]
            assert not seat.sent["backward"] or seat.sent["forward"] == self._chunks
        seats = self._seats.values()
        assert self._under_way == sum(sum(seat.sent.values()) - sum(seat.done.values()) for seat in seats)
        for direction, missing in self._missing.items():
            there = sum(known[direction] for column in self._columns for known in self._known[column])
            assert missing == len(self._columns) * self._sequences * self._chunks - there
        for column, desks in self.desks.items():
            for desk in desks:
                mine = [seat for seat in self._seats.values() if seat.desk is desk and not self.is_over(seat)]
                assert desk.open == len(mine), (column, desk.open, len(mine))

    # -------------------------------------------------------------------------------------------- events

    def begin(self) -> list[Unit]:
        return self.settle()

    def done(self, unit: Unit) -> list[Unit]:
        """A unit's result is in its place, or it was silent."""
        seat = unit.seat
        assert self._seats.get((seat.column, seat.sequence)) is seat, "the shell forgets units of seats that are lost"
        seat.done[unit.direction] += 1
        self._under_way -= 1
        assert seat.done[unit.direction] <= seat.sent[unit.direction]
        if not unit.is_silent:
            self._known[seat.column][seat.sequence][unit.direction] += 1
            self._missing[unit.direction] -= 1
        if not self.is_over(seat):
            return self._around(seat.column.stage, seat.sequence)
        seat.desk.open -= 1
        return self._around(seat.column.stage, seat.sequence) + self.settle()

    def readable(self, column: Column) -> list[Account]:
        """Accounts to be read now; each is given once.

        All of a column, when everything has gone through it. One that makes up for what a device took with it, as soon
        as all of that has: another of those may need its room.
        """
        if column.stage not in self.trained:
            return []
        is_whole = all(self.is_through(column, sequence) for sequence in range(self._sequences))
        if is_whole:  # others gave theirs up
            self.accounts[column] = [account for account in self.accounts[column] if account.seats]
        found = [
            account
            for account in self.accounts[column]
            if not account.is_closed and (is_whole or self._is_made_up(account))
        ]
        for account in found:
            account.is_closed = True
        return found

    def leave(self, device: DeviceId, left_over: Mapping[Account, object]) -> tuple[list[Seat], list[Unit]]:
        """A device is gone; of its accounts that were being read, `left_over` is what had not come.

        Gives the seats that are lost, whose units are to be forgotten, and the units that became ready elsewhere.
        """
        for desks in self.desks.values():
            desks[:] = [desk for desk in desks if desk.device != device]
        lost: list[Seat] = []
        for column in self._columns:
            for account in [account for account in self.accounts[column] if account.device == device]:
                if account.is_read:
                    continue
                self.accounts[column].remove(account)
                part = left_over.get(account, account.part)
                for seat in account.seats:
                    if self.is_over(seat) and column.stage not in self.trained:
                        continue  # all that was wanted of it is there
                    lost.append(seat)
                    self._unseat(seat, part)
        return lost, self.settle()

    def give_up_seats(self, device: DeviceId) -> tuple[list[Seat], list[Unit]]:
        """A device lags: sequences of which it has added nothing to an account move to others, if there are any."""
        lost: list[Seat] = []
        free = {
            column: sum(desk.slots - desk.open for desk in desks if not desk.is_late)
            for column, desks in self.desks.items()
        }
        for seat in list(self.seats(device)):
            if free[seat.column] > 0 and not seat.sent["backward"] and not self.is_over(seat):
                free[seat.column] -= 1
                lost.append(seat)
                seat.account.seats.remove(seat)
                seat.desk.open -= 1
                self._unseat(seat, seat.account.part)
        return lost, self.settle() if lost else []

    @property
    def is_stuck(self) -> bool:
        """Sequences without a seat, and nothing under way that could free one."""
        return not self._under_way and (bool(self._homeless) or self._opened < self._sequences)

    @property
    def unserved(self) -> list[Column]:
        """Columns that sequences wait for and nobody serves."""
        empty = [column for column in self._columns if not self.desks[column]]
        every = range(self._sequences)
        return [column for column in empty if not all(self.is_through(column, sequence) for sequence in every)]

    def settle(self) -> list[Unit]:
        """Seats for those who lost theirs, then for sequences that have not begun, as long as there are any free.

        To be asked again when desks were added, or accounts are being read.
        """
        units: list[Unit] = []
        for entry in list(self._homeless):
            column, sequence, part = entry
            desk = self._free_desk(column, part)
            if desk is not None:
                self._homeless.remove(entry)
                units += self._sit(column, sequence, desk, part)
        while self._opened < self._sequences and not self._homeless:
            desks = {column: self._free_desk(column, None) for column in self._columns}
            if any(desk is None for desk in desks.values()):
                break
            sequence, self._opened = self._opened, self._opened + 1
            for column, desk in desks.items():
                assert desk is not None
                units += self._sit(column, sequence, desk, None)
        return units

    # -------------------------------------------------------------------------------------------- parts

    def _unseat(self, seat: Seat, part: object) -> None:
        """A sequence waits for another seat; of what it will add to an account there, `part` is asked for."""
        del self._seats[seat.column, seat.sequence]
        self._under_way -= sum(seat.sent.values()) - sum(seat.done.values())
        self._homeless.append((seat.column, seat.sequence, part))

    def _free_desk(self, column: Column, part: object) -> Desk | None:
        """Who should be soonest done with one sequence more, of those who need no second account for it at a time."""
        taken = {a.device for a in self.accounts[column] if not a.is_closed and a.seats and a.part is not part}
        free = [desk for desk in self.desks[column] if desk.open < desk.slots and desk.device not in taken]
        return min(free, key=lambda desk: (desk.is_late, (desk.open + 1) / desk.speed), default=None)

    def _sit(self, column: Column, sequence: int, desk: Desk, part: object) -> list[Unit]:
        seat = Seat(column, sequence, desk, self._account(column, desk.device, part))
        seat.account.seats.append(seat)
        self._seats[column, sequence] = seat
        desk.open += 1
        return list(self._ready(seat))

    def _is_made_up(self, account: Account) -> bool:
        waiting = any(part is account.part for _, _, part in self._homeless)
        return account.part is not None and not waiting and all(self.is_over(seat) for seat in account.seats)

    def _account(self, column: Column, device: DeviceId, part: object) -> Account:
        for account in self.accounts[column]:
            if account.device == device and account.part is part and not account.is_closed:
                return account
        account = Account(column, device, part)
        self.accounts[column].append(account)
        return account

    def _around(self, stage: int, sequence: int) -> list[Unit]:
        """Who may go on because something of this stage is done: the stage itself and its neighbours."""
        seats = [self._seats[column, sequence] for column in self._near[stage] if (column, sequence) in self._seats]
        return [unit for seat in seats for unit in self._ready(seat)]

    def _ready(self, seat: Seat) -> Iterator[Unit]:
        known, last = self._known[seat.column][seat.sequence], self._chunks - 1
        for direction in ("forward", "backward"):
            if direction == "backward" and seat.done["forward"] < self._chunks:
                return  # they are more urgent, and would take the turns of those they wait for
            while seat.sent[direction] < self._there(seat, direction):
                place = seat.sent[direction]
                seat.sent[direction] += 1
                self._under_way += 1
                yield Unit(
                    seat=seat,
                    direction=direction,
                    chunk=place if direction == "forward" else last - place,
                    is_silent=place < known[direction],
                )

    def _there(self, seat: Seat, direction: Direction) -> int:
        """How many chunks a seat could be given of one direction, as far as what they read is there."""
        stage, last = seat.column.stage, len(self._slices) - 1
        if direction == "forward":
            return self._chunks if stage == 0 else self._everywhere(stage - 1, seat.sequence, "forward")
        if self.course == "forward":
            return 0
        if stage < last:
            return self._everywhere(stage + 1, seat.sequence, "backward")
        is_whole = self._everywhere(stage, seat.sequence, "forward") == self._chunks
        return self._chunks if is_whole else 0  # what begins backward needs every slice's part of the loss

    def _everywhere(self, stage: int, sequence: int, direction: Direction) -> int:
        return min(self._known[Column(stage, part)][sequence][direction] for part in range(self._slices[stage]))
