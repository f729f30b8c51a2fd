"""`python -m benchmarks.rivals FLEET.csv`: every rival and Cleave on one testbed; a table and raw numbers.

Systems take turns: each round runs every setting once, so that a slow minute of the machine affects all. Of each rival
the best setting is kept, by the median over all its counted steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from benchmarks.rivals import peers
from benchmarks.rivals.shape import MODELS, Work
from benchmarks.rivals.table import best_of, markdown, merge
from benchmarks.rivals.turns import Cleave, Forks, Limits, Result, cleave_forks, rival_forks, torch_turn
from benchmarks.rivals.variants import least_step_s, order_by_uplink, variants_of
from benchmarks.testbed import Reserved, Testbed
from benchmarks.testbed.bed import read_fleet

from cleave.core.fleet.profiles import Profiles
from cleave.errors import CleaveError

PEER_SYSTEMS: tuple[peers.PeerSystem, ...] = ("hivemind", "torchft")
MODES = ("full", "lora")
WIRES = ("bf16", "q8")
SYSTEMS = ("torch", "hivemind", "torchft", "cleave")
_SERVER_CORES = 0.5


def main(words: list[str] | None = None) -> int:
    options = _parser().parse_args(words)
    given = sys.argv[1:] if words is None else words
    for each in (signal.SIGINT, signal.SIGTERM):  # also where a shell started this in its background
        signal.signal(each, signal.default_int_handler)
    try:
        fleets = {path.stem: read_fleet(path) for path in options.fleets}
        with tempfile.TemporaryDirectory(prefix="cleave-rivals-") as scratch, ExitStack() as stack:
            out = Path(options.keep or scratch)
            out.mkdir(parents=True, exist_ok=True)
            forks = stack.enter_context(closing(rival_forks(out)))
            ours = stack.enter_context(closing(cleave_forks(out)))
            for fleet, profiles in fleets.items():
                with Testbed(profiles, _reserved(options, len(profiles))) as testbed:
                    for model, mode in itertools.product(options.models, options.modes):
                        cell = Cell(
                            fleet=fleet,
                            profiles=profiles,
                            testbed=testbed,
                            work=Work(model=model, lora=mode == "lora"),
                            forks=forks,
                            cleave_forks=ours,
                            out=out,
                        )
                        if not _measure(cell, options, given):
                            return 130
    except CleaveError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A fleet, a model, full or LoRA, and what it is measured with."""

    fleet: str
    profiles: Profiles
    testbed: Testbed
    work: Work
    forks: Forks
    cleave_forks: Forks
    out: Path


def _measure(cell: Cell, options: argparse.Namespace, given: list[str]) -> bool:
    """Measure a cell, print its table and save it; return False if it was interrupted."""
    results: list[Result] = []
    until_s = time.monotonic() + options.cell_minutes * 60
    complete = True
    try:
        for result in _rounds(cell, options):
            steps = " ".join(f"{each:.2f}" for each in result.step_s)
            print(f"{result.system}, {result.settings}: {result.error or steps}", file=sys.stderr, flush=True)
            results.append(result)
            if time.monotonic() > until_s:
                print("this cell's time is up: the table has what was measured until now", file=sys.stderr)
                break
    except (KeyboardInterrupt, CleaveError) as fault:
        print(f"ended early, with what was measured until now: {fault or 'interrupted'}", file=sys.stderr)
        complete = False
    if not results:
        return complete
    every = merge(results)
    mode = "lora" if cell.work.lora else "full"
    command = _shown(given)
    load = f"load average {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores"
    text = markdown(f"{cell.fleet}, {cell.work.model}, {mode}", command, best_of(every), load, every)
    print(text, flush=True)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        stem = f"{datetime.now(UTC):%Y-%m-%d}-rivals-{cell.fleet}-{cell.work.model}-{mode}"
        (options.save / f"{stem}.md").write_text(text, encoding="utf-8")
        raw = {"command": command, "results": [asdict(each) for each in results]}
        (options.save / f"{stem}.json").write_text(json.dumps(_rounded(raw)) + "\n", encoding="utf-8")
    return complete


def _rounds(cell: Cell, options: argparse.Namespace) -> Iterator[Result]:
    profiles, work, testbed = cell.profiles, cell.work, cell.testbed
    ups: list[float] = profiles.up_bytes_per_s.tolist()
    capacities: list[float] = profiles.medium_bytes_per_s.tolist()
    order = order_by_uplink(ups)
    # Devices on one medium share it, and what two of them exchange takes it twice.
    shared = [
        min(own, most / len(ups) / 2) if name else own
        for own, name, most in zip(ups, profiles.medium, capacities, strict=True)
    ]
    by_rank = [shared[device] for device in order]
    variants = variants_of(by_rank, work.layers)
    if options.only:
        variants = [each for each in variants if any(word in each.name for word in options.only)]
    names = [profiles.names[device] for device in order]
    limits = Limits(steps=options.steps, budget_s=options.budget)
    for number in range(options.rounds):
        if "cleave" in options.systems:
            for wire in options.wires:
                yield Cleave(cell.cleave_forks, testbed, work, cell.out, limits, options.grain, wire).turn()
        for variant in variants if "torch" in options.systems else ():
            least_s = least_step_s(variant, by_rank, 4.0 * work.trained, 4.0 * work.weights)
            if least_s <= options.longest:
                yield torch_turn(cell.forks, testbed, names, work, variant, cell.out, limits)
            elif number == 0:
                hopeless = f"not run: its bytes take at least {least_s:.0f} s a step"
                yield Result(system=variant.rival, settings=variant.settings, error=hopeless)
        for system in PEER_SYSTEMS:
            if system in options.systems:
                yield peers.turn(system, cell.forks, testbed, profiles, work, cell.out, limits)


def _reserved(options: argparse.Namespace, devices: int) -> Reserved | None:
    """Half a core for the server, the rest in equal shares for the devices."""
    cores: float | None = options.cores
    return None if cores is None else Reserved(device=(cores - _SERVER_CORES) / devices, server=_SERVER_CORES)


def _shown(given: list[str]) -> str:
    """The command that measured this, without where it kept its logs."""
    words = list(given)
    if "--keep" in words:
        at = words.index("--keep")
        del words[at : at + 2]
    return shlex.join(["python", "-m", "benchmarks.rivals", *words])


def _rounded(value: object) -> object:
    """Numbers with six significant digits: enough, and readable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_rounded(each) for each in cast("list[object]", value)]
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rivals",
        description="Run other systems and Cleave on a testbed, in turns, with the same model and batches.",
    )
    parser.add_argument("fleets", type=Path, nargs="+", metavar="fleet", help="fleet CSV")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["demo"], help="models to train (default: demo)")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["full"], help="all weights, or LoRA of rank 8 on q and v"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="systems to run (default: all)")
    parser.add_argument("--only", nargs="+", help="run only torch settings whose name contains one of these")
    parser.add_argument("--grain", choices=["auto", "gemm", "resident"], default="auto", help="grain of Cleave")
    parser.add_argument(
        "--wires", nargs="+", choices=WIRES, default=["bf16"], help="wire formats of Cleave (default: bf16)"
    )
    parser.add_argument(
        "--cores",
        type=float,
        help=f"reserve shares of so many cores: {_SERVER_CORES:g} for the server, the rest in equal parts for the "
        "devices (default: all processes share this machine's cores)",
    )
    parser.add_argument("--rounds", type=int, default=1, help="turns of every setting (default: 1)")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn at most (default: 6)")
    parser.add_argument(
        "--budget", type=float, default=30.0, help="seconds of a turn after which it stops (default: 30)"
    )
    parser.add_argument(
        "--longest", type=float, default=60.0, help="seconds a step above which a setting is not run (default: 60)"
    )
    parser.add_argument(
        "--cell-minutes",
        type=float,
        default=60.0,
        help="minutes after which a cell ends with what it has (default: 60)",
    )
    parser.add_argument("--save", type=Path, help="directory for the table and the raw numbers")
    parser.add_argument("--keep", type=Path, help="directory for logs (default: a temporary one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
