"""The device's own counts agree with `core/cost`: one cost law for planner, server and device."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.device_bench import Bench, Journey
from tests.support.stacks import Builder

from cleave.core.cost.demand import ShardDemand, shard_demand
from cleave.core.cost.resident import seen_keys, shard_costs, sum_up
from cleave.core.cost.terms import ALLOWANCE_BYTES, live_terms
from cleave.core.cost.wire import DEVICE_BYTES
from cleave.core.model.decoder import Attention, Decoder, Part, View
from cleave.core.model.keeping import KEEPINGS, Keeping
from cleave.core.model.shard import Shard, most_slices
from cleave.core.model.sublayers import sublayers
from cleave.device.kernels import NumpyKernel
from cleave.device.programs.resident import make_task

steady = settings(max_examples=60, deadline=None, derandomize=True)
keepings = st.sampled_from(KEEPINGS)
TILE_ROWS, TILES = 16, 3
"""The smallest tiles attention computes at once, however small a tile is configured."""


@st.composite
def models(draw: st.DrawFn, scale: int = 1) -> tuple[Builder, Decoder]:
    """One or two layers of every kind, also with windows, with or without a head."""
    builder = Builder(4 * scale, np.random.default_rng(0), is_frozen=draw(st.booleans()))
    parts: list[Part] = []
    for _ in range(draw(st.integers(1, 2))):
        how = {"bias": draw(st.booleans()), "is_transposed": draw(st.booleans()), "rank": draw(st.integers(0, 2))}
        window = draw(st.sampled_from([None, 1, 3, 7]))
        heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        parts.append(builder.attention(heads, group, 2 * scale, window=window, **how))
        parts.append(builder.mlp(draw(st.integers(1, 9)) * scale, gated=draw(st.booleans()), **how))
    head = builder.head(draw(st.integers(1, 9)) * scale) if draw(st.booleans()) else None
    return builder, builder.decoder(parts, head)


@st.composite
def shards(draw: st.DrawFn, decoder: Decoder) -> Shard:
    total = len(decoder.sublayers)
    first = draw(st.integers(0, total - 1))
    if draw(st.booleans()):
        return Shard(first=first, count=draw(st.integers(1, total - first)))
    of = draw(st.integers(1, min(3, most_slices(decoder, first))))
    return Shard(first=first, count=1, index=draw(st.integers(0, of - 1)), of=of)


class Held:
    """A shard on a bench."""

    def __init__(self, builder: Builder, decoder: Decoder, shard: Shard, rows: int, keeps: Keeping = "nothing") -> None:
        kernel = NumpyKernel()
        kernel.tile_elements = 1
        self.bench = Bench(kernel)
        self.trained: list[int] = []

        def name(view: View) -> int:
            number = self.bench.put(builder.weights[view.parameter][slice(*view.rows), slice(*view.cols)])
            if decoder.parameters[view.parameter].is_trained:
                self.trained.append(number)
            return number

        parts, head = shard.cut(decoder, name)
        targets = None if head is None else np.zeros((rows, 1), dtype=np.float32)
        self.keeps: Keeping = keeps if any(isinstance(part, Attention) for part in parts) else "nothing"
        """A shard without attention has no state to keep anything in."""
        self.journey = Journey(
            bench=self.bench, parts=parts, head=head, is_slice=shard.is_slice, targets=targets, keeps=self.keeps
        )
        self.x = np.ones((rows, decoder.hidden), dtype=np.float32)
        self.dy = np.ones((rows, decoder.hidden if head is None else 2), dtype=np.float32)

    def forward_flops(self, chunk: int, *, is_silent: bool = False) -> tuple[float, int]:
        """FLOPs of a forward pass, and the number of the state it leaves."""
        self.bench.flops, state = 0.0, self.bench.number()
        for unit in self.journey.forward(self.x, chunk, state, is_silent=is_silent):
            self.bench.done(unit)
        return self.bench.flops, state

    def backward_flops(self, chunk: int, state: int) -> float:
        self.bench.flops = 0.0
        self.journey.back(self.x, self.dy, chunk, self.trained, state)
        return self.bench.flops


def law(
    demand: ShardDemand,
    direction: str,
    rows: int,
    chunk: int,
    *,
    is_silent: bool = False,
    keeps: Keeping = "nothing",
) -> float:
    assert direction in ("forward", "backward")
    firsts = range(0, rows, chunk)
    return sum(
        demand.flops(direction, first, min(chunk, rows - first), is_silent=is_silent, keeps=keeps)  # type: ignore[arg-type]
        for first in firsts
    )


@steady
@given(st.data(), st.integers(1, 9), keepings)
def test_row_by_row_a_device_computes_exactly_the_flops_of_the_cost_law(
    data: st.DataObject, rows: int, keeps: Keeping
) -> None:
    builder, decoder = data.draw(models())
    shard = data.draw(shards(decoder))
    held, demand = Held(builder, decoder, shard, rows, keeps), shard_demand(decoder, shard, rows)
    silent, silent_state = held.forward_flops(1, is_silent=True)
    assert silent == law(demand, "forward", rows, 1, is_silent=True, keeps=held.keeps)
    assert held.backward_flops(1, silent_state) == law(demand, "backward", rows, 1, keeps=held.keeps)
    forward, state = held.forward_flops(1)
    assert forward == law(demand, "forward", rows, 1)
    assert held.backward_flops(1, state) == law(demand, "backward", rows, 1, keeps=held.keeps)


@steady
@given(st.data(), st.integers(1, 9), st.integers(1, 9), keepings)
def test_a_state_takes_exactly_the_memory_of_the_cost_law(
    data: st.DataObject, rows: int, chunk: int, keeps: Keeping
) -> None:
    builder, decoder = data.draw(models())
    shard = data.draw(shards(decoder))
    held, demand = Held(builder, decoder, shard, rows, keeps), shard_demand(decoder, shard, rows)
    number = held.forward_flops(chunk)[1]
    state = held.bench.store.state(number)
    if state is None:
        return
    assert state.bytes == demand.state_bytes(held.keeps)
    kept = [one for tape in state.tapes.values() for one in tape.kept]
    arrays = [array for one in kept for array in (one.x, *one.inside) if array is not None]
    assert sum(array.nbytes for array in arrays) == DEVICE_BYTES * rows * demand.kept_numbers(held.keeps)
    held.backward_flops(chunk, number)
    assert not state.tapes, "backward frees what it has used"


@steady
@given(st.data(), st.integers(2, 9), st.integers(2, 9))
def test_chunks_only_add_the_attention_scores_that_tiles_waste(data: st.DataObject, rows: int, chunk: int) -> None:
    builder, decoder = data.draw(models())
    shard = data.draw(shards(decoder))
    held, demand = Held(builder, decoder, shard, rows), shard_demand(decoder, shard, rows)
    width = sum(widths.whole for widths in demand.scores)
    vain = sum(
        min(chunk, rows - first) * min(first + chunk, rows) - seen_keys(first, min(chunk, rows - first), 1)
        for first in range(0, rows, chunk)
    )
    forward, state = held.forward_flops(chunk)
    assert 0 <= forward - law(demand, "forward", rows, chunk) <= 2 * 2 * width * vain
    assert 0 <= held.backward_flops(chunk, state) - law(demand, "backward", rows, chunk) <= 2 * 8 * width * vain


@steady
@given(st.data(), st.integers(1, 6), st.integers(1, 40), st.sampled_from([1, 7, 40]))
def test_no_unit_needs_more_workspace_than_the_cost_law_says(
    data: st.DataObject, scale: int, sequence: int, chunk: int
) -> None:
    builder, decoder = data.draw(models(scale))
    shard = data.draw(shards(decoder))
    held, demand = Held(builder, decoder, shard, sequence), shard_demand(decoder, shard, sequence)
    state = held.bench.number()
    groups = [
        decoder.out_width(part.q) // decoder.out_width(part.k)
        for part in decoder.parts[shard.first : shard.stop]
        if isinstance(part, Attention)
    ]
    tiles = 4 * TILES * TILE_ROWS * max(groups, default=0) * sequence
    for unit in held.journey.forward(held.x, chunk, state):
        held.bench.done(unit)
    numbers = {operand: held.bench.number() for operand in held.trained}
    for unit in held.journey.backward(held.x, held.dy, chunk, numbers, state):
        task = make_task(unit, held.bench.store, held.bench.kernel)
        found = task.next_chunk()
        assert found is not None
        assert task.room_bytes <= demand.workspace_bytes(min(chunk, sequence)) + tiles
        found.run()


def test_the_tiles_of_a_long_sequence_fit_the_devices_allowance() -> None:
    assert 4 * TILES * max(NumpyKernel.tile_elements, TILE_ROWS * 8 * 32_768) <= ALLOWANCE_BYTES


@steady
@given(st.data(), st.sampled_from([1, 16, 64]), st.sampled_from([1, 8, 64, 300]))
def test_planner_and_server_count_the_same_for_a_shard(data: st.DataObject, chunk: int, sequence: int) -> None:
    """Equal for whole sublayers; for slices, the planner counts the largest."""
    _, decoder = data.draw(models())
    shard = data.draw(shards(decoder))
    chunk = min(chunk, sequence)
    demand = shard_demand(decoder, shard, sequence)
    sums = sum_up(sublayers(decoder), hidden=decoder.hidden, sequence=sequence, terms=live_terms("fp32"))
    costs = shard_costs(sums, *(np.array([number]) for number in (shard.first, shard.count, shard.of)), chunk=chunk)
    tables = int(live_terms("fp32").tables_bytes * sequence)
    for planned, exact in (
        (costs.params[0], demand.params),
        (costs.trained[0], demand.trained),
        (costs.state_bytes[0], demand.state_bytes()),
        (costs.memory_bytes[0], demand.memory_bytes(chunk, 1, tables)),
        *(
            (costs.state_keeping(np.array([[index]]))[0, 0], demand.state_bytes(keeps))
            for index, keeps in enumerate(KEEPINGS)
        ),
    ):
        assert planned >= exact * (1 - 1e-12)
        assert shard.is_slice or planned == pytest.approx(exact, rel=1e-12)
    if not shard.is_slice:
        for index, keeps in enumerate(KEEPINGS):
            rows = sequence * costs.flops_keeping(np.array([[index]]))[0, 0]
            both = demand.flops("forward", 0, sequence) + demand.flops("backward", 0, sequence, keeps=keeps)
            assert rows == pytest.approx(both, rel=1e-12)
