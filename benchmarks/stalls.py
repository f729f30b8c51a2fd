"""Time lost to a device that stalls: in every phase and manner, for both grains, beside an undisturbed run.

The table comes from real servers and workers in virtual time (`tests/support`), so that what is measured is waiting and
nothing else: predictions are about 0, and the bound of a step is that of `core/schedule/lateness.py`. With `--real`,
device processes on this machine are stopped (SIGSTOP) in the middle of a step as well.
Run: python benchmarks/stalls.py [--real] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.support

from tests.support import stallers
from tests.support.doomed import Moment
from tests.support.plans import arranged
from tests.support.stacks import decoder
from tests.support.stallers import MANNERS, Manner
from tests.support.virtual import run
from tests.support.world import World, layer

from cleave.core.schedule.lateness import lost_s
from cleave.transport.faulty import Fault, Kind

Grain = Literal["resident", "gemm"]
_STEPS, _PAUSE_S = 6, 1.0
_NEVER = Moment("gemm", "told", 1 << 30)
_PHASES: dict[Grain, dict[str, Moment]] = {
    "resident": {
        "receiving weights": Moment("forward", "told"),
        "forward unit": Moment("forward", "returning", 1),
        "backward unit": Moment("backward", "returning"),
        "collect": Moment("collect", "returning"),
    },
    "gemm": {"receiving operands": Moment("gemm", "told"), "returning a block": Moment("gemm", "returning", 1)},
}
_JOINING: dict[str, Kind] = {"silent": "stall", "frozen": "half-open", "deaf": "deaf"}
_MOVES: tuple[Manner, ...] = ("noise", "drip")
_OVERHEAD_S = 1.0
"""Doing the work again, ticks, and a heartbeat's share of the time for which bytes count."""


@dataclass(frozen=True, kw_only=True)
class Row:
    grain: Grain
    phase: str
    manner: str
    calm_s: float
    """A step without a staller."""
    worst_s: float
    """The longest step with one."""
    lost_s: float
    """All steps with one, less those without."""
    bound_s: float
    """The most a step may lose."""
    left: bool
    """Whether the staller was disconnected within the run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--real", action="store_true", help="stop real processes too (default: virtual time only)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    print(f"| grain | phase | manner | calm step, s | worst step, s | lost in {_STEPS} steps, s | bound, s | left |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows: list[Row] = []
    for row in _rows(is_real=options.real):
        rows.append(row)
        cells = (row.grain, row.phase, row.manner, f"{row.calm_s:.2f}", f"{row.worst_s:.2f}", f"{row.lost_s:.2f}")
        print(f"| {' | '.join(cells)} | {row.bound_s:.1f} | {'yes' if row.left else 'no'} |", flush=True)
    over = [row for row in rows if row.worst_s - row.calm_s > row.bound_s]
    print(f"\n{len(rows)} cases, {len(over)} beyond their bound: {[(row.phase, row.manner) for row in over]}")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


def _rows(*, is_real: bool) -> Iterator[Row]:
    for grain, phases in _PHASES.items():
        calm, _ = run(_scene(grain, _NEVER, "silent"), limit_s=1e4)
        for manner, kind in _JOINING.items():
            steps, left = run(_scene(grain, _NEVER, "silent", joining=kind), limit_s=1e4)
            yield _row(grain, "joining", manner, calm, steps, 0.0, left=left)
        for phase, moment in phases.items():
            for manner in MANNERS:
                steps, left = run(_scene(grain, moment, manner), limit_s=1e4)
                bound_s = lost_s(0.0, moves_bytes=manner in _MOVES)
                yield _row(grain, phase, manner, calm, steps, bound_s, left=left)
    if is_real:
        for grain in _PHASES:
            yield _stopped(grain)


def _row(
    grain: Grain, phase: str, manner: str, calm: list[float], steps: list[float], bound_s: float, *, left: bool
) -> Row:
    return Row(
        grain=grain,
        phase=phase,
        manner=manner,
        calm_s=statistics.median(calm),
        worst_s=max(steps),
        lost_s=sum(steps) - sum(calm),
        bound_s=bound_s + _OVERHEAD_S,
        left=left,
    )


async def _scene(
    grain: Grain, moment: Moment, manner: Manner, *, joining: Kind | None = None
) -> tuple[list[float], bool]:
    """Run steps with two honest devices and one that stalls; return the seconds of each, and whether it left."""
    layout = [(5, [["eve", "ann", "bob"] if joining is None else ["ann", "bob"]])]
    world = World(arrange=arranged(layout, 4))
    for name in ("ann", "bob"):
        await world.join(name)
    if joining is None:
        await stallers.join(world, "eve", moment, manner, flops_per_s=4e10)
    else:
        world.dial("eve", (Fault(kind=joining, phase="joining"),))
    steps: list[float] = []
    for number in range(_STEPS):
        started_s = world.loop.time()
        if grain == "gemm":
            await world.products(layer(number))
        else:
            model = decoder()
            batch = cast("Any", model.batch(world.cluster, seed=number))
            running = world.cluster.run(model.decoder, batch)
            await asyncio.wrap_future(running.outputs)
            await asyncio.wrap_future(running.backward(None))
            world.cluster.step_ended()
        steps.append(world.loop.time() - started_s)
        await asyncio.sleep(_PAUSE_S)
    assert {"ann", "bob"} <= world.here(), "honest devices stay"
    left = "eve" in world.departures()
    await world.close()
    return steps, left


def _stopped(grain: Grain) -> Row:
    """Stop one of three device processes in the middle of a step."""
    import torch

    from cleave import Fleet, distribute
    from home import Work

    torch.set_num_threads(1)
    work = Work(hidden=256, layers=4, tokens=1024, sequence=256, full=True, steps=1)
    model = work.model()

    def step() -> float:
        started_s = time.perf_counter()
        tokens = torch.randint(0, 256, (work.tokens // work.sequence, work.sequence))
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
        return time.perf_counter() - started_s

    with Fleet.local(3, offload="always") as fleet:
        distribute(model, fleet, grain=grain)
        calm = [step() for _ in range(_STEPS + 1)][1:]
        victim = fleet._processes[0].pid  # pyright: ignore[reportPrivateUsage]
        timer = threading.Timer(0.3 * statistics.median(calm), os.kill, (victim, signal.SIGSTOP))
        timer.start()
        try:
            steps = [step() for _ in range(_STEPS)]
            left = len(fleet.devices) < 3
        finally:
            timer.join()
            os.kill(victim, signal.SIGCONT)
    bound_s = lost_s(statistics.median(calm)) + statistics.median(calm)
    return _row(grain, "any", "SIGSTOP, real process", calm, steps, bound_s, left=left)


if __name__ == "__main__":
    main()
