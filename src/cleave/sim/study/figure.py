"""A figure as a declarative record: what is varied, for which lines, and which quantity is shown.

`figures` lists all of a study. A panel is a row of points; a point has a label and the cells of which a line takes its
value, for its own system. Nothing here computes an outcome: `cells` collects what has to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cleave.report.chart import NO_FIT, Kind, Unit
from cleave.sim.cell import Cell
from cleave.sim.cleave import SYSTEM
from cleave.sim.setting import Outcome

CLOUDS = ("a100", "h100")
"""Systems that begin so are cloud GPUs: a fleet changes nothing for them."""


class Found(NamedTuple):
    cell: Cell
    outcome: Outcome


class Value(NamedTuple):
    """What a line shows at a point, or why it shows nothing."""

    y: float | None
    short: str = ""
    """What is in place of the value, in a few words."""
    why: str = ""


def no_fit(outcome: Outcome) -> Value:
    return Value(None, NO_FIT, outcome.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: float
    label: str
    cells: tuple[Cell, ...]
    """Templates: each line puts its own system in."""


Measure = Callable[[Point, Sequence[Found]], Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    system: str
    kind: Kind
    value: Measure
    meets_churn: bool = False
    """Whether the churn of the templates is simulated; otherwise the measure may count with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigurePanel:
    title: str
    x_label: str
    y_label: str
    unit: Unit
    points: tuple[Point, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    title: str
    says: str
    panels: tuple[FigurePanel, ...]


def cells_of(line: Line, point: Point) -> tuple[Cell, ...]:
    plain = {} if line.meets_churn else {"churn_per_hour": 0.0, "batches": 1}
    return tuple(replace(cell, system=line.system, **plain) for cell in point.cells)


def cells(figures: Sequence[Figure]) -> tuple[Cell, ...]:
    """All cells of figures, once each, in their order."""
    return tuple(
        dict.fromkeys(
            cell
            for figure in figures
            for panel in figure.panels
            for point in panel.points
            for line in panel.lines
            for cell in cells_of(line, point)
        )
    )


def kind_of(system: str) -> Kind:
    if system.startswith(SYSTEM):  # plain 2D blocks are the paper's own method
        return "ours"
    return "cloud" if system.startswith(CLOUDS) else "rival"


def field(name: str) -> Measure:
    """A quantity of the outcome, or of its `detail`."""

    def value(_: Point, found: Sequence[Found]) -> Value:
        ((_cell, outcome),) = found
        if not outcome.fits:
            return no_fit(outcome)
        got = getattr(outcome, name) if name in Outcome.__slots__ else outcome.detail.get(name)
        return (
            Value(float(got))
            if isinstance(got, int | float)
            else Value(None, "not modeled", f"{outcome.system} does not report this figure")
        )

    return value


def largest(params: Mapping[str, int]) -> Measure:
    """Billions of parameters of the largest model that fits."""

    def value(_: Point, found: Sequence[Found]) -> Value:
        fitting = [params[cell.model] for cell, outcome in found if outcome.fits]
        smallest = min(found, key=lambda one: params[one.cell.model])
        return Value(max(fitting) / 1e9) if fitting else no_fit(smallest.outcome)

    return value


def expected_under_churn(point: Point, found: Sequence[Found]) -> Value:
    """Seconds per batch if each departure adds the mean recovery, and somebody takes the place at once.

    T' = T + (departures during T') x recovery = T / (1 - devices x rate x recovery).
    """
    ((_cell, outcome),) = found
    rate_per_hour = point.cells[0].churn_per_hour
    if not outcome.fits or outcome.batch_s is None:
        return no_fit(outcome)
    if rate_per_hour == 0:
        return Value(outcome.batch_s)
    if outcome.recovery_s is None:
        return Value(None, "not modeled", "its recovery is not modeled")
    lost = outcome.devices_used * rate_per_hour / 3600 * outcome.recovery_s
    if lost >= 1:
        return Value(None, "never ends", f"departures add {lost:.3g} s of recovery per second")
    return Value(outcome.batch_s / (1 - lost))
