"""The view of a training run: a live screen on a terminal, plain lines elsewhere.

Built from events alone, plus a snapshot of the devices that the owner of the fleet supplies on request. The join
command stands above the live part, which never grows so tall that it scrolls away. `train_summary.py` has the final
report.
"""

from __future__ import annotations

import io
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cleave import events
from cleave.report.device_table import DeviceRow, device_table
from cleave.report.event_text import describe
from cleave.report.quantities import plural, seconds, si
from cleave.report.run_figures import RunFigures
from cleave.terminal import is_behind

_BARS = "▁▂▃▄▅▆▇█"
_MAX_NOTES = 20
_REFRESH_S = 0.25
_LINE_S = 5.0  # without a terminal, at most one line in this time
_MOST_DEVICES = 12
_LEAST_NOTE_LINES = 4
_ROOMY = 22
"""Lines of a terminal that has room for blank ones."""
_ACCENT = "cyan"


class TrainView:
    """An event listener; a context manager, to restore the terminal on exit."""

    def __init__(self, console: Console, devices: Callable[[], Sequence[DeviceRow]]) -> None:
        self.figures = RunFigures()
        self._console, self._devices = console, devices
        self._notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self._join_command = ""
        self._lock = threading.Lock()
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._screen, transient=True)
        self._ended = threading.Event()
        self._last_line = 0.0
        self._waits_since = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
            threading.Thread(target=self._refresh, name="screen", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._live.stop()

    def _refresh(self) -> None:
        """Draw the screen again and again, but not while the last drawing waits for a stopped terminal."""
        while not self._ended.wait(_REFRESH_S):
            if not is_behind(self._console.file):
                self._live.refresh()

    def __call__(self, event: events.AnyEvent) -> None:
        with self._lock:
            waited = self.figures.waits
            self.figures(event)
            if self.figures.waits != waited:
                self._waits_since = time.monotonic()
            note = self._step_line(event) if isinstance(event, events.StepDone) else describe(event)
            if note is not None and self._console.is_terminal and [note] != list(self._notes)[-1:]:
                self._notes.append(note)
        if note is not None and not self._console.is_terminal:
            self._console.print(note, markup=False, soft_wrap=True)

    def show_join_command(self, command: str, *, is_local: bool = False) -> None:
        """Print the command that joins a device on a line of its own, which only the terminal wraps."""
        with self._lock:
            self._join_command = command
        heading = "devices on this machine join with:" if is_local else "to lend another machine, run on it:"
        self._console.print(heading, style="dim")
        self._console.print(f"{command}\n", style="bold", markup=False, soft_wrap=True)

    def show_join_page(self, link: str, *, is_local: bool = False) -> None:
        """Print the link that makes a browser a device, and a QR code of it for phones.

        It comes before the join command, so that a small terminal scrolls it away first.
        """
        heading = "in a browser on this machine:" if is_local else "to lend a phone, or anything with a browser, open:"
        self._console.print(heading, style="dim")
        self._console.print(link, style="bold", markup=False, soft_wrap=True)
        if not is_local and self._console.is_terminal:
            self._console.print(Text(qr_code(link), style="white on black"), soft_wrap=True)
        self._console.print()

    def show_token_command(self, command: str) -> None:
        """Print the command that prints a join command, where a token must not be shown."""
        self._console.print("output goes to a file, so no token is shown; for a cleave join command, run:", style="dim")
        self._console.print(f"{command}\n", style="bold", markup=False, soft_wrap=True)

    def _step_line(self, step: events.StepDone) -> str | None:
        """Describe a step for output that is not a terminal, once every few seconds."""
        figures, started = self.figures, self.figures.started
        last = started is not None and step.step == started.steps
        if self._console.is_terminal or (
            time.monotonic() - self._last_line < _LINE_S and not last and len(figures.losses) > 1
        ):
            return None
        self._last_line = time.monotonic()
        steps = f"/{started.steps}" if started else ""
        return (
            f"step {step.step}{steps}: loss {step.loss:.4f}, {figures.tokens_per_s:,.0f} tokens/s, "
            f"{'' if last else f'{seconds(figures.left_s)} left, '}{plural(step.devices, 'device')}, "
            f"{si(figures.mean('down_bytes'), 'B')} down and {si(figures.mean('up_bytes'), 'B')} up a step, "
            f"{figures.recent_waiting_share:.0%} of the time waiting for devices"
        )

    # -------------------------------------------------------------------------------------------- screen

    def _screen(self) -> RenderableType:
        width, height = self._console.size
        with self._lock:
            # Below the join command, its heading and a blank line; the cursor needs the last line.
            room = height - 3 - -(-len(self._join_command) // width)
            gap = [Text()] if height >= _ROOMY else []
            numbers = [*self._numbers(width)[: max(room, 1)], *gap]
            room -= len(numbers)
            devices = self._devices()
            rows = min(len(devices), _MOST_DEVICES, max(room - 1 - len(gap) - _LEAST_NOTE_LINES, 0))
            table = [device_table(devices, width, at_most=rows), *gap] if rows else []
            room -= rows + 1 + len(gap) if rows else 0
            return Group(*numbers, *table, *_newest(self._notes, width, room))

    def _numbers(self, width: int) -> list[RenderableType]:
        figures = self.figures
        started = figures.started
        if started is None:
            return [Text("preparing ...")]
        lines: list[RenderableType] = [Text(f"cleave train {started.model}", style=f"bold {_ACCENT}")]
        if figures.waits is not None:
            waited = f"{time.monotonic() - self._waits_since:,.0f} s"
            lines.append(Text(f"{figures.waits} ({waited})", style="bold yellow", no_wrap=True, overflow="ellipsis"))
        if not figures.recent:
            if figures.waits is None:
                lines.append(Text("first step ..."))
            return lines
        step = figures.recent[-1]
        evaluated = f", evaluation {figures.evaluated.loss:.3f}" if figures.evaluated else ""
        share = figures.recent_waiting_share
        loss = f"{step.loss:.4f}{evaluated}  "
        predicted = figures.predicted_step_s
        beside = f" (predicted {seconds(predicted)})" if predicted is not None else ""
        facts: dict[str, str | Text] = {
            "step": f"{step.step} of {started.steps}, {seconds(figures.left_s)} left",
            "loss": Text.assemble(loss, (curve(figures.losses, min(60, width - len(loss) - 8)), _ACCENT)),
            "speed": f"{figures.tokens_per_s:,.0f} tokens/s, {seconds(figures.mean('seconds'))} a step{beside}",
            "grain": f"{figures.grain.grain}: {figures.grain.reason}" if figures.grain else "",
            "links": f"{si(figures.mean('down_bytes'), 'B')} down, {si(figures.mean('up_bytes'), 'B')} up a step",
            "time": Text.assemble(
                (bar(share, min(30, width // 4)), _ACCENT), f" {share:.0%} waiting for devices, the rest on the server"
            ),
        }
        return [*lines, *(fact_line(name, fact) for name, fact in facts.items() if fact)]


def qr_code(text: str) -> str:
    """Draw a QR code in light blocks, for a dark background; a line has two rows of it."""
    import segno

    drawn = io.StringIO()
    segno.make(text, error="l", micro=False).terminal(drawn, compact=True, border=1)
    return drawn.getvalue()


def fact_line(name: str, fact: str | Text) -> Text:
    """One line: a name and a fact, cut at the width of the terminal."""
    return Text.assemble((f"{name:6} ", "dim"), fact, no_wrap=True, overflow="ellipsis")


def fact_table(facts: dict[str, str]) -> Table:
    """Names and facts in two columns; long facts wrap."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, fact in facts.items():
        table.add_row(name, Text(fact))
    return table


def _newest(notes: Sequence[str], width: int, lines: int) -> list[Text]:
    """Wrap the newest notes that fit into so many lines, oldest first."""
    shown: list[Text] = []
    for note in reversed(notes):
        text = Text(f"· {note}", style="dim")
        lines -= -(-text.cell_len // max(width - 8, 1))  # words do not fill lines to the end
        if lines < 0:
            break
        shown.insert(0, text)
    return shown


def curve(values: Sequence[float], width: int) -> str:
    """Draw values as a row of bars, averaging neighbors if there are more than `width`."""
    if not values or width < 1:
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
