"""`python -m benchmarks.rivals.summary RESULTS`: all saved cells in one table, from their raw numbers.

A row is a fleet, a model, full or LoRA; a column a rival, with its seconds a step and Cleave's over it: above 1, the
rival wins.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.rivals.table import Merged, best_of, merge
from benchmarks.rivals.turns import Result

_PREFIXES: Final = "-rivals-", "-peers-"
"""In names of files; rivals that have a turn of their own are in the same cell."""
_OURS: Final = ("Cleave", "Cleave, q8")
_PIPELINES: Final = ("torch GPipe", "torch 1F1B", "torch GPipe x data parallel (DT-FM)")
_COLUMNS: Final = (
    "one device alone",
    *_PIPELINES,
    "torch DDP",
    "torch FSDP",
    "hivemind",
    "torchft",
)


def load(directory: Path) -> list[tuple[str, list[Merged]]]:
    """Read the raw numbers of all cells; return their names and the best setting of every system."""
    cells: dict[str, list[Result]] = {}
    for prefix in _PREFIXES:
        for path in sorted(directory.glob(f"*{prefix}*.json")):
            raw = json.loads(path.read_text(encoding="utf-8"))
            cells.setdefault(path.stem.partition(prefix)[2], []).extend(Result(**each) for each in raw["results"])
    return [(name, best_of(merge(results))) for name, results in sorted(cells.items())]


def over_predicted(ours: Merged) -> str:
    """Measured over predicted seconds, median from the third step on."""
    last = ours.last
    pairs = list(zip(last.step_s, last.predicted_s, strict=True))[2:]
    ratios = [taken_s / predicted_s for taken_s, predicted_s in pairs if predicted_s]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def summary(cells: Sequence[tuple[str, list[Merged]]]) -> str:
    """Format all cells."""
    heads = [f"{name}, s | measured / predicted | over the best pipeline" for name in _OURS]
    tried = {each.system for _, systems in cells for each in systems}
    columns = [name for name in _COLUMNS if name in tried]
    lines = [
        f"| fleet, model, mode | {' | '.join([*heads, *columns])} |",
        f"|---|{'---|' * (3 * len(_OURS) + len(columns))}",
    ]
    for name, systems in cells:
        found = {each.system: each for each in systems}
        pipelines = [found[each].median_s for each in _PIPELINES if each in found]
        ours = [_own(found.get(each), min(pipelines, default=None)) for each in _OURS]
        lines.append(f"| {name} | {' | '.join([*ours, *(_rival(found, each) for each in columns)])} |")
    return "\n".join(lines) + "\n"


def _own(ours: Merged | None, pipeline_s: float | None) -> str:
    if ours is None or not ours.counted_s:
        return " | | "
    ratio = "" if pipeline_s is None else f"{ours.median_s / pipeline_s:.2f}"
    return f"{ours.median_s:.2f} | {over_predicted(ours)} | {ratio}"


def _rival(found: Mapping[str, Merged], name: str) -> str:
    rival, ours = found.get(name), found.get(_OURS[0])
    if rival is None or not rival.counted_s:
        return "" if rival is None else rival.error
    if ours is None or not ours.counted_s:
        return f"{rival.median_s:.2f}"
    return f"{rival.median_s:.2f} ({ours.median_s / rival.median_s:.2f})"


if __name__ == "__main__":
    print(summary(load(Path(sys.argv[1]))))
