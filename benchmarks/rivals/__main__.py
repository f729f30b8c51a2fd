"""`python -m benchmarks.rivals FLEET.csv --model demo`: every rival and Cleave on one testbed; a table and raw numbers.

Systems take turns: each round runs every setting once, so that a slow minute of the machine affects all. Of each rival
the best setting is kept, by the median over all its counted steps.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from benchmarks.rivals import peers
from benchmarks.rivals.table import best_of, markdown, merge
from benchmarks.rivals.turns import Cleave, Forks, Limits, Result, torch_turn
from benchmarks.rivals.variants import least_step_s, order_by_uplink, variants_of
from benchmarks.rivals.work import MODELS, Work, sizes
from benchmarks.testbed import Testbed
from benchmarks.testbed.bed import read_fleet

from cleave.core.fleet.profiles import Profiles
from cleave.errors import CleaveError

PEER_SYSTEMS: tuple[peers.PeerSystem, ...] = ("hivemind", "torchft")
SYSTEMS = ("torch", "hivemind", "torchft", "cleave")


def main(words: list[str] | None = None) -> int:
    options = _parser().parse_args(words)
    results: list[Result] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work = Work(model=options.model, lora=options.lora)
    try:
        profiles = read_fleet(options.fleet)
        with tempfile.TemporaryDirectory(prefix="cleave-rivals-") as scratch:
            for result in _rounds(profiles, work, options, Path(options.keep or scratch)):
                results.append(result)  # noqa: PERF402  what there is must survive an interrupt
    except CleaveError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the table has what was measured until now", file=sys.stderr)
    if not results:
        return 130
    merged = best_of(merge(results))
    fleet = options.fleet.stem
    title = f"{fleet}, {work.model}, {'LoRA' if work.lora else 'full'}"
    command = " ".join(["python -m benchmarks.rivals", *(sys.argv[1:] if words is None else words)])
    text = markdown(title, command, merged, work, merge(results))
    print(text)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        stem = f"{datetime.now(UTC):%Y-%m-%d}-rivals-{fleet}-{work.model}-{'lora' if work.lora else 'full'}"
        (options.save / f"{stem}.md").write_text(text, encoding="utf-8")
        raw = {"command": command, "results": [asdict(each) for each in results]}
        (options.save / f"{stem}.json").write_text(json.dumps(_rounded(raw), indent=0) + "\n", encoding="utf-8")
    return 0


def _rounds(profiles: Profiles, work: Work, options: argparse.Namespace, out: Path) -> Iterator[Result]:
    ups: list[float] = profiles.up_bytes_per_s.tolist()
    capacities: list[float] = profiles.medium_bytes_per_s.tolist()
    order = order_by_uplink(ups)
    weights, trained = sizes(work)
    # Devices on one medium share it, and what two of them exchange takes it twice.
    shared = [
        own if not name else min(own, most / len(ups) / 2)
        for own, name, most in zip(ups, profiles.medium, capacities, strict=True)
    ]
    by_rank = [shared[device] for device in order]
    variants = variants_of(by_rank, work.layers)
    if options.only:
        variants = [each for each in variants if any(word in each.name for word in options.only)]
    names = [profiles.names[device] for device in order]
    out.mkdir(parents=True, exist_ok=True)
    limits = Limits(steps=options.steps, budget_s=options.budget)
    with Testbed(profiles) as testbed, closing(Forks(out / "rivals.log")) as forks:
        ours = Cleave(testbed, work, out, limits, options.grain)
        for number in range(options.rounds):
            if "cleave" in options.systems:
                yield _told(ours.turn())
            for variant in variants if "torch" in options.systems else ():
                least_s = least_step_s(variant, by_rank, 4.0 * trained, 4.0 * weights)
                if least_s <= options.longest:
                    yield _told(torch_turn(forks, testbed, names, work, variant, out, limits))
                elif number == 0:
                    hopeless = f"not run: its bytes take at least {least_s:.0f} s a step"
                    yield _told(Result(system=variant.rival, settings=variant.settings, error=hopeless))
            for system in PEER_SYSTEMS:
                if system in options.systems:
                    yield _told(peers.turn(system, forks, testbed, profiles, work, out, limits))


def _told(result: Result) -> Result:
    steps = " ".join(f"{each:.2f}" for each in result.step_s)
    print(f"{result.system}, {result.settings}: {result.error or steps}", file=sys.stderr, flush=True)
    return result


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
    parser.add_argument("fleet", type=Path, help="fleet CSV")
    parser.add_argument("--model", choices=MODELS, default="demo", help="model to train (default: demo)")
    parser.add_argument("--lora", action="store_true", help="train LoRA of rank 8 on q and v instead of all weights")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="systems to run (default: all)")
    parser.add_argument("--only", nargs="+", help="run only torch settings whose name contains one of these")
    parser.add_argument("--grain", choices=["auto", "gemm", "resident"], default="auto", help="grain of Cleave")
    parser.add_argument("--rounds", type=int, default=1, help="turns of every setting (default: 1)")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn at most (default: 6)")
    parser.add_argument(
        "--budget", type=float, default=30.0, help="seconds of a turn after which it stops (default: 30)"
    )
    parser.add_argument(
        "--longest", type=float, default=60.0, help="seconds a step above which a setting is not run (default: 60)"
    )
    parser.add_argument("--save", type=Path, help="directory for the table and the raw numbers")
    parser.add_argument("--keep", type=Path, help="directory for logs (default: a temporary one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
