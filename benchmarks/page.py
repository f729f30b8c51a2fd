"""Put the newest results of `cleave bench` on a page: `python benchmarks/page.py build/wire/wire.json`.

The raw numbers are kept in `results/`, and the page has a table made from them between two marks,
`<!-- bench: NAME -->` and `<!-- end of bench: NAME -->`. Without arguments, every table is made again from the numbers
kept; a test compares.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from cleave.bench.records import Results, read_results
from cleave.bench.table import tables
from cleave.errors import CleaveError

_HERE = Path(__file__).parent
PAGE = _HERE.parent / "docs" / "benchmarks.md"
RESULTS = _HERE / "results"
_REGION = re.compile(r"(<!-- bench: (?P<name>[\w-]+) -->\n).*?(<!-- end of bench: (?P=name) -->)", re.DOTALL)


def main(given: list[str]) -> int:
    """Keep the results given, and write the page."""
    try:
        for path in map(Path, given):
            if f"<!-- bench: {path.stem} -->" not in PAGE.read_text(encoding="utf-8"):
                return _fail(f"{PAGE.name} has no place for {path.stem}; add <!-- bench: {path.stem} --> and its end")
            if read_results(path) is None:
                return _fail(f"there are no results in {path}; run cleave bench first")
            shutil.copyfile(path, kept(path.stem))
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    except CleaveError as fault:
        return _fail(str(fault))
    return 0


def kept(name: str) -> Path:
    """Where the newest raw numbers of a scenario are kept."""
    return RESULTS / f"bench-{name}.json"


def written(page: str) -> str:
    """Return the page with each table made from the raw numbers kept; places without numbers stay as they are."""

    def fill(region: re.Match[str]) -> str:
        results = read_results(kept(region["name"]))
        return region[0] if results is None else f"{region[1]}\n{_table(region['name'], results)}\n{region[3]}"

    return _REGION.sub(fill, page)


def names(page: str) -> list[str]:
    """The scenarios that a page has a place for."""
    return [region["name"] for region in _REGION.finditer(page)]


def _table(name: str, results: Results) -> str:
    versions = results.versions
    measured = (
        f"Measured on {results.date} with `{results.command}` (code {versions['code']}, torch {versions['torch']}, "
        f"{versions['cores']} cores); every step is in `benchmarks/results/{kept(name).name}`."
    )
    return "\n".join([measured, "", *tables(results), ""])


def _fail(problem: str) -> int:
    print(problem, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
