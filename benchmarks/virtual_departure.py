"""Cost of a departure with resident layers in virtual time: the real engine on devices without sockets or numbers.

The work of `departure.py`, on links where compute takes most of a step and on links where gradients do. A device leaves
after a share of a step; what a departure costs beyond an undisturbed step does not depend on the machine this runs on.
Run: python benchmarks/virtual_departure.py
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.support

from tests.support.plans import Layout, plan_of, stage_of
from tests.support.virtual_fleet import decoder

from cleave.core.cost.rates import Pace
from cleave.sim.devices import Device
from cleave.sim.fleet import Fleet, batch_of

_MBIT_BYTES = 1e6 / 8
_MOMENTS = 8
LINKS = {"1000/1000": (1000, 1000), "100/20": (100, 20)}
LAYOUTS: dict[str, Layout] = {
    "2 share all": [(9, [["d0", "d1"]])],
    "3 share all": [(9, [["d0", "d1", "d2"]])],
    "2 stages of 2": [(4, [["d0", "d1"]]), (5, [["d2", "d3"]])],
    "2 stages of 1": [(4, [["d0"]]), (5, [["d1"]])],
}


@dataclass(frozen=True, slots=True)
class Took:
    seconds: float
    computed_s: float
    down_bytes: int
    up_bytes: int


class Bench:
    """A fleet of equal devices under a plan."""

    def __init__(self, layout: Layout, links: tuple[int, int], gflops: float) -> None:
        count = len({name for _, slices in layout for column in slices for name in column})
        pace = Pace(gflops * 1e9, links[0] * _MBIT_BYTES, links[1] * _MBIT_BYTES, 0.002)
        self._devices = [Device(pace, 4 << 30) for _ in range(count)]
        self._fleet, self._model = Fleet(self._devices), decoder(layers=4, hidden=256, inner=704, words=2048)
        firsts = itertools.accumulate((count for count, _ in layout), initial=0)
        stages = [stage_of(first, count, slices, "all") for first, (count, slices) in zip(firsts, layout, strict=False)]
        self._plan = plan_of(stages, chunk=256)

    def step(self, leaving_after_s: float | None = None) -> Took:
        driver, before = self._fleet.driver, self._totals()
        began = driver.now
        batch = batch_of(self._model, self._fleet.operands, sequences=8, sequence=256)
        run = self._fleet.resident(self._model, batch, self._plan)
        if leaving_after_s is not None:
            driver.leave("d0", began + leaving_after_s)
        driver.run_until(run.returned.done)
        after = self._totals()
        return Took(
            driver.now - began,
            after.computed_s - before.computed_s,
            after.down_bytes - before.down_bytes,
            after.up_bytes - before.up_bytes,
        )

    def _totals(self) -> Took:
        return Took(
            0.0,
            sum(device.computed_s for device in self._devices),
            sum(device.down_bytes for device in self._devices),
            sum(device.up_bytes for device in self._devices),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gflops", type=float, default=40.0, help="speed of each device (default: 40)")
    options = parser.parse_args()
    print("| Mbit/s | devices | s per step | killed at | lost | s computed more | MB down more | MB up more |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, links in LINKS.items():
        for arrangement, layout in LAYOUTS.items():
            lost: list[float] = []
            for number in range(_MOMENTS):
                at = (number + 0.5) / _MOMENTS
                bench = Bench(layout, links, options.gflops)
                bench.step()  # which sends all weights
                usual = bench.step()
                took = bench.step(leaving_after_s=at * usual.seconds)
                lost.append(100 * (took.seconds / usual.seconds - 1))
                down, up = took.down_bytes - usual.down_bytes, took.up_bytes - usual.up_bytes
                print(
                    f"| {name} | {arrangement} | {usual.seconds:.2f} | {100 * at:.0f} % | {lost[-1]:.0f} % | "
                    f"{took.computed_s - usual.computed_s:.2f} | {down / 1e6:.1f} | {up / 1e6:.1f} |"
                )
            print(f"| {name} | {arrangement} | | mean | {sum(lost) / len(lost):.0f} % | | | |", flush=True)


if __name__ == "__main__":
    main()
