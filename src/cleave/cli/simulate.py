"""`cleave simulate`: how long batches would take on a fleet that need not exist."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING

from cleave.cli.arguments import AddVerb, count, positive
from cleave.core.cost.wire import PLAN_WIRE, WIRE_NAMES

if TYPE_CHECKING:
    from cleave.api.simulating import Simulated
    from cleave.report.simulation import Sheet

_GBIT_BYTES = 1e9 / 8


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
        ),
    )
    work = verb.add_argument_group("work")
    work.add_argument(
        "--model",
        required=True,
        metavar="NAME|PATH",
        help="model by name (opt-125m ... opt-175b, llama-2-7b, -13b, -70b), or a Hugging Face config.json or its "
        "directory",
    )
    work.add_argument("--tokens", type=count, required=True, metavar="N", help="tokens per batch")
    work.add_argument(
        "--sequence",
        type=count,
        metavar="N",
        help="tokens per sequence (default: the largest divisor of --tokens up to 1024)",
    )
    work.add_argument("--batches", type=count, default=1, metavar="N", help="batches to simulate (default: 1)")
    work.add_argument(
        "--wire", choices=WIRE_NAMES, default=PLAN_WIRE, help=f"number format on the wire (default: {PLAN_WIRE})"
    )
    work.add_argument(
        "--systems", default="cleave", metavar="NAMES", help="systems to compare, separated by commas (default: cleave)"
    )
    place = verb.add_argument_group("fleet and server")
    place.add_argument("--fleet", required=True, metavar="FLEET.csv", help="device profiles, one per line")
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
        "--away", type=positive, default=600.0, metavar="S", help="mean absence with a churn rate (default: 600)"
    )
    world.add_argument(
        "--noise",
        type=_share,
        default=0.0,
        metavar="X",
        help="how far true rates are from those of the fleet file, as the standard deviation of their logarithm: 0.2 "
        "is about 20%% (default: 0)",
    )
    world.add_argument(
        "--drift", type=_share, default=0.0, metavar="X", help="the same for changes from hour to hour (default: 0)"
    )
    world.add_argument(
        "--stalls", type=_share, default=0.0, metavar="N", help="stalls per device and hour, of 10 s (default: 0)"
    )
    world.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all draws (default: 0)")
    output = verb.add_argument_group("output")
    output.add_argument(
        "--method",
        choices=["auto", "engine", "law"],
        default="auto",
        help="every event of the real engine, the planner's law, or whichever suits the size (default: auto)",
    )
    output.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    verb.set_defaults(run=_run_simulate)


def _share(text: str) -> float:
    """A number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0 up, got {text!r}")
    return value


def _run_simulate(options: argparse.Namespace) -> None:
    from cleave.api.simulating import simulate
    from cleave.core.cost.rates import Server
    from cleave.report import simulation
    from cleave.sim.world import Noise

    simulated = simulate(
        options.fleet,
        model=options.model,
        tokens=options.tokens,
        sequence=options.sequence,
        wire=options.wire,
        server=Server(
            down_bytes_per_s=math.inf if options.server_down is None else options.server_down * _GBIT_BYTES,
            up_bytes_per_s=math.inf if options.server_up is None else options.server_up * _GBIT_BYTES,
        ),
        systems=[name.strip() for name in options.systems.split(",") if name.strip()],
        batches=options.batches,
        churn=options.churn,
        away_s=options.away,
        noise=Noise(spread=options.noise, drift=options.drift, stalls_per_hour=options.stalls),
        seed=options.seed,
        method=options.method,
    )
    sheet = _sheet(simulated)
    if options.json:
        sys.stdout.write(json.dumps(simulation.as_json(sheet)) + "\n")
    else:
        simulation.show(sheet)


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
