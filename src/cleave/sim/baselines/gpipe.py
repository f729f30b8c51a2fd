"""Pipelines with GPipe's schedule, times data parallel.

Source, formulas and memory: `core/plan/rivals/pipeline.py` and `stages.py`, which plans are compared with; this is the
same search. Its knobs: number of pipelines, their devices and layers, recomputation, how gradients are reduced.
Recovery: the cheapest of what was published for pipelines and fits here. Restart and Varuna always do, Bamboo where
every device has room for its successor's stage too, Oobleck from two pipelines up.
"""

from __future__ import annotations

import numpy as np

from cleave.core.plan.rivals.case import Case
from cleave.core.plan.rivals.pipeline import Arranged, arranged, why_not
from cleave.sim.baselines import recovery
from cleave.sim.baselines.work import case_of, unfit
from cleave.sim.setting import Outcome, Setting

NAME = "gpipe"


def gpipe(setting: Setting) -> Outcome:
    case = case_of(setting)
    found = arranged(case)
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


def _recoveries(case: Case, found: Arranged) -> dict[str, float]:
    """Seconds by manner, of those that are possible."""
    placed = found.placed
    loss = recovery.loss_of(case, placed, found.flow.step_s, found.flow.path_s)
    manners = {"restart": recovery.checkpoint_restart(loss), "varuna": recovery.varuna(loss)}
    held = found.stages.held_bytes(placed)
    successor = np.roll(held, -1)
    if (held + successor <= case.profiles.memory_bytes[placed.devices]).all():
        manners["bamboo"] = recovery.bamboo(loss)
    if found.pipelines > 1:
        manners["oobleck"] = recovery.oobleck(loss)
    return manners
