"""Time and bytes that a departure costs where devices keep weights, beside columns that several devices share.

Real training (torch, leases, engine) on simulated devices and links, in virtual time; devices answer zeros. A device
leaves in the middle of a step. Lost are the seconds and bytes of the steps from then on, until they are as usual,
beyond those that they take with the devices left. Run: python benchmarks/virtual_lease.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # for benchmarks and tests.support

from benchmarks.rivals.shape import Work
from benchmarks.rivals.work import adamw, batch, build
from tests.support.virtual_training import VirtualTraining

from cleave.core.cost.rates import Pace
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.sim.devices import Device
from cleave.train.offload.distribute import distribute

_BYTES_PER_MBIT = 1e6 / 8
HOME4 = {"home4-1": (100, 20), "home4-2": (100, 20), "home4-3": (200, 40), "home4-4": (50, 10)}
"""The links of `fleets/home4.csv`: Mbit/s down and up."""
_AFTER = 8
"""Steps that are watched after a departure."""


@dataclass(frozen=True, slots=True)
class Took:
    seconds: float
    down_bytes: int
    up_bytes: int


@dataclass(frozen=True, slots=True)
class Lost:
    usual: Took
    later: Took
    """A step of the devices left."""
    lost: Took
    steps_s: tuple[float, ...]
    moments: tuple[tuple[float, str], ...]
    """Seconds after the departure, and what happened then."""


def every_device(count: int) -> Callable[..., ResidentPlan]:
    """A planner that has so many devices share all layers, without leases."""

    def arrange(problem: Any, **_: object) -> ResidentPlan:
        from tests.support.plans import plan_of, stage_of

        names = sorted(problem.profiles.names)[:count]
        return plan_of([stage_of(0, len(problem.sums.sublayers), [names], "all")], 256)

    return arrange


def depart(links: dict[str, tuple[int, int]], arrange: Callable[..., ResidentPlan], before: int, model: str) -> Lost:
    """Train for some steps, take a device that holds something away in mid-step, and train on."""
    devices = {
        name: Device(Pace(40e9, down * _BYTES_PER_MBIT, up * _BYTES_PER_MBIT, 0.002), 8 << 30)
        for name, (down, up) in links.items()
    }
    fleet = VirtualTraining(devices, arrange=arrange)
    moments: list[tuple[float, str]] = []
    model_on_devices = build(Work(model=model, lora=False))
    trained = distribute(model_on_devices, fleet, offload="always", grain="resident")
    optimizer = adamw(trained)

    def step(number: int) -> Took:
        tokens, began, down, up = batch(number), fleet.driver.now, _down(devices), _up(devices)
        trained(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return Took(fleet.driver.now - began, _down(devices) - down, _up(devices) - up)

    usual = _median([step(number) for number in range(before)][2:])
    plan = fleet.planning.latest
    assert plan is not None
    gone = max(plan.stages, key=lambda stage: stage.count).devices[0]
    left_s = fleet.driver.now + usual.seconds / 2
    _watch(fleet, left_s, moments)
    fleet.driver.leave(gone, left_s)
    steps = [step(before + number) for number in range(_AFTER)]
    later = _median(steps[-3:])
    lost = Took(
        sum(one.seconds - later.seconds for one in steps),
        sum(one.down_bytes - later.down_bytes for one in steps),
        sum(one.up_bytes - later.up_bytes for one in steps),
    )
    return Lost(usual, later, lost, tuple(one.seconds for one in steps), tuple(moments))


def _watch(fleet: VirtualTraining, since_s: float, moments: list[tuple[float, str]]) -> None:
    """Note when training waits for what."""
    for name in ("lease", "run", "place"):
        plain = getattr(fleet, name)

        def told(*args: Any, name: str = name, plain: Any = plain, **options: Any) -> Any:
            if fleet.driver.now >= since_s:
                moments.append((fleet.driver.now - since_s, name))
            return plain(*args, **options)

        setattr(fleet, name, told)


def _down(devices: dict[str, Device]) -> int:
    return sum(device.down_bytes for device in devices.values())


def _up(devices: dict[str, Device]) -> int:
    return sum(device.up_bytes for device in devices.values())


def _median(steps: list[Took]) -> Took:
    return sorted(steps, key=lambda one: one.seconds)[len(steps) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo", choices=("demo", "demo10"), help="model to train (default: demo)")
    parser.add_argument("--before", type=int, default=5, help="steps before the departure (default: 5)")
    parser.add_argument("--verbose", action="store_true", help="also print what happened when")
    options = parser.parse_args()
    three = {name: HOME4[name] for name in ("home4-1", "home4-2", "home4-3")}
    two = {name: HOME4[name] for name in ("home4-1", "home4-3")}
    cases: dict[str, tuple[dict[str, tuple[int, int]], Callable[..., ResidentPlan]]] = {
        "leased, a device to spare": (HOME4 | {"home4-5": (100, 20)}, plan_columns),
        "leased, a slow device to spare": (HOME4, plan_columns),
        "leased, none to spare": (two, plan_columns),
        "2 share all": (two, every_device(2)),
        "3 share all": (three, every_device(3)),
    }
    print("| devices | s a step | with those left | s lost | MB down more | MB up more | steps after |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, (links, arrange) in cases.items():
        found = depart(links, arrange, options.before, options.model)
        steps = ", ".join(f"{seconds:.2f}" for seconds in found.steps_s)
        print(
            f"| {name} | {found.usual.seconds:.2f} | {found.later.seconds:.2f} | {found.lost.seconds:.2f} | "
            f"{found.lost.down_bytes / 1e6:.1f} | {found.lost.up_bytes / 1e6:.1f} | {steps} |",
            flush=True,
        )
        if options.verbose:
            for moment, what in found.moments:
                print(f"{moment:8.2f} s {what}")


if __name__ == "__main__":
    main()
