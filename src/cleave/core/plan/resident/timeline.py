"""The timeline of a step: chunks through the stages and back, event by event, on devices with three queues each.

A formula for the busiest device and the fill of the pipeline misses how the two interact: a stage waits while the one
before it still downloads weights, and the first stage returns its gradients when all others are idle. This module plays
a pass through instead, with the rules of the live schedule: weights are sent ahead, few tasks are under way on a device
at once, rows go in the order of `row_priority` and before gradients, a shard's gradients are read when every sequence
has passed it. A device is a downlink, a processor and an uplink; the server handles one result at a time; a medium and
the cores of a host are shared. `tests/core/plan/test_timeline.py` holds it to the real engine in virtual time.

Of batches of many sequences only the first are played; the others take what the busiest device needs for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count
from math import inf

IN_FLIGHT = 6
"""Maximum number of unfinished tasks on a device: enough that its links and compute never wait for the server."""
FIRST, READING, AHEAD = 0, 1 << 30, (1 << 30) + 1
"""Priorities of tasks: what rows wait for; behind the rows (`row_priority`), gradients; what is not urgent."""
PLAYED_SEQUENCES = 32
"""Most sequences that are played."""
_PIECES = 32
"""Tasks that send up a step's share of a snapshot."""


def row_priority(sequence: int, ahead: int, *, is_backward: bool) -> int:
    """Priority of a sequence's rows where forward may be `ahead` sequences ahead of backward.

    As in a 1F1B pipeline, forward of a sequence goes before backward of one that is at least `ahead` sequences older,
    and after that of all others. Were backward always first, the last sequences' forward would wait at a busy stage
    until everything else is done, and then find the stages after it idle.
    """
    return 2 * (sequence + ahead) if is_backward else 2 * sequence + 1


def sequences_ahead(holders: Sequence[int], lead: int) -> list[int]:
    """Sequences that forward may be ahead of backward at each stage, given the number of devices that share its rows.

    `lead` times as many as the stages from there on can have under way at once.
    """
    behind = accumulate(reversed(holders))
    return [lead * count for count in reversed(list(behind))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """A device's links and processor, seen from the server."""

    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    """Round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """A device at a shard."""

    station: int
    speed: float
    """Share of the sequences, relative to the other devices at the shard."""
    slots: int
    """Sequences that can be open at once."""
    again: float
    """Share of the rows whose x is sent again for backward."""
    forward_s: float
    """Compute of a chunk."""
    backward_s: float
    update_s: float = 0.0
    """Compute of the last step's update, where the shard is leased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A shard: its traffic, and the devices that serve it."""

    stage: int
    seatings: tuple[Seating, ...]
    forward_down: float
    """Bytes of a chunk; the same below."""
    forward_up: float
    backward_down: float
    again_down: float
    backward_up: float
    weights_down: float
    """Bytes of the step."""
    gradients_up: float
    readings: int
    """Tasks that read the gradients."""
    is_leased: bool = False
    """Its device updates the weights, so only those of them that the server updates travel."""
    snapshot_up: float = 0.0
    """Bytes of the step, sent up while the link has nothing else to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all devices share."""

    task_s: float = 0.0
    """Seconds of the server per result."""
    byte_s: float = 0.0
    """Seconds of the server per byte of a result."""
    medium_bytes_per_s: float = inf
    cores: float = inf


def play(
    posts: Sequence[Post],
    stations: Sequence[Station],
    *,
    sequences: int,
    chunks: int,
    shared: Shared,
    lead: int = 0,
    sequence_s: float = 0.0,
    within_s: float = inf,
) -> float:
    """Seconds from the first byte of a step to its last gradient; infinite as soon as they exceed `within_s`.

    `lead` orders rows (`sequences_ahead`). `sequence_s` is what one more sequence takes in a full pipeline, for those
    that are not played.
    """
    played = min(sequences, PLAYED_SEQUENCES)
    unplayed_s = (sequences - played) * sequence_s
    return _Play(posts, stations, played, chunks, shared, lead).seconds(within_s - unplayed_s) + unplayed_s


@dataclass(slots=True, eq=False)
class _Device:
    """Three lines that each serve one task at a time, most urgent first, and tasks that wait to be sent.

    What the server has handed to its downlink is not overtaken by what it starts later.
    """

    latency_s: float
    """One way."""
    down_bytes_per_s: float
    up_bytes_per_s: float
    running: int = 0
    waiting: list[_Task] = field(default_factory=lambda: list[_Task]())
    downlink: list[tuple[float, _Task]] = field(default_factory=lambda: list[tuple[float, _Task]]())
    processor: list[_Task] = field(default_factory=lambda: list[_Task]())
    uplink: list[_Task] = field(default_factory=lambda: list[_Task]())
    is_receiving: bool = False
    is_computing: bool = False
    is_sending: bool = False
    computing_s: float = 0.0
    """What its processor has yet to do at least; the same for its uplink below."""
    sending_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class _Work:
    """What tasks of one kind have in common: a shard's chunks in one direction on one device, or its weights."""

    device: _Device
    down: float = 0.0
    compute_s: float = 0.0
    up: float = 0.0
    number: int = -1
    """The shard whose chunks these are."""
    stage: int = -1
    is_backward: bool = False
    is_snapshot: bool = False


_Task = tuple[int, int, _Work, int, int]
"""Priority, order, work, sequence and chunk: what is most urgent and oldest sorts first."""
_Event = tuple[float, int, Callable[[_Device, _Task], None], _Device, _Task]


class _Play:
    def __init__(
        self,
        posts: Sequence[Post],
        stations: Sequence[Station],
        sequences: int,
        chunks: int,
        shared: Shared,
        lead: int,
    ) -> None:
        self._posts, self._sequences, self._chunks, self._shared = posts, sequences, chunks, shared
        self._devices = [_Device(one.latency_s / 2, one.down_bytes_per_s, one.up_bytes_per_s) for one in stations]
        self._events: list[_Event] = []
        self._order = count()
        self._now = self._medium_until = self._server_until = 0.0
        self._least_s = 0.0
        """No end is possible before this."""
        self._has_medium = shared.medium_bytes_per_s < inf
        self._idle_cores = shared.cores
        self._for_core: list[_Device] = []
        """Devices that wait for one of the shared cores."""
        self._works = [[self._rows(number, seating) for seating in post.seatings] for number, post in enumerate(posts)]
        stages = max(post.stage for post in posts) + 1
        self._stages = [[number for number, post in enumerate(posts) if post.stage == stage] for stage in range(stages)]
        holders = [max(len(posts[number].seatings) for number in slices) for slices in self._stages]
        self._ahead = sequences_ahead(holders, lead)
        self._open = [[0] * len(post.seatings) for post in posts]
        self._seat = [[0] * sequences for _ in posts]
        self._left: dict[tuple[int, int, int, bool], int] = {}
        """(stage, sequence, chunk, is backward): slices whose result is missing."""
        self._unfinished = [[chunks] * sequences for _ in posts]
        """Backward chunks missing, per shard and sequence."""
        self._passing = [sequences] * len(posts)
        """Sequences that have not passed each shard."""
        self._forward_left = [chunks] * sequences
        """Forward chunks that have not left the last stage."""
        self._opened = 0
        self._pieces = [_PIECES] * len(posts)
        """Pieces of each shard's snapshot that are still to be sent."""
        for number, post in enumerate(posts):
            if len(post.seatings) == 1:  # else sequences go to whoever is free
                self._expect(number)

    def _expect(self, number: int) -> None:
        """Count what the only device of a shard has to do for it."""
        post, ((forward, backward),) = self._posts[number], self._works[number]
        device, chunks = forward.device, self._sequences * self._chunks
        device.computing_s += post.seatings[0].update_s + chunks * (forward.compute_s + backward.compute_s)
        moved = chunks * (forward.up + backward.up) + post.gradients_up + post.snapshot_up
        device.sending_s += moved / device.up_bytes_per_s

    def _rows(self, number: int, seating: Seating) -> tuple[_Work, _Work]:
        """Chunks of a shard on one of its devices: forward, backward."""
        post, device = self._posts[number], self._devices[seating.station]
        forward = _Work(
            device=device,
            down=post.forward_down,
            compute_s=seating.forward_s,
            up=post.forward_up,
            number=number,
            stage=post.stage,
        )
        backward = _Work(
            device=device,
            down=post.backward_down + seating.again * post.again_down,
            compute_s=seating.backward_s,
            up=post.backward_up,
            number=number,
            stage=post.stage,
            is_backward=True,
        )
        return forward, backward

    def seconds(self, within_s: float) -> float:
        for number, post in enumerate(self._posts):
            if post.is_leased:
                self._renew(number)
            for seating in post.seatings if post.weights_down else ():
                device = self._devices[seating.station]
                self._submit(_Work(device=device, down=post.weights_down), AHEAD)
        self._open_sequences()
        events = self._events
        while events:
            self._now, _, happen, device, task = heappop(events)
            happen(device, task)
            if self._least_s > within_s or self._now > within_s:
                return inf
        return self._now

    # -------------------------------------------------------------------------------------------- the schedule

    def _open_sequences(self) -> None:
        """Seat sequences at every shard while all have a free slot."""
        while self._opened < self._sequences:
            chosen = [self._free_seat(number) for number in range(len(self._posts))]
            if min(chosen) < 0:
                return
            sequence, self._opened = self._opened, self._opened + 1
            for number, seat in enumerate(chosen):
                self._open[number][seat] += 1
                self._seat[number][sequence] = seat
            for chunk in range(self._chunks):
                self._enter(0, sequence, chunk, is_backward=False)

    def _free_seat(self, number: int) -> int:
        best, soonest = -1, inf
        for seat, (seating, taken) in enumerate(zip(self._posts[number].seatings, self._open[number], strict=True)):
            done = (taken + 1) / seating.speed
            if taken < seating.slots and done < soonest:
                best, soonest = seat, done
        return best

    def _enter(self, stage: int, sequence: int, chunk: int, *, is_backward: bool) -> None:
        """Submit a chunk to every slice of a stage."""
        slices = self._stages[stage]
        if len(slices) > 1:
            self._left[stage, sequence, chunk, is_backward] = len(slices)
        priority = row_priority(sequence, self._ahead[stage], is_backward=is_backward)
        for number in slices:
            work = self._works[number][self._seat[number][sequence]][is_backward]
            self._submit(work, priority, sequence, chunk)

    def _stored(self, device: _Device, task: _Task) -> None:
        """Let a chunk go on once the server has the results of all slices."""
        _, _, work, sequence, chunk = task
        stage, is_backward = work.stage, work.is_backward
        is_complete = True
        if len(self._stages[stage]) > 1:
            self._left[stage, sequence, chunk, is_backward] -= 1
            is_complete = not self._left[stage, sequence, chunk, is_backward]
        if is_backward:
            if is_complete and stage > 0:
                self._enter(stage - 1, sequence, chunk, is_backward=True)
            self._pass(work.number, sequence)
        elif is_complete and stage < len(self._stages) - 1:
            self._enter(stage + 1, sequence, chunk, is_backward=False)
        elif is_complete:
            self._forward_left[sequence] -= 1
            if not self._forward_left[sequence]:
                for place in reversed(range(self._chunks)):
                    self._enter(stage, sequence, place, is_backward=True)

    def _pass(self, number: int, sequence: int) -> None:
        """Count a backward chunk; after a sequence's last one, close it."""
        unfinished = self._unfinished[number]
        unfinished[sequence] -= 1
        if not unfinished[sequence]:
            self._open[number][self._seat[number][sequence]] -= 1
            self._passing[number] -= 1
            if not self._passing[number]:
                self._read(self._posts[number])
            self._open_sequences()

    def _read(self, post: Post) -> None:
        """Read the gradients of a shard from every device that has some; of a leased one, their square sum."""
        if post.is_leased:
            self._submit(_Work(device=self._devices[post.seatings[0].station]), READING)
        for seating in post.seatings if post.gradients_up else ():
            up = post.gradients_up / post.readings
            reading = _Work(device=self._devices[seating.station], up=up)
            for _ in range(post.readings):
                self._submit(reading, READING)

    def _renew(self, number: int) -> None:
        """Let a leased shard's device apply the last step's update, and begin its snapshot."""
        post = self._posts[number]
        (seating,) = post.seatings
        device = self._devices[seating.station]
        self._submit(_Work(device=device, compute_s=seating.update_s), FIRST)
        if post.snapshot_up:
            up = post.snapshot_up / _PIECES
            self._send_piece(_Work(device=device, up=up, number=number, is_snapshot=True))

    def _send_piece(self, work: _Work) -> None:
        """Send the next piece of a snapshot when no result waits for the link, however many tasks are under way."""
        if self._pieces[work.number]:
            self._pieces[work.number] -= 1
            work.device.running += 1
            heappush(work.device.uplink, (AHEAD, next(self._order), work, 0, 0))
            self._send_up(work.device)

    # -------------------------------------------------------------------------------------------- devices

    def _submit(self, work: _Work, priority: int, sequence: int = 0, chunk: int = 0) -> None:
        heappush(work.device.waiting, (priority, next(self._order), work, sequence, chunk))
        self._start(work.device)

    def _start(self, device: _Device) -> None:
        while device.waiting and device.running < IN_FLIGHT:
            device.running += 1
            heappush(device.downlink, (self._now, heappop(device.waiting)))
        if device.downlink and not device.is_receiving:
            self._send_down(device)

    def _send_down(self, device: _Device) -> None:
        _, task = heappop(device.downlink)
        device.is_receiving = True
        self._at(self._sent_at(task[2].down, device.down_bytes_per_s), self._came_down, device, task)

    def _came_down(self, device: _Device, task: _Task) -> None:
        device.is_receiving = False
        if device.downlink:
            self._send_down(device)
        self._at(self._now + device.latency_s, self._arrived, device, task)

    def _arrived(self, device: _Device, task: _Task) -> None:
        heappush(device.processor, task)
        if not device.is_computing:
            self._compute(device)

    def _compute(self, device: _Device) -> None:
        if self._idle_cores <= 0:
            self._for_core.append(device)
            return
        task = heappop(device.processor)
        device.is_computing = True
        self._idle_cores -= 1
        self._least_s = max(self._least_s, self._now + device.computing_s)
        device.computing_s -= task[2].compute_s
        self._at(self._now + task[2].compute_s, self._computed, device, task)

    def _computed(self, device: _Device, task: _Task) -> None:
        device.is_computing = False
        self._idle_cores += 1
        waiting, self._for_core = self._for_core, []
        for other in (*waiting, device):
            if other.processor and not other.is_computing:
                self._compute(other)
        heappush(device.uplink, task)
        if not device.is_sending:
            self._send_up(device)

    def _send_up(self, device: _Device) -> None:
        if device.uplink and not device.is_sending:
            task = heappop(device.uplink)
            device.is_sending = True
            self._least_s = max(self._least_s, self._now + device.sending_s)
            device.sending_s -= task[2].up / device.up_bytes_per_s
            self._at(self._sent_at(task[2].up, device.up_bytes_per_s), self._came_up, device, task)

    def _came_up(self, device: _Device, task: _Task) -> None:
        device.is_sending = False
        if device.uplink:
            self._send_up(device)
        self._at(self._now + device.latency_s, self._returned, device, task)

    def _returned(self, device: _Device, task: _Task) -> None:
        device.running -= 1
        if device.waiting:
            self._start(device)
        work = task[2]
        handled_s = self._shared.task_s + self._shared.byte_s * (work.down + work.up)
        self._server_until = max(self._server_until, self._now) + handled_s
        self._at(self._server_until, self._handled, device, task)

    def _handled(self, device: _Device, task: _Task) -> None:
        work = task[2]
        if work.is_snapshot:
            self._send_piece(work)
        elif work.stage >= 0:
            self._stored(device, task)

    # -------------------------------------------------------------------------------------------- time

    def _sent_at(self, size: float, bytes_per_s: float) -> float:
        """When the bytes have left over a link and, if there is one, the medium that all links share."""
        if not self._has_medium or not size:
            return self._now + size / bytes_per_s
        self._medium_until = max(self._medium_until, self._now) + size / self._shared.medium_bytes_per_s
        return max(self._medium_until, self._now + size / bytes_per_s)

    def _at(self, moment: float, happen: Callable[[_Device, _Task], None], device: _Device, task: _Task) -> None:
        heappush(self._events, (moment, next(self._order), happen, device, task))
