"""`cleave simulate --report`: a study of many settings and systems, as a page, pictures and tables in a directory."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cleave import __version__
from cleave.api.checks import checked_wire
from cleave.api.outcomes import Kept, home
from cleave.api.planning import checked_sequence, load_fleet, load_shape, sample_fleet
from cleave.core.cost.wire import PLAN_WIRE, WireName
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.shapes import PRESET_NAMES, named
from cleave.disk import write_whole
from cleave.errors import InputError
from cleave.report.chart import Chart, series_of
from cleave.report.claim import Claim, as_markdown
from cleave.report.quantities import plural
from cleave.report.study_page import StudyPage, as_html
from cleave.sim.cell import Cell, Ground
from cleave.sim.cleave import SYSTEM
from cleave.sim.setting import Outcome
from cleave.sim.study.charts import chart_of, setting_text
from cleave.sim.study.claims import claims
from cleave.sim.study.figure import Figure, cells
from cleave.sim.study.grid import Grid, figures
from cleave.sim.study.names import FIGURES
from cleave.sim.systems import baselines, checked_systems

MODELS: Final = ("opt-1.3b", "llama-2-7b", "llama-2-13b", "llama-2-70b")
"""Models for which devices are varied, unless one is named."""
CENTER: Final = "llama-2-13b"
TOKENS: Final = 131_072
DEVICES: Final = (16, 64, 256, 1024, 4096, 8192)
FEW: Final = (64, 1024)
MOST_DEVICES: Final = 65_536
MIX: Final = {"phone": 0.6, "laptop": 0.3, "desktop": 0.1}
COUNTRY: Final = "us"
_NOTES: Final = (
    "Simulated, not measured: Cleave by the laws of its planner, rivals re-implemented on the same devices and links. "
    "A system that cannot run in a setting is shown as such, with its reason.",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """What a report is made of."""

    setting: str
    charts: tuple[Chart, ...]
    claims: tuple[Claim, ...]
    systems: dict[str, str]
    cells: int
    computed: int
    """Cells computed for this study, not kept from an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A study that is laid out but not computed yet."""

    grid: Grid
    ground: Ground
    population: str
    """Where devices are from, in words."""
    figures: tuple[Figure, ...]


def plan_study(
    *,
    fleet: Profiles | str | Path | None = None,
    devices: Sequence[int] | None = None,
    model: str | None = None,
    tokens: int = TOKENS,
    sequence: int | None = None,
    wire: WireName = PLAN_WIRE,
    systems: Sequence[str] | None = None,
    only: Sequence[str] = FIGURES,
    seed: int = 1,
) -> Plan:
    """Lay out a study around one setting.

    Without a fleet, devices are drawn from the fact tables, and there are 16 to 8,192 of them; otherwise from a quarter
    of the fleet to sixteen times as many; or `devices` lists the sizes. Without a model, devices are varied for four
    models, the rest for one.
    """
    if not 0 <= seed < 2**63:
        raise InputError(f"expected a seed of at least 0, got {seed}; change it")
    for name in only:
        if name not in FIGURES:
            raise InputError(f"expected figures among {', '.join(FIGURES)}, got {name[:60]!r}; change --figures")
    names = checked_systems([SYSTEM, *(systems if systems is not None else baselines())])
    population, source = _population(fleet, seed)
    sizes, few = _sizes(devices, None if fleet is None else len(population))
    shapes = {name: named(name) for name in PRESET_NAMES}
    if model is not None:
        shapes[model] = load_shape(model)
    center = model or CENTER
    length = checked_sequence(shapes[center], tokens, sequence)
    if tokens % length:
        raise InputError(f"expected whole sequences of {length} tokens, got --tokens {tokens}; change one of them")
    grid = Grid(
        center=Cell(model=center, tokens=tokens, sequence=length, devices=few[-1], wire=checked_wire(wire), seed=seed),
        systems=tuple(names),
        devices=sizes,
        few=few,
        models=MODELS if model is None else (model,),
        families={
            family: tuple(name for name in PRESET_NAMES if name.startswith(family.lower()))
            for family in ("OPT", "Llama-2")
        },
        shapes=shapes,
    )
    chosen = tuple(figure for figure in figures(grid) if figure.name in only)
    ground = Ground(population=population, shapes=shapes)
    return Plan(grid=grid, ground=ground, population=source, figures=chosen)


def make_study(plan: Plan, progress: Callable[[int, int, str], None], kept_in: Path | None = None) -> Study:
    """Find or compute the outcome of every cell; `progress` is told how many are done, of how many, and the last."""
    kept = Kept(kept_in or home(), plan.ground)
    needed = cells(plan.figures)
    outcomes: dict[Cell, Outcome] = {}
    for cell, outcome in kept.outcomes(needed):
        outcomes[cell] = outcome
        progress(len(outcomes), len(needed), f"{cell.system}: {cell.model} on {cell.devices:,} devices")
    return Study(
        setting=setting_text([plan.grid.center], plan.population),
        charts=tuple(chart_of(figure, outcomes, plan.population) for figure in plan.figures),
        claims=claims(outcomes, plan.grid.center),
        systems=_systems(plan.grid, outcomes),
        cells=len(needed),
        computed=kept.computed,
    )


def write_study(study: Study, out: Path, *, date: str, command: str) -> list[Path]:
    """Write the page, a PNG and a CSV per chart, and the claims; needs matplotlib."""
    from cleave.report.chart_plot import as_png, as_svg

    kinds = series_of(study.charts)
    page = StudyPage(
        title="Cleave and its rivals, simulated",
        date=date,
        version=__version__,
        command=command,
        setting=f"Center of the study: {study.setting}",
        notes=_NOTES,
        systems=study.systems,
        claims=study.claims,
        charts=study.charts,
    )
    made = {"index.html": as_html(page, lambda panel: as_svg(panel, kinds), kinds).encode()}
    made["claims.md"] = as_markdown(study.claims, date=date, command=command, setting=study.setting).encode()
    for chart in study.charts:
        made[f"{chart.name}.png"] = as_png(chart, kinds)
        made[f"{chart.name}.csv"] = _csv(chart).encode()
    written: list[Path] = []
    for name, data in made.items():
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_whole(out / name, data)
        except OSError as fault:
            raise InputError(f"cannot write {out / name}: {fault.strerror}; choose another --report") from None
        written.append(out / name)
    return written


def _population(fleet: Profiles | str | Path | None, seed: int) -> tuple[Profiles, str]:
    """Devices to draw fleets from, and where they are from, in words."""
    if fleet is None:
        mix = ",".join(f"{name}={share * DEVICES[-1]:.0f}" for name, share in MIX.items())
        shares = ", ".join(f"{share:.0%} {name}s" for name, share in MIX.items())
        return sample_fleet(mix, COUNTRY, seed), f"{shares} as drawn by cleave fleet sample for {COUNTRY.upper()}"
    profiles = fleet if isinstance(fleet, Profiles) else load_fleet(fleet)
    where = "a fleet" if isinstance(fleet, Profiles) else str(fleet)
    return profiles, f"{where} of {plural(len(profiles), 'device')}, repeated beyond that"


def _sizes(devices: Sequence[int] | None, own: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of fleets, and those of them in which more is tried; the last of these is the center."""
    if devices is not None:
        sizes = tuple(sorted(set(devices)))
        if not sizes or not 1 <= sizes[0] <= sizes[-1] <= MOST_DEVICES:
            raise InputError(f"expected numbers of devices from 1 to {MOST_DEVICES:,}, got {sizes}; change --devices")
        return sizes, sizes[: (len(sizes) + 1) // 2]
    if own is None:
        return DEVICES, FEW
    sizes = tuple(sorted({math.ceil(own * share) for share in (0.25, 1, 4, 16)}))
    return tuple(one for one in sizes if one <= max(DEVICES[-1], own)), tuple(one for one in sizes if one <= own)


def _systems(grid: Grid, outcomes: dict[Cell, Outcome]) -> dict[str, str]:
    """How each system runs: in the center of the study, or in the nearest setting that was computed."""
    center, found = grid.center, dict[str, str]()
    for name in grid.systems:
        own = [cell for cell in outcomes if cell.system == name]
        if own:
            nearest = min(own, key=lambda cell: (cell.model != center.model, abs(cell.devices - center.devices)))
            outcome = outcomes[nearest]
            found[name] = outcome.reason if outcome.fits else f"does not fit: {outcome.reason}"
    return found


def _csv(chart: Chart) -> str:
    columns = list(dict.fromkeys(name for row in chart.rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(chart.rows)
    return text.getvalue()
