"""Figures of a cell from its raw numbers: medians, spread, measured over predicted, link rates against profiles.

Pure arithmetic on records; `table.py` and `plot.py` show what is computed here.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cleave.bench.records import Measured, Rates, Reference, Run, Step
from cleave.core.fleet.profiles import read_csv


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range of a figure over steps."""

    median: float
    least: float
    most: float

    @property
    def worst(self) -> float:
        """Of a ratio: the value furthest from 1, either way."""
        return max((self.least, self.most), key=lambda ratio: abs(math.log(ratio)) if ratio > 0 else math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a cell's table row says; None where nothing was measured."""

    seconds: Spread
    predicted_s: float | None
    modeled_s: float | None
    """By the cost model alone, before the server corrects it by what earlier steps took."""
    ratio: Spread | None
    """Measured over predicted seconds of a step."""
    grains: tuple[str, ...]
    down_bytes: float
    up_bytes: float
    server_cpu_s: float
    device_cpu_s: float | None
    other_share: float | None
    """Share of this machine's cores that other processes used meanwhile."""
    late_share: float | None
    """Share of answers that emulated devices gave later than their profile says, as this machine was too slow."""
    peak_rss_bytes: int | None
    down_off: float | None
    """Learned over configured rate, less 1, of the device for which it is furthest from 0."""
    up_off: float | None
    loss_off: float | None
    """Largest difference of a loss from plain torch's."""


def figures(measured: Measured, warmup: int, reference: Reference | None) -> Figures | None:
    """Summarize a cell over all of its runs, without the first `warmup` steps; None if no step is left."""
    steps = [step for run in measured.runs for step in run.steps[warmup:]]
    if not steps:
        return None
    ratios = [step.ratio for step in steps if step.ratio is not None]
    predicted = [step.predicted_s for step in steps if step.predicted_s is not None]
    modeled = [step.modeled_s for step in steps if step.modeled_s is not None]
    device_cpu = [step.device_cpu_s for step in steps if step.device_cpu_s is not None]
    peaks = [run.peak_rss_bytes for run in measured.runs if run.peak_rss_bytes is not None]
    down_off, up_off = links_off(measured)
    return Figures(
        seconds=_spread([step.seconds for step in steps]),
        predicted_s=statistics.median(predicted) if predicted else None,
        modeled_s=statistics.median(modeled) if modeled else None,
        ratio=_spread(ratios) if ratios else None,
        grains=tuple(dict.fromkeys(step.grain or "?" for step in steps)),
        down_bytes=statistics.median(step.down_bytes for step in steps),
        up_bytes=statistics.median(step.up_bytes for step in steps),
        server_cpu_s=statistics.median(step.server_cpu_s for step in steps),
        device_cpu_s=statistics.median(device_cpu) if device_cpu else None,
        other_share=_other_share(steps, int(measured.versions.get("cores", 1))),
        late_share=_late_share(measured),
        peak_rss_bytes=max(peaks, default=None),
        down_off=down_off,
        up_off=up_off,
        loss_off=_loss_off(measured, reference),
    )


def short_names(cells: Sequence[Measured]) -> list[str]:
    """Name cells by the parts of their names in which they differ."""
    parts = [each.cell.name.split("/") for each in cells]
    differing = [len(set(each)) > 1 for each in zip(*parts, strict=True)]
    kept = differing if any(differing) else [True] * len(differing)
    return ["  ".join(part for part, keep in zip(each, kept, strict=True) if keep) for each in parts]


def links_off(measured: Measured, step: int | None = None) -> tuple[float | None, float | None]:
    """Return how far the learned link rates are from the fleet file's, down and up: the worst device of all runs.

    Rates are those believed after `step`, by default the last one. Devices that moved nothing in a direction taught
    the server nothing about it, and are left out. Of a shared medium, a device is right to expect anything between its
    fair share and all of it.
    """
    if not measured.cell.fleet_csv:
        return None, None
    profiles = read_csv(measured.cell.fleet_csv, "fleet")
    known = {name: index for index, name in enumerate(profiles.names)}
    sharing = Counter(profiles.medium)
    down: list[float] = []
    up: list[float] = []
    for run in measured.runs:
        for rates in _rates_after(run, step):
            index = known.get(rates.device)
            if index is None:
                continue
            medium = float(profiles.medium_bytes_per_s[index]) if profiles.medium[index] else math.inf
            devices = sharing[profiles.medium[index]]
            for learned, own, moved, off in (
                (rates.down_bytes_per_s, profiles.down_bytes_per_s, rates.down_bytes, down),
                (rates.up_bytes_per_s, profiles.up_bytes_per_s, rates.up_bytes, up),
            ):
                most = min(float(own[index]), medium)
                least = min(most, medium / devices)
                if moved >= _LEAST_BYTES:
                    off.append(learned / min(max(learned, least), most) - 1)
    return max(down, key=abs, default=None), max(up, key=abs, default=None)


_LEAST_BYTES = 1 << 18


def _rates_after(run: Run, number: int | None) -> tuple[Rates, ...]:
    if number is None:
        return run.steps[-1].rates if run.steps else ()
    return next((step.rates for step in run.steps if step.number == number), ())


def _other_share(steps: Sequence[Step], cores: int) -> float | None:
    known = [(step.other_cpu_s, step.seconds) for step in steps if step.other_cpu_s is not None]
    return sum(other_s for other_s, _ in known) / (cores * sum(seconds for _, seconds in known)) if known else None


def _late_share(measured: Measured) -> float | None:
    counts = [(run.emulation.get("late_results"), run.emulation.get("results")) for run in measured.runs]
    known = [(late, all_) for late, all_ in counts if isinstance(late, int) and isinstance(all_, int) and all_ > 0]
    return sum(late for late, _ in known) / sum(all_ for _, all_ in known) if known else None


def _spread(values: list[float]) -> Spread:
    return Spread(median=statistics.median(values), least=min(values), most=max(values))


def _loss_off(measured: Measured, reference: Reference | None) -> float | None:
    if reference is None or measured.cell.fleet.compute == "none":
        return None
    pairs = [
        (step.loss, reference.losses[step.number - 1])
        for run in measured.runs
        for step in run.steps
        if step.number <= len(reference.losses)
    ]
    return max((abs(loss - plain) for loss, plain in pairs), default=None)
