"""Cleave as published (arXiv:2512.22142): every gemm by itself, cut in two dimensions over the fleet.

No grouped projections, no split of the inner dimension, no resident layers. Blocks are planned in full by this
project's own planner, so this is at its best: the streamed cost law of `core/cost/gemm.py`, which the published cost
model (operands, then compute, then results) does not reach. Attention is divided by heads. The optimizer is on the
server and takes no time. Memory: a block with its operands, in panels where they do not fit.
Recovery: `recovery.cleave`, for the longest gemm.
"""

from __future__ import annotations

import numpy as np

from cleave.core.cost.gemm import unit_costs
from cleave.core.plan.gemm.product import GemmPlan
from cleave.core.plan.rivals.products import attention_use
from cleave.core.plan.step import plan_step
from cleave.core.plan.usage import use_of
from cleave.errors import InfeasibleError
from cleave.sim.baselines import recovery
from cleave.sim.baselines.work import case_of, unfit
from cleave.sim.setting import Outcome, Setting

NAME = "cleave-2d"


def cleave_2d(setting: Setting) -> Outcome:
    case, profiles = case_of(setting), setting.profiles
    try:
        plan = plan_step(
            profiles,
            setting.model,
            setting.tokens,
            sequence=setting.sequence,
            wire=setting.wire,
            server=setting.server,
            split="2d",
            grouped=False,
        )
    except InfeasibleError as why:
        return unfit(NAME, str(why))
    use = use_of(plan, profiles)
    if not plan.attention_s:  # the server does not compute
        use += attention_use(case)
    distinct = {id(part.plan): part.plan for part in plan.segments}.values()
    longest = max(distinct, key=lambda gemm: gemm.makespan_s)
    return Outcome(
        system=NAME,
        fits=True,
        reason=f"{sum(part.what.count for part in plan.segments):,} gemms one by one, in blocks",
        batch_s=max(use.wall_s, case.medium_s(use.down_bytes + use.up_bytes)),
        down_bytes=float(use.down_bytes.max()),
        up_bytes=float(use.up_bytes.max()),
        memory_bytes=max(_held_bytes(gemm, setting) for gemm in distinct),
        devices_used=int((use.down_bytes > 0).sum()),
        recovery_s=recovery.cleave(longest, profiles),
        detail={
            "server_down_bytes": float(use.down_bytes.sum()),
            "server_up_bytes": float(use.up_bytes.sum()),
            "rounds": max(gemm.rounds for gemm in distinct),
            "recovery": "cleave",
        },
    )


def _held_bytes(plan: GemmPlan, setting: Setting) -> float:
    """Memory of the device that needs most."""
    unit = unit_costs(setting.profiles, plan.wire, plan.server, plan.a_wire)
    held = plan.tiling.memory_bytes(unit)
    return float(np.where(plan.tiling.device < len(setting.profiles), held, 0.0).max())
