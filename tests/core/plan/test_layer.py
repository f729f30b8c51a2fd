"""Laws of a layer's plan: its blocks tile each gemm and fit on their devices, and rows are shared optimally."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support import fleets, tilings
from tests.support.grids import examples

from cleave.core.cost.rates import Server
from cleave.core.cost.wire import DEVICE_BYTES, WireFormat
from cleave.core.fleet.profiles import DeviceId, Floats, Ints, Profiles
from cleave.core.model.gemms import Gemm, Linear, Role
from cleave.core.plan.gemm.layer import Block, LinearPlan, fill, fit, judge_linear, least_linear_s, plan_linear
from cleave.errors import InfeasibleError

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a fleet is (kind, count, seed): shrinking explains nothing
ROLES: tuple[tuple[Role, ...], ...] = (
    ("forward", "grad_input", "grad_weight"),
    ("forward", "grad_input"),
    ("forward",),
    ("grad_input",),
    ("grad_weight",),
)
wires = st.sampled_from(fleets.WIRES)
sizes = st.one_of(st.sampled_from([1, 2, 3, 7, 64, 768]), st.integers(1, 300), st.integers(1, 4000))
linears = st.builds(Linear, tokens=sizes, in_width=sizes, out_width=sizes, roles=st.sampled_from(ROLES))


def sides(block: Block) -> tuple[int, int, int]:
    return (
        block.rows[1] - block.rows[0],
        block.cols[1] - block.cols[0],
        block.inner[1] - block.inner[0],
    )


def held_bytes(block: Block) -> int:
    """Bytes of both operands and the result, as a device holds them."""
    rows, cols, inner = sides(block)
    return DEVICE_BYTES * (rows * inner + inner * cols + rows * cols)


def tiles(blocks: tuple[Block, ...] | list[Block], whole: Block) -> bool:
    """Whether every (row, column, inner) element is in exactly one block, and no block is empty."""

    def ranges(of: tuple[tuple[int, int], ...]) -> Ints:
        return np.array(of, dtype=np.int64).reshape(-1, 2)

    def corners(of: tuple[Block, ...] | list[Block]) -> tilings.Corners:
        return tilings.corners(
            ranges([b.rows for b in of]), ranges([b.cols for b in of]), ranges([b.inner for b in of])
        )

    volume = sum(int(np.prod(sides(block), dtype=object)) for block in blocks)
    return (
        all(min(sides(block)) > 0 for block in blocks)
        and volume == int(np.prod(sides(whole), dtype=object))
        and tilings.same(corners(blocks), corners([whole]))
    )


def check(plan: LinearPlan, linear: Linear, fleet: Profiles) -> None:
    """Check everything that holds for any plan, recomputed from its blocks."""
    assert tuple(plan.blocks) == tuple(plan.seconds) == linear.roles
    memory = dict(zip(fleet.names, fleet.memory_bytes.tolist(), strict=True))
    for role, gemm in linear.gemms.items():
        blocks = plan.blocks[role]
        assert tiles(blocks, Block(DeviceId("all"), (0, gemm.m), (0, gemm.n), (0, gemm.k)))
        assert 0 < plan.seconds[role] < np.inf
        for block in blocks:
            assert held_bytes(block) <= memory[block.device]
    assert plan.total_s == pytest.approx(sum(plan.seconds.values()))
    if plan.way == "rows":
        check_rows(plan, linear, memory)


def check_rows(plan: LinearPlan, linear: Linear, memory: dict[str, float]) -> None:
    """Each device has the same tokens in every role, and W, a partial dW and the tokens fit together."""
    k, n = linear.in_width, linear.out_width
    seen: list[dict[str, tuple[int, int]]] = []
    for role, blocks in plan.blocks.items():
        tokens = {block.device: block.inner if role == "grad_weight" else block.rows for block in blocks}
        assert len(tokens) == len(blocks), "each device has one share"
        seen.append(tokens)
    assert all(tokens == seen[0] for tokens in seen)
    weights = k * n * (2 if "grad_weight" in linear.roles else 1)
    for device, (start, end) in seen[0].items():
        assert DEVICE_BYTES * (weights + (end - start) * (k + n + max(k, n))) <= memory[device]


@settings(phases=QUICK, max_examples=examples(24))
@given(fleets.fleets(most=8), linears, wires)
def test_any_plan_tiles_its_gemms_within_memory(fleet: Profiles, linear: Linear, wire: WireFormat) -> None:
    try:
        plan = plan_linear(fleet, linear, wire)
    except InfeasibleError:
        assert fleet.memory_bytes.max() < 1e5, "only very small devices hold nothing"
        return
    check(plan, linear, fleet)
    least_s = least_linear_s(fleet, linear, wire)
    assert plan.devices_s >= least_s * (1 - 1e-6)
    charged = plan_linear(fleet, linear, wire, server=Server(task_s=1e-3, byte_s=1e-9))
    assert charged.devices_s >= least_s * (1 - 1e-6), "nor can a plan for fewer devices beat it"


@settings(phases=QUICK, max_examples=examples(3))
@given(
    fleets.fleets(most=5, kinds=("cramped",)),
    st.builds(
        Linear,
        tokens=st.integers(1, 400),
        in_width=st.integers(1, 400),
        out_width=st.integers(1, 400),
        roles=st.sampled_from(ROLES[2:]),
    ),
    wires,
)
def test_plans_for_scarce_memory_fit_into_it(fleet: Profiles, linear: Linear, wire: WireFormat) -> None:
    check(plan_linear(fleet, linear, wire), linear, fleet)


@settings(phases=QUICK, max_examples=examples(2))
@given(st.integers(2, 6), st.integers(0, 2**31), st.builds(Gemm, m=sizes, n=sizes, k=sizes))
def test_a_product_far_larger_than_any_memory_is_cut_until_it_fits(count: int, seed: int, gemm: Gemm) -> None:
    linear = Linear(tokens=gemm.m, in_width=gemm.k, out_width=gemm.n, roles=("forward",))
    whole = DEVICE_BYTES * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
    fleet = with_memory(fleets.wild(count, seed), np.full(count, max(whole / 12, 4096.0)))
    check(plan_linear(fleet, linear, "bf16"), linear, fleet)


@settings(phases=QUICK, max_examples=examples(4))
@given(st.sampled_from(ROLES[:3]), st.lists(st.floats(2.0, 3.5), min_size=3, max_size=5))
def test_no_more_rows_than_fit_next_to_the_weights_and_their_gradient(
    roles: tuple[Role, ...], room: list[float]
) -> None:
    """Memory of two to four times the weights, where one more token may be too many."""
    linear = Linear(tokens=400, in_width=300, out_width=200, roles=roles)
    memory = np.array(room) * DEVICE_BYTES * linear.in_width * linear.out_width
    fleet = with_memory(alike(len(room), flops=1e11, down=1e9, up=1e9), memory)
    check(plan_linear(fleet, linear, "bf16"), linear, fleet)


# ------------------------------------------------------------------------------------------------ fill

rates = st.floats(1e-6, 10.0)
loads = st.lists(st.tuples(st.floats(0.0, 20.0), rates, st.integers(0, 12)), min_size=2, max_size=3)


@settings(max_examples=examples(80))
@given(st.integers(1, 20), loads)
def test_no_other_sharing_of_rows_ends_more_than_one_row_sooner(
    rows: int, load: list[tuple[float, float, int]]
) -> None:
    """No split into whole rows ends sooner by more than one row of any device."""
    fixed, row, most = (np.array(column, dtype=np.float64) for column in zip(*load, strict=True))
    shares = fill(rows, fixed, row, most)
    if most.sum() < rows:
        assert shares is None
        return
    assert shares is not None
    assert shares.sum() == rows
    assert (shares >= 0).all()
    assert (shares <= most).all()
    best_s = min(
        ends_s(np.array(tried), fixed, row)
        for tried in product(*(range(min(int(limit), rows) + 1) for limit in most))
        if sum(tried) == rows
    )
    used = shares > 0
    assert ends_s(shares, fixed, row) <= best_s + row[used].max() * (1 + 1e-9)


@settings(max_examples=examples(100))
@given(st.integers(1, 10**6), st.integers(1, 64), st.integers(0, 2**31))
def test_shares_sum_to_the_rows_and_stay_within_limits(rows: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fixed, row = 10 ** rng.uniform(-4, 2, count), 10 ** rng.uniform(-9, 1, count)
    most = np.floor(10 ** rng.uniform(0, 6, count)) * rng.integers(0, 2, count)
    shares = fill(rows, fixed, row, most)
    if most.sum() < rows:
        assert shares is None
        return
    assert shares is not None
    assert shares.sum() == rows
    assert (shares >= 0).all()
    assert (shares <= most).all()
    # within a row: a device with work ends no later than any other with room would with two more rows
    room = shares < most
    if room.any():
        used = shares > 0
        latest_s = (fixed + row * (shares - 1))[used].max()
        assert latest_s <= (fixed + row * (shares + 1))[room].min() * (1 + 1e-6)


def ends_s(shares: np.ndarray, fixed: Floats, row: Floats) -> float:
    return float(np.where(shares > 0, fixed + shares * row, 0.0).max())


def test_equal_devices_share_equally() -> None:
    shares = fill(10, np.zeros(3), np.ones(3), np.full(3, 100.0))
    assert shares is not None
    assert sorted(shares.tolist()) == [3, 3, 4]


# ------------------------------------------------------------------------------------------------ fit


@settings(max_examples=examples(30))
@given(st.tuples(*[st.integers(0, 50)] * 3), st.tuples(*[st.integers(1, 60)] * 3), st.floats(12.0, 20_000.0))
def test_pieces_tile_their_block_and_fit(starts: tuple[int, ...], lengths: tuple[int, ...], memory: float) -> None:
    block = Block(DeviceId("d3"), *((start, start + length) for start, length in zip(starts, lengths, strict=True)))
    pieces = fit(block, memory)
    assert tiles(pieces, block)
    assert all(piece.device == "d3" and held_bytes(piece) <= memory for piece in pieces)
    if held_bytes(block) <= memory:
        assert pieces == [block]


# ------------------------------------------------------------------------------------------------ choices


def with_memory(fleet: Profiles, memory: Floats) -> Profiles:
    return fleets.of(fleet.flops_per_s, fleet.down_bytes_per_s, fleet.up_bytes_per_s, fleet.latency_s, memory)


def alike(count: int, *, flops: float, down: float, up: float, latency: float = 1e-3, memory: float = 8e9) -> Profiles:
    return fleets.of(*(np.full(count, value) for value in (flops, down, up, latency, memory)))


LAYER = Linear(tokens=4096, in_width=2048, out_width=2048)


def test_a_few_devices_on_fast_links_take_rows() -> None:
    plan = plan_linear(alike(4, flops=1e11, down=1e9, up=1e9), LAYER, "bf16")
    assert plan.way == "rows"


def test_many_devices_on_slow_links_take_blocks() -> None:
    """With rows, each would receive all of W and return all of dW."""
    plan = plan_linear(alike(256, flops=1e12, down=12e6, up=3e6), LAYER, "bf16")
    assert plan.way == "blocks"


def test_devices_that_cannot_hold_the_weights_take_blocks() -> None:
    weights = DEVICE_BYTES * LAYER.in_width * LAYER.out_width
    fleet = alike(4, flops=1e11, down=1e9, up=1e9, memory=weights * 0.9)
    plan = plan_linear(fleet, LAYER, "bf16")
    assert plan.way == "blocks"
    check(plan, LAYER, fleet)


@pytest.mark.parametrize("memory", [8e9, 20e6])
def test_a_device_ten_times_slower_gets_about_a_tenth(memory: float) -> None:
    fast = alike(3, flops=1e12, down=1e9, up=1e9, latency=1e-5, memory=memory)
    slower = np.array([1.0, 1.0, 0.1])
    fleet = fleets.of(
        fast.flops_per_s * slower,
        fast.down_bytes_per_s * slower,
        fast.up_bytes_per_s * slower,
        fast.latency_s,
        fast.memory_bytes,
    )
    linear = Linear(tokens=65_536, in_width=512, out_width=512, roles=("forward",))
    plan = plan_linear(fleet, linear, "fp32")
    done = dict.fromkeys(fleet.names, 0.0)
    for block in plan.blocks["forward"]:
        done[block.device] += float(np.prod(sides(block)))
    first, second, slow = done.values()
    assert first == pytest.approx(second, rel=0.1)
    assert 0.05 < slow / first < 0.15


def test_equal_layers_have_equal_plans() -> None:
    fleet = fleets.usual(6, 5)
    assert plan_linear(fleet, LAYER, "bf16") == plan_linear(fleet, LAYER, "bf16")


@pytest.mark.parametrize("count", [8, 64, 512])
def test_only_devices_that_are_worth_the_servers_time_take_part(count: int) -> None:
    """Everyone together would finish sooner, if handing out the work took no time."""
    fleet, server = alike(count, flops=1e12, down=12e6, up=3e6), Server(task_s=7e-4, byte_s=7e-10)
    everyone, chosen = plan_linear(fleet, LAYER, "bf16"), plan_linear(fleet, LAYER, "bf16", server=server)
    handing_out_s = everyone.tasks * server.task_s + everyone.moved_bytes * server.byte_s
    assert chosen.server_s == pytest.approx(chosen.tasks * server.task_s + chosen.moved_bytes * server.byte_s)
    assert everyone.devices_s <= chosen.devices_s
    assert chosen.total_s <= (everyone.devices_s + handing_out_s) * 1.001
    if count == 512:
        assert chosen.tasks < everyone.tasks / 4


def test_devices_that_are_all_needed_for_their_memory_all_take_part() -> None:
    weights = DEVICE_BYTES * LAYER.in_width * LAYER.out_width
    fleet = alike(16, flops=1e11, down=1e9, up=1e9, memory=weights / 8)
    plan = plan_linear(fleet, LAYER, "bf16", server=Server(task_s=1.0))
    assert {block.device for blocks in plan.blocks.values() for block in blocks} == set(fleet.names)


def test_moved_bytes_are_those_of_the_blocks() -> None:
    plan = plan_linear(alike(64, flops=1e12, down=12e6, up=3e6), LAYER, "bf16")
    assert plan.way == "blocks"
    numbers = 0
    for blocks in plan.blocks.values():
        for rows, cols, inner in map(sides, blocks):
            numbers += inner * (rows + cols) + rows * cols
    assert plan.moved_bytes == 2 * numbers


HEAD = replace(LAYER, is_head=True)


def test_rows_of_logit_gradients_are_counted_in_16_bits_over_q8() -> None:
    fleet = alike(3, flops=1e12, down=1e9, up=1e9)
    plan, other = plan_linear(fleet, HEAD, "q8"), plan_linear(fleet, LAYER, "q8")
    assert plan.way == other.way == "rows"
    assert plan.moved_bytes - other.moved_bytes == pytest.approx((2 - 1.0625) * LAYER.tokens * LAYER.out_width)
    assert plan_linear(fleet, HEAD, "bf16") == plan_linear(fleet, LAYER, "bf16")


def test_blocks_of_logit_gradients_are_counted_in_16_bits_over_q8() -> None:
    fleet = alike(64, flops=1e12, down=12e6, up=3e6)
    plan = plan_linear(fleet, HEAD, "q8")
    assert plan.way == "blocks"
    expected = 0.0
    for role, blocks in plan.blocks.items():
        for rows, cols, inner in map(sides, blocks):
            a_bytes = 1.0625 if role == "forward" else 2
            expected += a_bytes * inner * rows + 1.0625 * (inner * cols + rows * cols)
    assert plan.moved_bytes == pytest.approx(expected)
    assert plan.total_s > plan_linear(fleet, LAYER, "q8").total_s


@pytest.mark.parametrize(
    ("way", "count", "links", "roles"),
    [
        ("rows", 4, 1e9, ROLES[0]),
        ("rows", 4, 1e9, ("forward", "grad_input")),
        ("rows", 4, 1e9, ("grad_weight",)),
        ("blocks", 64, 3e6, ROLES[0]),
        ("blocks", 64, 3e6, ("grad_weight",)),
    ],
)
def test_a_plan_judged_by_other_rates_takes_what_a_new_one_of_the_same_blocks_would(
    way: str, count: int, links: float, roles: tuple[Role, ...]
) -> None:
    linear, server = replace(LAYER, roles=roles), Server(task_s=1e-7, byte_s=1e-12)
    profiles = alike(count, flops=1e11, down=links, up=links)
    plan = plan_linear(profiles, linear, "bf16", server=server)
    assert plan.way == way
    assert judge_linear(plan, profiles, linear, "bf16", server) == plan
    slow = replace(
        profiles,
        flops_per_s=profiles.flops_per_s / 2,
        down_bytes_per_s=profiles.down_bytes_per_s / 2,
        up_bytes_per_s=profiles.up_bytes_per_s / 2,
        latency_s=profiles.latency_s * 2,
    )
    judged = judge_linear(plan, slow, linear, "bf16", server)
    assert judged is not None
    assert judged.blocks == plan.blocks
    assert judged.seconds == pytest.approx({role: 2 * seconds for role, seconds in plan.seconds.items()})
    assert judged.server_s == plan.server_s
    used = {block.device for blocks in plan.blocks.values() for block in blocks}
    gone = profiles.take(np.array([i for i, name in enumerate(profiles.names) if name != min(used)]))
    assert judge_linear(plan, gone, linear, "bf16", server) is None
