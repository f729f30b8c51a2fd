"""The carbon bill of some work on a fleet: its footprint, the same work on cloud GPUs, and all it rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cleave.core.carbon.cloud import CARDS, cloud_card, cloud_footprint
from cleave.core.carbon.energy import Use, awake_idle, footprint
from cleave.core.carbon.facts import CarbonFacts
from cleave.core.carbon.footprint import Assumption, Comparison, Footprint, Part
from cleave.core.carbon.power import DevicePower, ServerPower, device_power, most_common_country, server_power
from cleave.core.fleet.profiles import Profiles


class CloudBill(NamedTuple):
    """The same work on one kind of cloud GPU."""

    gpu: str
    gpu_s: float
    """GPU seconds, of all cards together."""
    footprint: Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    footprint: Footprint
    kept_awake: Part
    """Idle energy to add if the devices would be asleep or off without the work."""
    clouds: tuple[CloudBill, ...]
    assumptions: tuple[Assumption, ...]
    evidence: tuple[Assumption, ...]
    """What others published on training on phones against the cloud, whatever this bill says."""

    def compared_with(self, cloud: CloudBill) -> Comparison:
        return self.footprint.compared_with(cloud.footprint)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FleetPower:
    """A fleet and its server, with the power of both."""

    profiles: Profiles
    facts: CarbonFacts
    devices: DevicePower
    server: ServerPower
    assumptions: tuple[Assumption, ...]

    def footprint(self, use: Use) -> Footprint:
        return footprint(use, self.devices, self.server)

    def bill(self, use: Use, flops: float) -> Bill:
        """The bill of so many model FLOPs, for which the fleet was used like this."""
        pue = self.facts.cloud_pue()
        grid = self.facts.kgco2e_per_kwh(most_common_country(self.profiles))
        clouds: list[CloudBill] = []
        notes = [
            *self.assumptions,
            Assumption("PUE of the cloud", f"{pue.value:g}", pue.source),
            Assumption("grid of the cloud", f"{grid.value:.3g} kgCO2e/kWh", "assumption: that of the server"),
        ]
        for name in CARDS:
            card, stated = cloud_card(self.facts, name)
            emitted = cloud_footprint(flops, card, pue=pue.value, kgco2e_per_kwh=grid.value)
            clouds.append(CloudBill(name, card.gpu_s(flops), emitted))
            notes += stated
        return Bill(
            footprint=self.footprint(use),
            kept_awake=awake_idle(use, self.devices),
            clouds=tuple(clouds),
            assumptions=tuple(notes),
            evidence=self.facts.counter_evidence(),
        )


def fleet_power(profiles: Profiles, facts: CarbonFacts, *, server_watts: float | None = None) -> FleetPower:
    devices, of_devices = device_power(profiles, facts)
    server, of_server = server_power(profiles, facts, watts=server_watts)
    return FleetPower(
        profiles=profiles, facts=facts, devices=devices, server=server, assumptions=(*of_devices, *of_server)
    )
