"""From results to a Markdown table: rounds joined, the best setting of each rival, ratios to Cleave. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rivals.shape import TOKENS
from benchmarks.rivals.turns import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """All rounds of one system with one setting."""

    system: str
    settings: str
    counted_s: tuple[float, ...]
    last: Result
    losses: tuple[float, ...]
    error: str

    @property
    def median_s(self) -> float:
        return statistics.median(self.counted_s) if self.counted_s else float("inf")

    @property
    def spread(self) -> str:
        return f"{min(self.counted_s):.2f}-{max(self.counted_s):.2f}" if self.counted_s else ""


def merge(results: Sequence[Result]) -> list[Merged]:
    """Join the rounds of every setting, in the order of their first appearance."""
    together: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        together.setdefault((result.system, result.settings), []).append(result)
    merged: list[Merged] = []
    for (system, settings), each in together.items():
        good = [result for result in each if not result.error]
        merged.append(
            Merged(
                system=system,
                settings=settings,
                counted_s=tuple(seconds for result in good for seconds in result.counted),
                last=(good or each)[-1],
                losses=tuple(good[0].losses) if good else (),
                error="" if good else each[0].error,
            )
        )
    return merged


def best_of(merged: Sequence[Merged]) -> list[Merged]:
    """Keep the best setting of every system."""
    best: dict[str, Merged] = {}
    for each in merged:
        kept = best.get(each.system)
        if kept is None or each.median_s < kept.median_s:
            best[each.system] = each
    return list(best.values())


def markdown(title: str, command: str, merged: Sequence[Merged], machine: str, every: Sequence[Merged] = ()) -> str:
    """Format one cell: a fleet, a model, full or LoRA."""
    ours = next((each for each in merged if each.system == "Cleave"), None)
    truth = next((each.losses for each in merged if each.system == "one device alone"), ())
    lines = [
        f"# {title}: {TOKENS:,} tokens a step",
        "",
        f"`{command}`; {machine}",
        "",
        "| | best setting | s a step, median | range | Cleave / it | MB up per device, most | MB down, most | "
        "CPU s, all devices | peak MB per device, most | loss differs by at most |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in sorted(merged, key=lambda one: one.median_s):
        if each.error:
            lines.append(f"| {each.system} | {each.settings} | {each.error} | | | | | | | |")
            continue
        ratio = f"{ours.median_s / each.median_s:.2f}" if ours is not None and ours.counted_s else ""
        up, down = (max(rows[-1]) / 1e6 for rows in (each.last.up_bytes, each.last.down_bytes))
        off = max((abs(one - two) for one, two in zip(each.losses, truth, strict=False)), default=float("nan"))
        cpu_s, peak = statistics.median(each.last.cpu_s[-3:]), max(each.last.peak_memory_bytes) / 1e6
        lines.append(
            f"| {each.system} | {each.settings} | {each.median_s:.2f} | {each.spread} | {ratio} "
            f"| {up:.2f} | {down:.2f} | {cpu_s:.2f} | {peak:.0f} | {off:.4f} |"
        )
    for each in merged:
        if each.last.predicted_s and not each.error:
            lines += ["", *_prediction(each)]
    if every:
        lines += ["", "All settings that were tried, by their median s a step: "]
        lines += [
            f"- {each.system}, {each.settings}: {each.error or f'{each.median_s:.2f} ({each.spread})'}"
            for each in every
        ]
    return "\n".join(lines) + "\n"


def _prediction(ours: Merged) -> list[str]:
    last = ours.last
    rows = [f"| step | {ours.system}, s | predicted | measured / predicted |", "|---|---|---|---|"]
    for number, (taken_s, predicted_s) in enumerate(zip(last.step_s, last.predicted_s, strict=True), start=1):
        shown = ("", "") if predicted_s is None else (f"{predicted_s:.2f}", f"{taken_s / predicted_s:.2f}")
        rows.append(f"| {number} | {taken_s:.2f} | {shown[0]} | {shown[1]} |")
    links = ", ".join(f"{name} {down / 125e3:.0f}/{up / 125e3:.1f}" for name, (down, up) in sorted(last.links.items()))
    return [*rows, "", f"Grain in use at the end: {last.grain}. Links as Cleave saw them, Mbit/s down/up: {links}."]
