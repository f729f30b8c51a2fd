"""`cleave view`: look at a run in a browser."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from cleave.cli.arguments import AddVerb
from cleave.errors import InputError

_LAST_PORT = 65535


def add_to(add: AddVerb) -> None:
    verb = add(
        "view",
        help="look at a run in a browser",
        description="Serve the dashboard of a run from its event log, to this machine only and until Ctrl-C: loss, "
        "times, devices, events. A run that is training has the same dashboard at its server's address.",
        examples=("cleave view", "cleave view 20260131-142500", "cleave view my-run/events.jsonl --port 8000"),
    )
    verb.add_argument(
        "name", nargs="?", metavar="RUN", help="name or directory of a run, or an event log (default: the newest run)"
    )
    verb.add_argument("--port", type=int, default=0, metavar="N", help="port to listen on (default: any free port)")
    verb.add_argument(
        "--dir", metavar="DIR", help="directory of the runs (default: ~/.cleave/runs, or runs/ of CLEAVE_HOME)"
    )
    verb.set_defaults(run=_run_view)


def _run_view(options: argparse.Namespace) -> None:
    from cleave.report.viewing import viewer
    from cleave.run_files import EVENTS
    from cleave.runs.reading import find_run

    if not 0 <= options.port <= _LAST_PORT:
        raise InputError(f"expected a --port of at most {_LAST_PORT}, or 0 for any free one, got {options.port}")
    given = Path(options.name) if options.name else None
    if given is not None and given.is_file():
        events = given
    else:
        events = find_run(options.name, Path(options.dir) if options.dir else None) / EVENTS
    if not events.is_file():
        raise InputError(f"expected an event log at {events}, but there is none; see cleave runs list")
    try:
        server = viewer(events, options.port)
    except OSError as fault:
        raise InputError(f"cannot answer on port {options.port}: {fault.strerror}; choose another --port") from None
    with server:
        sys.stdout.write(f"{events.parent.name}: open http://127.0.0.1:{server.server_port}/ ; press Ctrl-C to stop\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
