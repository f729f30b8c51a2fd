"""`cleave emulate`: many emulated devices in this process join a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from cleave.cli.arguments import AddVerb, count, positive, seed
from cleave.cli.join import until_stopped
from cleave.errors import InputError

if TYPE_CHECKING:
    from cleave.emulate.devices import DeviceProfile
    from cleave.emulate.fleet import Activity, Stays, Terms


class Churn(NamedTuple):
    """How devices come and go."""

    kind: str | None
    away_s: float
    day_s: float
    seed: int


_FILES = 256
"""File descriptors needed besides one per device."""


def add_to(add: AddVerb) -> None:
    verb = add(
        "emulate",
        help="join a server with many emulated devices",
        description="Emulate a fleet in this process: its devices join a server over real sockets and run the real "
        "protocol, and downloads, computing and uploads take the time that their profiles say. Ctrl-C leaves cleanly.",
        usage="cleave emulate ADDRESS --fleet FLEET.csv [OPTION ...]",
        examples=(
            "cleave emulate '192.168.1.20:7077#TOKEN.PIN' --fleet fleet.csv",
            "cleave emulate 127.0.0.1:7077 --fleet fleet.csv --count 64 --claim 20",
        ),
    )
    verb.add_argument(
        "url",
        nargs="?",
        metavar="ADDRESS",
        help="address of the server, as it prints it: HOST:PORT#TOKEN.PIN, or a ws:// or wss:// URL (default: "
        "CLEAVE_SERVER)",
    )
    fleet = verb.add_argument_group("fleet")
    fleet.add_argument("--fleet", required=True, metavar="FLEET.csv", help="device profiles, one per line")
    fleet.add_argument(
        "--count",
        type=count,
        metavar="N",
        help="devices to emulate, repeating the fleet as needed (default: one per line)",
    )
    fleet.add_argument(
        "--calibrate",
        metavar="PROFILE.csv",
        help="profile whose costs per task and per byte apply to devices that state none (default: they cost nothing)",
    )
    fleet.add_argument(
        "--claim",
        type=positive,
        default=1.0,
        metavar="FACTOR",
        help="claim this many times the true FLOP/s (default: 1)",
    )
    fleet.add_argument(
        "--compute",
        choices=("real", "none"),
        default="real",
        help="real: true results; none: zeros of the right shape, only for a server started with --scale-test "
        "(default: real)",
    )
    fleet.add_argument(
        "--threads", type=count, metavar="N", help="threads that compute for all devices (default: one per core)"
    )
    coming = verb.add_argument_group("coming and going")
    coming.add_argument(
        "--churn",
        metavar="RATE|daily|fta:TRACE|FILE",
        help="departures per device and hour; daily: idle and charging, mostly at night; fta: a trace of the Failure "
        "Trace Archive, such as fta:microsoft99; or a CSV with the columns device, leave_s, join_s (default: devices "
        "stay)",
    )
    coming.add_argument(
        "--away", type=positive, default=60.0, metavar="S", help="mean seconds until a device returns (default: 60)"
    )
    coming.add_argument(
        "--day", type=positive, default=86_400.0, metavar="S", help="seconds of a day of --churn daily (default: 86400)"
    )
    coming.add_argument(
        "--seed", type=seed, default=1, metavar="N", help="seed; the same one draws the same stays (default: 1)"
    )
    connection = verb.add_argument_group("connection")
    connection.add_argument(
        "--token", metavar="TEXT", help="token of the run, if not in the address (default: CLEAVE_TOKEN)"
    )
    connection.add_argument(
        "--wait",
        type=positive,
        default=30.0,
        metavar="S",
        help="seconds for which the server may be out of reach before giving up (default: 30)",
    )
    connection.add_argument("--quiet", action="store_true", help="print only errors")
    connection.add_argument("--json", action="store_true", help="print a summary as JSON at the end")
    verb.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    # All devices together get one thread per core, so none of their products should start more.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ[variable] = "1"  # BLAS libraries read these when numpy is imported, below
    run_emulate(
        url=options.url or os.environ.get("CLEAVE_SERVER"),
        fleet=options.fleet,
        devices=options.count,
        calibration=options.calibrate,
        claim=options.claim,
        threads=options.threads,
        computes=options.compute == "real",
        churn=Churn(options.churn, options.away, options.day, options.seed),
        token=options.token,
        wait_s=options.wait,
        quiet=options.quiet,
        as_json=options.json,
    )


def run_emulate(
    *,
    url: str | None,
    fleet: str,
    devices: int | None,
    calibration: str | None,
    claim: float,
    threads: int | None,
    computes: bool,
    churn: Churn,
    token: str | None,
    wait_s: float,
    quiet: bool,
    as_json: bool,
) -> None:
    from cleave.api.planning import load_fleet
    from cleave.descriptors import descriptors, raise_descriptors
    from cleave.device.worker import Contribution
    from cleave.emulate.devices import devices_of
    from cleave.emulate.fleet import Activity, Terms
    from cleave.emulate.pacing import KeepingUp
    from cleave.report import emulate as emulate_report
    from cleave.transport.address import parse_address
    from cleave.transport.allocation import keep_freed_memory

    keep_freed_memory()
    if not url:
        raise InputError("expected the address of a server; copy it from the join command that the server prints")
    address = parse_address(url)
    profiles = devices_of(load_fleet(fleet), devices, load_fleet(calibration) if calibration else None)
    stays = _stays(churn, [profile.name for profile in profiles])
    restore = raise_descriptors(len(profiles) + _FILES)
    if descriptors()[0] < len(profiles) + _FILES:
        restore()
        raise InputError(
            f"{len(profiles)} devices need {len(profiles) + _FILES} open files, but this process may have "
            f"{descriptors()[0]:.0f}; raise the limit (ulimit -Hn), or emulate fewer"
        )
    said: list[Callable[[str], None]] = []
    activity = Activity(
        devices=len(profiles),
        keeping_up=KeepingUp(lambda text: said[-1](text)),
        contribution=Contribution(),
    )
    terms = Terms(
        address=address, token=token or address.token or os.environ.get("CLEAVE_TOKEN", ""), claim=claim, wait_s=wait_s
    )
    with (
        emulate_report.shown(activity, quiet=quiet, as_json=as_json) as say,
        contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError),
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        said.append(say)
        gc.freeze()  # exempt everything loaded so far from collection
        gc.set_threshold(50_000)
        most_threads = threads or os.cpu_count() or 1
        runner.run(until_stopped(_emulate(profiles, terms, activity, most_threads if computes else 0, stays, say)))


async def _emulate(
    profiles: list[DeviceProfile],
    terms: Terms,
    activity: Activity,
    threads: int,
    stays: Mapping[str, Stays] | None,
    say: Callable[[str], None],
) -> None:
    """Emulate devices that compute in `threads` threads; with 0, they answer zeros."""
    from cleave.emulate.arithmetic import SharedThreads, Zeros
    from cleave.emulate.fleet import EmulatedFleet

    answers = SharedThreads(threads) if threads else Zeros()
    try:
        await EmulatedFleet(profiles, terms, answers, activity, say).run(stays)
    finally:
        answers.close()


def _stays(churn: Churn, names: list[str]) -> Mapping[str, Stays] | None:
    """Return when each device is connected; None if all of them stay."""
    from cleave.api.churning import churn_of

    if churn.kind is None:
        return None
    return churn_of(churn.kind, names, seed=churn.seed, away_s=churn.away_s, day_s=churn.day_s)()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Prefer uvloop, where it is installed: one loop moves the bytes of all devices."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
