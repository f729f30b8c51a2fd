"""Advice names what would make a step faster, and only that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.stacks import decoder

from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.advice import advise
from cleave.core.plan.choose import Local, PassWork, Setting, choose_pass

WORK = PassWork(
    decoder(hidden=128, head_dim=32, inner=768, words=512).decoder, sequences=8, sequence=64, is_trained=True
)


def profiles(flops_per_s: float, rate: float) -> Profiles:
    many = np.ones(3)
    return Profiles(
        names=("ann", "bob", "eve"),
        flops_per_s=flops_per_s * many,
        down_bytes_per_s=rate * many,
        up_bytes_per_s=rate * many,
        latency_s=0.001 * many,
        memory_bytes=1e9 * many,
    )


def by_planner(fleet: Profiles) -> float | None:
    return choose_pass(WORK, fleet, Setting(wire="fp32"), Local(), must=True).modeled_s


def test_more_devices_help_where_devices_compute_for_long() -> None:
    fleet = profiles(flops_per_s=1e8, rate=1e9)
    (advice,) = advise(fleet, by_planner)
    names = (*fleet.names, "copy 1", "copy 2")
    before_s, after_s = by_planner(fleet), by_planner(fleet.take(np.array([0, 1, 2, 1, 1]), names))
    assert before_s is not None
    assert after_s is not None
    assert advice.change == pytest.approx(after_s / before_s - 1)
    assert advice.change < -0.2


def test_a_device_that_all_wait_for_is_named() -> None:
    fleet = profiles(flops_per_s=1e9, rate=1e7)
    fleet = replace(fleet, up_bytes_per_s=np.array([1e7, 1e4, 1e7]))
    told = advise(fleet, lambda one: float(1 / one.up_bytes_per_s.min()))
    assert ["bob" in advice.text for advice in told] == [True]


def test_nothing_is_said_where_nothing_changes_or_nobody_can_tell() -> None:
    fleet = profiles(flops_per_s=1e9, rate=1e7)
    assert advise(fleet, lambda _: 1.0) == ()
    assert advise(fleet, lambda _: None) == ()
    assert advise(fleet, lambda one: 1.0 if len(one) == 3 else None) == ()
