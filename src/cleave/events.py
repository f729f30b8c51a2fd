"""Events of a run and their log: one JSON object per line, in the order they happened.

Terminal views and reports are built from events alone, so a finished run can be shown again from its log. The log knows
no devices and no training; `train` and `server` emit events, the command line writes them down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from cleave.disk import MAX_WAITING, AppendedFile, open_regular


def _snake(name: str) -> str:
    return "".join("_" + character.lower() if character.isupper() else character for character in name).lstrip("_")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_snake):
    """Base of all events. `time_s` is in seconds since 1970, set by the log."""

    time_s: float = 0.0


class RunStarted(Event, frozen=True, kw_only=True):
    """A run started or resumed."""

    model: str
    parameters: int
    steps: int
    first_step: int
    tokens_per_step: int
    wire: str
    seed: int
    weights: Literal["fresh", "pretrained", "checkpoint", ""] = ""
    """Whether the weights were drawn at random, loaded, or those of a resumed run; empty in logs of older runs."""
    tokenizer: Literal["bytes", "model", ""] = ""
    """Whether a token is a byte of text, or comes from the model's own tokenizer."""
    passes_per_step: int = 1
    """Micro-batches per step."""


class DeviceJoined(Event, frozen=True, kw_only=True):
    """A device was admitted; rates and latency are measured at that moment."""

    device: str
    flops_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    memory_bytes: float
    kernel: str


class DeviceLeft(Event, frozen=True, kw_only=True):
    """A device left or was disconnected."""

    device: str
    reason: str
    lost_tasks: int


class DeviceLate(Event, frozen=True, kw_only=True):
    """A device is late: its running tasks are hedged, and it gets no new work until it responds."""

    device: str
    is_only: bool = False
    """Whether no other device is connected, so that nobody can hedge."""


class DeviceIdle(Event, frozen=True, kw_only=True):
    """A device gets no work, as the plans are faster without it."""

    device: str
    reason: str


class GrainChosen(Event, frozen=True, kw_only=True):
    """The grain of the model's layers was chosen, or changed with the fleet."""

    grain: Literal["resident", "gemm", "server"]
    """`server`: computed by the training process itself."""
    reason: str
    predicted_s: float | None = None
    """Predicted seconds of one batch, forward and backward, on devices or on the server."""


class ResultRefused(Event, frozen=True, kw_only=True):
    """A result was wrong; another device recomputes its block."""

    device: str
    reason: str


class Audited(Event, frozen=True, kw_only=True):
    """The server audited a device's work on resident layers."""

    device: str
    units: int
    is_right: bool


class RolledBack(Event, frozen=True, kw_only=True):
    """A device was found wrong, so the steps that rest on unchecked work of it, or of its token, were undone."""

    device: str
    from_step: int
    """The last step undone."""
    step: int
    """The step after which training continues."""


class Recovered(Event, frozen=True, kw_only=True):
    """Other devices finished the work of one that left."""

    device: str
    blocks: int
    seconds: float
    """Time since the departure was noticed."""


class Paused(Event, frozen=True, kw_only=True):
    """No device is connected; work waits."""

    reason: str


class Note(Event, frozen=True, kw_only=True):
    """A message for the user, such as which gemms stay on the server and why."""

    text: str


class StepDone(Event, frozen=True, kw_only=True):
    """An optimizer step finished."""

    step: int
    """Counted from 1."""
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    seconds: float
    predicted_s: float | None = None
    """What was predicted of the step just before it."""
    waiting_s: float
    """Part of `seconds` in which the training loop waited for devices."""
    checking_s: float = 0.0
    """Time the server spent verifying results."""
    devices: int
    down_bytes: int
    up_bytes: int


class Evaluated(Event, frozen=True, kw_only=True):
    """The model was evaluated on held-out text."""

    step: int
    loss: float


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """A checkpoint was written."""

    step: int
    path: str


class Resumed(Event, frozen=True, kw_only=True):
    """A run resumed from a checkpoint."""

    step: int
    path: str


class EnergyUsed(Event, frozen=True, kw_only=True):
    """Energy and emissions of what devices and server did since the start or resume, by `core.carbon`."""

    energy_j: float
    devices_j: float
    """Above idle, at the plug; of devices on other machines."""
    network_j: float
    server_j: float
    kgco2e: float
    embodied_kgco2e: float
    """Part of `kgco2e`."""


class RunFinished(Event, frozen=True, kw_only=True):
    """A run ended, for whatever reason."""

    step: int
    loss: float | None
    """Loss of the last finished step; None if there is none, as JSON has no NaN."""
    reason: str
    """`done`, or why it stopped."""


AnyEvent = (
    RunStarted
    | DeviceJoined
    | DeviceLeft
    | DeviceLate
    | DeviceIdle
    | GrainChosen
    | ResultRefused
    | Audited
    | RolledBack
    | Recovered
    | Paused
    | Note
    | StepDone
    | Evaluated
    | CheckpointSaved
    | Resumed
    | EnergyUsed
    | RunFinished
)
Listener = Callable[[AnyEvent], None]


class Throttle:
    """Bound what devices that come and go without end add to logs and screens.

    Everything that tells how training went passes (_UNLIMITED). Of other events, _BURST pass at once (a large fleet
    that joins together) and _PER_S a second in the long run, some 40 MB a day; what is beyond is counted, and a note
    a minute says how much that was. `clock` is in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left, self._at_s = float(_BURST), clock()
        self._omitted: Counter[str] = Counter()
        self._since_s = self._at_s

    def __call__(self, event: AnyEvent) -> list[AnyEvent]:
        """Return the event, unless there are too many, and the note that is due, if any."""
        now_s = self._clock()
        passed: list[AnyEvent] = self.rest() if now_s - self._since_s >= _NOTE_S else []
        self._left, self._at_s = min(self._left + (now_s - self._at_s) * _PER_S, _BURST), now_s
        if isinstance(event, _UNLIMITED):
            return [*passed, event]
        if self._left >= 1:
            self._left -= 1
            return [*passed, event]
        if not self._omitted:
            self._since_s = now_s
        self._omitted[str(event.__struct_config__.tag)] += 1
        return passed

    def rest(self) -> list[AnyEvent]:
        """Return a note about the events omitted since the last one, if there are any."""
        omitted, self._omitted = self._omitted, Counter()
        kinds = ", ".join(f"{count:,} x {kind}" for kind, count in sorted(omitted.items()))
        return [Note(text=f"too many events to list, left out in the last minute: {kinds}")] if omitted else []


_BURST = 10_000
_PER_S = 2.0
_NOTE_S = 60.0
_UNLIMITED = (
    RunStarted,
    StepDone,
    Evaluated,
    GrainChosen,
    Audited,
    RolledBack,
    CheckpointSaved,
    Resumed,
    RunFinished,
)


class EventLog:
    """Append events to a file. A crash can tear only the last line, which `read_events` skips.

    An event is with the system when the call returns, so that not even a kill loses it. A full or hung disk does not
    stop a run: events wait in memory, and a note reports how many had to be dropped. `Throttle` bounds the size.
    """

    def __init__(self, path: Path, clock: Callable[[], float], *, max_waiting: int = MAX_WAITING) -> None:
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        self._file = AppendedFile(path, end=b"\n", max_waiting=max_waiting)
        self._reported = 0

    def __call__(self, event: AnyEvent) -> None:
        self._append(event)
        if (dropped := self._file.dropped) > self._reported and not self._file.waiting:
            lost = f"{dropped - self._reported} events were dropped"
            self._append(Note(text=f"the disk was full or did not answer for too long: {lost}"))
            self._reported = dropped

    def close(self) -> None:
        self._file.close()

    def _append(self, event: AnyEvent) -> None:
        self._file.write(self._encoder.encode(msgspec.structs.replace(event, time_s=self._clock())) + b"\n")


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Yield the events of a log, skipping lines torn by a crash; a power failure may leave NULs in front of one."""
    decoder = msgspec.json.Decoder(AnyEvent)
    with open_regular(path) as file:
        while line := file.readline(_LONGEST_LINE):
            try:
                yield decoder.decode(line.strip(b"\0\r\n"))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue


_LONGEST_LINE = 1 << 20
