"""The fact tables, as package data: device models, links, carbon, model shapes, each row with its source.

Reads tables without knowing what columns mean: `core.fleet.sampling` and others get rows as parameters, because the
core opens no files. README.md next to the tables lists the origin of each and the assumptions made.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Literal

TableName = Literal[
    "access",
    "availability_distributions",
    "carbon_defaults",
    "carbon_facts",
    "carbon_intensity",
    "cloud",
    "country_codes",
    "device_memory_policy",
    "devices",
    "measured_gemm",
    "model_shapes",
    "network_distributions",
    "network_energy",
    "networks",
    "pue",
    "rivals",
]


@cache
def table(name: TableName) -> tuple[Mapping[str, str], ...]:
    """Return the rows of a fact table, every cell as text; read once, and read-only as all callers share it."""
    text = resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    header, *rows = csv.reader(text.splitlines())
    return tuple(MappingProxyType(dict(zip(header, row, strict=True))) for row in rows)
