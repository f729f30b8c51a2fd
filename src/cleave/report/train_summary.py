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

from cleave.core.carbon.bill import Bill
from cleave.report.carbon import bill_json, footprint_text
from cleave.report.device_table import DeviceRow, device_table
from cleave.report.quantities import plural, seconds
from cleave.report.run_figures import RunFigures
from cleave.report.train_screen import bar, curve, fact_table


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


def show(
    summary: RunSummary,
    figures: RunFigures,
    devices: Sequence[DeviceRow],
    directory: Path,
    console: Console,
    *,
    bill: Bill | None = None,
    can_be_joined: bool,
    as_json: bool,
) -> None:
    if as_json:
        sys.stdout.write(json.dumps(_as_json(summary, figures, devices, directory, bill)) + "\n")
        return
    losses = summary.losses
    if losses:
        evaluated = "" if summary.evaluation_loss is None else f", evaluation loss {summary.evaluation_loss:.4f}"
        console.print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}{evaluated} after {plural(summary.step, 'step')}, "
            f"{summary.tokens:,} tokens, {seconds(summary.seconds)}",
            soft_wrap=True,
        )
        console.print(curve(losses, min(60, console.width)))
    if summary.sample:
        written = Text(summary.prompt, style="dim") + Text(summary.sample)
        console.print(Panel(written, title="text sample", title_align="left"))
    console.print(fact_table(_facts(summary, figures, bill)))
    if devices:
        console.print(device_table(devices, console.width))
    for device in devices:
        if device.idle_reason and not device.tasks:
            console.print(f"{device.name} had no work: {device.idle_reason}", markup=False)
    if summary.exported is not None:
        console.print(
            f"model and tokenizer: {summary.exported} (load them with AutoModelForCausalLM and AutoTokenizer)",
            soft_wrap=True,
            markup=False,
        )
    if summary.reason != "done":
        again = f"cleave train --resume --out {directory}"
        console.print(f"{summary.reason} after step {summary.step}; resume with: {again}", soft_wrap=True, markup=False)
    elif not can_be_joined:
        console.print(
            "to use other machines of yours, start with: cleave train --listen 0.0.0.0:7077 --tls --trust own\n"
            "and run the cleave join command that it prints on each of them",
            soft_wrap=True,
        )


def _facts(summary: RunSummary, figures: RunFigures, bill: Bill | None) -> dict[str, str]:
    """What the run used and where its time went; measured times are from this start or resume on."""
    facts: dict[str, str] = {}
    if figures.grain is not None:
        facts["grain"] = f"{figures.grain.grain}: {figures.grain.reason}"
    measured, predicted = figures.measured_step_s, figures.predicted_step_s
    if measured is not None:
        beside = "" if predicted is None else f", predicted {seconds(predicted)} ({measured / predicted:.2f}x)"
        facts["step"] = f"measured {seconds(measured)} (median){beside}"
    if figures.steps_s and summary.seconds:
        total_s = max(summary.seconds, figures.steps_s)
        waiting, server = figures.waiting_s / total_s, (figures.steps_s - figures.waiting_s) / total_s
        facts["time"] = (
            f"{bar(waiting, 20)} {waiting:.0%} waiting for devices, {server:.0%} computing on the server, "
            f"{max(0.0, 1 - waiting - server):.0%} outside of steps (starting, evaluating, saving)"
        )
        if figures.checking_s:
            facts["checks"] = f"{seconds(figures.checking_s)} verifying results, while devices computed"
    if figures.undone:
        facts["undone"] = f"{plural(figures.undone, 'step')}, which rested on work of a device found wrong"
    if bill is not None:
        whose = "devices are taken for laptops on the grid of the world" if bill.footprint.devices.energy_j else ""
        facts["energy"] = "; ".join(filter(None, (footprint_text(bill.footprint), whose)))
    return facts


def _as_json(
    summary: RunSummary, figures: RunFigures, devices: Sequence[DeviceRow], directory: Path, bill: Bill | None
) -> dict[str, object]:
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
        "grain": figures.grain.grain if figures.grain else None,
        "grain_reason": figures.grain.reason if figures.grain else "",
        "predicted_step_s": figures.predicted_step_s,
        "measured_step_s": figures.measured_step_s,
        "waiting_s": figures.waiting_s,
        "checking_s": figures.checking_s,
        "footprint": None if bill is None else bill_json(bill),
        "devices": [
            {
                "device": device.name,
                "tasks": device.tasks,
                "flops": device.done_flops,
                "verified_flops": device.verified_flops,
                "wrong": device.wrong,
                "trust": device.level,
                "down_bytes": device.down_bytes,
                "up_bytes": device.up_bytes,
                "idle_reason": device.idle_reason,
            }
            for device in devices
        ],
    }
