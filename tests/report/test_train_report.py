"""What `cleave train` shows fits the terminal: the join command can be copied, numbers are never cut."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from cleave import events
from cleave.device.worker import Contribution
from cleave.report import join as join_report
from cleave.report import train_summary
from cleave.report.device_table import device_table
from cleave.report.event_text import describe
from cleave.report.plain import plain_console
from cleave.report.run_figures import RunFigures
from cleave.report.train_screen import TrainView

LINK = "http://192.168.1.20:7077/join#SECRET"
COMMAND = "cleave join '192.168.100.200:65535#0123456789abcdefghij-_.0123456789abcdefghij-_'"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Row:
    name: str
    rates: tuple[float, float, float] = (123.4e9, 123.4e6, 123.4e6)
    kernel: str = "numpy"
    tasks: int = 1_234_567
    done_flops: float = 123.4e12
    verified_flops: float = 0.0
    wrong: int = 0
    down_bytes: int = 123_400_000
    up_bytes: int = 123_400_000
    idle_reason: str = ""
    level: str = "stranger"


@dataclass
class Outcome:
    step: int = 2
    reason: str = "done"
    losses: tuple[float, ...] = (3.0, 2.0)
    evaluation_loss: float | None = 2.5
    tokens: int = 128
    seconds: float = 10.0
    parameters: int = 140_000
    checkpoint: Path | None = None
    exported: Path | None = None
    prompt: str = ""
    sample: str = ""


def shown(width: int, height: int = 24, *, terminal: bool = True) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    console = Console(
        file=output, force_terminal=terminal, width=width, height=height, highlight=False, color_system=None
    )
    return console, output


def started(**changes: object) -> events.RunStarted:
    facts: dict[str, object] = {
        "model": "demo",
        "parameters": 3_540_000,
        "steps": 10,
        "first_step": 1,
        "tokens_per_step": 64,
        "wire": "fp32",
        "seed": 1,
    }
    return events.RunStarted(**{**facts, **changes})  # type: ignore[arg-type]


def step(number: int) -> events.StepDone:
    return events.StepDone(
        step=number,
        loss=3.0 - number / 10,
        learning_rate=1e-3,
        gradient_norm=1.0,
        tokens=64,
        seconds=2.0,
        waiting_s=1.5,
        devices=3,
        down_bytes=10,
        up_bytes=5,
    )


@pytest.mark.parametrize("width", [20, 40, 80, 140])
@pytest.mark.parametrize("terminal", [True, False])
def test_the_join_command_is_one_line_at_any_width(width: int, terminal: bool) -> None:
    console, output = shown(width, terminal=terminal)
    with TrainView(console, list) as view:
        view(started())
        view.show_join_command(COMMAND)
        view(step(1))
    lines = ESCAPES.sub("", output.getvalue().replace("\r", "\n")).split("\n")
    assert COMMAND in lines


@pytest.mark.parametrize(("terminal", "is_local"), [(True, False), (True, True), (False, False)])
def test_a_link_for_browsers_is_drawn_for_cameras_where_a_phone_could_use_it(terminal: bool, is_local: bool) -> None:
    console, output = shown(80, terminal=terminal)
    view = TrainView(console, list)
    view.show_join_page(LINK, is_local=is_local)
    lines = ESCAPES.sub("", output.getvalue()).split("\n")
    assert LINK in lines
    assert any("█▀▀▀▀▀▀▀█" in line for line in lines) == (terminal and not is_local)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40), (60, 12), (80, 10)])
def test_the_live_part_never_pushes_the_join_command_off_the_screen(width: int, height: int) -> None:
    console, _ = shown(width, height)
    view = TrainView(console, lambda: [Row(f"device-{number}") for number in range(50)])
    view(started())
    view.show_join_command(COMMAND)
    for number in range(30):
        view(events.Note(text=f"note {number}: " + "a long story " * (number % 12)))
    view(events.GrainChosen(grain="resident", reason="predicted " * 40, predicted_s=1.5))
    for number in range(1, 9):
        view(step(number))
    lines = console.render_lines(view._screen(), pad=False)  # pyright: ignore[reportPrivateUsage]
    rows_above = 2 + -(-len(COMMAND) // width)
    assert len(lines) + rows_above <= height
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert "8 of 10" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_a_device_table_cuts_names_and_drops_columns_but_never_cuts_a_number(width: int) -> None:
    console, output = shown(width, terminal=False)
    console.print(device_table([Row("a-very-long-name-of-a-device.local"), Row("b", tasks=7)], width))
    lines = output.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    header = lines[0].split()
    assert header[:2] == ["device", "tasks"]
    for line in lines[1:]:
        assert "…" not in line.partition("  ")[2]
    assert "1,234,567" in lines[1]
    assert len(header) >= (5 if width >= 80 else 2)


@pytest.mark.parametrize("name", ["[/x]", "[bold red]a[/]", ":skull:", "\\[b]", "a[link=x]b[/]\\"])
def test_names_and_reasons_of_devices_are_shown_as_they_are_and_never_read_as_markup(name: str) -> None:
    output = io.StringIO()
    console = plain_console()
    console.file, console.width = output, 200
    view = TrainView(console, lambda: [Row(name)])
    view(started(model=name))
    view(events.DeviceLeft(device=name, reason=name, lost_tasks=0))
    view(events.GrainChosen(grain="gemm", reason=name))
    view(step(1))
    console.print(view._screen())  # pyright: ignore[reportPrivateUsage]
    idle = Row(name, tasks=0, idle_reason=name)
    train_summary.show(Outcome(), view.figures, [idle], Path(name), console, can_be_joined=False, as_json=False)
    lines = output.getvalue().splitlines()
    assert f"{name} left: {name}" in lines
    assert f"{name} had no work: {name}" in lines
    assert len([line for line in lines if line.startswith(f"{name} ")]) >= 4  # a note, two tables, a reason


@pytest.mark.parametrize("terminal", [True, False])
def test_a_volunteer_sees_what_the_server_says_and_never_its_markup(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "stderr", output)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    with join_report.shown(Contribution(), 1e9, 1 << 30, "numpy", paused=lambda: "", quiet=False) as say:
        say("joined as [/x] [red]no[/] :skull:")
    assert "joined as [/x] [red]no[/] :skull:" in output.getvalue()


def test_a_table_of_many_devices_says_how_many_are_not_shown() -> None:
    console, output = shown(80, terminal=False)
    console.print(device_table([Row(f"d{number}") for number in range(9)], 80, at_most=4))
    assert "+ 6 more" in output.getvalue()
    assert len(output.getvalue().splitlines()) == 5


@pytest.mark.parametrize("width", [80, 140])
def test_the_final_report_keeps_grain_predicted_and_measured_time_and_where_time_went(width: int) -> None:
    figures = RunFigures()
    for event in (
        started(passes_per_step=2),
        events.GrainChosen(grain="resident", reason="predicted 0.5 s a step (limit: compute)", predicted_s=0.5),
        step(1),
        step(2),
    ):
        figures(event)
    console, output = shown(width, terminal=False)
    idle = Row("spare", tasks=0, idle_reason="a step is faster without this device")
    train_summary.show(
        Outcome(), figures, [Row("busy"), idle], Path("run"), console, can_be_joined=False, as_json=False
    )
    text = " ".join(output.getvalue().split())
    for fact in (
        "resident: predicted 0.5 s",
        "measured 2 s",
        "predicted 1 s (2.00x)",
        "30% waiting for devices",
        "10% computing on the server",
        "spare had no work: a step is faster without this device",
    ):
        assert fact in text
    assert all(len(line) <= width for line in output.getvalue().splitlines() if "cleave train" not in line)


def test_the_screen_says_that_a_run_waits_until_a_device_joins() -> None:
    console, _ = shown(80)
    view = TrainView(console, list)
    view(started())
    view(events.Paused(reason="waiting for a device to join; Ctrl-C stops"))

    def screen() -> str:
        lines = console.render_lines(view._screen(), pad=False)  # pyright: ignore[reportPrivateUsage]
        return "\n".join("".join(segment.text for segment in line) for line in lines[:3])

    assert "waiting for a device to join" in screen()
    view(
        events.DeviceJoined(
            device="laptop",
            flops_per_s=1e9,
            down_bytes_per_s=1e6,
            up_bytes_per_s=1e6,
            latency_s=0.01,
            memory_bytes=1e9,
            kernel="numpy",
        )
    )
    assert "waiting" not in screen()


@pytest.mark.parametrize(
    ("event", "facts", "never"),
    [
        (events.DeviceLeft(device="a", reason="stopped by its owner", lost_tasks=1), "left: stopped", "left: left"),
        (events.DeviceLate(device="a", is_only=True), "no other device", "take over"),
        (events.DeviceLate(device="a"), "take over", "no other device"),
        (started(weights="fresh", tokenizer="bytes"), "fresh weights", "pretrained weights"),
        (started(weights="fresh", tokenizer="bytes"), "one byte", "own tokenizer"),
        (started(weights="pretrained", tokenizer="model"), "pretrained weights", "fresh"),
        (started(weights="pretrained", tokenizer="model"), "own tokenizer", "byte"),
    ],
)
def test_an_event_is_told_with_its_facts(event: events.AnyEvent, facts: str, never: str) -> None:
    text = describe(event) or ""
    assert facts in text
    assert never not in text
