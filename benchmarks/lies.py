"""What lies cost a run: caught after how many steps, undone or not, the final loss, and what it takes.

    python benchmarks/lies.py               every manner of lying, both grains, every level of trust
    python benchmarks/lies.py --honest      honest devices under audits of everything: none may be accused
    python benchmarks/lies.py --cost        seconds a step at each level, real devices, in turns

Lies are told by one of three devices (two where they agree) to real workers' channels in this process, after it was
found right often enough to go unchecked. Losses are compared with plain torch.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.server.resident.test_audits import LAYOUTS, Watched, go
from tests.support import virtual
from tests.support.in_process import ROOMY, InProcess
from tests.support.plans import arranged
from tests.support.runs import TEXT, train

from cleave import Fleet, distribute, events
from cleave.config import TrainConfig
from cleave.core.cost.wire import WireFormat
from cleave.core.model.grain import Grain
from cleave.core.verify.trust import LEVELS, PROBATION, Level
from cleave.train.loop import Summary
from cleave.train.models import build_model
from cleave.train.offload.distribute import distribute as send
from cleave.transport.lying import Lie

STEPS: dict[Grain, int] = {"resident": 80, "gemm": 20}
HONEST = 2 * PROBATION
"""Steps before the first lie."""

Make = Callable[[], list[Lie]]
EVERYTHING = ("product", "forward", "backward", "collect")
MANNERS: dict[str, Make] = {
    "flips everything": lambda: [Lie(EVERYTHING, "flipped")],
    "scales everything by 0.9": lambda: [Lie(EVERYTHING, factor=0.9)],
    "scales everything by 0.999": lambda: [Lie(EVERYTHING, factor=0.999)],
    "one row of everything by 1.1": lambda: [Lie(EVERYTHING, "one row")],
    "every 10th result, flipped": lambda: [Lie(EVERYTHING, "flipped", every=10)],
    "only input gradients, flipped": lambda: [Lie(("backward",), "flipped")],
    "only weight gradients, flipped": lambda: [Lie(("collect",), "flipped")],
    "only weight gradients, by 0.9": lambda: [Lie(("collect",), factor=0.9)],
    "one NaN": lambda: [Lie(EVERYTHING, "nan", most=1)],
    "one flipped result": lambda: [Lie(EVERYTHING, "flipped", most=1)],
    "two liars that agree, flipped": lambda: [Lie(EVERYTHING, "flipped"), Lie(EVERYTHING, "flipped")],
}


SETTINGS: list[tuple[Grain, Level]] = [
    ("gemm", "stranger"),
    ("resident", "stranger"),
    ("resident", "known"),
    ("resident", "own"),
]
"""Products are checked at every level alike."""


def _config(directory: Path, steps: int) -> TrainConfig:
    data = directory / "text.txt"
    data.write_text(TEXT)
    return TrainConfig(
        model="tiny-llama",
        data=data,
        steps=steps,
        sequence=32,
        batch=4,
        warmup_steps=2,
        eval_every=0,
        eval_batches=1,
        save_every=10,
        tensorboard=False,
        sample=0,
    )


def _train(
    config: TrainConfig, directory: Path, grain: Grain, trust: Level, lies: list[Lie], seed: int
) -> tuple[Summary, int | None, int]:
    """Train on three devices, the first of which lie from step HONEST + 1 on."""
    step, first_lie, caught = 0, None, None
    undone = 0

    def act(event: events.AnyEvent) -> None:
        nonlocal step, first_lie, caught, undone
        if isinstance(event, events.StepDone):
            if first_lie is None and any(lie.told for lie in lies):
                first_lie = event.step
            step = event.step
            for lie in lies:
                lie.is_on |= step >= HONEST
        elif isinstance(event, events.ResultRefused) and caught is None:
            caught = step + 1
        elif isinstance(event, events.RolledBack):
            undone += event.from_step - event.step

    for lie in lies:
        lie.is_on = False
    draw = np.random.default_rng(seed).random
    told = dict(enumerate(lies))
    arrange = arranged([(2, [["d0"]]), (3, [["d1"]])], chunk=32)  # the third device takes over from liars
    with InProcess([ROOMY] * 3, arrange=arrange, trust=trust, lies=told, draw=draw, listener=act) as fleet:
        summary = train(
            config,
            directory,
            wrap=lambda model: send(
                model, fleet.cluster, offload="always", tell=lambda event: None, immediate=False, grain=grain
            ),
            act=act,
            watching=fleet.cluster.vouching,
        )
    found = caught if caught is None or first_lie is None else max(0, caught - first_lie)
    return summary, found, undone


def lies(seed: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        configs = {grain: _config(here, steps) for grain, steps in STEPS.items()}
        plain = {grain: train(config, here / f"plain-{grain}") for grain, config in configs.items()}
        print("| manner | grain | trust | lies told | caught after (steps) | steps undone | largest loss difference |")
        print("|---|---|---|---|---|---|---|")
        for number, (manner, make) in enumerate({"none": list[Lie], **MANNERS}.items()):
            for grain, trust in SETTINGS:
                made = make()
                if grain == "gemm" and made and "product" not in made[0].kinds:
                    continue
                directory = here / f"{number}-{grain}-{trust}"
                summary, caught, undone = _train(configs[grain], directory, grain, trust, made, seed + number)
                both = zip(summary.losses, plain[grain].losses, strict=True)
                off = max(abs(ours - theirs) for ours, theirs in both)
                told = sum(lie.told for lie in made)
                when = "-" if not made else "never" if caught is None else str(caught)
                print(f"| {manner} | {grain} | {trust} | {told} | {when} | {undone} | {off:.1e} |", flush=True)


def honest(units: int) -> None:
    """Audit everything of honest devices, on every wire."""
    print("| wire | units audited | accused | seconds |")
    print("|---|---|---|---|")
    formats: tuple[WireFormat, ...] = ("fp32", "bf16", "q8")
    for wire in formats:

        async def main(wire: WireFormat = wire) -> tuple[int, int]:
            world = Watched(LAYOUTS["slices"], "stranger", wire=wire)
            await world.join_all("ann", "bob", "eve")
            seed = 0
            while world.cluster.totals().audited_units < units:
                await go(world, seed=seed, sequences=32)
                seed += 1
            totals = world.cluster.totals()
            await world.close()
            return totals.audited_units, totals.wrong_audits

        started = time.perf_counter()
        done, wrong = virtual.run(main(), limit_s=1e9)
        print(f"| {wire} | {done:,} | {wrong} | {time.perf_counter() - started:.0f} |", flush=True)


def cost(steps: int, rounds: int) -> None:
    """Seconds a step of the demo model on four local devices, at each level in turns."""
    tokens = torch.randint(0, 256, (8, 256), generator=torch.Generator().manual_seed(1))
    times: dict[Level, list[float]] = {level: [] for level in LEVELS}
    for _ in range(rounds):
        for level in LEVELS:
            model, _ = build_model("demo", "fp32", 1, None)
            with Fleet.local(4, trust=level) as fleet:
                distribute(model, fleet, grain="resident")
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
                for number in range(PROBATION + 1 + steps):
                    started = time.perf_counter()
                    optimizer.zero_grad()
                    model(input_ids=tokens, labels=tokens).loss.backward()
                    optimizer.step()
                    if number > PROBATION:  # the first steps of newcomers are audited
                        times[level].append(time.perf_counter() - started)
    base = statistics.mean(times["own"])
    print("| trust | mean s a step | median | beside own |")
    print("|---|---|---|---|")
    for level, found in times.items():
        mean, median = statistics.mean(found), statistics.median(found)
        print(f"| {level} | {mean:.2f} | {median:.2f} | {mean / base:.2f}x |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, nargs="?", const=100_000, metavar="UNITS")
    parser.add_argument("--cost", type=int, nargs="?", const=12, metavar="STEPS")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.honest:
        honest(options.honest)
    elif options.cost:
        cost(options.cost, options.rounds)
    else:
        lies(options.seed)


if __name__ == "__main__":
    main()
