"""Profiles of a fleet's devices, as columns of numbers.

A profile is what a device can do: FLOP/s, bytes/s down and up, latency, usable memory, and what a task costs besides.
Everything downstream (cost, bounds, planners, simulator) works on whole columns, so a fleet is a struct of arrays, not
a list of objects. This module validates profiles and converts them to and from the text of a fleet CSV. It opens no
files; `sampling` draws fleets.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any, Final, NewType

import numpy as np
from numpy.typing import NDArray

from cleave.errors import FleetError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
DeviceId = NewType("DeviceId", str)
"""The name of a device, unique in its fleet."""

_REQUIRED: Final = ("flops_per_s", "down_bytes_per_s", "up_bytes_per_s", "latency_s", "memory_bytes")
_OPTIONAL: Final = ("task_s", "byte_s", "medium_bytes_per_s", "watts", "idle_watts", "embodied_kgco2e")
_NOT_ADDED: Final = ("latency_s", "task_s", "byte_s", "medium_bytes_per_s")
_ABSENT: Final = {"task_s": 0.0, "byte_s": 0.0}
"""What an optional column holds where nothing is given; others hold NaN, for unknown."""
_TEXTS: Final = {"device_class": "class", "country": "country", "medium": "medium"}
"""Optional columns of text, and their names in a CSV."""
MEASURED: Final = (*_REQUIRED, "task_s", "byte_s")
"""What a server measures of its devices."""
_HEADER: Final = ("device", *_REQUIRED)
_MAX_TEXT_LENGTH: Final = 200


def _unknown() -> Floats:
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profiles:
    """One entry per device in every column; rates are sustained, memory is the usable part.

    Validated on construction, so an instance is always usable; takes a few milliseconds for 8,192 devices.
    """

    names: tuple[str, ...]
    """Unique; `server` is reserved for the server's own part of a plan."""
    flops_per_s: Floats
    down_bytes_per_s: Floats
    up_bytes_per_s: Floats
    latency_s: Floats
    """Round trip between server and device on an idle link."""
    memory_bytes: Floats
    task_s: Floats = field(default_factory=_unknown)
    """Seconds that a task takes a device whatever its size; 0 if omitted."""
    byte_s: Floats = field(default_factory=_unknown)
    """Seconds of a device's processor per byte it receives or sends; 0 if omitted."""
    medium_bytes_per_s: Floats = field(default_factory=_unknown)
    """Capacity of the medium a device shares, both ways together; NaN without one."""
    watts: Floats = field(default_factory=_unknown)
    """Power of the whole device under load; NaN where unknown, all NaN if omitted."""
    idle_watts: Floats = field(default_factory=_unknown)
    """Power of the whole device when it has nothing to do; NaN where unknown, all NaN if omitted."""
    embodied_kgco2e: Floats = field(default_factory=_unknown)
    """Emissions of manufacturing; NaN where unknown, all NaN if omitted."""
    device_class: tuple[str, ...] = ()
    """phone, laptop, ...; empty where unknown."""
    country: tuple[str, ...] = ()
    """ISO 3166 code of two or three letters, or world; empty where unknown."""
    medium: tuple[str, ...] = ()
    """Name of a medium that devices share, such as a Wi-Fi network; empty for a link of their own."""

    def __post_init__(self) -> None:
        count = len(self.names)
        if count == 0:
            raise FleetError("a fleet needs at least one device, but none was given; add one")
        for column, given in _numeric(self).items():
            values = np.asarray(given, dtype=np.float64).view()
            if column in _OPTIONAL and values.size == 0:
                values = np.full(count, _ABSENT.get(column, np.nan))
            elif column in _ABSENT and np.isnan(values).any():
                values = np.nan_to_num(values, nan=_ABSENT[column])
            values.flags.writeable = False
            object.__setattr__(self, column, values)
        for column in _TEXTS:
            object.__setattr__(self, column, getattr(self, column) or ("",) * count)
        _check_lengths(self)
        _check_texts(self)
        _check_numbers(self)
        _check_media(self)

    @classmethod
    def prechecked(cls, names: tuple[str, ...], numbers: Floats) -> Profiles:
        """Profiles of devices that were checked one by one: no check, no copy.

        `numbers` has a row for each of the `MEASURED` columns. Cost: some 30 microseconds for 8,192 devices.
        """
        count = len(names)
        numbers.flags.writeable = False
        unknown = np.full(count, np.nan)
        unknown.flags.writeable = False
        profiles = object.__new__(cls)
        columns = {**dict.fromkeys(_OPTIONAL, unknown), **dict(zip(MEASURED, numbers, strict=True))}
        texts = {"names": names, **dict.fromkeys(_TEXTS, ("",) * count)}
        for column, values in {**columns, **texts}.items():
            object.__setattr__(profiles, column, values)
        return profiles

    def __len__(self) -> int:
        return len(self.names)

    @property
    def common_medium_bytes_per_s(self) -> float:
        """Capacity of the medium that all devices share; infinite if they do not."""
        is_common = self.medium[0] and len(set(self.medium)) == 1
        return float(self.medium_bytes_per_s[0]) if is_common else inf

    def take(self, indices: Ints, names: tuple[str, ...] | None = None) -> Profiles:
        """Select devices by index, in the order given; with new names, one may be taken several times."""
        chosen: list[int] = indices.tolist()
        texts = {column: tuple(getattr(self, column)[i] for i in chosen) for column in ("names", *_TEXTS)}
        if names is not None:
            texts["names"] = names
        return _from_columns({**texts, **{column: values[indices] for column, values in _numeric(self).items()}})


class _DeviceFault(FleetError):
    """A fault in one device's profile; the index lets `read_csv` name the line."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def _from_columns(columns: dict[str, Any]) -> Profiles:
    return Profiles(**columns)


def _numeric(profiles: Profiles) -> dict[str, Floats]:
    return {column: getattr(profiles, column) for column in (*_REQUIRED, *_OPTIONAL)}


def _check_lengths(profiles: Profiles) -> None:
    shapes = {column: values.shape for column, values in _numeric(profiles).items()}
    shapes.update((column, (len(getattr(profiles, column)),)) for column in _TEXTS)
    for column, shape in shapes.items():
        if shape != (len(profiles),):
            raise FleetError(
                f"{column} needs one entry for each of the {len(profiles)} devices, but has shape {shape}; "
                "give every column the same length"
            )


def _check_texts(profiles: Profiles) -> None:
    names = profiles.names
    distinct = set(names)
    if "" in distinct:
        i = names.index("")
        raise _DeviceFault(i, f"every device needs a name, but number {i + 1} has none; name it")
    if "server" in distinct:
        i = names.index("server")
        raise _DeviceFault(i, "the name 'server' is reserved for the server itself; rename that device")
    if len(distinct) < len(names):
        i = _first_duplicate(names)
        raise _DeviceFault(i, f"device names must be unique, but {_quote(names[i])} comes twice; rename one of them")
    texts = {"device": names, **{name: getattr(profiles, column) for column, name in _TEXTS.items()}}
    for column, entries in texts.items():
        for text in dict.fromkeys(entries):
            # A CSV line, a log line or a table must be able to carry it unchanged.
            if not text.isprintable() or text != text.strip() or len(text) > _MAX_TEXT_LENGTH:
                raise _DeviceFault(
                    entries.index(text),
                    f"{column} must be printable text of at most {_MAX_TEXT_LENGTH} characters without spaces "
                    f"at its ends, but is {_quote(text)}; change it",
                )


def _first_duplicate(names: Sequence[str]) -> int:
    first = {name: i for i, name in reversed(list(enumerate(names)))}
    return next(i for i, name in enumerate(names) if first[name] != i)


def _check_numbers(profiles: Profiles) -> None:
    for column, values in _numeric(profiles).items():
        if column == "latency_s":
            good, expected = values >= 0, "a finite number of at least 0"
        elif column in _OPTIONAL:
            good, expected = (values >= 0) | np.isnan(values), "a finite number of at least 0, or unknown"
        else:
            good, expected = values > 0, "a finite number above 0"
        good &= values != np.inf
        if not good.all():
            i = int(np.argmin(good))
            raise _DeviceFault(
                i,
                f"{column} of device {_quote(profiles.names[i])} must be {expected}, but is "
                f"{float(values[i])}; correct it or leave the device out",
            )


def _check_media(profiles: Profiles) -> None:
    """Check that every medium has one capacity."""
    capacities: dict[str, float] = {}
    for i, (medium, capacity) in enumerate(zip(profiles.medium, _as_list(profiles.medium_bytes_per_s), strict=True)):
        if not medium:
            continue
        if not capacity > 0 or capacities.setdefault(medium, capacity) != capacity:
            raise _DeviceFault(
                i,
                f"medium_bytes_per_s of device {_quote(profiles.names[i])} must be the capacity of its medium "
                f"{_quote(medium)}, above 0 and the same for all devices that share it, but is {capacity}; correct it",
            )


def read_csv(text: str, source: str) -> Profiles:
    """Parse the text of a fleet CSV; `source` names it in errors.

    Columns may be in any order, and unknown ones are ignored, so that a fleet can carry notes. An empty cell in an
    optional column means unknown.
    """
    lines, rows = _split(text, source)
    if not rows:
        raise FleetError(
            f"{source} is empty; a fleet file needs the header {','.join(_HEADER)} and one device per line"
        )
    header = _parse_header(rows.pop(0), source)
    if not rows:
        raise FleetError(f"{source} has a header but no device; add one device per line")
    del lines[0]
    _trim_rows(rows, len(header), lines, source)
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    names = _strip_all(columns["device"])
    numbers = {
        column: _numbers(columns[column], column, names, lines, source)
        for column in (*_REQUIRED, *_OPTIONAL)
        if column in columns
    }
    try:
        texts = {column: _strip_all(columns.get(name, ())) for column, name in _TEXTS.items()}
        return _from_columns({"names": names, **numbers, **texts})
    except _DeviceFault as fault:
        raise FleetError(f"{source}, line {lines[fault.index]}: {fault}") from None


def write_csv(profiles: Profiles) -> str:
    """Format profiles as a fleet CSV, from which `read_csv` restores them bit for bit.

    Optional columns are omitted if nothing in them is known.
    """
    columns: dict[str, Iterable[str]] = {"device": map(_csv_cell, profiles.names)}
    numeric = _numeric(profiles)
    for column in _REQUIRED:
        columns[column] = map(repr, _as_list(numeric[column]))
    for column, name in _TEXTS.items():
        if any(getattr(profiles, column)):
            columns[name] = map(_csv_cell, getattr(profiles, column))
    for column in _OPTIONAL:
        if (numeric[column] > 0).any() or (column not in _ABSENT and not np.isnan(numeric[column]).all()):
            columns[column] = ("" if isnan(value) else repr(value) for value in _as_list(numeric[column]))
    rows = [",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]
    return "\n".join(rows) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSummary:
    """Statistics of one column over the devices for which it is known."""

    column: str
    known: int
    p10: float
    p50: float
    p90: float
    total: float | None
    """None where a sum is meaningless, as for latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSummary:
    """A fleet in numbers, as `cleave fleet show` presents it."""

    devices: int
    classes: tuple[tuple[str, int], ...]
    """Most frequent first; devices without a class count as `unknown`. Same for countries."""
    countries: tuple[tuple[str, int], ...]
    columns: tuple[ColumnSummary, ...]
    """Omits columns in which nothing is known."""


def describe(profiles: Profiles) -> FleetSummary:
    """Summarize a fleet: counts, quantiles, totals."""
    summaries: list[ColumnSummary] = []
    for column, values in _numeric(profiles).items():
        known = values[~np.isnan(values)]
        if known.size == 0 or (column in _ABSENT and not known.any()):
            continue
        p10, p50, p90 = _as_list(np.quantile(known, (0.1, 0.5, 0.9)))
        total = None if column in _NOT_ADDED else float(known.sum())
        summaries.append(ColumnSummary(column=column, known=known.size, p10=p10, p50=p50, p90=p90, total=total))
    return FleetSummary(
        devices=len(profiles),
        classes=_count(profiles.device_class),
        countries=_count(profiles.country),
        columns=tuple(summaries),
    )


def _count(texts: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(text or "unknown" for text in texts).most_common())


def _as_list(values: Floats) -> list[float]:
    return values.tolist()


def _quote(text: str) -> str:
    """Quote untrusted text, safe and short enough for an error message."""
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."


def _csv_cell(text: str) -> str:
    if "," in text or '"' in text:
        return '"' + text.replace('"', '""') + '"'
    return text


def _strip_all(cells: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(str.strip, cells))


def _split(text: str, source: str) -> tuple[list[int], list[list[str]]]:
    """Split into rows that are not blank, with their line numbers."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    reader = csv.reader(text.split("\n"), skipinitialspace=True)
    lines: list[int] = []
    rows: list[list[str]] = []
    line = 0
    try:
        for line, row in enumerate(reader, start=1):
            if reader.line_num > line:
                raise FleetError(f"{source}, line {line}: unclosed quote; close it on the same line")
            if any(map(str.strip, row)):
                lines.append(line)
                rows.append(row)
    except csv.Error as error:
        raise FleetError(
            f"{source}, line {line + 1}: expected comma-separated cells, but {error}; correct that line"
        ) from None
    return lines, rows


def _parse_header(cells: list[str], source: str) -> list[str]:
    header = list(_strip_all(cells))
    while not header[-1]:
        header.pop()
    missing = [column for column in _HEADER if column not in header]
    if missing:
        raise FleetError(
            f"{source} lacks {', '.join(missing)}: its first line should be {','.join(_HEADER)}, but is "
            f"{_quote(','.join(header))}; add what is missing"
        )
    duplicates = [column for column in (*_HEADER, *_TEXTS.values(), *_OPTIONAL) if header.count(column) > 1]
    if duplicates:
        raise FleetError(f"{source} needs each column once, but has {duplicates[0]} twice; keep one of them")
    return header


def _trim_rows(rows: list[list[str]], width: int, lines: Sequence[int], source: str) -> None:
    """Trim every row to the width of the header.

    Spreadsheets pad short tables with empty cells at the end of a line; those are cut off.
    """
    for line, row in zip(lines, rows, strict=True):
        if len(row) == width:
            continue
        if len(row) < width or any(map(str.strip, row[width:])):
            raise FleetError(
                f"{source}, line {line}: expected {width} cells as in the header, but found {len(row)}; "
                "give every device all columns, with a decimal point and no thousands separator"
            )
        del row[width:]


def _numbers(cells: Sequence[str], column: str, names: Sequence[str], lines: Sequence[int], source: str) -> Floats:
    if column in _OPTIONAL:
        cells = [cell.strip() or "nan" for cell in cells]
    try:
        return np.array(list(map(float, cells)))
    except ValueError:
        i = next(i for i, cell in enumerate(cells) if not _is_number(cell))
    problem = f"is {_quote(cells[i])}" if cells[i].strip() else "the cell is empty"
    raise FleetError(
        f"{source}, line {lines[i]}: {column} of device {_quote(names[i])} must be a number, but {problem}; "
        "correct it or leave the device out"
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
