"""Data parallel: the whole model and its optimizer on every device; gradients are reduced once a step.

Source: torch.nn.parallel.DistributedDataParallel (Li et al., 2020, arXiv:2006.15704), gradients accumulated over
micro-batches of one sequence. Memory: 16 bytes a parameter and the activations of one sequence on every device.
Compute: the step's FLOPs over the FLOP/s of all; shares in proportion to speed are granted, which DDP's equal ones are
not. Reduction (see `reduction`) overlaps with the whole backward, so

    step = max(forward + backward, forward + reduction)

The slowest link paces the reduction, so devices are taken in order of their links, as many as pays.
"""

from __future__ import annotations

from math import inf

import numpy as np

from cleave.core.cost.resident import effective_flops_per_s
from cleave.core.plan.rivals.case import Case, Rival, too_small
from cleave.core.plan.rivals.reduction import MANNERS, byte_s, reduced

REPLICAS = "data parallel"


def data_parallel(case: Case) -> Rival:
    """The best number of replicas, with or without recomputation."""
    needed = case.replica_bytes(case.sequence, recompute=True)
    why_not = too_small("each of two replicas", needed, case.profiles, devices=2)
    if min(len(case.profiles), case.sequences) < 2:
        why_not = "takes two devices and two sequences at least"
    best = Rival(name=REPLICAS, step_s=inf, arrangement=why_not)
    for recompute in (False, True):
        found = _replicas(case, recompute=recompute)
        if found is not None and found.step_s < best.step_s:
            best = found
    return best


def _replicas(case: Case, *, recompute: bool) -> Rival | None:
    able = np.flatnonzero(case.profiles.memory_bytes >= case.replica_bytes(case.sequence, recompute=recompute))
    if len(able) < 2:
        return None
    link_s = byte_s(case.profiles)
    order = able[np.argsort(link_s[able], kind="stable")]
    order = order[: max(int(case.sequences), 1)]  # a sequence at least for each
    used = np.arange(2, len(order) + 1)
    if len(used) == 0:
        return None
    speed = np.cumsum(effective_flops_per_s(case.profiles.flops_per_s[order], case.sequence, case.terms))[1:]
    forward, backward = case.step_flops(recompute=recompute)
    gradients = case.terms.gradient_bytes * case.whole.trained
    reducing = reduced(gradients * link_s[order[1:]], gradients, used, case.server)
    step_s = np.maximum((forward + backward) / speed, forward / speed + reducing.seconds)
    pick = int(step_s.argmin())
    moved = np.zeros(len(case.profiles))
    moved[order[: pick + 2]] = gradients * reducing.moved[pick]
    return Rival(
        name=REPLICAS,
        step_s=max(float(step_s[pick]), case.medium_s(moved)),
        arrangement=f"{pick + 2} devices with the whole model, gradients reduced {MANNERS[reducing.is_ring[pick]]}",
        spares="no activations cross links, and gradients are reduced while backward runs",
    )
