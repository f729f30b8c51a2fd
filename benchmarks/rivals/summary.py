"""`python -m benchmarks.rivals.summary RESULTS`: all saved cells in one table, from their raw numbers.

A row is a fleet, a model, full or LoRA; a column a rival, with its seconds a step and Cleave's over it: above 1, the
rival wins.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.rivals.table import Merged, best_of, merge
from benchmarks.rivals.turns import Result

_PREFIX: Final = "-rivals-"
_COLUMNS: Final = (
    "one device alone",
    "torch GPipe",
    "torch 1F1B",
    "torch GPipe x data parallel (DT-FM)",
    "torch DDP",
    "torch FSDP",
    "hivemind",
    "torchft",
)


def load(path: Path) -> tuple[str, list[Merged]]:
    """Read the raw numbers of a cell; return its name and the best setting of every system."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    return path.stem.partition(_PREFIX)[2], best_of(merge([Result(**each) for each in raw["results"]]))


def over_predicted(ours: Merged) -> str:
    """Measured over predicted seconds, median from the third step on."""
    last = ours.last
    pairs = list(zip(last.step_s, last.predicted_s, strict=True))[2:]
    ratios = [taken_s / predicted_s for taken_s, predicted_s in pairs if predicted_s]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def summary(cells: Sequence[tuple[str, list[Merged]]]) -> str:
    """Format all cells."""
    lines = [
        f"| fleet, model, mode | Cleave, s | measured / predicted | {' | '.join(_COLUMNS)} |",
        f"|---|---|---|{'---|' * len(_COLUMNS)}",
    ]
    for name, systems in cells:
        found = {each.system: each for each in systems}
        ours = found.get("Cleave")
        shown: list[str] = []
        for column in _COLUMNS:
            rival = found.get(column)
            if rival is None or not rival.counted_s:
                shown.append("" if rival is None else rival.error)
            elif ours is None or not ours.counted_s:
                shown.append(f"{rival.median_s:.2f}")
            else:
                shown.append(f"{rival.median_s:.2f} ({ours.median_s / rival.median_s:.2f})")
        own = f"{ours.median_s:.2f} | {over_predicted(ours)}" if ours is not None and ours.counted_s else " | "
        lines.append(f"| {name} | {own} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(summary([load(path) for path in sorted(Path(sys.argv[1]).glob(f"*{_PREFIX}*.json"))]))
