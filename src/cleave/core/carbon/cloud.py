"""The footprint of the same work on cloud GPUs.

    gpu_s      FLOPs / (peak FLOP/s x MFU), of all GPUs together
    energy     TDP x power share x PUE x gpu_s
    embodied   embodied kgCO2e x gpu_s / lifetime

Hosts, switches and storage are left out, and so is the traffic to and from the cloud: all in favor of the cloud.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cleave.core.carbon.energy import emitted
from cleave.core.carbon.facts import CarbonFacts, first_number
from cleave.core.carbon.footprint import Assumption, Footprint

CARDS: Final = ("A100 SXM4", "H100 SXM")


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudCard:
    """A datacenter GPU and the utilization that training reaches on it."""

    name: str
    peak_flops_per_s: float
    mfu: float
    """Model FLOPs utilization: the share of the peak that counts."""
    tdp_w: float
    power_share: float
    """Mean power over TDP."""
    embodied_kgco2e: float
    lifetime_s: float

    def gpu_s(self, flops: float) -> float:
        return flops / (self.peak_flops_per_s * self.mfu)


def cloud_card(facts: CarbonFacts, name: str) -> tuple[CloudCard, tuple[Assumption, ...]]:
    (row,) = (row for row in facts.cloud if row["gpu"] == name)
    share, lifetime = facts.default("power_share", "gpu"), facts.default("lifetime_h", "gpu")
    card = CloudCard(
        name=name,
        peak_flops_per_s=float(row["fp16_dense_peak_tflops"]) * 1e12,
        mfu=first_number(row["typical_mfu"]),
        tdp_w=float(row["tdp_w"]),
        power_share=share.value,
        embodied_kgco2e=first_number(row["embodied_kgco2e"]),
        lifetime_s=lifetime.value * 3600,
    )
    return card, (
        Assumption(f"MFU on {name}", f"{card.mfu:.3g}", row["typical_mfu"]),
        Assumption(f"power of {name}", f"{card.tdp_w * card.power_share:g} W", f"TDP, {row['source']}; {share.source}"),
        Assumption(f"embodied carbon of {name}", f"{card.embodied_kgco2e:g} kgCO2e", row["embodied_kgco2e"]),
        Assumption(f"lifetime of {name}", f"{lifetime.value:g} h", lifetime.source),
    )


def cloud_footprint(flops: float, card: CloudCard, *, pue: float, kgco2e_per_kwh: float) -> Footprint:
    gpu_s = card.gpu_s(flops)
    energy_j = card.tdp_w * card.power_share * pue * gpu_s
    return Footprint(
        devices=emitted(np.array([energy_j]), np.array([kgco2e_per_kwh])),
        embodied_kgco2e=card.embodied_kgco2e * gpu_s / card.lifetime_s,
    )
