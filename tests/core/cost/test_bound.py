"""Laws of the lower bounds: their values, what they bound, and how they change with the fleet."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import fleets
from tests.support.grids import examples

from cleave.core.cost.bound import bound_2d, bound_3d, by_worth, ideal_overlap_bound, least_time, volume_within
from cleave.core.cost.gemm import area_within, finish_s, unit_costs
from cleave.core.cost.rates import Server
from cleave.core.cost.wire import WIRE_BYTES, WireFormat
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.gemms import Gemm

wires = st.sampled_from(fleets.WIRES)
ROOMY = ("usual", "wild", "narrow", "twins", "mixed")
TOLERANCE = 3e-6  # of the bisection on the logarithm of time


def scalar_bound_2d_s(fleet: Profiles, gemm: Gemm, wire: WireFormat) -> float:
    """2D bound by plain bisection, device by device, ignoring memory."""
    size, short, long = WIRE_BYTES[wire], min(gemm.m, gemm.n), max(gemm.m, gemm.n)

    def area(i: int, t: float) -> float:
        tau = t - fleet.latency_s[i]
        if tau <= 0:
            return 0.0
        al = size * gemm.k / fleet.down_bytes_per_s[i]
        be = max(2 * gemm.k / fleet.flops_per_s[i], size / fleet.up_bytes_per_s[i])

        def finish(rows: float, cols: float) -> float:
            d, m = al * (rows + cols), be * rows * cols
            return d if d >= 2 * m else m + d * d / (4 * m)

        if finish(short, short) > tau:
            side = _largest(lambda s: finish(s, s) <= tau, short)
            return side * side
        return short * _largest(lambda s: finish(short, s) <= tau, long)

    low, high = 0.0, 1.0
    target = gemm.m * gemm.n
    while sum(area(i, high) for i in range(len(fleet))) < target * (1 - 1e-12):
        low, high = high, high * 2
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        done = sum(area(i, middle) for i in range(len(fleet))) >= target * (1 - 1e-12)
        low, high = (low, middle) if done else (middle, high)
    return high


def _largest(holds, most: float) -> float:
    if holds(most):
        return float(most)
    low, high = 0.0, float(most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@settings(max_examples=examples(15))
@given(fleets.fleets(most=4, kinds=("usual", "wild", "narrow")), fleets.gemms(), wires)
def test_the_2d_bound_agrees_with_plain_bisection(fleet: Profiles, gemm: Gemm, wire: WireFormat) -> None:
    unit = unit_costs(fleet, wire, Server()).with_boundless_memory()
    assert bound_2d(unit, gemm, Server()) == pytest.approx(scalar_bound_2d_s(fleet, gemm, wire), rel=1e-5)


@settings(max_examples=examples(12))
@given(fleets.fleets(most=20, kinds=ROOMY), fleets.gemms(), wires, fleets.servers)
def test_more_freedom_never_raises_a_bound(fleet: Profiles, gemm: Gemm, wire: WireFormat, server: Server) -> None:
    """Freedom to split the inner dimension, no server cap, complete overlap."""
    unit = unit_costs(fleet, wire, server).with_boundless_memory()
    flat, deep = bound_2d(unit, gemm, Server()), bound_3d(unit, gemm, Server())
    assert deep <= flat * (1 + TOLERANCE)
    assert ideal_overlap_bound(unit, gemm) <= deep * (1 + TOLERANCE)
    assert bound_2d(unit, gemm, server) >= flat * (1 - TOLERANCE)
    assert bound_3d(unit, gemm, server) >= deep * (1 - TOLERANCE)


@settings(max_examples=examples(10))
@given(fleets.fleets(most=20), fleets.gemms(), wires, st.integers(0, 2**31))
def test_bounds_fall_when_the_fleet_gets_better(fleet: Profiles, gemm: Gemm, wire: WireFormat, seed: int) -> None:
    up = np.random.default_rng(seed).uniform(1, 2, (5, len(fleet)))
    better = fleets.of(
        fleet.flops_per_s * up[0],
        fleet.down_bytes_per_s * up[1],
        fleet.up_bytes_per_s * up[2],
        fleet.latency_s / up[3],
        fleet.memory_bytes * up[4],
    )
    old, new = (unit_costs(x, wire, Server()) for x in (fleet, better))
    assert bound_2d(new, gemm, Server()) <= bound_2d(old, gemm, Server()) * (1 + TOLERANCE)
    assert bound_3d(new, gemm, Server()) <= bound_3d(old, gemm, Server()) * (1 + TOLERANCE)


@settings(max_examples=examples(8))
@given(fleets.fleets(most=20), fleets.gemms(), st.floats(1, 10), fleets.servers)
def test_a_wider_server_link_never_raises_a_bound(fleet: Profiles, gemm: Gemm, factor: float, server: Server) -> None:
    unit = unit_costs(fleet, "bf16", server)
    wider = Server(
        down_bytes_per_s=server.down_bytes_per_s * factor,
        up_bytes_per_s=server.up_bytes_per_s * factor,
        flops_per_s=server.flops_per_s,
    )
    assert bound_2d(unit, gemm, wider) <= bound_2d(unit, gemm, server) * (1 + TOLERANCE)
    assert bound_3d(unit, gemm, wider) <= bound_3d(unit, gemm, server) * (1 + TOLERANCE)


@settings(max_examples=examples(25))
@given(st.floats(0, 0.5), st.integers(1, 500), st.integers(1, 500), st.integers(1, 500), wires)
def test_the_bound_of_a_single_device_is_its_time_for_the_whole_gemm(
    latency: float, m: int, n: int, k: int, wire: WireFormat
) -> None:
    """In 2D there is no alternative, and in 3D neither, since one device computes one block."""
    gemm = Gemm(m=m, n=n, k=k)
    unit = unit_costs(fleets.one(latency=latency, memory=1e12), wire, Server())
    alone = finish_s(unit, np.array([float(m)]), np.array([float(n)]), float(k))[0]
    assert bound_2d(unit, gemm, Server()) == pytest.approx(alone, rel=1e-5)
    assert bound_3d(unit, gemm, Server()) == pytest.approx(alone, rel=1e-5)


@settings(max_examples=examples(25))
@given(fleets.fleets(most=10, kinds=ROOMY), fleets.gemms(), fleets.servers)
def test_the_server_link_bounds_the_whole_output(fleet: Profiles, gemm: Gemm, server: Server) -> None:
    """A server without a block of its own receives the output once and sends each operand at least once."""
    capped = Server(down_bytes_per_s=server.down_bytes_per_s, up_bytes_per_s=server.up_bytes_per_s)
    unit = unit_costs(fleet, "bf16", capped)
    ingress_s = 2 * gemm.m * gemm.n / capped.up_bytes_per_s
    egress_s = 2 * gemm.k * 2 * np.sqrt(float(gemm.m) * gemm.n) / capped.down_bytes_per_s
    assert bound_2d(unit, gemm, capped) >= max(ingress_s, egress_s) * (1 - TOLERANCE)
    assert bound_3d(unit, gemm, capped) >= ingress_s * (1 - TOLERANCE)


@settings(max_examples=examples(100))
@given(fleets.fleets(most=3), fleets.gemms(), wires, st.floats(-3, 3), st.integers(0, 2**31))
def test_no_block_within_the_deadline_exceeds_volume_within(
    fleet: Profiles, gemm: Gemm, wire: WireFormat, log_deadline: float, seed: int
) -> None:
    unit, deadline = unit_costs(fleet, wire, Server()).with_boundless_memory(), 10.0**log_deadline
    most = volume_within(unit, deadline, gemm)
    short, long = float(min(gemm.m, gemm.n)), float(max(gemm.m, gemm.n))
    for thickness in np.exp(np.random.default_rng(seed).uniform(0, np.log(gemm.k), 50)):
        volume = thickness * area_within(unit, deadline, short, long, thickness)
        assert (volume <= most * (1 + 1e-3) + 1e-9).all()


@settings(max_examples=examples(25))
@given(fleets.fleets(most=30), fleets.gemms(), st.floats(-2, 3))
def test_devices_are_ranked_by_area_and_useless_ones_dropped(fleet: Profiles, gemm: Gemm, log_deadline: float) -> None:
    server = Server(flops_per_s=1e9)
    unit, deadline = unit_costs(fleet, "bf16", server), 10.0**log_deadline
    ranked = by_worth(unit, gemm, deadline)
    short, long = float(min(gemm.m, gemm.n)), float(max(gemm.m, gemm.n))
    areas = area_within(unit, deadline, short, long, gemm.k)
    assert set(ranked.tolist()) == set(np.flatnonzero(areas > 0).tolist())
    assert ranked[0] == len(fleet)  # the server itself, whose bytes are free
    assert (np.diff(areas[ranked[1:]]) <= 0).all()


@given(st.floats(-6, 6), st.floats(0.6, 3), st.floats(0, 10))
def test_least_time_inverts_an_increasing_function(log_target: float, power: float, delay: float) -> None:
    target = 10.0**log_target
    found = least_time(lambda t: max(t - delay, 0.0) ** power, target)
    assert found == pytest.approx(delay + target ** (1 / power), rel=TOLERANCE)


@pytest.mark.parametrize("most", [1.0, 1.5, math.inf], ids=["just-enough", "more", "boundless"])
@pytest.mark.parametrize("after_s", [0.0, 2e-4, 0.3])
@given(log_share=st.floats(-6, 3), power=st.floats(0.5, 3))
def test_least_time_takes_few_evaluations_also_where_just_enough_can_be_done(
    most: float, after_s: float, log_share: float, power: float
) -> None:
    exact_s = after_s + 10.0**log_share
    asked: list[float] = []

    def work(t: float) -> float:
        asked.append(t)
        return min((max(t - after_s, 0.0) / (exact_s - after_s)) ** power, most) if t > after_s else 0.0

    found = least_time(work, 1.0, after_s=after_s)
    assert exact_s * (1 - 1.01e-6) <= found <= exact_s * (1 + 1e-12)
    brackets = abs(log_share + 3) / math.log10(4)
    assert len(asked) <= brackets + 20


def test_work_that_is_never_enough_takes_forever() -> None:
    assert least_time(lambda t: 1 - 1 / (1 + t), 2.0) == np.inf
