"""The way of a batch through resident layers: what can be computed next, and by whom.

A stage is a shard of the model, or the slices of one sublayer; each shard is served by the devices that hold its
weights. A sequence takes a **seat** in every shard: one device, which keeps its K and V. Its chunks flow forward in
causal order and backward in reverse; a unit is ready as soon as what it reads is stored, so stages overlap without a
barrier. Gradients of weights add up on the device in an **account** of the shard, read once when all sequences are
through.

A result is *received* when all of it came: from then on it is known, whatever becomes of its device. It is *stored*
when its numbers are where the next units read them. A departed device's sequences take other seats and go their way
again from the first chunk; results that are known already are not asked for (silent units). What its account had not
returned is lost with it and made again by those units; what had been returned is not asked for again.

Knows neither numbers nor bytes nor time. Not a scheduler of devices either: units are handed to the ledger, which
decides when each starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

from cleave.core.model.batch import Direction
from cleave.core.model.shard import Shard
from cleave.core.schedule.tasks import DeviceId

Course = Literal["forward", "backward", "both"]
"""Forward alone; backward of an earlier forward, whose states must be made again; or one behind the other."""
_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


def _none() -> dict[Direction, int]:
    return {"forward": 0, "backward": 0}


@dataclass(slots=True, eq=False)
class Desk:
    """A device at a shard: how many sequences it can have open at once, and how fast it is beside the others."""

    device: DeviceId
    slots: int
    speed: float
    open: int = 0


@dataclass(slots=True, eq=False)
class Account:
    """Gradients of a shard's weights, as one device adds them up."""

    shard: Shard
    device: DeviceId
    part: object = None
    """Which part of them is asked for, if a departed device had returned some: None is all."""
    is_closed: bool = False
    """Being read, or read: nothing may be added."""
    is_read: bool = False
    seats: list[Seat] = field(default_factory=lambda: list[Seat]())


@dataclass(slots=True, eq=False)
class Seat:
    """A sequence's place at a shard: what one device has been given of it, and has done."""

    shard: Shard
    sequence: int
    desk: Desk
    account: Account
    sent: dict[Direction, int] = field(default_factory=_none)
    received: dict[Direction, int] = field(default_factory=_none)
    done: dict[Direction, int] = field(default_factory=_none)
    """Units whose results are stored, or that were silent."""

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


@dataclass(slots=True, eq=False)
class _Progress:
    """How many results of one sequence there are at one shard, in the order of each direction."""

    received: dict[Direction, int]
    stored: dict[Direction, int]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A sequence that lost its seat; of what it adds to an account at the next one, `part` is asked for."""

    shard: Shard
    sequence: int
    part: object


class Pipeline:
    """`begin`, then `received` and `stored` for every unit; `stored` gives the units that became ready."""

    def __init__(
        self,
        stages: Sequence[Sequence[Shard]],
        *,
        sequences: int,
        chunks: int,
        course: Course,
        trained: Collection[int] = (),
        late: AbstractSet[DeviceId] = frozenset(),
    ) -> None:
        """`trained` are the stages with gradients, `late` a live view of stragglers; add desks before `begin`."""
        self._stages = [tuple(shards) for shards in stages]
        self._stage = {shard: number for number, shards in enumerate(stages) for shard in shards}
        self.course: Course = course
        self._sequences, self._chunks, self._late = sequences, chunks, late
        self._trained = frozenset(trained) if course != "forward" else frozenset[int]()
        self.desks: dict[Shard, list[Desk]] = {shard: [] for shard in self._stage}
        self._shards_of: dict[DeviceId, list[Shard]] = {}
        """Shards at which a device has a desk."""
        start: dict[Direction, int] = {"forward": chunks if course == "backward" else 0, "backward": 0}
        self._progress: dict[Shard, list[_Progress]] = {
            shard: [_Progress(dict(start), dict(start)) for _ in range(sequences)] for shard in self._stage
        }
        each = len(self._stage) * sequences
        self._missing: dict[Direction, int] = {
            "forward": each * (chunks - start["forward"]),
            "backward": each * chunks,
        }
        """Results that are not stored, of all shards and sequences."""
        self._under_way = 0
        """Units that were given out and are not done."""
        self._seats: dict[tuple[Shard, int], Seat] = {}
        self._seats_of: dict[DeviceId, dict[Seat, None]] = {}
        self._through: dict[Shard, int] = dict.fromkeys(self._stage, 0)
        """Sequences that are through a shard."""
        self._opened = 0
        self._waiting: list[_Waiting] = []
        self._accounts: dict[Shard, list[Account]] = {shard: [] for shard in self._stage}
        self._unread = 0
        """Accounts of trained stages that have not been read."""

    # -------------------------------------------------------------------------------------------- questions

    @property
    def shards(self) -> Collection[Shard]:
        return self._stage.keys()

    def stage_of(self, shard: Shard) -> int:
        return self._stage[shard]

    def place_of(self, unit: Unit) -> int:
        """A unit's place in the order of its direction."""
        return unit.chunk if unit.direction == "forward" else self._chunks - 1 - unit.chunk

    def is_current(self, seat: Seat) -> bool:
        """Whether its sequence did not lose it."""
        return self._seats.get((seat.shard, seat.sequence)) is seat

    def ended(self, direction: Direction) -> bool:
        """Whether every result of one direction is stored."""
        return self._missing[direction] == 0

    def is_over(self, seat: Seat) -> bool:
        """Whether all that was asked of a seat is done."""
        return seat.done["forward" if self.course == "forward" else "backward"] == self._chunks

    def is_through_stage(self, stage: int, sequence: int) -> bool:
        return all(self._is_through(shard, sequence) for shard in self._stages[stage])

    def is_gathered(self, shard: Shard) -> bool:
        """Whether all sequences went through a shard and every account of it has been read."""
        return self._is_whole(shard) and all(account.is_read for account in self._accounts[shard])

    @property
    def is_read(self) -> bool:
        """Whether every account was read, and no sequence waits for a seat, to add to one again."""
        return not self._waiting and not self._unread

    @property
    def is_stuck(self) -> bool:
        """Whether sequences wait for seats and nothing is under way that could free one."""
        return not self._under_way and (bool(self._waiting) or self._opened < self._sequences)

    @property
    def unserved(self) -> list[Shard]:
        """Shards that sequences wait for and nobody serves."""
        return [shard for shard, desks in self.desks.items() if not desks and not self._is_whole(shard)]

    def desks_of(self, device: DeviceId) -> Iterator[tuple[Shard, Desk]]:
        for shard in self._shards_of.get(device, ()):
            yield from ((shard, desk) for desk in self.desks[shard] if desk.device == device)

    def check(self) -> None:
        """State the invariants; a violation is our own bug."""
        for (shard, sequence), seat in self._seats.items():
            progress = self._progress[shard][sequence]
            assert seat.shard == shard
            assert seat in seat.account.seats
            assert seat in self._seats_of[seat.device]
            for direction in _DIRECTIONS:
                assert 0 <= seat.done[direction] <= seat.received[direction] <= seat.sent[direction] <= self._chunks
                assert seat.received[direction] <= progress.received[direction]
                assert progress.stored[direction] <= progress.received[direction]
            assert not seat.sent["backward"] or seat.sent["forward"] == self._chunks
        seats = self._seats.values()
        assert sum(len(mine) for mine in self._seats_of.values()) == len(seats)
        assert self._under_way == sum(sum(seat.sent.values()) - sum(seat.done.values()) for seat in seats)
        for direction, missing in self._missing.items():
            stored = sum(one.stored[direction] for sequences in self._progress.values() for one in sequences)
            assert missing == len(self._stage) * self._sequences * self._chunks - stored
        for shard, desks in self.desks.items():
            assert self._through[shard] == sum(self._is_through(shard, number) for number in range(self._sequences))
            for desk in desks:
                mine = [seat for seat in seats if seat.desk is desk and not self.is_over(seat)]
                assert desk.open == len(mine), (shard, desk.open, len(mine))
                assert shard in self._shards_of[desk.device]
        unread = [account for shard in self._stage for account in self._counted(shard) if not account.is_read]
        assert self._unread == len(unread)

    # -------------------------------------------------------------------------------------------- events

    def add_desk(self, shard: Shard, desk: Desk) -> None:
        """Let a device serve a shard; call `settle` afterwards."""
        self.desks[shard].append(desk)
        self._shards_of.setdefault(desk.device, []).append(shard)

    def begin(self) -> list[Unit]:
        return self.settle()

    def received(self, unit: Unit) -> None:
        """All of a unit's result came, after those of the chunks before it."""
        seat, direction = unit.seat, unit.direction
        assert self.is_current(seat), "units of lost seats are forgotten"
        assert seat.received[direction] == self.place_of(unit)
        seat.received[direction] += 1
        if not unit.is_silent:
            self._progress[seat.shard][seat.sequence].received[direction] += 1

    def stored(self, unit: Unit) -> list[Unit]:
        """A received result is where the next units read it, even if its seat has been lost since."""
        seat, direction = unit.seat, unit.direction
        if not unit.is_silent:
            self._progress[seat.shard][seat.sequence].stored[direction] += 1
            self._missing[direction] -= 1
        is_over = False
        if self.is_current(seat):
            seat.done[direction] += 1
            self._under_way -= 1
            is_over = self.is_over(seat)
            if is_over:
                seat.desk.open -= 1
                self._through[seat.shard] += 1
        units = self._around(self._stage[seat.shard], seat.sequence)
        return units + self.settle() if is_over else units

    def readable(self, shard: Shard) -> list[Account]:
        """Accounts to be read now; each is given once.

        All of a shard, when every sequence went through it. One that makes up for what a device took with it, as soon
        as all of that has: another of those may need its room.
        """
        if self._stage[shard] not in self._trained:
            return []
        is_whole = self._is_whole(shard)
        if is_whole:  # others gave theirs up
            for account in [account for account in self._accounts[shard] if not account.seats]:
                self._drop(account)
        found = [
            account
            for account in self._accounts[shard]
            if not account.is_closed and (is_whole or self._is_made_up(account))
        ]
        for account in found:
            account.is_closed = True
        return found

    def read(self, account: Account) -> None:
        """All of an account came and was added."""
        assert not account.is_read
        account.is_read = True
        self._unread -= self._stage[account.shard] in self._trained

    def leave(self, device: DeviceId, left_over: Mapping[Account, object]) -> tuple[list[Seat], list[Unit]]:
        """A device is gone; of its accounts that were being read, `left_over` is what had not come.

        Gives the seats that are lost, whose units are to be forgotten, and the units that became ready elsewhere.
        """
        shards = dict.fromkeys(self._shards_of.pop(device, ()))
        for shard in shards:
            self.desks[shard] = [desk for desk in self.desks[shard] if desk.device != device]
        lost: list[Seat] = []
        for shard in dict.fromkeys((*shards, *(seat.shard for seat in self._seats_of.get(device, ())))):
            for account in [account for account in self._accounts[shard] if account.device == device]:
                if account.is_read:
                    continue
                self._drop(account)
                part = left_over.get(account, account.part)
                for seat in account.seats:
                    if self.is_over(seat) and self._stage[shard] not in self._trained:
                        continue  # all that was wanted of it is there
                    lost.append(seat)
                    self._unseat(seat, part)
        return lost, self.settle()

    def give_up_seats(self, device: DeviceId) -> tuple[list[Seat], list[Unit]]:
        """A device lags: sequences of which it has added nothing to an account move to others, if there are any."""
        lost: list[Seat] = []
        free: dict[Shard, int] = {}
        for seat in list(self._seats_of.get(device, ())):
            if seat.shard not in free:
                desks = [desk for desk in self.desks[seat.shard] if desk.device not in self._late]
                free[seat.shard] = sum(desk.slots - desk.open for desk in desks)
            if free[seat.shard] > 0 and not seat.sent["backward"] and not self.is_over(seat):
                free[seat.shard] -= 1
                lost.append(seat)
                seat.account.seats.remove(seat)
                seat.desk.open -= 1
                self._unseat(seat, seat.account.part)
        return lost, self.settle() if lost else []

    def settle(self) -> list[Unit]:
        """Give seats to sequences that lost theirs, then to those that have not begun, while there are any free.

        To be called again when desks were added, or accounts are being read.
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

    # -------------------------------------------------------------------------------------------- parts

    def _is_through(self, shard: Shard, sequence: int) -> bool:
        seat = self._seats.get((shard, sequence))
        return seat is not None and self.is_over(seat)

    def _is_whole(self, shard: Shard) -> bool:
        return self._through[shard] == self._sequences

    def _unseat(self, seat: Seat, part: object) -> None:
        """A sequence waits for another seat; of what it will add to an account there, `part` is asked for."""
        del self._seats[seat.shard, seat.sequence]
        del self._seats_of[seat.device][seat]
        self._through[seat.shard] -= self.is_over(seat)
        self._under_way -= sum(seat.sent.values()) - sum(seat.done.values())
        self._waiting.append(_Waiting(seat.shard, seat.sequence, part))

    def _free_desk(self, shard: Shard, part: object) -> Desk | None:
        """Whoever should be soonest done with one sequence more, without a second account for it at a time."""
        taken = {a.device for a in self._accounts[shard] if not a.is_closed and a.seats and a.part is not part}
        free = [desk for desk in self.desks[shard] if desk.open < desk.slots and desk.device not in taken]
        return min(free, key=lambda desk: (desk.device in self._late, (desk.open + 1) / desk.speed), default=None)

    def _sit(self, shard: Shard, sequence: int, desk: Desk, part: object) -> list[Unit]:
        seat = Seat(shard, sequence, desk, self._account(shard, desk.device, part))
        seat.account.seats.append(seat)
        self._seats[shard, sequence] = seat
        self._seats_of.setdefault(desk.device, {})[seat] = None
        desk.open += 1
        return list(self._ready(seat))

    def _is_made_up(self, account: Account) -> bool:
        waits = any(entry.part is account.part for entry in self._waiting)
        return account.part is not None and not waits and all(self.is_over(seat) for seat in account.seats)

    def _account(self, shard: Shard, device: DeviceId, part: object) -> Account:
        for account in self._accounts[shard]:
            if account.device == device and account.part is part and not account.is_closed:
                return account
        account = Account(shard, device, part)
        self._accounts[shard].append(account)
        self._unread += self._stage[shard] in self._trained
        return account

    def _drop(self, account: Account) -> None:
        self._accounts[account.shard].remove(account)
        self._unread -= not account.is_read and self._stage[account.shard] in self._trained

    def _counted(self, shard: Shard) -> list[Account]:
        return self._accounts[shard] if self._stage[shard] in self._trained else []

    def _around(self, stage: int, sequence: int) -> list[Unit]:
        """Units that are ready because something of this stage was stored: its own and its neighbours'."""
        near = (shard for shards in self._stages[max(stage - 1, 0) : stage + 2] for shard in shards)
        seats = [self._seats[shard, sequence] for shard in near if (shard, sequence) in self._seats]
        return [unit for seat in seats for unit in self._ready(seat)]

    def _ready(self, seat: Seat) -> Iterator[Unit]:
        known, last = self._progress[seat.shard][seat.sequence].received, self._chunks - 1
        for direction in _DIRECTIONS:
            if direction == "backward" and seat.done["forward"] < self._chunks:
                return  # they are more urgent, and would take the turns of those they wait for
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
        """How many chunks of one direction a seat could be given, as far as what they read is stored."""
        stage, last = self._stage[seat.shard], len(self._stages) - 1
        if direction == "forward":
            return self._chunks if stage == 0 else self._stored(stage - 1, seat.sequence, "forward")
        if self.course == "forward":
            return 0
        if stage < last:
            return self._stored(stage + 1, seat.sequence, "backward")
        is_whole = self._stored(stage, seat.sequence, "forward") == self._chunks
        return self._chunks if is_whole else 0  # what begins backward needs every slice's part of the loss

    def _stored(self, stage: int, sequence: int, direction: Direction) -> int:
        """Chunks of which every slice of a stage is stored."""
        return min(self._progress[shard][sequence].stored[direction] for shard in self._stages[stage])
