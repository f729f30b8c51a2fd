"""`cleave runs`: runs as tables or as JSON."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from cleave.printable import printable
from cleave.report.plain import plain_console
from cleave.report.quantities import parameters, seconds, si
from cleave.report.train_screen import curve
from cleave.runs.reading import Run, SeenDevice

_WIDTH_OF_A_FILE: Final = 200  # columns if the output is not a terminal
_CURVE_WIDTH: Final = 60
_HALF_A_YEAR_S: Final = 182 * 86400
_KEYS: Final = "keys.json"  # a run that others may join has keys


def show_list(runs: Sequence[Run], home: Path, *, as_json: bool) -> None:
    if as_json:
        _write_json({"home": str(home), "runs": [_as_json(run) for run in runs]})
        return
    console = _console()
    if not runs:
        console.print(f"there are no runs in {home}; cleave train starts one", soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("started", no_wrap=True)
    table.add_column("model", overflow="fold")
    table.add_column("state", no_wrap=True)
    for heading in ("steps", "loss", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        steps = f"{run.step}/{run.steps}"
        table.add_row(
            printable(run.name), _date(run.started_s), printable(run.model), run.state, steps, _loss(run), _size(run)
        )
    console.print(table)
    if len(runs) > 1:
        total = si(sum(run.size_bytes for run in runs), "B")
        console.print(f"{len(runs)} runs, {total}, in {home}", soft_wrap=True)


def show_run(run: Run, *, as_json: bool) -> None:
    if as_json:
        _write_json(_as_json(run) | _details_as_json(run))
        return
    console = _console()
    console.print(f"{run.path}", style="bold", soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _facts(run):
        table.add_row(label, printable(text, len(text)))
    console.print(table)
    if run.losses:
        console.print(curve(run.losses, _CURVE_WIDTH))
    if run.devices:
        console.print(_device_table(run.devices))
    for label, command in _commands(run):
        console.print(f"{label}: {command}", soft_wrap=True)


def _facts(run: Run) -> list[tuple[str, str]]:
    """Lines of the description: label and text."""
    claim = run.claim
    where = "" if claim is None else f", process {claim.pid}" + (f", devices join {claim.url}" if claim.url else "")
    size = "" if run.parameters is None else f", {parameters(run.parameters)}"
    facts = [
        ("state", f"{run.state}{f': {run.reason}' if run.reason else ''}{where}"),
        ("model", f"{run.model}{size}"),
        ("started", _time(run.started_s)),
        ("last event", _time(run.ended_s)),
        ("steps", f"{run.step:,} of {run.steps:,}, {run.tokens:,} tokens"),
    ]
    if run.losses:
        facts.append(("loss", f"{run.losses[0]:.4f} -> {run.losses[-1]:.4f}"))
    if run.evaluations:
        step, loss = run.evaluations[-1]
        facts.append(("evaluation", f"{loss:.4f} at step {step:,}"))
    facts.append(("settings", _settings(run)))
    saved = [f"step {each.step:,} ({si(each.size_bytes, 'B')})" for each in run.checkpoints]
    facts.append(("checkpoints", ", ".join(saved) or "none"))
    facts.append(("exported", "no" if run.exported is None else str(run.exported)))
    facts.append(("on disk", si(run.size_bytes, "B")))
    return facts


def _settings(run: Run) -> str:
    if run.settings_problem:
        return run.settings_problem
    return ", ".join(f"{each.name} {_plain(each.value)}" for each in run.settings) or "the defaults"


def _plain(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _device_table(devices: Sequence[SeenDevice]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("device", overflow="fold")
    for heading in ("speed", "memory", "joined", "time", "lost", "audited", "wrong"):
        table.add_column(heading, justify="right", no_wrap=True)
    for device in devices:
        table.add_row(
            printable(device.name),
            si(device.flops_per_s, "FLOP/s"),
            si(device.memory_bytes, "B"),
            f"{device.joined:,}x",
            seconds(device.connected_s),
            f"{device.lost_tasks:,}",
            f"{device.audited_units:,}",
            f"{device.wrong:,}",
        )
    return table


def _commands(run: Run) -> list[tuple[str, str]]:
    """Commands to continue with: what they do, and how they are typed."""
    place = shlex.quote(str(run.path))
    commands: list[tuple[str, str]] = []
    if run.state in {"interrupted", "failed"}:
        label = "resume" if run.checkpoints else "start again, as there is no checkpoint"
        commands.append((label, f"cleave train --resume --out {place}"))
    if run.state != "done" and (run.path / _KEYS).is_file():
        commands.append(("new join command", f"cleave token add --out {place}"))
    if run.state == "done" and run.checkpoints:
        commands.append(("free the space of checkpoints", f"cleave runs remove --checkpoints {place}"))
    return commands


# ----------------------------------------------------------------------------------------------------------- JSON


def _as_json(run: Run) -> dict[str, object]:
    last = run.losses[-1] if run.losses else None
    return {
        "run": run.name,
        "path": str(run.path),
        "state": run.state,
        "reason": run.reason,
        "started_s": run.started_s,
        "model": run.model,
        "step": run.step,
        "steps": run.steps,
        "loss": _finite(last),
        "size_bytes": run.size_bytes,
    }


def _details_as_json(run: Run) -> dict[str, object]:
    return {
        "ended_s": run.ended_s,
        "pid": None if run.claim is None else run.claim.pid,
        "url": None if run.claim is None else run.claim.url,
        "parameters": run.parameters,
        "tokens": run.tokens,
        "losses": [_finite(loss) for loss in run.losses],
        "evaluations": [{"step": step, "loss": _finite(loss)} for step, loss in run.evaluations],
        "settings": {each.name: _json_value(each.value) for each in run.settings},
        "checkpoints": [
            {"step": each.step, "path": str(each.path), "size_bytes": each.size_bytes} for each in run.checkpoints
        ],
        "exported": None if run.exported is None else str(run.exported),
        "devices": [
            {
                "device": device.name,
                "kernel": device.kernel,
                "flops_per_s": device.flops_per_s,
                "memory_bytes": device.memory_bytes,
                "joined": device.joined,
                "connected_s": device.connected_s,
                "lost_tasks": device.lost_tasks,
                "audited_units": device.audited_units,
                "wrong": device.wrong,
            }
            for device in run.devices
        ],
    }


def _json_value(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _finite(loss: float | None) -> float | None:
    """JSON has no NaN."""
    return loss if loss is not None and math.isfinite(loss) else None


def _write_json(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


# ----------------------------------------------------------------------------------------------------------- text


def _console() -> Console:
    return plain_console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)


def _loss(run: Run) -> str:
    return f"{run.losses[-1]:.4f}" if run.losses else "-"


def _size(run: Run) -> str:
    return si(run.size_bytes, "B")


def _date(time_s: float | None) -> str:
    """Format a time in 12 characters, as `ls` does: without the year if recent, else without the hour."""
    if time_s is None:
        return "never"
    is_recent = abs(time.time() - time_s) < _HALF_A_YEAR_S
    return time.strftime("%b %d %H:%M" if is_recent else "%b %d  %Y", time.localtime(time_s))


def _time(time_s: float | None) -> str:
    return "never" if time_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
