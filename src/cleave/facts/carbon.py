"""The fact tables that carbon bills rest on, as `core.carbon` wants them."""

from __future__ import annotations

from cleave.core.carbon.facts import CarbonFacts
from cleave.facts import table


def carbon_facts() -> CarbonFacts:
    return CarbonFacts(
        devices=table("devices"),
        intensity=table("carbon_intensity"),
        codes=table("country_codes"),
        network=table("network_energy"),
        pue=table("pue"),
        cloud=table("cloud"),
        defaults=table("carbon_defaults"),
        evidence=table("carbon_facts"),
    )
