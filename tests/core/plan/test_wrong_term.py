"""The wrong term of a prediction is found, whichever it is, and named with its device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.stacks import decoder

from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.choose import PassWork, Setting, plan_pass, replan_pass
from cleave.core.plan.wrong_term import Terms, wrong_term

WORK = PassWork(
    decoder(hidden=128, head_dim=32, inner=768, words=512).decoder, sequences=8, sequence=64, is_trained=True
)
SETTING = Setting(wire="fp32")
SERVER = Server(task_s=1e-4, byte_s=1e-10)
NAMES = ("ann", "bob", "eve")


def profiles(flops_per_s: float = 1e10, rate: float = 20e6) -> Profiles:
    many = np.ones(len(NAMES))
    return Profiles(
        names=NAMES,
        flops_per_s=flops_per_s * many,
        down_bytes_per_s=rate * many,
        up_bytes_per_s=rate * many,
        latency_s=0.001 * many,
        memory_bytes=1e9 * many,
        task_s=0.001 * many,
    )


def told(measured: Profiles, server: Server = SERVER, assumed: Profiles | None = None) -> str:
    assumed = assumed or profiles()
    setting = replace(SETTING, server=SERVER)
    plan = plan_pass(WORK, assumed, setting)

    def judge(terms: Terms) -> float | None:
        again = replan_pass(WORK, terms.profiles, replace(setting, server=terms.server), plan)
        return None if again is None else again.step_s

    return wrong_term(Terms(profiles=assumed, server=SERVER), Terms(profiles=measured, server=server), judge)


def slower(column: str, factor: float, *devices: str) -> Profiles:
    base = profiles()
    values = getattr(base, column) * np.array([factor if name in devices else 1.0 for name in NAMES])
    return replace(base, **{column: values})


@pytest.mark.parametrize(
    ("column", "factor", "words"),
    [
        ("flops_per_s", 0.05, ("computes", "0.5 GFLOP/s, not 10")),
        ("down_bytes_per_s", 0.02, ("downlink", "3.2 Mbit/s, not 160")),
        ("up_bytes_per_s", 0.02, ("uplink", "3.2 Mbit/s, not 160")),
        ("latency_s", 500.0, ("round trip", "500 ms, not 1")),
        ("task_s", 500.0, ("task", "500 ms", "not 1")),
    ],
)
def test_the_wrong_term_of_one_device_is_named(column: str, factor: float, words: tuple[str, ...]) -> None:
    assumed = profiles()
    plan = plan_pass(WORK, assumed, replace(SETTING, server=SERVER))
    device = plan.stages[0].devices[0]
    sentence = told(slower(column, factor, device))
    assert device in sentence
    assert all(word in sentence for word in words), sentence
    assert "other devices" not in sentence


def test_where_many_devices_are_off_the_sentence_says_so() -> None:
    sentence = told(slower("flops_per_s", 0.05, *NAMES))
    assert "computes at 0.5 GFLOP/s, not 10" in sentence


def test_the_servers_own_cost_of_a_task_is_a_term() -> None:
    assert "server 50 ms, not 0.1" in told(profiles(), replace(SERVER, task_s=0.05))


def test_a_medium_that_nobody_knew_of_is_a_term() -> None:
    found = replace(profiles(), medium=("wifi",) * 3, medium_bytes_per_s=np.full(3, 1e6))
    assert told(found) == "all devices share a medium of 8 Mbit/s"


def test_what_is_as_assumed_or_better_explains_nothing() -> None:
    assert told(profiles()) == ""
    assert told(profiles(flops_per_s=2e10, rate=40e6)) == ""


def test_nothing_is_said_of_a_plan_whose_devices_have_left() -> None:
    assert told(profiles().take(np.array([0, 1]))) == ""
