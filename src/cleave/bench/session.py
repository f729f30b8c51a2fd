"""A whole `cleave bench`: progress on standard error, results in files after every cell, a line for each cell."""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cleave.bench.figures import figures
from cleave.bench.files import Files
from cleave.bench.processes import terminable
from cleave.bench.records import Measured, Results, Step, versions
from cleave.bench.runner import plan_cells, run_cells
from cleave.bench.scenario import Cell, Scenario
from cleave.report.plain import plain_console
from cleave.report.quantities import plural, seconds


def run_session(
    scenario: Scenario,
    cells: tuple[Cell, ...],
    chosen: tuple[Cell, ...],
    files: Files,
    *,
    command: str,
    selection: str,
    again: bool,
) -> Results:
    """Run the chosen cells that are not done yet. Ctrl-C keeps every finished one.

    `command` is what measures all cells of the scenario, `selection` the options by which some were chosen.
    """
    files.prepare()
    console = plain_console(stderr=True)
    earlier = files.read()
    results = Results(
        scenario=scenario,
        command=command,
        date=datetime.now(UTC).date().isoformat(),
        versions=versions(),
        cells=_kept(cells, earlier),
        references=earlier.references if earlier is not None else (),
    )
    plan = plan_cells(chosen, earlier, results.versions["code"], again=again)
    if plan.standing:
        console.print(f"{plural(len(plan.standing), 'cell')} done before, with the same settings and code")
    if (hint := files.missing_plot) is not None:
        console.print(hint)
    with terminable(), _Progress(console, plan.pending) as progress:

        def done(so_far: Results, measured: Measured) -> None:
            files.write(_ordered(so_far, cells))
            progress.done(so_far, measured)

        try:
            results = run_cells(
                plan,
                results,
                command=f"{command} {selection}".strip(),
                limit_s=scenario.limit_s,
                watch=progress.watch,
                done=done,
            )
        except KeyboardInterrupt:
            console.print(f"finished cells are kept in {files.raw.parent}; the same command continues")
            raise
    results = _ordered(results, cells)
    files.write(results)
    return results


def _kept(cells: tuple[Cell, ...], earlier: Results | None) -> tuple[Measured, ...]:
    """Return earlier results of this scenario's cells, by whatever code; of those with other settings, none."""
    known = {cell.name: cell for cell in cells}
    found = earlier.cells if earlier is not None else ()
    return tuple(each for each in found if known.get(each.cell.name) == each.cell)


def _ordered(results: Results, cells: tuple[Cell, ...]) -> Results:
    place = {cell.name: number for number, cell in enumerate(cells)}
    return replace(results, cells=tuple(sorted(results.cells, key=lambda each: place[each.cell.name])))


class _Progress:
    """A bar over all steps to do, on a terminal, and a line for each finished cell."""

    def __init__(self, console: Console, pending: tuple[Cell, ...]) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        total = sum(cell.steps * cell.repeats for cell in pending)
        self._task = self._progress.add_task(pending[0].name if pending else "", total=total)
        self._pending = list(pending)
        self._steps_done = 0

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def watch(self, cell: Cell, run: int, step: Step) -> None:
        described = f"{cell.name}, step {step.number}: {seconds(step.seconds)}"
        completed = self._steps_done + (run - 1) * cell.steps + step.number
        self._progress.update(self._task, completed=completed, description=described)

    def done(self, results: Results, measured: Measured) -> None:
        cell = measured.cell
        self._steps_done += cell.steps * cell.repeats
        self._pending.remove(cell)
        following = self._pending[0].name if self._pending else ""
        self._progress.update(self._task, completed=self._steps_done, description=following)
        self._console.print(_line(results, measured), soft_wrap=True)


def _line(results: Results, measured: Measured) -> str:
    found = figures(measured, results.scenario.warmup, results.reference(measured.cell))
    if measured.failed is not None or found is None:
        return f"{measured.cell.name}: failed, {measured.failed or 'no step was measured'}"
    line = f"{measured.cell.name}: {seconds(found.seconds.median)} a step"
    if found.predicted_s is not None and found.ratio is not None:
        line += f", predicted {seconds(found.predicted_s)} ({found.ratio.median:.2f} of it measured)"
    return line
