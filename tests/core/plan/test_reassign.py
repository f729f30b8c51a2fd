"""Laws of reassigning a block: it is covered exactly, by the devices that can hold it and finish it soonest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from tests.support import fleets, tilings
from tests.support.grids import examples

from cleave.core.cost.wire import DEVICE_BYTES, WIRE_BYTES, WireFormat
from cleave.core.fleet.profiles import Bools, DeviceId, Floats, Profiles
from cleave.core.plan.gemm.layer import Block, Extent
from cleave.core.plan.gemm.reassign import plan_redo
from cleave.errors import InfeasibleError

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a fleet is (kind, count, seed): shrinking explains nothing
ROOMY: tuple[fleets.Kind, ...] = ("usual", "wild", "narrow", "twins", "mixed")
wires = st.sampled_from(fleets.WIRES)
seeds = st.integers(0, 2**31)


class Lost(NamedTuple):
    """A lost block, and what is known about the devices that may take it."""

    fleet: Profiles
    block: Extent
    wire: WireFormat
    holds_a: Bools
    holds_b: Bools
    backlog_s: Floats

    def redone(self) -> list[Block]:
        return plan_redo(
            self.fleet,
            self.block,
            self.wire,
            holds_a=self.holds_a,
            holds_b=self.holds_b,
            backlog_s=self.backlog_s,
        )

    def given_to(self, number: int) -> Block:
        return Block(DeviceId(self.fleet.names[number]), *self.block)

    @property
    def size(self) -> tuple[int, int, int]:
        m, n, k = (end - start for start, end in self.block)
        return m, n, k

    def taken_s(self, parts: list[Block]) -> float:
        """Recompute when the last device is done: wait, fetch the operand needed whole, then go line by line."""
        m, n, k = self.size
        by_rows = all(part.cols == self.block.cols for part in parts)
        ends: list[float] = []
        for part in parts:
            if by_rows:
                ends.append(self.line_by_line_s(part.device, part.rows[1] - part.rows[0], n, k, self.holds_b))
            else:
                ends.append(self.line_by_line_s(part.device, part.cols[1] - part.cols[0], m, k, self.holds_a))
        if len(parts) == 1 and by_rows:  # a single device may go by rows or by columns
            ends = [min(ends[0], self.line_by_line_s(parts[0].device, n, m, k, self.holds_a))]
        return max(ends)

    def line_by_line_s(self, name: str, lines: int, across: int, inner: int, holds: Bools) -> float:
        size, fleet, device = WIRE_BYTES[self.wire], self.fleet, self.fleet.names.index(name)
        down_s, up_s = size / fleet.down_bytes_per_s[device], size / fleet.up_bytes_per_s[device]
        mac_s = 2.0 / fleet.flops_per_s[device]
        first_s = 0.0 if holds[device] else down_s * across * inner
        line_s = max(down_s * inner, mac_s * across * inner, up_s * across)
        return float(self.backlog_s[device] + fleet.latency_s[device] + first_s + lines * line_s)


@st.composite
def losses(
    draw: st.DrawFn, kinds: tuple[fleets.Kind, ...] = ROOMY, most: int = 24, sizes: st.SearchStrategy[int] | None = None
) -> Lost:
    fleet = draw(fleets.fleets(most=most, kinds=kinds))
    rng = np.random.default_rng(draw(seeds))
    lengths = sizes if sizes is not None else st.sampled_from([1, 2, 7, 64]) | st.integers(1, 3000)
    starts = st.integers(0, 500)

    def cut() -> tuple[int, int]:
        start = draw(starts)
        return start, start + draw(lengths)

    count = len(fleet)
    return Lost(
        fleet,
        Extent(cut(), cut(), cut()),
        draw(wires),
        rng.random(count) < draw(st.sampled_from([0.0, 0.3, 1.0])),
        rng.random(count) < draw(st.sampled_from([0.0, 0.3, 1.0])),
        draw(st.sampled_from([0.0, 0.1, 10.0])) * rng.random(count),
    )


def check_tiles(lost: Lost, parts: list[Block]) -> None:
    """Check that every element of the block is in exactly one part, each on a connected device."""
    assert {part.device for part in parts} <= set(lost.fleet.names)
    columns = [np.array([part[axis] for part in parts]) for axis in (1, 2, 3)]
    assert all((column[:, 0] < column[:, 1]).all() for column in columns)
    whole = tilings.corners(*(np.array([side]) for side in lost.block))
    assert tilings.same(tilings.corners(*columns), whole)


def held_bytes(part: Block) -> int:
    m, n, k = (end - start for start, end in part[1:])
    return DEVICE_BYTES * (m * k + k * n + m * n)


def lines_of(lost: Lost, parts: list[Block], number: int) -> int:
    """Number of elements assigned to a device."""
    return sum((p.rows[1] - p.rows[0]) * (p.cols[1] - p.cols[0]) for p in parts if p.device == lost.fleet.names[number])


# ------------------------------------------------------------------------------------------------ any fleet


@settings(phases=QUICK, max_examples=examples(100))
@given(losses())
def test_the_parts_tile_the_block_exactly(lost: Lost) -> None:
    check_tiles(lost, lost.redone())


@settings(phases=QUICK, max_examples=examples(50))
@given(losses(kinds=("cramped", "wild"), sizes=st.integers(1, 150)))
def test_no_device_gets_more_than_fits_even_when_the_block_must_be_cut_further(lost: Lost) -> None:
    try:
        parts = lost.redone()
    except InfeasibleError:
        return
    check_tiles(lost, parts)
    assert all(held_bytes(part) <= lost.fleet.memory_bytes[lost.fleet.names.index(part.device)] for part in parts)


@settings(phases=QUICK, max_examples=examples(200))
@given(losses(kinds=ROOMY))
def test_reassignment_ends_no_later_than_any_single_device_would(lost: Lost) -> None:
    m, n, k = lost.size
    room = lost.fleet.memory_bytes >= 4 * DEVICE_BYTES * (m * k + k * n + m * n)
    assume(room.any())
    alone = [lost.taken_s([lost.given_to(device)]) for device in np.flatnonzero(room)]
    assert lost.taken_s(lost.redone()) <= min(alone) * (1 + 1e-9)


@settings(phases=QUICK, max_examples=examples(100))
@given(losses(kinds=ROOMY))
def test_no_other_split_into_whole_lines_ends_sooner(lost: Lost) -> None:
    """Split the same way, all devices together finish less than the block in slightly less time."""
    m, n, k = lost.size
    room = lost.fleet.memory_bytes >= 4 * DEVICE_BYTES * (m * k + k * n + m * n)
    assume(room.all())
    parts = lost.redone()
    by_rows = all(part.cols == lost.block.cols for part in parts)
    lines, across, holds = (m, n, lost.holds_b) if by_rows else (n, m, lost.holds_a)
    assume(len(parts) > 1)
    level_s = lost.taken_s(parts) * (1 - 1e-6)
    done = 0
    for device in lost.fleet.names:
        first_s = lost.line_by_line_s(device, 0, across, k, holds)
        line_s = lost.line_by_line_s(device, 1, across, k, holds) - first_s
        done += max(0, int((level_s - first_s) / line_s))
    assert done < lines


@settings(phases=QUICK, max_examples=examples(100))
@given(losses(kinds=ROOMY), st.data())
def test_a_device_already_holding_an_operand_never_delays_the_result(lost: Lost, data: st.DataObject) -> None:
    device = data.draw(st.integers(0, len(lost.fleet) - 1))
    holds_b = lost.holds_b.copy()
    holds_b[device] = True
    more = lost._replace(holds_b=holds_b)
    m, n, k = lost.size
    slowest_line_s = max(
        more.line_by_line_s(part.device, 1, across, k, np.ones(len(lost.fleet), dtype=np.bool_))
        - lost.backlog_s[lost.fleet.names.index(part.device)]
        for part in more.redone()
        for across in (m, n)
    )
    assert more.taken_s(more.redone()) <= lost.taken_s(lost.redone()) + slowest_line_s, "up to one line of rounding"


# ------------------------------------------------------------------------------------------------ equal devices

TWINS = ("twins",)


@settings(phases=QUICK, max_examples=examples(60))
@given(losses(kinds=TWINS))
def test_among_equal_devices_holders_get_at_least_as_much(lost: Lost) -> None:
    lost = lost._replace(backlog_s=np.zeros(len(lost.fleet)))
    parts = lost.redone()
    by_rows = all(part.cols == lost.block.cols for part in parts)
    holds, across = (lost.holds_b, lost.size[1]) if by_rows else (lost.holds_a, lost.size[0])
    if len(parts) > 1:
        share = [lines_of(lost, parts, device) // across for device in range(len(lost.fleet))]
        with_it = [lines for lines, has in zip(share, holds, strict=True) if has]
        without_it = [lines for lines, has in zip(share, holds, strict=True) if not has]
        assert min(with_it, default=0) + 1 >= max(without_it, default=0) or not with_it


@settings(phases=QUICK, max_examples=examples(60))
@given(losses(kinds=TWINS))
def test_among_equal_devices_busier_ones_get_no_more(lost: Lost) -> None:
    nobody = np.zeros(len(lost.fleet), dtype=np.bool_)
    lost = lost._replace(holds_a=nobody, holds_b=nobody)
    parts = lost.redone()
    across = lost.size[1] if all(part.cols == lost.block.cols for part in parts) else lost.size[0]
    order = np.argsort(lost.backlog_s, kind="stable")
    share = [lines_of(lost, parts, int(device)) // across for device in order]
    least = np.minimum.accumulate(share)
    assert all(lines <= before + 1 for before, lines in zip(least, share[1:], strict=False))


# ------------------------------------------------------------------------------------------------ examples


def example(count: int, block: tuple[int, int, int], **known: list[float]) -> Lost:
    m, n, k = block
    ones = np.ones(count)
    return Lost(
        fleets.of(1e12 * ones, 1e7 * ones, 3e6 * ones, 0.02 * ones, 2e9 * ones),
        Extent((5, 5 + m), (7, 7 + n), (3, 3 + k)),
        "fp32",
        np.array(known.get("holds_a", [0] * count), dtype=np.bool_),
        np.array(known.get("holds_b", [0] * count), dtype=np.bool_),
        np.array(known.get("backlog_s", [0] * count), dtype=np.float64),
    )


def test_the_holder_of_the_large_operand_takes_the_whole_block() -> None:
    """A few rows through a large W: fetching W takes the other three longer than the holder needs for everything."""
    lost = example(4, (16, 2048, 2048), holds_b=[0, 0, 1, 0])
    assert lost.redone() == [lost.given_to(2)]


def test_devices_that_hold_the_rows_divide_the_columns() -> None:
    lost = example(4, (2048, 16, 2048), holds_a=[1, 0, 1, 0])
    assert lost.redone() == [
        lost.given_to(0)._replace(cols=(7, 15)),
        lost.given_to(2)._replace(cols=(15, 23)),
    ]


def test_equal_devices_share_the_block_equally() -> None:
    lost = example(4, (400, 64, 64))
    assert [part.rows for part in lost.redone()] == [(5, 105), (105, 205), (205, 305), (305, 405)]


def test_a_briefly_busy_device_gets_less_and_a_long_busy_one_nothing() -> None:
    lost = example(3, (4000, 64, 64), backlog_s=[0.0, 0.05, 1000.0])
    share = [lines_of(lost, lost.redone(), device) for device in range(3)]
    assert share[0] > share[1] > 0 == share[2]


def test_a_busy_holder_is_passed_over_when_fetching_is_faster() -> None:
    lost = example(2, (16, 256, 256), holds_b=[1, 0], backlog_s=[100.0, 0.0])
    assert {part.device for part in lost.redone()} == {lost.fleet.names[1]}


def test_a_single_element_is_done_by_one_device() -> None:
    lost = example(3, (1, 1, 1), backlog_s=[1.0, 0.5, 2.0])
    assert lost.redone() == [lost.given_to(1)]


def test_many_slow_devices_beside_a_fast_one_do_not_delay_it() -> None:
    """Each could do a tenth of a line while the fast one does everything, so it gets the rounding remainder."""
    count, side = 41, 100
    flops = np.full(count, 1e12 / 1000)
    flops[0] = 1e12
    wide = np.full(count, 1e15)
    fleet = fleets.of(flops, wide, wide, np.zeros(count), np.full(count, 1e12))
    nobody = np.zeros(count, dtype=np.bool_)
    lost = Lost(fleet, Extent((0, side), (0, side), (0, side)), "fp32", nobody, nobody, np.zeros(count))
    assert lost.taken_s(lost.redone()) <= lost.taken_s([lost.given_to(0)]) * (1 + 1e-9)


def test_reassigning_is_infeasible_when_no_device_holds_even_the_smallest_block() -> None:
    tiny = fleets.one(memory=4.0)
    lost = example(1, (4, 4, 4))._replace(fleet=tiny)
    with pytest.raises(InfeasibleError):
        lost.redone()
