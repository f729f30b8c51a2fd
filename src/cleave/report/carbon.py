"""The carbon bill of a plan: lines for people, and the keys `objective` and `footprint` of JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from cleave.core.carbon.bill import Bill
from cleave.core.carbon.footprint import Assumption, Footprint, Part
from cleave.core.plan.objective import Chosen
from cleave.core.plan.usage import Plan
from cleave.report.plain import plain_console
from cleave.report.plan_words import devices_text
from cleave.report.quantities import seconds, si


class PartJson(TypedDict):
    energy_j: float
    kgco2e: float


class AssumptionJson(TypedDict):
    what: str
    value: str
    source: str
    column: str


class CloudJson(PartJson):
    gpu: str
    gpu_s: float
    embodied_kgco2e: float
    energy_ratio: float
    kgco2e_ratio: float


class FootprintJson(PartJson):
    devices: PartJson
    network: PartJson
    server: PartJson
    embodied_kgco2e: float
    kept_awake: PartJson
    cloud: list[CloudJson]
    assumptions: list[AssumptionJson]
    evidence: list[AssumptionJson]


class ObjectiveJson(TypedDict):
    name: str
    devices: int
    seconds: float
    fastest_s: float
    fastest_energy_j: float
    fastest_kgco2e: float


class BilledJson(TypedDict):
    objective: ObjectiveJson
    footprint: FootprintJson


def as_json(chosen: Chosen[Plan]) -> BilledJson:
    return {
        "objective": {
            "name": chosen.objective,
            "devices": len(chosen.profiles),
            "seconds": chosen.plan_s,
            "fastest_s": chosen.fastest_s,
            "fastest_energy_j": chosen.fastest.energy_j,
            "fastest_kgco2e": chosen.fastest.kgco2e,
        },
        "footprint": bill_json(chosen.bill),
    }


def bill_json(bill: Bill) -> FootprintJson:
    """A bill with everything it rests on; ratios say how many times as much as the cloud."""
    whole = bill.footprint
    return {
        "energy_j": whole.energy_j,
        "kgco2e": whole.kgco2e,
        "devices": _part(whole.devices),
        "network": _part(whole.network),
        "server": _part(whole.server),
        "embodied_kgco2e": whole.embodied_kgco2e,
        "kept_awake": _part(bill.kept_awake),
        "cloud": [
            {
                "gpu": cloud.gpu,
                "gpu_s": cloud.gpu_s,
                "energy_j": cloud.footprint.energy_j,
                "kgco2e": cloud.footprint.kgco2e,
                "embodied_kgco2e": cloud.footprint.embodied_kgco2e,
                "energy_ratio": ratio.energy,
                "kgco2e_ratio": ratio.kgco2e,
            }
            for cloud in bill.clouds
            for ratio in [bill.compared_with(cloud)]
        ],
        "assumptions": _assumptions(bill.assumptions),
        "evidence": _assumptions(bill.evidence),
    }


def _part(part: Part) -> PartJson:
    return {"energy_j": part.energy_j, "kgco2e": part.kgco2e}


def _assumptions(of: Iterable[Assumption]) -> list[AssumptionJson]:
    return [{"what": one.what, "value": one.value, "source": one.source, "column": one.column} for one in of]


def show(chosen: Chosen[Plan]) -> None:
    """Print what the objective cost, the footprint, the cloud beside it, and what the fleet file did not say."""
    console = plain_console()
    bill = chosen.bill
    if chosen.objective != "time":
        before = chosen.fastest
        console.print(
            f"objective {chosen.objective}: {devices_text(len(chosen.profiles))} of "
            f"{len(chosen.profiles) + len(chosen.left_out):,}; {seconds(chosen.plan_s)} instead of "
            f"{seconds(chosen.fastest_s)} with all ({chosen.plan_s / chosen.fastest_s:.3g} times the time), "
            f"{si(bill.footprint.energy_j, 'J')} instead of {si(before.energy_j, 'J')}, "
            f"{grams(bill.footprint.kgco2e)} instead of {grams(before.kgco2e)}"
        )
    console.print(f"energy {footprint_text(bill.footprint)}")
    clouds = "; ".join(
        f"{cloud.gpu} {si(cloud.footprint.energy_j, 'J')}, {grams(cloud.footprint.kgco2e)}" for cloud in bill.clouds
    )
    ratios = [bill.compared_with(cloud) for cloud in bill.clouds]
    energies, emissions = (" and ".join(f"{float(f'{ratio[i]:.3g}'):,g}" for ratio in ratios) for i in (0, 1))
    console.print(
        f"the same work in the cloud: {clouds}; this fleet takes {energies} times the energy and emits {emissions} "
        "times as much"
    )
    defaults = [one for one in bill.assumptions if one.column]
    if defaults:
        columns = ", ".join(dict.fromkeys(one.column for one in defaults))
        values = "; ".join(f"{one.what} {one.value}" for one in defaults)
        console.print(f"the fleet file leaves out some of {columns}; assumed: {values}")
    published = "; ".join(f"{fact.what}: {fact.value}" for fact in bill.evidence)
    console.print(f"published counter-evidence ({bill.evidence[0].source}): {published}; --json lists every assumption")


def footprint_text(footprint: Footprint) -> str:
    """A footprint in one line: joules, then emissions."""
    return (
        f"{si(footprint.energy_j, 'J')}: devices {si(footprint.devices.energy_j, 'J')} above idle, network "
        f"{si(footprint.network.energy_j, 'J')}, server {si(footprint.server.energy_j, 'J')}; "
        f"{grams(footprint.kgco2e)}, {grams(footprint.embodied_kgco2e)} of it embodied"
    )


def grams(kgco2e: float) -> str:
    """Format emissions in kg or g."""
    return si(kgco2e, "kg CO2e") if kgco2e >= 1 else si(kgco2e * 1e3, "g CO2e")
