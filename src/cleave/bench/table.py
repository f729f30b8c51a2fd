"""Results as Markdown: step times against predictions, links and server, and single steps where the scenario asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cleave.bench.figures import Figures, figures, short_names
from cleave.bench.records import Measured, Results
from cleave.report.quantities import plural

_MANY_LATE = 0.05
_BUSY = 0.1


def markdown(results: Results) -> str:
    """Write the whole report."""
    return "\n".join([*_heading(results), "", *tables(results), ""])


def tables(results: Results) -> list[str]:
    """Write the tables and the lines about them, for a page that has its own heading."""
    scenario = results.scenario
    rows = [(each, figures(each, scenario.warmup, results.reference(each.cell))) for each in results.cells]
    measured = [(each, found) for each, found in rows if found is not None]
    lines = _steps_table(results) if scenario.show_steps else []
    lines += _times_table(results, rows)
    lines += ["", *_links_table(measured)] if measured else []
    lines += _remarks(results, measured)
    return lines


def _heading(results: Results) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return [
        f"# {results.scenario.title}",
        "",
        f"{results.date}, `{results.command}`",
        "",
        f"Versions: {versions}.",
    ]


def _times_table(results: Results, rows: Sequence[tuple[Measured, Figures | None]]) -> list[str]:
    names = _name_columns([measured for measured, _ in rows])
    lines = _header(
        *names, "grain", "s a step", "range", "modeled s", "predicted s", "measured / predicted", "worst step"
    )
    for measured, found in rows:
        cells = [column(measured) for column in names.values()]
        if found is None:
            lines.append(_row(*cells, "", f"failed: {_in_cell(measured.failed or 'no step was measured')}", *[""] * 5))
            continue
        time = _number(found.seconds.median)
        ratio, worst = ("", "") if found.ratio is None else (found.ratio.median, found.ratio.worst)
        lines.append(
            _row(
                *cells,
                ", ".join(found.grains),
                f"{time}, then failed: {_in_cell(measured.failed)}" if measured.failed else time,
                f"{_number(found.seconds.least)}-{_number(found.seconds.most)}",
                _number(found.modeled_s),
                _number(found.predicted_s),
                _judged(ratio, results.scenario.target),
                _judged(worst, results.scenario.target),
            )
        )
    return lines


def _links_table(rows: Sequence[tuple[Measured, Figures]]) -> list[str]:
    names = _name_columns([measured for measured, _ in rows])
    lines = _header(
        *names,
        "MB down",
        "MB up",
        "down rate off",
        "up rate off",
        "server CPU s",
        "devices' CPU s",
        "late answers",
        "others' CPU",
        "server peak MB",
        "loss off",
    )
    for measured, found in rows:
        lines.append(
            _row(
                *(column(measured) for column in names.values()),
                f"{found.down_bytes / 1e6:.1f}",
                f"{found.up_bytes / 1e6:.1f}",
                _percent(found.down_off),
                _percent(found.up_off),
                _number(found.server_cpu_s),
                _number(found.device_cpu_s),
                _share(found.late_share),
                _share(found.other_share),
                "" if found.peak_rss_bytes is None else f"{found.peak_rss_bytes / 1e6:.0f}",
                "" if found.loss_off is None else f"{found.loss_off:.1e}",
            )
        )
    return lines


def _steps_table(results: Results) -> list[str]:
    """Write a row per step and a column per run, so that cells can be compared step by step."""
    names = short_names(results.cells)
    runs = [(name, run) for name, each in zip(names, results.cells, strict=True) for run in each.runs]
    lines = _header("step", *(f"{name}, s" for name, _ in runs))
    for number in range(results.scenario.steps):
        taken = [run.steps[number] if number < len(run.steps) else None for _, run in runs]
        lines.append(_row(str(number + 1), *("" if step is None else _number(step.seconds) for step in taken)))
    return [*lines, ""]


def _remarks(results: Results, rows: Sequence[tuple[Measured, Figures]]) -> list[str]:
    scenario = results.scenario
    steps, runs = plural(scenario.steps, "step"), plural(scenario.repeats, "run")
    skipped = f", without the first {plural(scenario.warmup, 'step')} of each" if scenario.warmup else ""
    lines = [
        "",
        f"Medians over {steps} of {runs}{skipped}. Modeled is what the cost model alone says; predicted, what the "
        "server made of it just before each step, corrected by what earlier steps took. Rates: learned over configured "
        "(on a shared medium, anything from the fair share to all of it is right), the worst device after the last "
        "step. Loss: the largest difference from plain torch in any step.",
    ]
    if scenario.target is not None:
        low, high = scenario.target
        judged = [found.ratio.median for _, found in rows if found.ratio is not None]
        good = sum(low <= ratio <= high for ratio in judged)
        lines += [
            "",
            f"Measured over predicted is between {low:g} and {high:g} in {good} of {len(results.cells)} cells.",
        ]
    code = results.versions.get("code")
    for remark, cells in (
        (
            "This machine was too slow to emulate all devices at their speed, so times are too long",
            [each for each, found in rows if (found.late_share or 0.0) > _MANY_LATE],
        ),
        (
            "Other processes took part of the machine, so times may be too long",
            [each for each, found in rows if (found.other_share or 0.0) > _BUSY],
        ),
        (
            "Devices answered zeros, at the speed of their profiles, so there is no loss to compare",
            [each for each, _ in rows if each.cell.fleet.compute == "none"],
        ),
        (
            "Measured on an earlier run, with other code",
            [each for each in results.cells if each.versions.get("code") != code],
        ),
    ):
        if cells:
            lines += ["", f"{remark}: {_names(cells, results)}."]
    return lines


def _names(cells: Sequence[Measured], results: Results) -> str:
    if len(cells) == len(results.cells) > 1:
        return "all cells"
    return ", ".join(f"`{each.cell.name}`" for each in cells)


def _name_columns(rows: Sequence[Measured]) -> dict[str, Callable[[Measured], str]]:
    """Return the columns that name a cell: what is the same in all rows is left out, except fleet, model and mode."""
    columns: dict[str, Callable[[Measured], str]] = {
        "fleet": lambda measured: measured.cell.fleet_name,
        "model": lambda measured: measured.cell.model_name,
        "mode": lambda measured: measured.cell.mode,
    }
    if len({measured.cell.wire for measured in rows}) > 1:
        columns["wire"] = lambda measured: measured.cell.wire
    if len({measured.cell.grain for measured in rows}) > 1:
        columns["asked for"] = lambda measured: measured.cell.grain
    return columns


def _header(*names: str) -> list[str]:
    return [_row(*names), _row(*["---"] * len(names)).replace(" ", "")]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 99.95 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.0%}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _judged(value: float | str, target: tuple[float, float] | None) -> str:
    if isinstance(value, str):
        return value
    text = f"{value:.2f}"
    return text if target is None or target[0] <= value <= target[1] else f"**{text}**"


def _in_cell(text: str | None) -> str:
    return (text or "").replace("|", "/").replace("\n", " ")
