"""FSDP: every device holds an equal share of parameters, gradients and optimizer state, and computes on its own tokens.

Source: torch FullyShardedDataParallel (Zhao et al., 2023, arXiv:2304.11277), which is ZeRO-3 (arXiv:1910.02054). Each
layer is gathered for forward and again for backward, and its gradients are scattered to their owners, all by rings from
device to device: with n devices each moves 3 (n - 1) / n of the bytes of all parameters, both ways, at the pace of the
slowest. Prefetching hides compute behind that or that behind compute:

    step = max(passes x 3 (n - 1) / n x bytes / slowest link, FLOPs / FLOP/s of all)

Memory: 16 P / n, two gathered layers (the current one and the next) and the gradients of one, the activations of its
tokens, one sequence at least; a device whose tokens do not fit at once takes several passes. Shares of tokens in
proportion to speed are granted.
"""

from __future__ import annotations

from math import inf

import numpy as np

from cleave.core.cost.resident import effective_flops_per_s
from cleave.core.cost.terms import RUNTIME_BYTES
from cleave.core.fleet.profiles import Ints
from cleave.core.plan.rivals.case import WEIGHT_BYTES, Case, Rival, plural, too_small
from cleave.core.plan.rivals.reduction import byte_s

SHARDED = "FSDP"
_SIZES = 256
"""Try all numbers of devices up to this many, else so many from few to all."""


def fsdp(case: Case) -> Rival:
    """The best number of devices, with or without recomputation."""
    best = Rival(name=SHARDED, step_s=inf, arrangement=_why_not(case))
    for used in _sizes(min(len(case.profiles), int(case.sequences))):
        for recompute in (False, True):
            found = _sharded(case, used, recompute=recompute)
            if found is not None and found.step_s < best.step_s:
                best = found
    return best


def _why_not(case: Case) -> str:
    most = min(len(case.profiles), int(case.sequences))
    if most < 2:
        return "takes two devices and two sequences at least"
    needed = _held(case, most, recompute=True)
    return too_small(f"each of {most:,} shares with two gathered layers", needed, case.profiles, devices=most)


def _sizes(count: int) -> list[int]:
    if count <= _SIZES:
        return list(range(2, count + 1))
    return np.unique(np.geomspace(2, count, _SIZES).round().astype(np.int64)).tolist()


def _held(case: Case, used: int, *, recompute: bool) -> float:
    """Memory of a share with one sequence at work."""
    return _fixed(case, used, recompute=recompute) + _sequence_bytes(case, recompute=recompute)


def _fixed(case: Case, used: int, *, recompute: bool) -> float:
    largest = max(case.layer.params, case.head.params)
    working = case.activation_bytes(0, case.sequence, recompute=recompute) + case.logit_bytes(case.sequence)
    return RUNTIME_BYTES + case.whole.state_bytes / used + 3 * WEIGHT_BYTES * largest + working


def _sequence_bytes(case: Case, *, recompute: bool) -> float:
    """Activations that a sequence keeps until its backward."""
    kept = case.activation_bytes(case.shape.layers, case.sequence, recompute=recompute)
    return kept - case.activation_bytes(0, case.sequence, recompute=recompute)


def _sharded(case: Case, used: int, *, recompute: bool) -> Rival | None:
    profiles = case.profiles
    able = np.flatnonzero(profiles.memory_bytes >= _held(case, used, recompute=recompute))
    if len(able) < used:
        return None
    link_s = byte_s(profiles)
    order: Ints = able[np.argsort(link_s[able], kind="stable")][:used]
    speed = effective_flops_per_s(profiles.flops_per_s[order], case.sequence, case.terms)
    room = profiles.memory_bytes[order] - _fixed(case, used, recompute=recompute)
    room /= _sequence_bytes(case, recompute=recompute)
    share = case.sequences * speed / speed.sum()
    passes = float(np.ceil((share / np.floor(room)).max() - 1e-9))
    weights, gradients = case.terms.weight_bytes * case.whole.params, case.terms.gradient_bytes * case.whole.trained
    around = (used - 1) / used * passes * (2 * weights + gradients)
    computing_s = sum(case.step_flops(recompute=recompute)) / float(speed.sum())
    moved = np.zeros(len(profiles))
    moved[order] = 2 * around
    often = "" if passes == 1 else f" in {passes:.0f} passes"
    return Rival(
        name=SHARDED,
        step_s=max(around * float(link_s[order[-1]]), computing_s, case.medium_s(moved)),
        arrangement=f"{plural(used, 'device')} with a share of the model each, gathered layer by layer{often}",
        spares="no activations cross links",
    )
