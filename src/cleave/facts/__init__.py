"""The fact tables, as package data: device models, links, carbon, model shapes, each row with its source.

Knows how to read a table and nothing about what its columns mean: `core.sampling`, `core.shapes` and the
carbon sums get rows as parameters, because the core opens no file. README.md beside the tables says where
each came from and what was assumed.
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
    "carbon_intensity",
    "cloud",
    "device_memory_policy",
    "devices",
    "measured_gemm",
    "model_shapes",
    "network_distributions",
    "network_energy",
    "networks",
]


@cache
def table(name: TableName) -> tuple[Mapping[str, str], ...]:
    """The rows of a fact table, every cell as text; read once, and read-only because all callers share it."""
    text = resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    header, *rows = csv.reader(text.splitlines())
    return tuple(MappingProxyType(dict(zip(header, row, strict=True))) for row in rows)
