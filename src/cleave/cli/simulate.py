"""`cleave simulate`: how long batches would take on a fleet that need not exist."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from cleave.cli.arguments import AddVerb, count, positive
from cleave.core.cost.wire import PLAN_WIRE, WIRE_NAMES
from cleave.errors import InputError
from cleave.sim.names import ALL, CLEAVE, SYSTEMS
from cleave.sim.study.names import FIGURES

if TYPE_CHECKING:
    from cleave.api.simulating import Simulated
    from cleave.report.simulation import Sheet
    from cleave.sim.course import Course

_GBIT_BYTES = 1e9 / 8
_OF_ONE_SETTING = (
    "batches", "server_down", "server_up", "churn", "away", "noise", "drift", "stalls", "method", "events",
)  # fmt: skip


def add_to(add_verb: AddVerb) -> None:
    verb = add_verb(
        "simulate",
        help="predict batches on a fleet under noise and churn, beside other systems",
        description="Simulate training batches of a named model on a fleet: the real engine in virtual time where it "
        "is small enough, otherwise the planner's law on true rates, under noise and churn.",
        examples=(
            "cleave simulate --model llama-2-13b --tokens 131072 --fleet fleet.csv",
            "cleave simulate --model opt-1.3b --tokens 65536 --fleet fleet.csv --batches 100 --churn 0.1 --noise 0.2",
            "cleave simulate --model llama-2-7b --tokens 131072 --fleet fleet.csv --churn fta:microsoft99 --json",
            "cleave simulate --model llama-2-7b --tokens 131072 --fleet fleet.csv --systems cleave,dtfm,swarm,a100",
            "cleave simulate --report study/",
        ),
    )
    work = verb.add_argument_group("work")
    work.add_argument(
        "--model",
        metavar="NAME|PATH",
        help="model by name (opt-125m ... opt-175b, llama-2-7b, -13b, -70b), or a Hugging Face config.json or its "
        "directory (default: llama-2-13b with --report; otherwise required)",
    )
    work.add_argument(
        "--tokens", type=count, metavar="N", help="tokens per batch (default: 131072 with --report; otherwise required)"
    )
    work.add_argument(
        "--sequence",
        type=count,
        metavar="N",
        help="tokens per sequence (default: the largest divisor of --tokens up to 1024)",
    )
    work.add_argument("--batches", type=count, metavar="N", help="batches to simulate (default: 1)")
    work.add_argument("--wire", choices=WIRE_NAMES, help=f"number format on the wire (default: {PLAN_WIRE})")
    work.add_argument(
        "--systems",
        metavar="NAMES",
        help=f"systems to compare, separated by commas: {', '.join(SYSTEMS)}, or {ALL} (default: {CLEAVE}; with "
        f"--report: {ALL})",
    )
    place = verb.add_argument_group("fleet and server")
    place.add_argument(
        "--fleet",
        metavar="FLEET.csv",
        help="device profiles, one per line (default: drawn from the fact tables with --report; otherwise required)",
    )
    place.add_argument(
        "--server-down", type=positive, metavar="GBIT", help="server to devices, in Gbit/s (default: unlimited)"
    )
    place.add_argument(
        "--server-up", type=positive, metavar="GBIT", help="devices to server, in Gbit/s (default: unlimited)"
    )
    world = verb.add_argument_group("the world")
    world.add_argument(
        "--churn",
        metavar="RATE|daily|fta:TRACE|FILE",
        help="departures per device and hour; daily: idle and charging, mostly at night; fta: a trace of the Failure "
        "Trace Archive, such as fta:microsoft99; or a CSV with the columns device, leave_s, join_s (default: none)",
    )
    world.add_argument(
        "--away", type=positive, metavar="S", help="mean seconds of an absence, with a churn rate (default: 600)"
    )
    world.add_argument(
        "--noise",
        type=_share,
        metavar="X",
        help="how far true rates are from those in the fleet file, as the standard deviation of their logarithm: 0.2 "
        "is about 20%% (default: 0)",
    )
    world.add_argument("--drift", type=_share, metavar="X", help="the same for changes from hour to hour (default: 0)")
    world.add_argument("--stalls", type=_share, metavar="N", help="stalls per device and hour, of 10 s (default: 0)")
    world.add_argument("--seed", type=int, metavar="N", help="seed of all draws (default: 0; with --report: 1)")
    output = verb.add_argument_group("output")
    output.add_argument(
        "--method",
        choices=["auto", "engine", "law"],
        help="how to simulate Cleave: every event of the real engine, the planner's law on true rates, or whichever "
        "suits the size (default: auto)",
    )
    output.add_argument(
        "--report",
        metavar="DIR",
        help="compare systems in many settings around this one; write a page (index.html), pictures, tables, and "
        "published claims beside what was found to this directory; takes minutes the first time, then seconds "
        "(default: no report)",
    )
    output.add_argument(
        "--devices",
        metavar="N,...",
        help="with --report: fleet sizes, separated by commas; devices are drawn from the fleet and may repeat "
        "(default: from a quarter of the fleet to 16 times its size; without --fleet, 16 to 8192)",
    )
    output.add_argument(
        "--figures",
        metavar="NAMES",
        help=f"with --report: figures to make, separated by commas, of {', '.join(FIGURES)} (default: all)",
    )
    output.add_argument(
        "--events",
        metavar="FILE",
        help="write what happened in Cleave's batches to a new event log, which cleave view shows (default: none)",
    )
    output.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    verb.set_defaults(run=_run_simulate)


def _share(text: str) -> float:
    """Parse a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def _run_simulate(options: argparse.Namespace) -> None:
    if options.report is not None:
        _run_report(options)
        return
    for name in ("figures", "devices"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name} only applies to a report; add --report DIR, or drop it")
    for name in ("model", "tokens", "fleet"):
        if getattr(options, name) is None:
            raise InputError(f"a simulation needs --{name} unless --report is given; add it")
    from cleave.api.churning import AWAY_S
    from cleave.api.simulated_run import write_log
    from cleave.api.simulating import simulate
    from cleave.core.cost.rates import Server
    from cleave.report import simulation
    from cleave.sim.world import Noise

    systems = [CLEAVE] if options.systems is None else _names(options.systems)
    if options.events is not None and not {CLEAVE, ALL} & set(systems):
        raise InputError(f"--events records {CLEAVE}'s batches, but --systems names only others; add {CLEAVE}")
    log, courses = None if options.events is None else _new_log(Path(options.events)), list["Course"]()
    simulated = simulate(
        options.fleet,
        model=options.model,
        tokens=options.tokens,
        sequence=options.sequence,
        wire=options.wire or PLAN_WIRE,
        server=Server(
            down_bytes_per_s=math.inf if options.server_down is None else options.server_down * _GBIT_BYTES,
            up_bytes_per_s=math.inf if options.server_up is None else options.server_up * _GBIT_BYTES,
        ),
        systems=systems,
        batches=options.batches or 1,
        churn=options.churn,
        away_s=options.away or AWAY_S,
        noise=Noise(spread=options.noise or 0.0, drift=options.drift or 0.0, stalls_per_hour=options.stalls or 0.0),
        seed=options.seed or 0,
        method=options.method or "auto",
        watch=courses.append,
    )
    if log is not None:
        if courses:
            write_log(log, simulated, courses[0])
        else:  # it cannot run on this fleet, as the outcome says
            log.unlink()
    sheet = _sheet(simulated)
    if options.json:
        sys.stdout.write(json.dumps(simulation.as_json(sheet)) + "\n")
    else:
        simulation.show(sheet)


def _new_log(path: Path) -> Path:
    """Make the file before anything is simulated; InputError if that cannot be done, or if it exists."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        raise InputError(f"--events {path} exists already; choose another file") from None
    except OSError as fault:
        raise InputError(f"cannot write to --events {path}: {fault.strerror}; choose another file") from None
    return path


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _counts(text: str) -> list[int]:
    try:
        return [int(one) for one in _names(text)]
    except ValueError:
        raise InputError(
            f"expected numbers of devices such as 16,64,256, got {text[:60]!r}; change --devices"
        ) from None


def _run_report(options: argparse.Namespace) -> None:
    for name in _OF_ONE_SETTING:
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} has no effect on a report, which varies such things by itself; drop {option}")
    from cleave.api.study import TOKENS, make_study, plan_study, write_study
    from cleave.report import study_text

    plan = plan_study(
        fleet=options.fleet,
        devices=None if options.devices is None else _counts(options.devices),
        model=options.model,
        tokens=options.tokens or TOKENS,
        sequence=options.sequence,
        wire=options.wire or PLAN_WIRE,
        systems=None if options.systems is None else _names(options.systems),
        only=FIGURES if options.figures is None else _names(options.figures),
        seed=1 if options.seed is None else options.seed,
    )
    _check_report(Path(options.report))
    with study_text.watched() as progress:
        study = make_study(plan, progress)
    written = write_study(
        study, Path(options.report), date=datetime.now(UTC).date().isoformat(), command=_report_command(options)
    )
    done = study_text.Done(cells=study.cells, computed=study.computed, written=tuple(written))
    if options.json:
        found = study_text.as_json(study.claims, study.charts, study.setting, done)
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        study_text.show(study.claims, done)


def _report_command(options: argparse.Namespace) -> str:
    words = ["cleave", "simulate", "--report", options.report]
    for name in ("figures", "systems", "fleet", "devices", "model", "tokens", "sequence", "wire", "seed"):
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def _check_report(out: Path) -> None:
    """Fail before minutes of computing, not after."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--report {out} is a file, but a report is a directory; choose another one")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as fault:
        raise InputError(f"cannot write to --report {out}: {fault.strerror}; choose another one") from None
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        from cleave.extras import install_command

        raise InputError(f"--report needs matplotlib, which is not installed; run {install_command('plot')}") from None


def _sheet(simulated: Simulated) -> Sheet:
    from cleave.report.simulation import Row, Sheet

    setting = simulated.setting
    return Sheet(
        model=setting.model.name,
        params=setting.model.params,
        tokens=setting.tokens,
        sequence=setting.sequence,
        devices=len(setting.profiles),
        wire=setting.wire,
        server=setting.server,
        batches=simulated.batches,
        churn=simulated.churn,
        noise=simulated.noise.spread,
        drift=simulated.noise.drift,
        stalls_per_hour=simulated.noise.stalls_per_hour,
        seed=setting.seed,
        rows=tuple(
            Row(**{name: getattr(outcome, name) for name in Row.__slots__}) for outcome in simulated.systems.values()
        ),
    )
