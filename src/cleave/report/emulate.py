"""The view of `cleave emulate`: how many devices are connected, what they do, and whether this machine keeps up."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console

from cleave.errors import CleaveError
from cleave.report.plain import plain_console
from cleave.report.quantities import plural, si

_REFRESH_S = 1.0


class Contributed(Protocol):
    tasks: int
    flops: float
    down_bytes: int
    up_bytes: int


class Kept(Protocol):
    chunks: int
    late: int
    late_s: float
    worst_s: float
    paced_s: float

    @property
    def keeps_up(self) -> bool: ...


class Emulated(Protocol):
    """What a fleet of emulated devices has done; `emulate.fleet.Activity` implements it."""

    devices: int
    connected: int
    most_connected: int
    joins: int
    departures: int
    losses: int
    refusals: int
    worst_lag_s: float

    @property
    def contribution(self) -> Contributed: ...

    @property
    def keeping_up(self) -> Kept: ...


@contextmanager
def shown(activity: Emulated, *, quiet: bool, as_json: bool) -> Generator[Callable[[str], None]]:
    """Yield a function that prints a line; on a terminal, keep a live status below it, and end with a summary.

    Devices that worked are summed up even if an error ended it, as when the server died.
    """
    console = plain_console(stderr=True, quiet=quiet)
    try:
        with _status_of(activity, console, quiet=quiet):
            yield lambda text: console.print(text, soft_wrap=True)
    except CleaveError:
        if activity.joins:
            _end(activity, console, as_json=as_json)
        raise
    _end(activity, console, as_json=as_json)


def _end(activity: Emulated, console: Console, *, as_json: bool) -> None:
    console.print(_summary(activity), soft_wrap=True)
    if as_json:
        sys.stdout.write(json.dumps(_figures(activity)) + "\n")


@contextmanager
def _status_of(activity: Emulated, console: Console, *, quiet: bool) -> Generator[None]:
    stop = threading.Event()
    with console.status("joining ...") as status:

        def refresh() -> None:
            while not stop.wait(_REFRESH_S):
                status.update(_status(activity))

        refresher = threading.Thread(target=refresh, daemon=True)
        if console.is_terminal and not quiet:
            refresher.start()
        try:
            yield
        finally:
            stop.set()


def _status(activity: Emulated) -> str:
    pace = "keeping up" if activity.keeping_up.keeps_up else f"NOT keeping up ({activity.keeping_up.late} results late)"
    return f"{activity.connected} of {plural(activity.devices, 'device')} connected, {_work(activity)}, {pace}"


def _summary(activity: Emulated) -> str:
    kept = activity.keeping_up
    pace = "this machine kept up with every profile"
    if kept.late:
        pace = (
            f"{kept.late} of {kept.chunks} results were later than their profiles say, by {kept.late_s:.2g} s in all "
            f"and {kept.worst_s:.2g} s at worst"
        )
    return f"emulated {plural(activity.devices, 'device')}: {_work(activity)}; {pace}"


def _work(activity: Emulated) -> str:
    done = activity.contribution
    return f"{plural(done.tasks, 'task')}, {si(done.down_bytes, 'B')} down, {si(done.up_bytes, 'B')} up"


def _figures(activity: Emulated) -> dict[str, object]:
    done, kept = activity.contribution, activity.keeping_up
    return {
        "devices": activity.devices,
        "most_connected": activity.most_connected,
        "joins": activity.joins,
        "departures": activity.departures,
        "losses": activity.losses,
        "refusals": activity.refusals,
        "tasks": done.tasks,
        "flops": done.flops,
        "down_bytes": done.down_bytes,
        "up_bytes": done.up_bytes,
        "paced_s": kept.paced_s,
        "results": kept.chunks,
        "late_results": kept.late,
        "late_s": kept.late_s,
        "worst_late_s": kept.worst_s,
        "worst_lag_s": activity.worst_lag_s,
        "keeps_up": kept.keeps_up,
    }
