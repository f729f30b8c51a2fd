"""`cleave plan`: plan a gemm or a training step over a fleet."""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cleave.cli.arguments import AddVerb, count, gemm_sizes, positive
from cleave.core.cost.wire import PLAN_WIRE, WIRE_NAMES
from cleave.core.model.grain import GRAINS
from cleave.core.model.lease import LEASE_MODES
from cleave.core.model.objective import OBJECTIVES
from cleave.errors import InputError
from cleave.settings import GRAIN, LEASE

if TYPE_CHECKING:
    from cleave.core.cost.wire import WireName
    from cleave.core.model.grain import Grain
    from cleave.core.model.lease import LeaseMode
    from cleave.core.model.objective import Objective
    from cleave.core.plan.gemm.product import Split

_GBIT_BYTES = 1e9 / 8


def add_to(add: AddVerb) -> None:
    verb = add(
        "plan",
        help="plan one product, or a model's training step, for a fleet",
        description="Plan one matrix product, or a model's whole training step, for a fleet: which device does what, "
        "how long it takes, how close that is to the lower bound, what limits it, and what one GPU would take.",
        usage="cleave plan --model NAME --tokens N --fleet FLEET.csv [OPTION ...]\n"
        "       cleave plan --gemm M,N,K --fleet FLEET.csv [OPTION ...]",
        examples=(
            "cleave fleet sample --mix phone=600,laptop=300 --out fleet.csv",
            "cleave plan --model llama-2-7b --tokens 131072 --fleet fleet.csv --plot step.png",
            "cleave plan --gemm 4096,2048,2048 --fleet fleet.csv --server-down 10 --server-up 10",
        ),
    )
    work = verb.add_argument_group("work")
    what = work.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model",
        metavar="NAME|PATH",
        help="model by name (opt-125m ... opt-175b, llama-2-7b, -13b, -70b), or a Hugging Face config.json or its "
        "directory",
    )
    what.add_argument("--gemm", type=gemm_sizes, metavar="M,N,K", help="one product C[M,N] = A[M,K] B[K,N]")
    work.add_argument("--tokens", type=count, metavar="N", help="tokens per step (required with --model)")
    work.add_argument(
        "--sequence",
        type=count,
        metavar="N",
        help="tokens per sequence (default: the largest divisor of --tokens up to 1024)",
    )
    work.add_argument(
        "--lora",
        type=count,
        metavar="RANK",
        help="train LoRA adapters of this rank beside every linear layer, all else frozen (default: train all weights)",
    )
    place = verb.add_argument_group("fleet and server")
    place.add_argument("--fleet", required=True, metavar="FLEET.csv", help="device profiles, one per line")
    place.add_argument(
        "--server-down", type=positive, metavar="GBIT", help="server to devices, in Gbit/s (default: unlimited)"
    )
    place.add_argument(
        "--server-up", type=positive, metavar="GBIT", help="devices to server, in Gbit/s (default: unlimited)"
    )
    place.add_argument(
        "--server-tflops", type=positive, metavar="TFLOPS", help="speed of the server itself, in TFLOP/s (default: 0)"
    )
    place.add_argument(
        "--server-watts", type=positive, metavar="W", help="power of the server at the plug, in W (default: 150)"
    )
    choices = verb.add_argument_group("how to cut it")
    choices.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="time",
        help="take the devices that make the step fastest, or those with the least energy or emissions, which takes "
        "several times as long to plan (default: time)",
    )
    choices.add_argument(
        "--wire",
        choices=WIRE_NAMES,
        default=PLAN_WIRE,
        help=f"number format on the wire; q8 is 8 bits, int8 its former name (default: {PLAN_WIRE})",
    )
    choices.add_argument(
        "--grain",
        choices=GRAINS,
        default=GRAIN,
        help="blocks of products (gemm), resident layers, or the faster of the two (default: auto)",
    )
    choices.add_argument(
        "--lease",
        choices=LEASE_MODES,
        default=LEASE,
        help="auto: up to 16 devices that hold layers alone may keep them, with the state of AdamW, and update them "
        f"themselves; never: the server updates all weights (default: {LEASE})",
    )
    choices.add_argument(
        "--split",
        choices=["auto", "2d", "3d"],
        default="auto",
        help="with grain gemm: whether blocks may also split the inner dimension (default: auto)",
    )
    choices.add_argument(
        "--ungrouped", action="store_true", help="with grain gemm: plan q, k and v, and gate and up, one by one"
    )
    output = verb.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the whole plan as JSON, with every unit of work")
    output.add_argument("--plot", metavar="FILE.png", help="draw the tiling and where the time goes (.png, .svg, .pdf)")
    verb.set_defaults(run=_run_plan)


def _run_plan(options: argparse.Namespace) -> None:
    run_plan(
        fleet=options.fleet,
        model=options.model,
        gemm=options.gemm,
        tokens=options.tokens,
        sequence=options.sequence,
        wire=options.wire,
        server_down_gbit=options.server_down,
        server_up_gbit=options.server_up,
        server_tflops=options.server_tflops,
        server_watts=options.server_watts,
        objective=options.objective,
        grain=options.grain,
        split=options.split,
        grouped=not options.ungrouped,
        lora=options.lora,
        lease=options.lease,
        as_json=options.json,
        plot=options.plot,
    )


def run_plan(
    *,
    fleet: str,
    model: str | None,
    gemm: tuple[int, int, int] | None,
    tokens: int | None,
    sequence: int | None,
    wire: WireName,
    server_down_gbit: float | None,
    server_up_gbit: float | None,
    server_tflops: float | None,
    server_watts: float | None,
    objective: Objective,
    grain: Grain,
    split: Split,
    grouped: bool,
    lora: int | None,
    lease: LeaseMode,
    as_json: bool,
    plot: str | None,
) -> None:
    from cleave.api.planning import load_fleet
    from cleave.api.planning import plan as make_plan
    from cleave.core.carbon.bill import fleet_power
    from cleave.core.cost.rates import Server
    from cleave.core.plan.objective import choose_devices
    from cleave.facts import table
    from cleave.facts.carbon import carbon_facts
    from cleave.report import carbon, plan_json, plan_text, plan_words

    if gemm is not None and tokens is not None:
        raise InputError("--tokens applies to --model, and a gemm already has its size; drop --tokens")
    if plot is not None:
        _check_plot(Path(plot))
    server = Server(
        down_bytes_per_s=math.inf if server_down_gbit is None else server_down_gbit * _GBIT_BYTES,
        up_bytes_per_s=math.inf if server_up_gbit is None else server_up_gbit * _GBIT_BYTES,
        flops_per_s=0.0 if server_tflops is None else server_tflops * 1e12,
    )
    profiles = load_fleet(fleet)
    make = partial(
        make_plan,
        model=model,
        tokens=tokens,
        gemm=gemm,
        sequence=sequence,
        wire=wire,
        server=server,
        split=split,
        grouped=grouped,
        grain=grain,
        lora=lora,
        lease=lease,
    )
    power = fleet_power(profiles, carbon_facts(), server_watts=server_watts)
    chosen = choose_devices(objective, power, make)
    planned, profiles = chosen.plan, chosen.profiles
    if as_json:
        whole = {**plan_json.as_json(planned, chosen.left_out), **carbon.as_json(chosen)}
        sys.stdout.write(json.dumps(whole) + "\n")
    else:
        plan_text.show(planned, profiles, server, plan_words.cloud_gpu(table("cloud")))
        carbon.show(chosen)
    if plot is not None:
        from cleave.report import plan_plot

        plan_plot.draw(planned, profiles, server, Path(plot))
        if not as_json:
            plan_words.say(f"wrote {plot}")


def _check_plot(path: Path) -> None:
    """Fail before a long plan is computed, not after."""
    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise InputError(f"expected --plot to end in .png, .svg or .pdf, got {path}; rename it")
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: there is no directory {path.parent}; create it first")
    from cleave.extras import install_command

    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise InputError(f"--plot needs matplotlib, which is not installed; run {install_command('plot')}") from None
