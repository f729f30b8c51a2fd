"""Data parallel among volunteers: hivemind.

Source: learning-at-home/hivemind (DeDLOC, arXiv:2106.10207), `hivemind/averaging/load_balancing.py` and
`optim/optimizer.py`. Every peer has the whole model and its optimizer (16 bytes a parameter), accumulates gradients at
its own pace until the target batch is reached, and averages V bytes of them by an all-reduce whose parts w_i are
balanced by bandwidth: peer i moves V (1 + (n - 2) w_i). The best parts, which hivemind finds by linear programming,
make that take

    reduction = max(V / slowest link, 2 (n - 1) V / sum of all links)        step = FLOPs / FLOP/s of all + reduction

Knobs: how many of the peers (those with the fastest links), recomputation. Matchmaking takes no time here, whole
samples are not enforced, and averaging is not delayed into the next batch, which would change the training.
Recovery: `recovery.averaging`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from cleave.core.cost.resident import effective_flops_per_s
from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.plan.rivals.case import Case, plural, too_small
from cleave.core.plan.rivals.reduction import byte_s
from cleave.sim.baselines import recovery
from cleave.sim.baselines.work import case_of, link_bytes_per_s, unfit
from cleave.sim.setting import Outcome, Setting

NAME = "hivemind"


def averaging_s(gradient_bytes: float, rates: Floats) -> Floats:
    """Seconds of the balanced all-reduce among the first 1, 2, ... peers, whose links are given fastest first."""
    count = np.arange(1, len(rates) + 1)
    around = 2 * (count - 1) * gradient_bytes / np.cumsum(rates)
    return np.where(count > 1, np.maximum(gradient_bytes / rates, around), 0.0)


def averaging_parts(rates: Floats) -> Floats:
    """The part of the vector that each of several peers averages, so that none takes longer than `averaging_s`.

    T seconds let peer i average w_i = (T rate_i / V - 1) / (n - 2); scaled to add up to 1.
    """
    count = len(rates)
    if count == 2:
        return np.full(2, 0.5)
    seconds = averaging_s(1.0, -np.sort(-rates))[-1]
    most = (seconds * rates - 1) / (count - 2)
    return most / most.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    step_s: float
    reduction_s: float
    devices: Ints
    recompute: bool


def hivemind(setting: Setting) -> Outcome:
    case = case_of(setting)
    found = min((_fastest(case, recompute=recompute) for recompute in (False, True)), key=lambda one: one.step_s)
    if found.step_s == inf:
        needed = case.replica_bytes(case.sequence, recompute=True)
        return unfit(NAME, too_small("the whole model with its optimizer", needed, case.profiles))
    count, profiles = len(found.devices), case.profiles
    gradients = case.terms.gradient_bytes * case.whole.trained
    moved = gradients * (1 + (count - 2) * averaging_parts(_rates(case)[found.devices])) if count > 1 else np.zeros(1)
    speed = effective_flops_per_s(profiles.flops_per_s[found.devices], case.sequence, case.terms)
    shares = speed / speed.sum()
    whole = np.full(count, float(case.whole.params)), np.full(count, float(case.whole.trained))
    loss = recovery.Loss(
        batch_s=found.step_s,
        moved_bytes=recovery.moved_bytes(*whole),
        link_bytes_per_s=link_bytes_per_s(profiles, found.devices),
        server=case.server,
    )
    return Outcome(
        system=NAME,
        fits=True,
        reason=f"{plural(count, 'peer')} with the whole model, gradients averaged in parts by bandwidth"
        + (", recomputing activations" if found.recompute else ""),
        batch_s=found.step_s,
        down_bytes=float(moved.max()),
        up_bytes=float(moved.max()),
        memory_bytes=case.replica_bytes(case.sequence, recompute=found.recompute),
        devices_used=count,
        recovery_s=recovery.averaging(loss, shares, found.reduction_s),
        detail={"reduction_s": found.reduction_s, "recomputes": int(found.recompute), "recovery": "averaging"},
    )


def _rates(case: Case) -> Floats:
    return 1 / byte_s(case.profiles)


def _fastest(case: Case, *, recompute: bool) -> _Found:
    able = np.flatnonzero(case.profiles.memory_bytes >= case.replica_bytes(case.sequence, recompute=recompute))
    rates = _rates(case)
    order = able[np.argsort(-rates[able], kind="stable")][: int(case.sequences)]
    if not len(order):
        return _Found(step_s=inf, reduction_s=0.0, devices=order, recompute=recompute)
    speed = np.cumsum(effective_flops_per_s(case.profiles.flops_per_s[order], case.sequence, case.terms))
    reduction_s = averaging_s(case.terms.gradient_bytes * case.whole.trained, rates[order])
    step_s = sum(case.step_flops(recompute=recompute)) / speed + reduction_s
    pick = int(step_s.argmin())
    return _Found(
        step_s=max(float(step_s[pick]), 0.0),
        reduction_s=float(reduction_s[pick]),
        devices=order[: pick + 1],
        recompute=recompute,
    )
