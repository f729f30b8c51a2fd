"""`cleave bench`: measure the cells of a scenario."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cleave.cli.arguments import AddVerb
from cleave.errors import CleaveError, InputError

if TYPE_CHECKING:
    from cleave.bench.records import Results
    from cleave.bench.scenario import Cell


def add_to(add: AddVerb) -> None:
    verb = add(
        "bench",
        help="train over emulated devices and measure every step",
        description="Run the cells of a scenario (fleet x model x mode x wire x grain): each is a real server and its "
        "devices on this machine, over real sockets. Writes a table (Markdown), a plot (PNG) and raw numbers (JSON) "
        "after every cell. Finished cells are not run again unless settings or code have changed.",
        usage="cleave bench SCENARIO.toml [OPTION ...]",
        examples=(
            "cleave bench benchmarks/scenarios/quick.toml",
            "cleave bench benchmarks/scenarios/wire.toml --only home4/demo --out build/wire",
            "cleave bench benchmarks/scenarios/wire.toml --redraw",
        ),
    )
    verb.add_argument("scenario", metavar="SCENARIO.toml", help="file with fleets, models and settings")
    verb.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="CELL",
        help="run only this cell, or those whose name starts so, such as home4/demo; may be repeated (default: all)",
    )
    verb.add_argument("--out", metavar="DIR", help="directory for table, plot and raw numbers (default: bench-NAME)")
    verb.add_argument("--again", action="store_true", help="run finished cells again, too")
    verb.add_argument(
        "--redraw", action="store_true", help="run nothing; write table and plot again from the raw numbers"
    )
    verb.add_argument("--list", action="store_true", help="run nothing; list the cells")
    verb.add_argument("--json", action="store_true", help="print the raw numbers as JSON")
    verb.set_defaults(run=_run_bench)


def _run_bench(options: argparse.Namespace) -> None:
    run_bench(
        scenario_file=Path(options.scenario),
        only=tuple(options.only),
        out=None if options.out is None else Path(options.out),
        again=options.again,
        redraw=options.redraw,
        list_only=options.list,
        as_json=options.json,
    )


def run_bench(
    *,
    scenario_file: Path,
    only: tuple[str, ...],
    out: Path | None,
    again: bool,
    redraw: bool,
    list_only: bool,
    as_json: bool,
) -> None:
    from cleave.bench.files import Files
    from cleave.bench.scenario import read_scenario, select
    from cleave.bench.session import run_session

    scenario, cells = read_scenario(scenario_file)
    chosen = select(cells, only)
    if list_only:
        sys.stdout.writelines(f"{cell.name}\n" for cell in chosen)
        return
    files = Files(out or Path(f"bench-{scenario_file.stem}"), scenario_file.stem)
    if redraw:
        results = files.read()
        if results is None:
            raise InputError(f"there are no results in {files.raw}; run the scenario first, or give its --out")
        files.write(results)
    else:
        _check_extras()
        results = run_session(
            scenario,
            cells,
            chosen,
            files,
            command=shlex.join(["cleave", "bench", str(scenario_file)]),
            selection=shlex.join(word for cell in only for word in ("--only", cell)),
            again=again,
        )
    if as_json:
        sys.stdout.write(files.raw.read_text(encoding="utf-8"))
    else:
        written = [files.table, files.raw, *([files.plot] if files.plot.exists() else [])]
        sys.stdout.write(f"wrote {', '.join(map(str, written))}\n")
    _check_failures(results, chosen)


def _check_extras() -> None:
    """Fail before a scenario is started, not in each of its cells."""
    try:
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import transformers  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import uvicorn  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as fault:
        from cleave.extras import install_command

        raise InputError(
            f"cleave bench needs {fault.name}, which is not installed; run {install_command('train')}"
        ) from None


def _check_failures(results: Results, chosen: tuple[Cell, ...]) -> None:
    """Raise CleaveError if a cell failed, so that a script notices."""
    names = {cell.name for cell in chosen}
    failed = [(each.cell.name, each.failed) for each in results.cells if each.cell.name in names and each.failed]
    if failed:
        name, reason = failed[0]
        raise CleaveError(f"{len(failed)} of {len(names)} cells failed, such as {name}: {reason}")
