"""The timeline of a step: chunks through the stages and back, event by event, on devices with three queues each.

A formula for the busiest device and the fill of the pipeline misses how the two interact: a stage waits while the one
before it still downloads weights, and the first stage returns its gradients when all others are idle. This module plays
a pass through instead, with the rules of the live schedule: weights are sent ahead, few tasks are under way on a device
at once, backward goes before forward and forward before gradients, a shard's gradients are read when every sequence
has passed it. A device is a downlink, a processor and an uplink; the server handles one result at a time; a medium and
the cores of a host are shared. `tests/core/plan/test_timeline.py` holds it to the real engine in virtual time.

Of batches of many sequences only the first are played; the others take what the busiest device needs for them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

IN_FLIGHT = 6
"""Maximum number of unfinished tasks on a device: enough that its links and compute never wait for the server."""
BACKWARD, FORWARD, READING, AHEAD = 0, 1, 2, 3
"""Priorities of tasks, most urgent first, on the same scale as those of products."""
PLAYED_SEQUENCES = 32
"""Most sequences that are played."""
_PIECES = 32
"""Tasks that send up a step's share of a snapshot."""


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
    sequence_s: float = 0.0,
) -> float:
    """Seconds from the first byte of a step to its last gradient.

    `sequence_s` is what one more sequence takes in a full pipeline, for those that are not played.
    """
    played = min(sequences, PLAYED_SEQUENCES)
    return _Play(posts, stations, played, chunks, shared).seconds() + (sequences - played) * sequence_s


@dataclass(slots=True, eq=False)
class _Task:
    station: int
    priority: int
    down: float
    compute_s: float
    up: float
    done: Callable[[], None]


_Queue = list[tuple[int, int, _Task]]


@dataclass(slots=True, eq=False)
class _Line:
    """A queue for something that serves one task at a time, most urgent first."""

    waiting: _Queue = field(default_factory=lambda: _Queue())
    is_busy: bool = False


@dataclass(slots=True, eq=False)
class _Device:
    station: Station
    running: int = 0
    waiting: _Queue = field(default_factory=lambda: _Queue())
    down: _Line = field(default_factory=_Line)
    processor: _Line = field(default_factory=_Line)
    up: _Line = field(default_factory=_Line)


class _Play:
    def __init__(
        self, posts: Sequence[Post], stations: Sequence[Station], sequences: int, chunks: int, shared: Shared
    ) -> None:
        self._posts, self._sequences, self._chunks, self._shared = posts, sequences, chunks, shared
        self._devices = [_Device(station) for station in stations]
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        self._now = self._medium_until = self._server_until = 0.0
        self._computing = 0
        self._for_core: list[_Device] = []
        """Devices that wait for one of the shared cores."""
        stages = max(post.stage for post in posts) + 1
        self._stages = [[number for number, post in enumerate(posts) if post.stage == stage] for stage in range(stages)]
        self._open = [[0] * len(post.seatings) for post in posts]
        self._seat: dict[tuple[int, int], int] = {}
        self._left: dict[tuple[int, int, int, bool], int] = {}
        """(stage, sequence, chunk, is backward): slices whose result is missing."""
        self._unfinished = {(number, sequence): chunks for number in range(len(posts)) for sequence in range(sequences)}
        """Backward chunks missing, per shard and sequence."""
        self._passing = [sequences] * len(posts)
        """Sequences that have not passed each shard."""
        self._forward_left = [[chunks] * sequences for _ in range(stages)]
        self._opened = 0

    def seconds(self) -> float:
        for post in self._posts:
            if post.is_leased:
                self._renew(post)
            for seating in post.seatings if post.weights_down else ():
                self._submit(_Task(seating.station, AHEAD, post.weights_down, 0.0, 0.0, _nothing))
        self._open_sequences()
        while self._events:
            self._now, _, happen, args = heapq.heappop(self._events)
            happen(*args)
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
                self._seat[number, sequence] = seat
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
        self._left[stage, sequence, chunk, is_backward] = len(slices)
        for number in slices:
            post = self._posts[number]
            seating = post.seatings[self._seat[number, sequence]]

            def stored(number: int = number) -> None:
                self._stored(number, stage, sequence, chunk, is_backward)

            if is_backward:
                down = post.backward_down + seating.again * post.again_down
                task = _Task(seating.station, BACKWARD, down, seating.backward_s, post.backward_up, stored)
            else:
                task = _Task(seating.station, FORWARD, post.forward_down, seating.forward_s, post.forward_up, stored)
            self._submit(task)

    def _stored(self, number: int, stage: int, sequence: int, chunk: int, is_backward: bool) -> None:
        self._left[stage, sequence, chunk, is_backward] -= 1
        is_complete = not self._left[stage, sequence, chunk, is_backward]
        last = len(self._stages) - 1
        if not is_backward:
            if is_complete:
                self._forward_left[stage][sequence] -= 1
                if stage < last:
                    self._enter(stage + 1, sequence, chunk, is_backward=False)
                elif not self._forward_left[stage][sequence]:
                    for place in reversed(range(self._chunks)):
                        self._enter(last, sequence, place, is_backward=True)
            return
        if is_complete and stage > 0:
            self._enter(stage - 1, sequence, chunk, is_backward=True)
        self._unfinished[number, sequence] -= 1
        if not self._unfinished[number, sequence]:
            self._open[number][self._seat[number, sequence]] -= 1
            self._passing[number] -= 1
            if not self._passing[number]:
                self._read(self._posts[number])
            self._open_sequences()

    def _read(self, post: Post) -> None:
        """Read the gradients of a shard from every device that has some; of a leased one, their square sum."""
        if post.is_leased:
            self._submit(_Task(post.seatings[0].station, READING, 0.0, 0.0, 0.0, _nothing))
        for seating in post.seatings if post.gradients_up else ():
            for _ in range(post.readings):
                self._submit(_Task(seating.station, READING, 0.0, 0.0, post.gradients_up / post.readings, _nothing))

    def _renew(self, post: Post) -> None:
        """Let a leased shard's device apply the last step's update, and begin its snapshot."""
        (seating,) = post.seatings
        self._submit(_Task(seating.station, BACKWARD, 0.0, seating.update_s, 0.0, _nothing))
        self._send_snapshot(seating.station, post.snapshot_up / _PIECES, _PIECES if post.snapshot_up else 0)

    def _send_snapshot(self, station: int, piece_up: float, left: int) -> None:
        """Send a snapshot piece by piece whenever no result waits for the link, however many tasks are under way."""
        if left:
            then = partial(self._send_snapshot, station, piece_up, left - 1)
            device = self._devices[station]
            device.running += 1
            self._push(device.up.waiting, _Task(station, AHEAD, 0.0, 0.0, piece_up, then))
            self._send_up(device)

    # -------------------------------------------------------------------------------------------- devices

    def _submit(self, task: _Task) -> None:
        device = self._devices[task.station]
        self._push(device.waiting, task)
        self._start(device)

    def _start(self, device: _Device) -> None:
        while device.waiting and device.running < IN_FLIGHT:
            device.running += 1
            self._push(device.down.waiting, heapq.heappop(device.waiting)[2])
        self._send_down(device)

    def _send_down(self, device: _Device) -> None:
        line = device.down
        if line.waiting and not line.is_busy:
            task, line.is_busy = heapq.heappop(line.waiting)[2], True
            self._at(self._sent_at(task.down, device.station.down_bytes_per_s), self._came_down, device, task)

    def _came_down(self, device: _Device, task: _Task) -> None:
        device.down.is_busy = False
        self._send_down(device)
        self._at(self._now + device.station.latency_s / 2, self._arrived, device, task)

    def _arrived(self, device: _Device, task: _Task) -> None:
        self._push(device.processor.waiting, task)
        self._compute(device)

    def _compute(self, device: _Device) -> None:
        line = device.processor
        if not line.waiting or line.is_busy:
            return
        if self._computing >= self._shared.cores:
            self._for_core.append(device)
            return
        task, line.is_busy = heapq.heappop(line.waiting)[2], True
        self._computing += 1
        self._at(self._now + task.compute_s, self._computed, device, task)

    def _computed(self, device: _Device, task: _Task) -> None:
        device.processor.is_busy = False
        self._computing -= 1
        waiting, self._for_core = self._for_core, []
        for other in (*waiting, device):
            self._compute(other)
        self._push(device.up.waiting, task)
        self._send_up(device)

    def _send_up(self, device: _Device) -> None:
        line = device.up
        if line.waiting and not line.is_busy:
            task, line.is_busy = heapq.heappop(line.waiting)[2], True
            self._at(self._sent_at(task.up, device.station.up_bytes_per_s), self._came_up, device, task)

    def _came_up(self, device: _Device, task: _Task) -> None:
        device.up.is_busy = False
        self._send_up(device)
        self._at(self._now + device.station.latency_s / 2, self._returned, device, task)

    def _returned(self, device: _Device, task: _Task) -> None:
        device.running -= 1
        self._start(device)
        handled_s = self._shared.task_s + self._shared.byte_s * (task.down + task.up)
        self._server_until = max(self._server_until, self._now) + handled_s
        self._at(self._server_until, task.done)

    # -------------------------------------------------------------------------------------------- time

    def _sent_at(self, size: float, bytes_per_s: float) -> float:
        """When the bytes have left over a link and, if there is one, the medium that all links share."""
        if self._shared.medium_bytes_per_s == inf or not size:
            return self._now + size / bytes_per_s
        self._medium_until = max(self._medium_until, self._now) + size / self._shared.medium_bytes_per_s
        return max(self._medium_until, self._now + size / bytes_per_s)

    def _at(self, moment: float, happen: Callable[..., None], *args: object) -> None:
        self._order += 1
        heapq.heappush(self._events, (moment, self._order, happen, args))

    def _push(self, queue: _Queue, task: _Task) -> None:
        self._order += 1
        heapq.heappush(queue, (task.priority, self._order, task))


def _nothing() -> None:
    pass
