"""A study on a terminal: its progress, the claims it judged, and what was written; the same as JSON."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cleave.report.chart import Chart
from cleave.report.claim import Claim, count_text, range_text
from cleave.report.claim import as_json as claims_json
from cleave.report.plain import plain_console
from cleave.report.quantities import plural


@contextmanager
def watched() -> Generator[Callable[[int, int, str], None]]:
    """Show progress on standard error. Yields what to call with the number done, of how many, and the last one."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=plain_console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


class Done(NamedTuple):
    cells: int
    computed: int
    """Cells that were not kept from before."""
    written: tuple[Path, ...]


def show(claims: Sequence[Claim], done: Done) -> None:
    console = plain_console()
    for claim in claims:
        console.print(f"{claim.published}:")
        for found in claim.comparisons:
            factors = f"; factors {range_text(found)}" if found.factors else ""
            console.print(
                f"  {found.system}, against {found.against}: holds in {count_text(found)}{factors}", soft_wrap=True
            )
    kept = done.cells - done.computed
    console.print(f"{plural(done.cells, 'outcome')}, {kept:,} of them kept from before; wrote {done.written[0]}")


def as_json(claims: Sequence[Claim], charts: Sequence[Chart], setting: str, done: Done) -> dict[str, object]:
    """What `--report --json` prints; a value that does not exist is null, and `missing` says why."""
    return {
        "setting": setting,
        "cells": done.cells,
        "computed": done.computed,
        "written": [str(path) for path in done.written],
        "claims": claims_json(tuple(claims)),
        "figures": {chart.name: _figure(chart) for chart in charts},
    }


def _figure(chart: Chart) -> dict[str, object]:
    return {
        "title": chart.title,
        "panels": [
            {
                "title": panel.title,
                "setting": panel.setting,
                "x": panel.x_label,
                "y": panel.y_label,
                "at": panel.labels,
                "series": {one.name: [mark.y for mark in one.marks] for one in panel.series},
                "missing": {
                    one.name: {
                        label: mark.why or mark.text
                        for label, mark in zip(panel.labels, one.marks, strict=True)
                        if mark.y is None
                    }
                    for one in panel.series
                },
            }
            for panel in chart.panels
        ],
    }
