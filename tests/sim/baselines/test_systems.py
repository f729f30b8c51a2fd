"""What holds for every rival: names, closed forms, digits, and settings that do not fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cleave.api.planning import sample_fleet
from cleave.cli.main import main
from cleave.core.cost.resident import effective_flops_per_s
from cleave.core.cost.terms import lean_terms
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.shapes import named
from cleave.core.plan.rivals.case import Case
from cleave.sim.baselines import SYSTEMS
from cleave.sim.baselines.work import case_of
from cleave.sim.names import RIVALS
from cleave.sim.setting import Setting

DEVICES = [name for name in RIVALS if name.split("-")[0] not in ("a100", "h100")]
RESIDENT = [name for name in DEVICES if name != "cleave-2d"]
CLOUD = [name for name in RIVALS if name not in DEVICES]
FLEETS = Path(__file__).parents[3] / "benchmarks" / "fleets"


def fleet(count: int, *, flops: float = 1e12, link: float = 1e16, latency_s: float = 0.0) -> Profiles:
    return Profiles(
        names=tuple(f"d{number}" for number in range(count)),
        flops_per_s=np.full(count, flops),
        down_bytes_per_s=np.full(count, link),
        up_bytes_per_s=np.full(count, link),
        latency_s=np.full(count, latency_s),
        memory_bytes=np.full(count, 64e9),
    )


def setting(profiles: Profiles, *, model: str = "opt-125m", sequences: int = 16, seed: int = 0) -> Setting:
    return Setting(model=named(model), tokens=1024 * sequences, sequence=1024, profiles=profiles, seed=seed)


def computing_s(case: Case, *, recompute: bool) -> float:
    speed = effective_flops_per_s(case.profiles.flops_per_s, 1024, lean_terms("bf16"))
    return sum(case.step_flops(recompute=recompute)) / float(speed.sum())


def test_every_name_has_its_system() -> None:
    assert tuple(SYSTEMS) == RIVALS


@pytest.mark.parametrize("name", RIVALS)
def test_outcomes_are_complete_and_the_same_seed_gives_the_same_digits(name: str) -> None:
    profiles = sample_fleet("phone=24,laptop=12,desktop=4", country="us", seed=3)
    one, again = (SYSTEMS[name](setting(profiles, sequences=32, seed=7)) for _ in range(2))
    assert one.fits, one.reason
    assert one.system == name
    assert one.reason
    assert one.batch_s is not None
    assert one.batch_s > 0
    assert one.recovery_s is not None
    assert one.recovery_s > 0
    assert one.memory_bytes is not None
    assert one.down_bytes is not None
    assert one.up_bytes is not None
    assert one.detail["recovery"]
    if name in DEVICES:
        assert 0 < one.memory_bytes <= profiles.memory_bytes.max()
        assert 0 < one.devices_used <= 40
    for field in ("batch_s", "down_bytes", "up_bytes", "memory_bytes", "devices_used", "recovery_s", "detail"):
        assert getattr(one, field) == getattr(again, field)


@pytest.mark.parametrize("name", [name for name in RESIDENT if name != "gpipe"])
def test_one_device_takes_the_time_of_its_flops(name: str) -> None:
    chosen = setting(fleet(1))
    found = SYSTEMS[name](chosen)
    assert found.fits, found.reason
    expected_s = computing_s(case_of(chosen), recompute=name == "dtfm")  # which always recomputes
    assert found.batch_s == pytest.approx(expected_s, rel=1e-6)
    assert found.down_bytes == found.up_bytes == 0


@pytest.mark.parametrize("name", DEVICES)
def test_boundless_links_leave_computing_and_a_bubble(name: str) -> None:
    chosen = setting(fleet(4))
    found = SYSTEMS[name](chosen)
    assert found.batch_s is not None
    least_s = computing_s(case_of(chosen), recompute=name == "dtfm")
    if name == "cleave-2d":  # attention is counted without a mask there, and reading of weights is not
        least_s *= 0.9
    assert least_s * (1 - 1e-9) <= found.batch_s <= 1.6 * least_s


@pytest.mark.parametrize("name", DEVICES)
def test_latency_and_slower_links_only_add_time(name: str) -> None:
    near, far, slow = (
        SYSTEMS[name](setting(profiles)).batch_s
        for profiles in (fleet(4, link=1e8), fleet(4, link=1e8, latency_s=0.2), fleet(4, link=2e6))
    )
    assert near is not None
    assert far is not None
    assert slow is not None
    assert near <= far
    assert near < slow


@pytest.mark.parametrize("name", DEVICES)
def test_what_does_not_fit_says_what_it_needs_and_what_there_is(name: str) -> None:
    profiles = replace(fleet(4), memory_bytes=np.full(4, 30e3 if name == "cleave-2d" else 30e6))
    found = SYSTEMS[name](setting(profiles))
    assert not found.fits
    assert found.batch_s is None
    if name == "cleave-2d":
        assert "30000 bytes" in found.reason
    else:
        assert "0.03 GB" in found.reason
        assert len(re.findall(r"[\d.,]+ GB", found.reason)) >= 2


@pytest.mark.parametrize("name", CLOUD)
def test_the_cloud_does_not_depend_on_the_fleet(name: str) -> None:
    one, other = (SYSTEMS[name](setting(profiles)) for profiles in (fleet(1), fleet(9, link=1e5)))
    assert one.batch_s == other.batch_s


def test_the_command_line_compares_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["simulate", "--model", "opt-125m", "--tokens", "4096", "--fleet", str(FLEETS / "home4.csv")]
    assert main([*usual, "--method", "law", "--systems", "all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["systems"]
    assert list(found) == ["cleave", *RIVALS]
    assert all(one["fits"] for one in found.values())
    assert main([*usual, "--method", "law", "--systems", "gpipe,cleave"]) == 0
    assert "gpipe" in capsys.readouterr().out
    assert main([*usual, "--systems", "gpip"]) == 2
    assert "did you mean gpipe" in capsys.readouterr().err
