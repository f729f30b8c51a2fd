"""What happens in a run, as facts for machines: one JSON object a line, in the order it happened.

Everything a person is shown live (terminal view, reports) is made from these, so a finished run can be looked at again.
The log knows no devices and no training; `train` and `server` say what happened, `app` writes it down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec


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
    loss: float
    reason: str
    """`done`, or what stopped it."""


AnyEvent = (
    RunStarted
    | DeviceJoined
    | DeviceLeft
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
    """Appends events to a file, each line whole: a crash can tear only the last one, which `read_events` skips."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        torn = path.exists() and not _ends_with_newline(path)
        self._file: IO[bytes] = path.open("ab", buffering=0)
        if torn:
            self._file.write(b"\n")

    def __call__(self, event: AnyEvent) -> None:
        stamped = msgspec.structs.replace(event, time_s=self._clock())
        self._file.write(self._encoder.encode(stamped) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[AnyEvent]:
    """The events of a log, without lines that a crash tore."""
    decoder = msgspec.json.Decoder(AnyEvent)
    for line in path.read_bytes().splitlines():
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError:
            continue


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
