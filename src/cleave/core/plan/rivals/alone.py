"""One device with the whole model: for scale, and the first thing to try.

Source: plain PyTorch with mixed precision and gradient accumulation. Seconds = FLOPs of the step / FLOP/s of the
device: 6 per weight and token, or 8 where it recomputes activations layer by layer to save memory
(`torch.utils.checkpoint`). Memory: 16 bytes a parameter, the activations of one sequence, its logits.
"""

from __future__ import annotations

from math import inf

import numpy as np

from cleave.core.cost.resident import effective_flops_per_s
from cleave.core.plan.rivals.case import Case, Rival, too_small

ALONE = "one device alone"


def alone(case: Case) -> Rival:
    """The fastest device that holds the model."""
    speed = effective_flops_per_s(case.profiles.flops_per_s, case.sequence, case.terms)
    step_s = np.full(len(case.profiles), inf)
    needed = inf
    for recompute in (False, True):
        needed = case.replica_bytes(case.sequence, recompute=recompute)
        seconds = sum(case.step_flops(recompute=recompute)) / speed
        step_s = np.minimum(step_s, np.where(case.profiles.memory_bytes >= needed, seconds, inf))
    best = int(step_s.argmin())
    if step_s[best] == inf:
        return Rival(name=ALONE, step_s=inf, arrangement=too_small("the whole model", needed, case.profiles))
    return Rival(
        name=ALONE,
        step_s=float(step_s[best]),
        arrangement=f"{case.profiles.names[best]} with the whole model and its optimizer",
        spares="nothing crosses a link",
    )
