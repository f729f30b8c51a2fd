"""The view of a training run: a live screen on a terminal, plain lines elsewhere.

Built from events alone, plus a snapshot of the devices that the owner of the fleet supplies on request. The final
report is in `train_summary.py`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cleave import events
from cleave.report.quantities import seconds, si

_BARS = "▁▂▃▄▅▆▇█"
_RECENT_STEPS = 20  # steps to average rates over
_CURVE_WIDTH = 60  # characters of the loss curve
_MAX_NOTES = 5
_LINE_S = 5.0  # without a terminal, at most one line in this time


class DeviceRow(Protocol):
    """A device as the view shows it; the server's `Member` implements it."""

    name: str
    kernel: str
    tasks: int
    done_flops: float
    verified_flops: float
    wrong: int
    down_bytes: int
    up_bytes: int

    @property
    def rates(self) -> tuple[float, float, float]: ...


class TrainView:
    """An event listener; a context manager, to restore the terminal on exit."""

    def __init__(self, console: Console, devices: Callable[[], Sequence[DeviceRow]]) -> None:
        self._console, self._devices = console, devices
        self._started: events.RunStarted | None = None
        self._losses: list[float] = []
        self._recent: deque[events.StepDone] = deque(maxlen=_RECENT_STEPS)
        self._evaluated: events.Evaluated | None = None
        self._notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self._lock = threading.Lock()
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._screen, transient=True)
        self._last_line = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, event: events.AnyEvent) -> None:
        with self._lock:
            note = self._update(event)
        if note is None:
            return
        if self._console.is_terminal:
            self._notes.append(note)
        else:
            self._console.print(note, markup=False, soft_wrap=True)

    # -------------------------------------------------------------------------------------------- events

    def _update(self, event: events.AnyEvent) -> str | None:
        """Update the view with an event and return the line to show for it, if any."""
        match event:
            case events.RunStarted():
                self._started = event
                return (
                    f"{event.model}: {si(event.parameters, 'parameters')}, {event.tokens_per_step:,} tokens a step, "
                    f"{event.wire} on the wire"
                )
            case events.StepDone():
                self._losses.append(event.loss)
                self._recent.append(event)
                return None if self._console.is_terminal else self._line(event)
            case events.Evaluated():
                self._evaluated = event
                return f"step {event.step}: evaluation loss {event.loss:.4f}"
            case events.DeviceJoined():
                down, up = si(event.down_bytes_per_s, "B/s"), si(event.up_bytes_per_s, "B/s")
                speed, memory = si(event.flops_per_s, "FLOP/s"), si(event.memory_bytes, "B")
                return f"{event.device} joined: {speed}, {down} down, {up} up, {memory}"
            case events.DeviceLeft():
                lost = f"; reassigning {event.lost_tasks} tasks" if event.lost_tasks else ""
                return f"{event.device} left: {event.reason}{lost}"
            case events.DeviceLate():
                return f"{event.device} is late; its work is hedged on other devices"
            case events.DeviceIdle():
                return f"{event.device} has no work: {event.reason}"
            case events.Audited():
                return None if event.is_right else f"{event.device} failed an audit: its work was wrong"
            case events.ResultRefused():
                return f"{event.device} returned a wrong result, which is recomputed: {event.reason}"
            case events.Recovered():
                blocks = f"{event.blocks} block{'s' if event.blocks > 1 else ''}"
                return f"other devices finished {blocks} of {event.device} in {event.seconds:.2f} s"
            case events.Paused():
                return f"paused: {event.reason}"
            case events.Note():
                return event.text
            case events.CheckpointSaved():
                return f"step {event.step}: saved {event.path}"
            case events.Resumed():
                return f"resumed after step {event.step} from {event.path}"
            case events.RunFinished():
                return None

    def _line(self, step: events.StepDone) -> str | None:
        last = self._started is not None and step.step == self._started.steps
        if time.monotonic() - self._last_line < _LINE_S and not last and len(self._losses) > 1:
            return None
        self._last_line = time.monotonic()
        steps = f"/{self._started.steps}" if self._started else ""
        return (
            f"step {step.step}{steps}: loss {step.loss:.4f}, {self._tokens_per_s():,.0f} tokens/s, "
            f"{seconds(self._left_s())} left, {step.devices} devices, "
            f"{si(self._mean('down_bytes'), 'B')} down and {si(self._mean('up_bytes'), 'B')} up a step, "
            f"{self._waiting_share():.0%} waiting for devices"
        )

    # -------------------------------------------------------------------------------------------- figures

    def _mean(self, field: str) -> float:
        return sum(getattr(step, field) for step in self._recent) / max(len(self._recent), 1)

    def _tokens_per_s(self) -> float:
        return self._mean("tokens") / max(self._mean("seconds"), 1e-9)

    def _left_s(self) -> float:
        if not self._started or not self._recent:
            return 0.0
        return (self._started.steps - self._recent[-1].step) * self._mean("seconds")

    def _waiting_share(self) -> float:
        return self._mean("waiting_s") / max(self._mean("seconds"), 1e-9)

    # -------------------------------------------------------------------------------------------- screen

    def _screen(self) -> RenderableType:
        with self._lock:
            return Group(self._numbers(), self._fleet(), *(Text(note, style="dim") for note in self._notes))

    def _numbers(self) -> RenderableType:
        started = self._started
        if started is None:
            return Text("preparing ...")
        table = Table.grid(padding=(0, 2))
        if not self._recent:
            table.add_row("waiting for the first step")
        else:
            step = self._recent[-1]
            evaluated = f", evaluation {self._evaluated.loss:.3f}" if self._evaluated else ""
            share = self._waiting_share()
            table.add_row("step", f"{step.step} of {started.steps}, {seconds(self._left_s())} left")
            table.add_row("loss", f"{step.loss:.4f}{evaluated}  {curve(self._losses, _CURVE_WIDTH)}")
            table.add_row("speed", f"{self._tokens_per_s():,.0f} tokens/s, {seconds(self._mean('seconds'))} a step")
            table.add_row(
                "links", f"{si(self._mean('down_bytes'), 'B')} down, {si(self._mean('up_bytes'), 'B')} up a step"
            )
            table.add_row("time", f"{bar(share, 30)} {share:.0%} waiting for devices, the rest on the server")
        return Panel(table, title=f"cleave train {escape(started.model)}", title_align="left")

    def _fleet(self) -> RenderableType:
        return device_table(self._devices())


def device_table(devices: Sequence[DeviceRow]) -> Table:
    """Tabulate the speed and the contribution of each device."""
    table = Table(box=None, padding=(0, 1))
    table.add_column("device", no_wrap=True)
    for heading in ("speed", "down", "up", "tasks", "work", "received", "returned"):
        table.add_column(heading, justify="right", no_wrap=True)
    for device in devices:
        flops, down, up = device.rates
        table.add_row(
            escape(device.name),
            si(flops, "FLOP/s"),
            si(down, "B/s"),
            si(up, "B/s"),
            f"{device.tasks:,}",
            si(device.done_flops, "FLOP"),
            si(device.down_bytes, "B"),
            si(device.up_bytes, "B"),
        )
    return table


def curve(values: Sequence[float], width: int) -> str:
    """Draw values as a row of bars, averaging neighbors if there are more than `width`."""
    if not values:
        return ""
    count = min(width, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    if not high > low:  # all equal, or NaN
        return _BARS[0] * count
    return "".join(_BARS[int((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def bar(share: float, width: int) -> str:
    """Draw a share between 0 and 1 as a horizontal bar."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)
