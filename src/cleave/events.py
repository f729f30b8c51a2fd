"""What happens in a run, as facts for machines: one JSON object a line, in the order it happened.

Everything a person is shown live (terminal view, reports) is made from these, so a finished run can be looked at again.
The log knows no devices and no training; `train` and `server` say what happened, `app` writes it down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from cleave.disk import MOST_WAITING, AppendedFile


def _snake(name: str) -> str:
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_snake):
    """`time_s` is seconds since 1970, set by the log."""

    time_s: float = 0.0


class RunStarted(Event, frozen=True, kw_only=True):
    model: str
    parameters: int
    steps: int
    first_step: int
    tokens_per_step: int
    wire: str
    seed: int


class DeviceJoined(Event, frozen=True, kw_only=True):
    device: str
    flops_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    memory_bytes: float
    kernel: str


class DeviceLeft(Event, frozen=True, kw_only=True):
    device: str
    reason: str
    lost_tasks: int


class DeviceLate(Event, frozen=True, kw_only=True):
    """Its work is given to others too; it gets no more until it speaks again."""

    device: str


class DeviceIdle(Event, frozen=True, kw_only=True):
    """With it, every product would end later than without."""

    device: str
    reason: str


class ResultRefused(Event, frozen=True, kw_only=True):
    """A result was found wrong; its block is computed again by another device."""

    device: str
    reason: str


class Audited(Event, frozen=True, kw_only=True):
    """What a device did in a column of a pass was computed again by the server."""

    device: str
    units: int
    is_right: bool


class Recovered(Event, frozen=True, kw_only=True):
    """All that a device left unfinished has been computed by others."""

    device: str
    blocks: int
    seconds: float
    """From the moment its loss was noticed."""


class Paused(Event, frozen=True, kw_only=True):
    """No device is there; work waits."""

    reason: str


class Note(Event, frozen=True, kw_only=True):
    """A sentence for the person who runs it, such as which gemms stay on the server and why."""

    text: str


class StepDone(Event, frozen=True, kw_only=True):
    step: int
    """Counted from 1."""
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    seconds: float
    waiting_s: float
    """Of `seconds`, how long the training loop stood waiting for devices."""
    checking_s: float = 0.0
    """How long the server was busy checking results."""
    devices: int
    down_bytes: int
    up_bytes: int


class Evaluated(Event, frozen=True, kw_only=True):
    step: int
    loss: float


class CheckpointSaved(Event, frozen=True, kw_only=True):
    step: int
    path: str


class Resumed(Event, frozen=True, kw_only=True):
    step: int
    path: str


class RunFinished(Event, frozen=True, kw_only=True):
    step: int
    loss: float | None
    """Of the last finished step; None if there is none, for JSON has no NaN."""
    reason: str
    """`done`, or what stopped it."""


AnyEvent = (
    RunStarted
    | DeviceJoined
    | DeviceLeft
    | DeviceLate
    | DeviceIdle
    | ResultRefused
    | Audited
    | Recovered
    | Paused
    | Note
    | StepDone
    | Evaluated
    | CheckpointSaved
    | Resumed
    | RunFinished
)
Listener = Callable[[AnyEvent], None]


class EventLog:
    """Appends events to a file, each line whole: a crash can tear only the last one, which `read_events` skips.

    A disk that is full ends no run: events wait in memory for room, and a note says how many were too many to keep.
    """

    def __init__(self, path: Path, clock: Callable[[], float], *, most_waiting: int = MOST_WAITING) -> None:
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        self._file = AppendedFile(path, end=b"\n", most_waiting=most_waiting)
        self._told = 0

    def __call__(self, event: AnyEvent) -> None:
        self._append(event)
        if (dropped := self._file.dropped) > self._told and not self._file.waiting:
            self._append(Note(text=f"the disk was full for so long that {dropped - self._told} events are not here"))
            self._told = dropped

    def close(self) -> None:
        self._file.close()

    def _append(self, event: AnyEvent) -> None:
        self._file.write(self._encoder.encode(msgspec.structs.replace(event, time_s=self._clock())) + b"\n")


def read_events(path: Path) -> Iterator[AnyEvent]:
    """The events of a log, without lines that a crash tore; NULs are what a lost power line may leave of a line."""
    decoder = msgspec.json.Decoder(AnyEvent)
    for line in path.read_bytes().splitlines():
        try:
            yield decoder.decode(line.strip(b"\0"))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
