"""Laws of what a column takes on a device: no unit takes more than was counted, and slots are as many as fit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stacks import Decoder, decoder

from cleave.core.cost.resident import live_terms, stack, units
from cleave.core.plan.resident.stages import ColumnPlan, Stage
from cleave.core.plan.resident.stages import Share as Place
from cleave.core.schedule.device_memory import Shelf
from cleave.core.schedule.pipeline import Column
from cleave.core.schedule.tasks import DeviceId
from cleave.protocol.decoder import Batch
from cleave.protocol.numbers import NumpyCodec
from cleave.server.grain import sublayers
from cleave.server.operands import Staging
from cleave.server.resident_tasks import PassRun
from cleave.server.residents import Resident, resident, slots
from cleave.server.segments import Share, sliceable

steady = settings(max_examples=40, deadline=None, derandomize=True)
MODELS = {"whole": decoder(), "adapters": decoder(rank=2), "no head": decoder(has_head=False)}


def staging() -> Staging:
    return Staging(NumpyCodec(), lambda operands: None)


def held(model: Decoder, share: Share, batch: Batch, at: Staging) -> Resident:
    return resident(model.stack, share, batch, at)


@st.composite
def columns(draw: st.DrawFn) -> tuple[str, Share]:
    name = draw(st.sampled_from(sorted(MODELS)))
    model = MODELS[name]
    total = len(model.stack.parts) + (model.stack.head is not None)
    first = draw(st.integers(0, total - 1))
    if draw(st.booleans()):
        return name, Share(first=first, count=draw(st.integers(1, total - first)))
    of = draw(st.integers(1, min(4, sliceable(model.stack, first))))
    return name, Share(first=first, count=1, index=draw(st.integers(0, of - 1)), of=of)


@steady
@given(columns(), st.integers(0, 300_000), st.integers(1, 8))
def test_slots_are_as_many_as_fit_and_one_more_would_not(
    column: tuple[str, Share], memory_bytes: int, chunk: int
) -> None:
    model, share = MODELS[column[0]], column[1]
    at = staging()
    batch = model.batch(at)
    mine = held(model, share, batch, at)
    open_sequences = slots(mine, memory_bytes, chunk, batch, True)
    assert 0 <= open_sequences <= batch.sequences
    if open_sequences:
        assert mine.need_bytes(chunk, batch, open_sequences, True) <= memory_bytes
    if open_sequences < batch.sequences:
        assert mine.need_bytes(chunk, batch, open_sequences + 1, True) > memory_bytes


@steady
@given(columns(), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_with_all_slots_taken_every_unit_still_finds_room(
    column: tuple[str, Share], chunk: int, open_sequences: int, is_rotary: bool
) -> None:
    """On shelves of just the bytes that were counted: states and gradients stay, and each unit fits beside them."""
    model, share = MODELS[column[0]], column[1]
    at = staging()
    rotary = np.zeros((6, 8), np.float32) if is_rotary else None
    batch = model.batch(at, mask=np.ones((4, 6), np.float32), rotary=rotary)
    run = _laid_out(model, share, batch, at, chunk)
    shelves: dict[Column, Shelf] = {}
    for place, desks in run.flow.desks.items():
        desks[0].slots = open_sequences
        shelves[place] = Shelf(run.residents[place].need_bytes(chunk, batch, open_sequences, True))
    units, went = run.flow.begin(), 0
    while units:
        unit = units.pop(0)
        seat, shelf, task = unit.seat, shelves[unit.seat.column], run.unit_task(unit)
        assert shelf.place(task) is not None, "there is room"
        shelf.unplace(task)
        went += 1
        units += run.flow.done(unit)
        if run.flow.is_over(seat):
            shelf.release([run.states.pop(seat).id])
    assert went == 2 * batch.sequences * -(-batch.sequence // chunk) * len(shelves)


def _laid_out(model: Decoder, share: Share, batch: Batch, at: Staging, chunk: int) -> PassRun:
    """A pass with this column among others, as a server lays it out."""
    run = PassRun(
        None,
        model.stack,
        batch,
        format="fp32",
        staging=at,
        ids=itertools.count(),
        go_back=lambda run: None,
        send_ahead=lambda run, number, tensor: None,
    )
    run.course = "both"
    run.dy = None if model.stack.head is not None else batch.x
    column = (Place(0, 1.0),)
    total = len(model.stack.parts) + (model.stack.head is not None)
    last = share.first + share.count
    stages = [(0, share.first, 1), (share.first, share.count, share.of), (last, total - last, 1)]
    plan = ColumnPlan(
        stages=tuple(Stage(first=f, count=c, slices=(column,) * of) for f, c, of in stages if c),
        chunk=chunk,
        step_s=1.0,
        busiest_s=1.0,
        fill_s=0.0,
        down_bytes=0.0,
        up_bytes=0.0,
        limit="compute",
    )
    run.lay_out(plan, ("ann",), lambda device: 1 << 40, ())
    return run


@steady
@given(columns())
def test_what_is_trained_is_what_the_stack_says(column: tuple[str, Share]) -> None:
    model, share = MODELS[column[0]], column[1]
    at = staging()
    mine = held(model, share, model.batch(at), at)
    numbers = {operand.id for operand in mine.operands}
    assert {weight for _, weight in mine.trained} <= numbers
    assert all(model.stack.parameters[view.parameter].is_trained for view, _ in mine.trained)
    frozen = [view for view in share.views(model.stack) if not model.stack.parameters[view.parameter].is_trained]
    assert len(mine.trained) + len(frozen) == len(numbers)
    assert mine.trained_bytes == 4 * sum(view.area for view, _ in mine.trained)


@pytest.mark.parametrize("sublayer", range(5))
def test_slices_share_the_flops_of_the_whole(sublayer: int) -> None:
    model, at = MODELS["whole"], staging()
    batch = model.batch(at)
    whole = held(model, Share(first=sublayer, count=1), batch, at)
    for of in range(2, 1 + min(4, sliceable(model.stack, sublayer))):
        parts = [held(model, Share(first=sublayer, count=1, index=index, of=of), batch, at) for index in range(of)]
        for direction in ("forward", "backward"):
            together = sum(part.flops(4, 6, direction) for part in parts)
            assert together == pytest.approx(whole.flops(4, 6, direction), rel=0.2)  # norms are in each


def test_the_same_rectangle_has_the_same_number_in_every_pass() -> None:
    """So that weights that did not change are not sent again."""
    model, at = MODELS["whole"], staging()
    batch = model.batch(at)
    once, again = (held(model, Share(first=0, count=5), batch, at) for _ in range(2))
    assert once.operands == again.operands


def test_devices_are_named_by_the_plan() -> None:
    model, at = MODELS["whole"], staging()
    run = _laid_out(model, Share(first=0, count=5), model.batch(at), at, 4)
    assert [desk.device for desks in run.flow.desks.values() for desk in desks] == [DeviceId("ann")]


@steady
@given(columns(), st.sampled_from([16, 64, 256]), st.sampled_from([8, 64, 512]))
def test_the_planner_counts_no_less_than_a_column_needs(column: tuple[str, Share], chunk: int, sequence: int) -> None:
    """Else it plans what cannot be done."""
    model, share = MODELS[column[0]], column[1]
    at = staging()
    batch = model.batch(at, sequences=1, sequence=sequence)
    need = held(model, share, batch, at).need_bytes(chunk, batch, 1, True)
    of = stack(sublayers(model.stack), hidden=model.stack.hidden, sequence=sequence, terms=live_terms("fp32"))
    run = (np.array([number]) for number in (share.first, share.count, share.of))
    counted = units(of, *run, chunk=min(chunk, sequence)).memory_bytes[0]
    assert counted >= need * 0.999, (column, chunk, sequence)
