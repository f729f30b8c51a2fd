"""`cleave runs`: list, describe and remove the runs on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cleave.cli.arguments import AddVerb, Parser
from cleave.errors import InputError

if TYPE_CHECKING:
    from cleave.runs.removal import Removal


def add_to(add: AddVerb) -> None:
    verb = add(
        "runs",
        help="list, describe or remove training runs",
        description="List, describe or remove training runs. They are in $CLEAVE_HOME/runs (default: ~/.cleave/runs), "
        "unless cleave train was given --out.",
        examples=["cleave runs list", "cleave runs show", "cleave runs remove --checkpoints 20260131-142500"],
    )
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)

    listing = actions.add_parser("list", help="list runs, newest first", description="List runs, newest first.")
    listing.set_defaults(run=_run_list)

    show = actions.add_parser(
        "show",
        help="describe a run",
        description="Describe a run: settings, loss, devices, checkpoints, and how to continue.",
    )
    show.add_argument("name", nargs="?", metavar="RUN", help="name or directory of the run (default: the newest)")
    show.set_defaults(run=_run_show)

    remove = actions.add_parser(
        "remove",
        help="remove runs from disk",
        description="Remove runs from disk. Says how much space that frees, and asks first. Files that Cleave did not "
        "write stay, and so does a run that is training.",
        examples=["cleave runs remove 20260131-142500", "cleave runs remove --checkpoints 20260131-142500"],
    )
    remove.add_argument("names", nargs="+", metavar="RUN", help="names or directories of runs")
    remove.add_argument(
        "--checkpoints", action="store_true", help="remove only the checkpoints; keep the exported model and the log"
    )
    remove.add_argument("--yes", action="store_true", help="do not ask; required if nobody is there to answer")
    remove.set_defaults(run=_run_remove)

    for action in (listing, show, remove):
        action.add_argument(
            "--dir", metavar="DIR", help="directory of the runs (default: ~/.cleave/runs, or runs/ of CLEAVE_HOME)"
        )
        action.add_argument("--json", action="store_true", help="print JSON")


def _run_list(options: argparse.Namespace) -> None:
    run_runs_list(directory=_directory(options), as_json=options.json)


def _run_show(options: argparse.Namespace) -> None:
    run_runs_show(name=options.name, directory=_directory(options), as_json=options.json)


def _run_remove(options: argparse.Namespace) -> None:
    run_runs_remove(
        names=options.names,
        directory=_directory(options),
        checkpoints_only=options.checkpoints,
        yes=options.yes,
        as_json=options.json,
    )


def _directory(options: argparse.Namespace) -> Path | None:
    return None if options.dir is None else Path(options.dir)


def run_runs_list(*, directory: Path | None, as_json: bool) -> None:
    from cleave.report import runs as runs_report
    from cleave.run_files import runs_home
    from cleave.runs.reading import list_runs

    runs_report.show_list(list_runs(directory), directory or runs_home(), as_json=as_json)


def run_runs_show(*, name: str | None, directory: Path | None, as_json: bool) -> None:
    from cleave.report import runs as runs_report
    from cleave.runs.reading import find_run, read_run

    runs_report.show_run(read_run(find_run(name, directory)), as_json=as_json)


def run_runs_remove(
    *, names: Sequence[str], directory: Path | None, checkpoints_only: bool, yes: bool, as_json: bool
) -> None:
    """Remove runs; all names are checked before anything is removed."""
    from cleave.runs.reading import find_run
    from cleave.runs.removal import plan_removal, remove

    paths = list(dict.fromkeys(find_run(name, directory) for name in names))
    removals = [plan_removal(path, checkpoints_only=checkpoints_only) for path in paths]
    if not yes and not _confirmed(removals, checkpoints_only=checkpoints_only):
        sys.stderr.write("nothing was removed\n")
        return
    kept = [path for removal in removals for path in remove(removal)]
    freed_bytes = sum(removal.size_bytes for removal in removals)
    if as_json:
        fields = {"runs": [str(path) for path in paths], "freed_bytes": freed_bytes, "kept": [str(p) for p in kept]}
        sys.stdout.write(json.dumps(fields) + "\n")
        return
    from cleave.report.quantities import si

    for path in kept:
        sys.stdout.write(f"kept {path}, which is not a file of a run\n")
    sys.stdout.write(f"freed {si(freed_bytes, 'B')}\n")


def _confirmed(removals: Sequence[Removal], *, checkpoints_only: bool) -> bool:
    """Say what would go and ask. Without a terminal, raise InputError."""
    from cleave.report.quantities import si
    from cleave.runs.reading import read_run

    total = si(sum(removal.size_bytes for removal in removals), "B")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(f"this would free {total}, and there is no terminal to confirm it on; add --yes")
    for removal in removals:
        run = read_run(removal.run)
        loss = "; it cannot be resumed without them" if checkpoints_only and run.state != "done" else ""
        sys.stderr.write(f"{removal.run}: {run.model}, {run.state}, {si(removal.size_bytes, 'B')}{loss}\n")
    sys.stderr.write(f"remove {'the checkpoints' if checkpoints_only else 'all of it'} and free {total}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
