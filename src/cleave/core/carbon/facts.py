"""Numbers of the fact tables that footprints need, looked up by name, each with its source.

The core opens no files: whoever calls passes the rows of `cleave.facts.table`. Cells that are ranges or text give the
middle of their first range, or their first number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from cleave.core.carbon.footprint import JOULES_PER_KWH, Assumption
from cleave.errors import FleetError

Row = Mapping[str, str]
Quantity = Literal[
    "grid", "idle_share", "charger_efficiency", "lifetime_h", "embodied", "load", "power_share"
]  # as in carbon_defaults.csv
Segment = Literal["fixed", "mobile"]

WORLD: Final = "world"
CLOUD_OPERATOR: Final = "AWS"
"""In the middle of the three largest clouds."""
_SEGMENTS: Final[Mapping[Segment, str]] = {"fixed": "Fixed (EU ICT study)", "mobile": "Mobile (EU ICT study)"}
_EVIDENCE: Final = "Patterson et al."
_GRAMS_PER_KG: Final = 1e3
_BYTES_PER_GB: Final = 1e9
_FACTOR: Final = re.compile(r"\dx|orders of magnitude")
_FIRST_RANGE: Final = re.compile(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?")


class Figure(NamedTuple):
    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CarbonFacts:
    """Rows of the fact tables."""

    devices: Sequence[Row]
    intensity: Sequence[Row]
    codes: Sequence[Row]
    network: Sequence[Row]
    pue: Sequence[Row]
    cloud: Sequence[Row]
    defaults: Sequence[Row]
    evidence: Sequence[Row]

    def default(self, quantity: Quantity, scope: str) -> Figure:
        row = _only(row for row in self.defaults if (row["quantity"], row["scope"]) == (quantity, scope))
        return Figure(float(row["value"]), row["source"])

    def kgco2e_per_kwh(self, country: str) -> Figure:
        """Emissions of a country's grid: by ISO 3166 code of two or three letters, or of the world if it is empty."""
        code = country.strip().lower() or WORLD
        if code == WORLD:
            grams, source = self.default("grid", WORLD)
            return Figure(grams / _GRAMS_PER_KG, source)
        iso3 = {row["iso2"]: row["iso3"] for row in self.codes}.get(code, code.upper())
        for row in self.intensity:
            if row["iso3"] == iso3:
                return Figure(float(row["gco2e_per_kwh"]) / _GRAMS_PER_KG, f"{row['source']}, {row['year']}")
        raise FleetError(
            f"expected a country as an ISO 3166 code such as us, gb or deu, or {WORLD}, got {country[:40]!r}, for "
            "which there is no grid intensity; correct the column country, or leave it empty for the world"
        )

    def network_j_per_byte(self, segment: Segment) -> Figure:
        row = _only(row for row in self.network if row["segment"] == _SEGMENTS[segment])
        return Figure(float(row["kwh_per_gb"]) * JOULES_PER_KWH / _BYTES_PER_GB, row["source"])

    def cloud_pue(self) -> Figure:
        row = _only(row for row in self.pue if row["operator"] == CLOUD_OPERATOR)
        return Figure(float(row["pue"]), f"{row['operator']} {row['year']}, {row['source']}")

    def counter_evidence(self) -> tuple[Assumption, ...]:
        """What is published against training on phones."""
        return tuple(
            Assumption(row["fact"], row["value"], row["source"])
            for row in self.evidence
            if row["source"].startswith(_EVIDENCE) and _FACTOR.search(row["value"])
        )


def first_number(cell: str) -> float:
    """The first number of a cell, or the middle of its first range: `0.38-0.43 (Llama-3)` is 0.405."""
    found = _FIRST_RANGE.search(cell)
    assert found is not None, cell
    low, high = float(found[1]), float(found[2] or found[1])
    return (low + high) / 2


def _only(rows: Iterable[Row]) -> Row:
    (row,) = rows
    return row
