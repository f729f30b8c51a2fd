"""Manners of recovery, each by hand: a batch of 100 s, 5 s to fill pipelines again, links of 1 MB/s."""

from __future__ import annotations

import numpy as np
import pytest

from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.core.model.gemms import Gemm
from cleave.core.plan.gemm.product import plan_gemm
from cleave.sim.baselines import recovery
from cleave.sim.baselines.recovery import Loss


def loss(*moved_mb: float, server: Server | None = None) -> Loss:
    return Loss(
        batch_s=100.0,
        fill_s=5.0,
        moved_bytes=1e6 * np.array(moved_mb or (10.0, 30.0)),
        link_bytes_per_s=1e6,
        server=server or Server(),
    )


def test_a_trained_parameter_moves_in_twelve_bytes_and_a_frozen_one_in_two() -> None:
    assert recovery.moved_bytes(np.array([10.0]), np.array([4.0])).tolist() == [2 * 6 + 12 * 4]


def test_a_restart_waits_loads_and_does_half_a_batch_again() -> None:
    assert recovery.checkpoint_restart(loss()) == 30 + 50 + 20 + 5  # a rendezvous, half a batch, mean of 10 and 30 MB


def test_varuna_waits_longer_and_loads_everywhere_at_once() -> None:
    assert recovery.varuna(loss()) == 60 + 50 + 30 + 5  # the largest stage
    slow = Server(down_bytes_per_s=0.5e6)
    assert recovery.varuna(loss(server=slow)) == 60 + 50 + 80 + 5  # all 40 MB from the server


def test_bamboo_loses_nothing_but_runs_slower() -> None:
    assert recovery.bamboo(loss()) == 20 + 0.5 * 50


def test_oobleck_copies_from_a_replica_without_waiting() -> None:
    assert recovery.oobleck(loss()) == 50 + 20 + 5


def test_peers_of_a_swarm_take_over_the_share_of_the_lost_one() -> None:
    # w = 0.2 and 0.8: 100 x 0.25 = 25 and min(400, 150 + 50 + 30 = 230); their mean
    assert recovery.swarm(loss(), np.array([0.2, 0.8])) == pytest.approx((25 + 230) / 2)
    # alone in its stage: half the 300 s between rebalancings, its state, half a batch
    assert recovery.swarm(loss(40.0), np.array([1.0])) == 150 + 40 + 50


def test_averaging_peers_do_the_samples_of_the_lost_one_again() -> None:
    # 80 s of computing x (1/3, 1), and a timeout of 60 s with a chance of 20 in 100
    shares: Floats = np.array([0.25, 0.5])
    assert recovery.averaging(loss(), shares, 20.0) == pytest.approx((80 / 3 + 80) / 2 + 12)
    assert recovery.averaging(loss(1.0), np.array([1.0]), 0.0) == 50


def test_asteroid_moves_layers_only_of_stages_without_mates() -> None:
    assert recovery.asteroid(loss(), np.array([True, True])) == 50 + 5
    assert recovery.asteroid(loss(), np.array([True, False])) == 50 + 15 + 5


def test_cleave_redoes_one_block_and_cannot_without_another_device() -> None:
    def fleet(count: int) -> Profiles:
        return Profiles(
            names=tuple(f"d{number}" for number in range(count)),
            flops_per_s=np.full(count, 1e9),
            down_bytes_per_s=np.full(count, 1e7),
            up_bytes_per_s=np.full(count, 1e7),
            latency_s=np.zeros(count),
            memory_bytes=np.full(count, 1e9),
        )

    gemm, many = Gemm(m=1024, n=1024, k=1024), fleet(16)
    plan = plan_gemm(many, gemm, split="2d")
    seconds = recovery.cleave(plan, many)
    assert seconds is not None
    # a sixteenth of the work over fifteen helpers, who receive more than their own strips' share
    assert plan.makespan_s / 15 * 0.9 < seconds < plan.makespan_s
    assert recovery.cleave(plan_gemm(fleet(1), gemm, split="2d"), fleet(1)) is None
