"""Pipelines with GPipe's schedule, times data parallel.

Source, formulas and memory: `core/plan/rivals/pipeline.py` and `stages.py`, which plans are compared with. Its knobs:
number of pipelines, their devices and layers, recomputation, how gradients are reduced. The search is that of plans;
for one pipeline also Asteroid's, with stages of one device.
Recovery: the cheapest of what was published for pipelines and fits here. Restart and Varuna always do, Bamboo where
every device has room for its successor's stage too, Oobleck from two pipelines up.
"""

from __future__ import annotations

from itertools import product
from math import inf
from typing import Final

import numpy as np

from cleave.core.plan.rivals.case import Case
from cleave.core.plan.rivals.pipeline import Arranged, arranged, weigh, why_not
from cleave.core.plan.rivals.stages import Placement, Stages
from cleave.sim.baselines import asteroid, recovery
from cleave.sim.baselines.hybrid import orders
from cleave.sim.baselines.work import case_of, unfit
from cleave.sim.setting import Outcome, Setting

NAME: Final = "gpipe"
_DEVICES_PER_LAYER = 4
"""That Asteroid's search may choose from, best first."""


def gpipe(setting: Setting) -> Outcome:
    case = case_of(setting)
    found = fastest(case)
    if found is None:
        return unfit(NAME, why_not(case))
    held, most_bytes = found.stages.held_bytes(found.placed), float(found.flow.moved_bytes.max())
    manners = _recoveries(case, found)
    best = min(manners, key=lambda manner: manners[manner])
    return Outcome(
        system=NAME,
        fits=True,
        reason=found.in_words(case.sequences),
        batch_s=found.flow.step_s,
        down_bytes=most_bytes / 2,
        up_bytes=most_bytes / 2,
        memory_bytes=float(held.max()),
        devices_used=len(found.placed.devices),
        recovery_s=manners[best],
        detail={
            "pipelines": found.pipelines,
            "recomputes": int(found.stages.recompute),
            "reduction_s": found.flow.reduction_s,
            "recovery": best,
            **{f"recovery_{manner}_s": seconds for manner, seconds in manners.items()},
        },
    )


def fastest(case: Case) -> Arranged | None:
    """The faster of two searches; None if nothing fits."""
    best = arranged(case)
    for recompute, order in product((False, True), orders(case)):
        below_s = best.flow.step_s if best else inf
        able = asteroid.able_of(case, order, recompute=recompute)
        units = able[: _DEVICES_PER_LAYER * case.shape.layers, None]
        found = asteroid.partition(case, units, 1, below_s, recompute=recompute, most_units=1)
        if found is None:
            continue
        stages, chosen = Stages(case, case.sequence, recompute=recompute), found.partition.stages
        numbers = np.arange(len(chosen))
        placed = Placement(
            devices=units[[stage.unit for stage in chosen], 0],
            layers=np.array([float(stage.layers) for stage in chosen]),
            has_table=numbers == 0,
            has_head=numbers == len(chosen) - 1,
        )
        flow = weigh(case, stages, placed, 1)
        if flow.step_s < below_s:
            best = Arranged(stages=stages, placed=placed, pipelines=1, flow=flow)
    return best


def _recoveries(case: Case, found: Arranged) -> dict[str, float]:
    """Seconds by manner, of those that are possible."""
    placed = found.placed
    loss = recovery.loss_of(case, placed, found.flow.step_s, found.flow.path_s)
    manners = {"restart": recovery.checkpoint_restart(loss), "varuna": recovery.varuna(loss)}
    held = found.stages.held_bytes(placed)
    successor = np.roll(held, -1)
    if len(held) > 1 and (held + successor <= case.profiles.memory_bytes[placed.devices]).all():
        manners["bamboo"] = recovery.bamboo(loss)
    if found.pipelines > 1:
        manners["oobleck"] = recovery.oobleck(loss)
    return manners
