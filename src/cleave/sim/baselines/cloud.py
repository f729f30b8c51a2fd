"""One card in a datacenter, or eight in one host.

    seconds = FLOPs of the model / (cards x peak FLOP/s x MFU)

Peak and MFU are those of `facts/cloud.csv`, as the carbon bill has them; the MFU of large clusters is granted to one
host, and eight cards are eight times as fast as one. Memory: 16 bytes a parameter and the activations of one sequence
at a time, whatever is more than the cards hold moves to the host (ZeRO-Offload, arXiv:2101.06840): gradients out and
weights in once a step over each card's own link, while it computes; where not even the 16-bit weights fit beside the
activations of a sequence, weights come in twice a pass and gradients go out (ZeRO-Infinity, arXiv:2104.07857), one pass
for as many sequences as fit. `devices_used` counts cards, as no device of the fleet takes part. `boundless_memory_s` is
the time without the question of memory.
Recovery: another instance and the work since the last batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cleave.core.carbon.cloud import CloudCard, cloud_card
from cleave.core.model.gemms import step_flops
from cleave.core.plan.rivals.case import WEIGHT_BYTES, Case, plural
from cleave.facts import table
from cleave.facts.carbon import carbon_facts
from cleave.sim.baselines.work import case_of, fact, unfit
from cleave.sim.setting import Outcome, Setting, System

_GIB = 1 << 30
_CARD = {"a100": "A100 SXM4", "h100": "H100 SXM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cards:
    card: CloudCard
    count: int
    memory_bytes: float
    """Of all cards together; the same for the host."""
    host_bytes: float
    host_bytes_per_s: float


def cloud(name: str, kind: str, count: int) -> System:
    """So many cards of a kind: a100 or h100."""

    def simulate(setting: Setting) -> Outcome:
        return _simulate(name, _cards(kind, count), setting)

    return simulate


def _cards(kind: str, count: int) -> _Cards:
    card, _ = cloud_card(carbon_facts(), _CARD[kind])
    (row,) = (row for row in table("cloud") if row["gpu"] == _CARD[kind])
    return _Cards(
        card=card,
        count=count,
        memory_bytes=count * float(row["mem_gb"].split("/")[-1]) * 1e9,
        host_bytes=count * fact(f"host_gib_{kind}") * _GIB,
        host_bytes_per_s=count * fact(f"host_gb_per_s_{kind}") * 1e9,
    )


def _simulate(name: str, cards: _Cards, setting: Setting) -> Outcome:
    case = case_of(setting)
    flops = step_flops(setting.model, setting.tokens, setting.sequence)
    computing_s = cards.card.gpu_s(flops) / cards.count
    whole = case.whole
    needed = _needed_bytes(case, cards.count)
    if needed > cards.memory_bytes + cards.host_bytes:
        why = (
            f"the whole model with its optimizer needs {needed / 1e9:,.0f} GB, {plural(cards.count, cards.card.name)} "
            f"and the host offer {(cards.memory_bytes + cards.host_bytes) / 1e9:,.0f} GB"
        )
        return unfit(name, why, boundless_memory_s=computing_s)
    away = max(needed - cards.memory_bytes, 0.0)
    weights, gradients = WEIGHT_BYTES * whole.params, WEIGHT_BYTES * whole.trained
    working = needed - whole.state_bytes
    passes = 1
    if away == 0:
        where, moved = "all in the cards' memory", 0.0
    elif weights + gradients + working <= cards.memory_bytes:
        where, moved = f"{away / 1e9:,.0f} GB of optimizer state on the host", max(weights, gradients)
    else:
        passes = ceil(case.sequences / max(cards.memory_bytes // working, 1) / cards.count)
        where, moved = f"weights on the host, {plural(passes, 'pass')}", passes * max(2 * weights, gradients)
    batch_s = max(computing_s, moved / cards.host_bytes_per_s)
    return Outcome(
        system=name,
        fits=True,
        reason=f"{plural(cards.count, cards.card.name)} at {cards.card.mfu:.3g} of the peak, {where}",
        batch_s=batch_s,
        down_bytes=0.0,
        up_bytes=0.0,
        memory_bytes=min(needed, cards.memory_bytes) / cards.count,
        devices_used=cards.count,
        recovery_s=fact("bamboo_instance_s") + batch_s / 2,
        detail={"boundless_memory_s": computing_s, "mfu": cards.card.mfu, "passes": passes, "recovery": "restart"},
    )


def _needed_bytes(case: Case, count: int) -> float:
    """Bytes of the whole model, and of one sequence on each card with recomputation."""
    working = case.activation_bytes(case.shape.layers, case.sequence, recompute=True) + case.logit_bytes(case.sequence)
    return case.whole.state_bytes + count * working
