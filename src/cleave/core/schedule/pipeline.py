"""The pipeline of a batch through resident layers: which units can be computed next, and on which device.

A stage is a shard of the model, or the slices of one sublayer; each shard is served by the devices that hold its
weights (`desks.py`). A sequence takes a seat in every shard (`accounts.py`). Its chunks flow forward in causal order
and backward in reverse; a unit is ready as soon as its inputs are stored, so stages overlap without a barrier.

A result is *received* when all of it has arrived: from then on it is known, whatever happens to its device. It is
*stored* when its numbers are where the next units read them; results may be stored in any order. A departed device's
sequences take other seats and start over from the first chunk; results already known are not requested again (silent
units). Gradients that its account had not returned are lost and recomputed by those units; returned ones are not
requested again.

This module knows no numbers, bytes or time, and does not schedule devices: units are handed to the ledger, which
decides when each starts. The cost of a unit here does not grow with the stages, slices or devices of the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

from cleave.core.model.batch import Direction
from cleave.core.model.shard import Shard
from cleave.core.schedule.accounts import Account, Accounts, Seat
from cleave.core.schedule.desks import Desk, Desks
from cleave.core.schedule.tasks import DeviceId

Course = Literal["forward", "backward", "both"]
"""Forward only; backward of an earlier forward, whose states must be recomputed; or forward, then backward."""
_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    seat: Seat
    direction: Direction
    chunk: int
    is_silent: bool
    """Its result is already known, from a device that left."""


@dataclass(slots=True, eq=False)
class _Stored:
    """Stored chunks of one sequence at one stage in one direction, in the order of that direction."""

    complete: int
    """Number of leading chunks that every slice has stored."""
    slices: dict[int, int] = field(default_factory=lambda: dict[int, int]())
    """Incomplete chunk -> number of slices that have stored it."""

    def add(self, place: int, slices: int) -> bool:
        """Count one of a chunk's `slices` as stored; return whether this completed any chunks."""
        self.slices[place] = self.slices.get(place, 0) + 1
        before = self.complete
        while self.slices.get(self.complete) == slices:
            del self.slices[self.complete]
            self.complete += 1
        return self.complete > before


@dataclass(slots=True, eq=False)
class _Waiting:
    """A sequence that lost its seat; `part` is what will be read of the account it adds to at the next one."""

    shard: Shard
    sequence: int
    part: object


class Pipeline:
    """Call `begin`, then `received` and `stored` for every unit; `stored` returns the units that became ready."""

    def __init__(
        self,
        stages: Sequence[Sequence[Shard]],
        *,
        sequences: int,
        chunks: int,
        course: Course,
        trained: Collection[Shard] = (),
        late: AbstractSet[DeviceId] = frozenset(),
    ) -> None:
        """`trained` are the shards with gradients, `late` a live view of stragglers; add desks before `begin`."""
        self._stages = [tuple(shards) for shards in stages]
        self._stage = {shard: number for number, shards in enumerate(stages) for shard in shards}
        self.course: Course = course
        self._sequences, self._chunks = sequences, chunks
        self.desks = Desks(self._stage, late)
        self._accounts = Accounts(trained if course != "forward" else ())
        start: dict[Direction, int] = {"forward": chunks if course == "backward" else 0, "backward": 0}
        self._received = {shard: [dict(start) for _ in range(sequences)] for shard in self._stage}
        """Number of known results per shard, sequence and direction."""
        self._stored: list[list[dict[Direction, _Stored]]] = [
            [{direction: _Stored(start[direction]) for direction in _DIRECTIONS} for _ in range(sequences)]
            for _ in self._stages
        ]
        each = len(self._stage) * sequences
        self._missing = {direction: each * (chunks - start[direction]) for direction in _DIRECTIONS}
        """Results not yet stored, over all shards and sequences."""
        self._under_way = 0
        """Units handed out and not done."""
        self._seats: dict[tuple[Shard, int], Seat] = {}
        self._seats_of: dict[DeviceId, dict[Seat, None]] = {}
        self._through: dict[Shard, int] = dict.fromkeys(self._stage, 0)
        """Number of sequences that have finished each shard."""
        self._opened = 0
        self._waiting: list[_Waiting] = []

    # -------------------------------------------------------------------------------------------- questions

    @property
    def shards(self) -> Collection[Shard]:
        return self._stage.keys()

    def stage_of(self, shard: Shard) -> int:
        return self._stage[shard]

    def place_of(self, unit: Unit) -> int:
        """Position of a unit in the order of its direction."""
        return unit.chunk if unit.direction == "forward" else self._chunks - 1 - unit.chunk

    def is_current(self, seat: Seat) -> bool:
        """Whether the sequence still has this seat."""
        return self._seats.get((seat.shard, seat.sequence)) is seat

    def ended(self, direction: Direction) -> bool:
        """Whether every result of one direction is stored."""
        return self._missing[direction] == 0

    def is_over(self, seat: Seat) -> bool:
        """Whether every unit of a seat is done."""
        return seat.done["forward" if self.course == "forward" else "backward"] == self._chunks

    def is_through_stage(self, stage: int, sequence: int) -> bool:
        return all(self._is_through(shard, sequence) for shard in self._stages[stage])

    def is_gathered(self, shard: Shard) -> bool:
        """Whether all sequences have finished the shard and all of its accounts have been read."""
        return self._is_whole(shard) and self._accounts.is_read(shard)

    @property
    def is_read(self) -> bool:
        """Whether every account has been read and no sequence waits for a seat, which would open another."""
        return not self._waiting and self._accounts.are_read

    @property
    def is_stuck(self) -> bool:
        """Whether sequences wait for seats while nothing is under way that could free one."""
        return not self._under_way and (bool(self._waiting) or self._opened < self._sequences)

    @property
    def unserved(self) -> list[Shard]:
        """Unfinished shards that no device serves."""
        return [shard for shard in self._stage if not self.desks.at(shard) and not self._is_whole(shard)]

    # -------------------------------------------------------------------------------------------- events

    def begin(self) -> list[Unit]:
        return self.settle()

    def received(self, unit: Unit) -> None:
        """Record that all of a unit's result has arrived; results arrive in chunk order."""
        seat, direction = unit.seat, unit.direction
        assert self.is_current(seat), "units of lost seats are forgotten"
        assert seat.received[direction] == self.place_of(unit)
        seat.received[direction] += 1
        if not unit.is_silent:
            self._received[seat.shard][seat.sequence][direction] += 1

    def stored(self, unit: Unit) -> list[Unit]:
        """Record that a received result is where the next units read it, even if its seat has been lost since."""
        seat, direction = unit.seat, unit.direction
        stage, is_more_complete = self._stage[seat.shard], False
        if not unit.is_silent:
            self._missing[direction] -= 1
            stored = self._stored[stage][seat.sequence][direction]
            is_more_complete = stored.add(self.place_of(unit), len(self._stages[stage]))
        is_current, is_over = self.is_current(seat), False
        if is_current:
            seat.done[direction] += 1
            self._under_way -= 1
            is_over = self.is_over(seat)
            if is_over:
                self.desks.leave(seat.shard, seat.desk)
                self._through[seat.shard] += 1
        if is_more_complete:
            units = self._around(stage, seat.sequence)
        else:
            units = list(self._ready(seat)) if is_current else []
        return units + self.settle() if is_over else units

    def readable(self, shard: Shard) -> list[Account]:
        """Accounts to read now; each is returned once.

        All accounts of a shard once every sequence has finished it. A partial account, which replaces what a departed
        device lost, once its own sequences have and no other waits for that part: another account may need its room.
        """
        if not self._accounts.is_trained(shard):
            return []
        if self._is_whole(shard):
            found = [account for account in self._accounts.at(shard) if not account.is_closed]
        else:
            found = [account for account in self._accounts.partial(shard) if self._is_made_up(account)]
        for account in found:
            if not account.seats:  # all of its sequences moved to other devices
                self._accounts.drop(account)
            account.is_closed = True
        return [account for account in found if account.seats]

    def being_read(self, shard: Shard, device: DeviceId) -> list[Account]:
        """Accounts of a device that were closed for reading and have not arrived yet."""
        return [one for one in self._accounts.of(device) if one.shard == shard and one.is_closed]

    def read(self, account: Account) -> None:
        """Record that all of an account has arrived and been added."""
        assert not account.is_read
        account.is_read = True
        self._accounts.drop(account)

    def leave(self, device: DeviceId, left_over: Mapping[Account, object]) -> tuple[list[Seat], list[Unit]]:
        """Remove a departed device; `left_over` is what had not arrived of the accounts being read from it.

        Return the lost seats, whose units the caller must forget, and the units that became ready elsewhere.
        """
        self.desks.remove(device)
        lost: list[Seat] = []
        for account in self._accounts.of(device):
            self._accounts.drop(account)
            part = left_over.get(account, account.part)
            for seat in account.seats:
                if self._accounts.is_trained(seat.shard) or not self.is_over(seat):  # else it owes nothing more
                    lost.append(seat)
                    self._unseat(seat, part)
        return lost, self.settle()

    def give_up_seats(self, device: DeviceId) -> tuple[list[Seat], list[Unit]]:
        """Move a lagging device's sequences to healthy devices with free slots.

        Except those with backward units, and those that make up for a departed device: their account stays open.
        """
        lost: list[Seat] = []
        free: dict[Shard, int] = {}
        for seat in list(self._seats_of.get(device, ())):
            if seat.sent["backward"] or seat.account.part is not None or self.is_over(seat):
                continue
            if seat.shard not in free:
                free[seat.shard] = self.desks.free_slots(seat.shard)
            if free[seat.shard] > 0:
                free[seat.shard] -= 1
                lost.append(seat)
                seat.account.seats.remove(seat)
                self.desks.leave(seat.shard, seat.desk)
                self._unseat(seat, seat.account.part)
        return lost, self.settle() if lost else []

    def settle(self) -> list[Unit]:
        """Seat the sequences that lost their seats, then new ones, while desks are free.

        Call again after desks were added or accounts closed for reading.
        """
        units: list[Unit] = []
        for entry in list(self._waiting):
            desk = self._free_desk(entry.shard, entry.part)
            if desk is not None:
                self._waiting.remove(entry)
                units += self._sit(entry.shard, entry.sequence, desk, entry.part)
        while self._opened < self._sequences and not self._waiting:
            desks: list[tuple[Shard, Desk]] = []
            for shard in self._stage:
                desk = self._free_desk(shard, None)
                if desk is None:
                    return units
                desks.append((shard, desk))
            sequence, self._opened = self._opened, self._opened + 1
            for shard, desk in desks:
                units += self._sit(shard, sequence, desk, None)
        return units

    # -------------------------------------------------------------------------------------------- seats

    def _is_through(self, shard: Shard, sequence: int) -> bool:
        seat = self._seats.get((shard, sequence))
        return seat is not None and self.is_over(seat)

    def _is_whole(self, shard: Shard) -> bool:
        return self._through[shard] == self._sequences

    def _is_made_up(self, account: Account) -> bool:
        waits = any(entry.part is account.part for entry in self._waiting)
        return not account.is_closed and not waits and all(self.is_over(seat) for seat in account.seats)

    def _free_desk(self, shard: Shard, part: object) -> Desk | None:
        return self.desks.soonest(shard, lambda device: self._accounts.may_open(shard, device, part))

    def _sit(self, shard: Shard, sequence: int, desk: Desk, part: object) -> list[Unit]:
        seat = Seat(shard, sequence, desk, self._accounts.open(shard, desk.device, part))
        seat.account.seats.append(seat)
        self._seats[shard, sequence] = seat
        self._seats_of.setdefault(desk.device, {})[seat] = None
        self.desks.take(shard, desk)
        return list(self._ready(seat))

    def _unseat(self, seat: Seat, part: object) -> None:
        """Make a sequence wait for another seat, whose account will be read for `part` only."""
        del self._seats[seat.shard, seat.sequence]
        del self._seats_of[seat.device][seat]
        self._through[seat.shard] -= self.is_over(seat)
        self._under_way -= seat.under_way
        self._waiting.append(_Waiting(seat.shard, seat.sequence, part))

    # -------------------------------------------------------------------------------------------- units

    def _around(self, stage: int, sequence: int) -> list[Unit]:
        """Units that became ready because more of this stage is complete: its own and its neighbors'."""
        near = (shard for shards in self._stages[max(stage - 1, 0) : stage + 2] for shard in shards)
        seats = [self._seats[shard, sequence] for shard in near if (shard, sequence) in self._seats]
        return [unit for seat in seats for unit in self._ready(seat)]

    def _ready(self, seat: Seat) -> Iterator[Unit]:
        known, last = self._received[seat.shard][seat.sequence], self._chunks - 1
        for direction in _DIRECTIONS:
            if direction == "backward" and seat.done["forward"] < self._chunks:
                return  # backward units are more urgent: they would take the slots of those they wait for
            while seat.sent[direction] < self._available(seat, direction):
                place = seat.sent[direction]
                seat.sent[direction] += 1
                self._under_way += 1
                yield Unit(
                    seat=seat,
                    direction=direction,
                    chunk=place if direction == "forward" else last - place,
                    is_silent=place < known[direction],
                )

    def _available(self, seat: Seat, direction: Direction) -> int:
        """How many chunks of one direction could be handed to a seat: those whose inputs are stored."""
        stage, last = self._stage[seat.shard], len(self._stages) - 1
        if direction == "forward":
            return self._chunks if stage == 0 else self._complete(stage - 1, seat.sequence, "forward")
        if self.course == "forward":
            return 0
        if stage < last:
            return self._complete(stage + 1, seat.sequence, "backward")
        is_whole = self._complete(stage, seat.sequence, "forward") == self._chunks
        return self._chunks if is_whole else 0  # backward starts from the loss, which needs every slice

    def _complete(self, stage: int, sequence: int, direction: Direction) -> int:
        """Number of leading chunks that every slice of a stage has stored."""
        return self._stored[stage][sequence][direction].complete

    # -------------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        """Assert the invariants; a violation is our bug."""
        self.desks.check()
        self._accounts.check()
        for (shard, sequence), seat in self._seats.items():
            known = self._received[shard][sequence]
            assert seat.shard == shard
            assert seat in seat.account.seats
            assert seat in self._seats_of[seat.device]
            for direction in _DIRECTIONS:
                assert 0 <= seat.done[direction] <= seat.received[direction] <= seat.sent[direction] <= self._chunks
                assert seat.received[direction] <= known[direction]
                assert self._complete(self._stage[shard], sequence, direction) <= known[direction]
            assert not seat.sent["backward"] or seat.sent["forward"] == self._chunks
        seats = self._seats.values()
        assert sum(len(mine) for mine in self._seats_of.values()) == len(seats)
        assert self._under_way == sum(seat.under_way for seat in seats)
        for shard in self._stage:
            assert self._through[shard] == sum(self._is_through(shard, number) for number in range(self._sequences))
            for desk in self.desks.at(shard):
                assert desk.open == sum(seat.desk is desk and not self.is_over(seat) for seat in seats)
