"""The report at the end of a run: loss, a text sample, each device's contribution, and how to continue."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from cleave.report.quantities import seconds
from cleave.report.train_screen import DeviceRow, curve, device_table


class RunSummary(Protocol):
    """The outcome of a run; `train.loop.Summary` implements it."""

    @property
    def step(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def losses(self) -> tuple[float, ...]: ...
    @property
    def evaluation_loss(self) -> float | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def parameters(self) -> int: ...
    @property
    def checkpoint(self) -> Path | None: ...
    @property
    def exported(self) -> Path | None: ...
    @property
    def prompt(self) -> str: ...
    @property
    def sample(self) -> str: ...


class Joinable(Protocol):
    """A fleet that other machines may join."""

    @property
    def join_command(self) -> str: ...
    @property
    def is_reachable(self) -> bool: ...


def show(
    summary: RunSummary,
    devices: Sequence[DeviceRow],
    fleet: Joinable | None,
    directory: Path,
    console: Console,
    *,
    as_json: bool,
) -> None:
    if as_json:
        sys.stdout.write(json.dumps(_as_json(summary, devices, directory)) + "\n")
        return
    losses = summary.losses
    if losses:
        evaluated = "" if summary.evaluation_loss is None else f", evaluation loss {summary.evaluation_loss:.4f}"
        console.print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}{evaluated} after {summary.step} steps, {summary.tokens:,} "
            f"tokens, {seconds(summary.seconds)}",
            soft_wrap=True,
        )
        console.print(curve(losses, 60))
    if summary.sample:
        written = Text(summary.prompt, style="dim") + Text(summary.sample)
        console.print(Panel(written, title="text sample", title_align="left"))
    if devices:
        console.print(device_table(devices))
    if summary.exported is not None:
        console.print(f"model: {summary.exported} (AutoModelForCausalLM.from_pretrained loads it)", soft_wrap=True)
    if summary.reason != "done":
        again = f"cleave train --resume --out {directory}"
        console.print(f"{summary.reason} after step {summary.step}; resume with: {again}", soft_wrap=True)
    if fleet is not None and summary.reason == "done":
        if fleet.is_reachable:
            console.print(f"to add another machine next time, run there: {fleet.join_command}", soft_wrap=True)
        else:
            console.print(
                "to add other machines, start with: cleave train --listen 0.0.0.0:7077 --tls\n"
                "and run the cleave join command it prints on them",
                soft_wrap=True,
            )


def _as_json(summary: RunSummary, devices: Sequence[DeviceRow], directory: Path) -> dict[str, object]:
    return {
        "run": str(directory),
        "reason": summary.reason,
        "steps": summary.step,
        "losses": list(summary.losses),
        "evaluation_loss": summary.evaluation_loss,
        "tokens": summary.tokens,
        "seconds": summary.seconds,
        "parameters": summary.parameters,
        "model": None if summary.exported is None else str(summary.exported),
        "checkpoint": None if summary.checkpoint is None else str(summary.checkpoint),
        "sample": summary.sample,
        "devices": [
            {
                "device": device.name,
                "tasks": device.tasks,
                "flops": device.done_flops,
                "verified_flops": device.verified_flops,
                "wrong": device.wrong,
                "down_bytes": device.down_bytes,
                "up_bytes": device.up_bytes,
            }
            for device in devices
        ],
    }
