"""Laws of the cost of a block: the streamed formula, its inverses, its memory, and the best blocks."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support import fleets

from cleave.core.cost.gemm import (
    Frame,
    UnitCosts,
    area_within,
    best_inner,
    block_memory_bytes,
    finish_s,
    inner_within,
    limiting,
    reach,
    reach_and_slopes,
    rows_that_fit,
    rows_within,
    transfers_bytes,
    unit_costs,
)
from cleave.core.cost.rates import Server
from cleave.core.cost.wire import WIRE_BYTES, WireFormat
from cleave.core.fleet.profiles import Profiles

wires = st.sampled_from(fleets.WIRES)
sides = st.floats(0.0, 4.5).map(lambda x: 10.0**x)
FRAMES: tuple[Frame, ...] = ("inner-side-side", "side-inner-side", "side-side-inner")


def costs(fleet: Profiles, wire: WireFormat = "bf16", server: Server | None = None) -> UnitCosts:
    return unit_costs(fleet, wire, server or Server())


def scalar_finish_s(fleet: Profiles, i: int, wire: WireFormat, rows: float, cols: float, inner: float) -> float:
    """Finish time of one device by the cost model's formula, straight from its profile."""
    size = WIRE_BYTES[wire]
    down = size * inner * (rows + cols) / fleet.down_bytes_per_s[i]
    compute = 2 * rows * cols * inner / fleet.flops_per_s[i]
    up = size * rows * cols / fleet.up_bytes_per_s[i]
    busy = max(compute, up)
    return float(fleet.latency_s[i] + (down if down >= 2 * busy else busy + down**2 / (4 * busy)))


@given(fleets.fleets(most=5), wires, sides, sides, sides)
def test_finish_time_follows_the_streamed_formula(
    fleet: Profiles, wire: WireFormat, rows: float, cols: float, inner: float
) -> None:
    same = np.ones(len(fleet))
    expected = [scalar_finish_s(fleet, i, wire, rows, cols, inner) for i in range(len(fleet))]
    assert finish_s(costs(fleet, wire), rows * same, cols * same, inner) == pytest.approx(expected, rel=1e-12)


@given(fleets.fleets(most=3), sides, sides)
def test_an_empty_block_costs_nothing(fleet: Profiles, cols: float, inner: float) -> None:
    unit, none, some = costs(fleet), np.zeros(len(fleet)), np.full(len(fleet), cols)
    assert not finish_s(unit, none, some, inner).any()
    assert not np.concatenate(transfers_bytes(unit, none, some, inner)).any()


@given(fleets.fleets(most=3), wires, sides, sides, sides)
def test_a_block_receives_both_strips_and_returns_the_block(
    fleet: Profiles, wire: WireFormat, rows: float, cols: float, inner: float
) -> None:
    same = np.ones(len(fleet) + 1)
    down, up = transfers_bytes(costs(fleet, wire, Server(flops_per_s=1e12)), rows * same, cols * same, inner)
    assert down[:-1] == pytest.approx(WIRE_BYTES[wire] * inner * (rows + cols))
    assert up[:-1] == pytest.approx(WIRE_BYTES[wire] * rows * cols)
    assert down[-1] == up[-1] == 0  # the server sends itself nothing


@given(sides, sides, sides, st.floats(8, 14).map(lambda x: 10.0**x))
def test_the_server_only_computes(rows: float, cols: float, inner: float, flops: float) -> None:
    unit = costs(fleets.one(), server=Server(flops_per_s=flops)).take(np.array([1]))
    assert finish_s(unit, np.array([rows]), np.array([cols]), inner)[0] == pytest.approx(
        2 * rows * cols * inner / flops
    )


def simulated_finish_s(down_s: float, work_s: float, up_s: float, pieces: int) -> float:
    """Simulate tile by tile: row and column strips arrive alternately; a tile is multiplied once both of its strips
    have arrived, and is then uploaded. `down_s` is per strip, `work_s` and `up_s` per tile."""
    ready: list[tuple[float, int, int]] = []
    for i in range(pieces):
        for j in range(pieces):
            arrived = (2 * i + 1 if i >= j else 0, 2 * j + 2 if j >= i else 0)  # row strip i is number 2i + 1
            heapq.heappush(ready, (max(arrived) * down_s, i, j))
    computed = sent = 0.0
    while ready:
        at, _, _ = heapq.heappop(ready)
        computed = max(computed, at) + work_s
        sent = max(sent, computed) + up_s
    return sent


@given(st.floats(-1.5, 1.5), st.floats(-3, 1.5))
def test_finish_time_agrees_with_a_tile_by_tile_simulation(log_down: float, log_up: float) -> None:
    pieces, compute = 32, 1.0
    down, up = 10.0**log_down, 10.0**log_up
    rows = cols = inner = 1024.0
    fleet = fleets.one(
        flops=2 * rows * cols * inner / compute,
        down=2 * inner * (rows + cols) / down,
        up=2 * rows * cols / up,
        latency=0.0,
    )
    simulated = simulated_finish_s(down / (2 * pieces), compute / pieces**2, up / pieces**2, pieces)
    formula = finish_s(costs(fleet), np.array([rows]), np.array([cols]), inner)[0]
    assert simulated == pytest.approx(formula, rel=0.1)


# -------------------------------------------------------------------------------------------------- inverses


deadlines = st.floats(-3, 4).map(lambda x: 10.0**x)


@given(fleets.fleets(most=5), wires, deadlines, sides, sides)
def test_rows_within_a_deadline_finish_on_it_or_fill_memory(
    fleet: Profiles, wire: WireFormat, deadline: float, cols: float, inner: float
) -> None:
    unit, same = costs(fleet, wire), np.ones(len(fleet))
    rows = rows_within(unit, deadline, cols, inner)
    finish = finish_s(unit, rows, cols * same, inner)
    fits = rows_that_fit(unit, cols, inner)
    for i in np.flatnonzero(rows > 1e-6):
        assert finish[i] <= deadline * (1 + 1e-6)
        assert rows[i] == pytest.approx(fits[i]) or finish[i] == pytest.approx(deadline, rel=1e-6)
    for i in np.flatnonzero(rows <= 1e-6):  # a single row takes longer, or does not fit
        alone = finish_s(unit, same, cols * same, inner)[i]
        assert alone >= deadline * (1 - 1e-6) or fits[i] < 1


@given(fleets.fleets(most=5), wires, deadlines, sides, sides)
def test_inner_within_a_deadline_finishes_on_it_or_fills_memory(
    fleet: Profiles, wire: WireFormat, deadline: float, rows: float, cols: float
) -> None:
    unit, same = costs(fleet, wire), np.ones(len(fleet))
    inner = inner_within(unit, deadline, rows, cols)
    finish = finish_s(unit, rows * same, cols * same, inner)
    more = block_memory_bytes(unit, rows * same, cols * same, inner * 1.001)
    for i in np.flatnonzero(inner > 1e-6):
        assert finish[i] <= deadline * (1 + 1e-6)
        assert finish[i] == pytest.approx(deadline, rel=1e-6) or more[i] > unit.memory_bytes[i]


@given(fleets.fleets(most=3), deadlines, sides, sides)
def test_reach_solves_for_the_one_dimension_not_given(
    fleet: Profiles, deadline: float, width: float, thickness: float
) -> None:
    unit = costs(fleet)
    rows = reach(unit, deadline, width, thickness, "inner-side-side")
    assert np.array_equal(rows, rows_within(unit, deadline, width, thickness))
    swapped = reach(unit, deadline, thickness, width, "side-inner-side")
    assert np.array_equal(rows, swapped)
    deep = reach(unit, deadline, width, thickness, "side-side-inner")
    assert np.array_equal(deep, inner_within(unit, deadline, width, thickness))


@given(fleets.fleets(most=3), st.floats(-2, 3), sides, sides, st.sampled_from(FRAMES))
def test_slopes_agree_with_finite_differences(
    fleet: Profiles, log_deadline: float, width: float, thickness: float, frame: Frame
) -> None:
    unit, deadline = costs(fleet), 10.0**log_deadline
    wide = np.full(len(fleet), width)
    length, by_deadline, by_width = reach_and_slopes(unit, deadline, wide, thickness, frame)

    def at(time_factor: float, width_factor: float) -> np.ndarray:
        return reach(unit, deadline * time_factor, wide * width_factor, thickness, frame)

    step = 1e-5
    for slope, low, middle, high, unit_step in (
        (by_deadline, at(1 - step, 1), at(1, 1), at(1 + step, 1), deadline * step),
        (by_width, at(1, 1 - step), at(1, 1), at(1, 1 + step), width * step),
    ):
        left, right = (middle - low) / unit_step, (high - middle) / unit_step
        smooth = (length > 1e-3) & (np.abs(left - right) <= 1e-3 * (np.abs(left) + np.abs(right)))
        scale = np.maximum(np.abs(left), 1e-3 * length / (unit_step / step))
        assert (np.abs(slope - left) <= 0.01 * scale)[smooth].all()


# -------------------------------------------------------------------------------------------------- best blocks


@settings(max_examples=150)
@given(fleets.fleets(most=4), wires, deadlines, sides, sides, sides, st.integers(0, 2**31))
def test_no_block_within_the_deadline_exceeds_area_within(
    fleet: Profiles, wire: WireFormat, deadline: float, one: float, other: float, inner: float, seed: int
) -> None:
    unit, short, long = costs(fleet, wire), min(one, other), max(one, other)
    best = area_within(unit, deadline, short, long, inner)
    widths = np.exp(np.random.default_rng(seed).uniform(np.log(long / 1e6), np.log(long), 200))
    for width in (*widths, short, long, 1.0):
        most = short if width > short else long  # a block fits the output in one orientation or the other
        rows = np.minimum(rows_within(unit, deadline, width, inner), most)
        assert (rows * width <= best * (1 + 1e-9) + 1e-9).all()


@given(fleets.fleets(most=4), wires, deadlines, sides, sides, sides)
def test_some_block_attains_area_within(
    fleet: Profiles, wire: WireFormat, deadline: float, one: float, other: float, inner: float
) -> None:
    """Without memory limits: the bound is tight, not merely safe."""
    unit, short, long = costs(fleet, wire).with_boundless_memory(), min(one, other), max(one, other)
    best = area_within(unit, deadline, short, long, inner)
    width = np.clip(np.sqrt(best), 1e-9, short)
    rows = np.minimum(rows_within(unit, deadline, width, inner), long)
    assert width * rows == pytest.approx(best, rel=1e-5, abs=1e-6)


@settings(max_examples=150)
@given(fleets.fleets(most=4), wires, deadlines, sides, sides, st.integers(1, 20_000), st.integers(0, 2**31))
def test_no_inner_depth_beats_best_inner(
    fleet: Profiles, wire: WireFormat, deadline: float, one: float, other: float, inner: int, seed: int
) -> None:
    unit, short, long = costs(fleet, wire).with_boundless_memory(), min(one, other), max(one, other)
    best = best_inner(unit, deadline, short, long, inner)
    assert (best >= 1 - 1e-9).all()
    assert (best <= inner * (1 + 1e-9)).all()
    most = best * area_within(unit, deadline, short, long, best)
    thicknesses = np.exp(np.random.default_rng(seed).uniform(0, math.log(inner), 100))
    for thickness in (*thicknesses, 1.0, float(inner)):
        volume = thickness * area_within(unit, deadline, short, long, thickness)
        assert (volume <= most * (1 + 1e-3) + 1e-9).all()


@given(st.integers(2, 20_000))
def test_with_time_to_spare_best_inner_is_the_whole_inner_dimension(inner: int) -> None:
    unit = costs(fleets.one(latency=0.0), server=Server(flops_per_s=1e12))
    assert (best_inner(unit, 1e12, 2.0, 3.0, inner) == inner).all()


# -------------------------------------------------------------------------------------------------- memory


@given(fleets.fleets(most=5), wires, sides, sides)
def test_rows_that_fit_is_the_most_rows_memory_holds(
    fleet: Profiles, wire: WireFormat, cols: float, inner: float
) -> None:
    unit, same = costs(fleet, wire), np.ones(len(fleet))
    rows = rows_that_fit(unit, cols, inner)
    some = rows > 0
    assert (block_memory_bytes(unit, rows, cols * same, inner) <= unit.memory_bytes * (1 + 1e-9))[some].all()
    assert (block_memory_bytes(unit, rows * 1.001 + 1, cols * same, inner) > unit.memory_bytes).all()


@given(fleets.fleets(most=3), wires, sides, sides, sides)
def test_a_block_holds_whole_operands_or_panels_next_to_its_sums(
    fleet: Profiles, wire: WireFormat, rows: float, cols: float, inner: float
) -> None:
    size, same = WIRE_BYTES[wire], np.ones(len(fleet))
    tiles = np.minimum(16e6, fleet.memory_bytes / 8)
    whole = size * inner * (rows + cols) + tiles
    panels = size * min(inner, 256) * (rows + cols) + 4 * rows * cols
    expected = np.minimum(whole, panels)
    assert block_memory_bytes(costs(fleet, wire), rows * same, cols * same, inner) == pytest.approx(expected)


@given(fleets.fleets(most=5), wires, sides, sides, sides)
def test_the_limit_is_the_largest_of_down_compute_up_and_latency(
    fleet: Profiles, wire: WireFormat, rows: float, cols: float, inner: float
) -> None:
    same = np.ones(len(fleet))
    for i, limit in enumerate(limiting(costs(fleet, wire), rows * same, cols * same, inner)):
        size = WIRE_BYTES[wire]
        parts = {
            "down": size * inner * (rows + cols) / fleet.down_bytes_per_s[i],
            "compute": 2 * rows * cols * inner / fleet.flops_per_s[i],
            "up": size * rows * cols / fleet.up_bytes_per_s[i],
            "latency": fleet.latency_s[i],
        }
        assert parts[limit] >= max(parts.values()) * (1 - 1e-12)


@given(fleets.fleets(most=5, kinds=("wild", "mixed")), sides, sides, sides, st.floats(1, 3))
def test_more_work_never_finishes_sooner(
    fleet: Profiles, rows: float, cols: float, inner: float, factor: float
) -> None:
    unit, same = costs(fleet), np.ones(len(fleet))
    assume(rows * factor < 1e6)
    now = finish_s(unit, rows * same, cols * same, inner)
    assert (finish_s(unit, rows * factor * same, cols * same, inner) >= now * (1 - 1e-12)).all()
    assert (finish_s(unit, rows * same, cols * same, inner * factor) >= now * (1 - 1e-12)).all()
