"""Laws of what a column takes on a device: no unit takes more than was counted, and slots are as many as fit."""

from __future__ import annotations

import itertools

import numpy as np
from cleave.core.schedule.desks import Desk
from cleave.server.residents import Resident, resident
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plans import plan_of, stage_of
from tests.support.stacks import SmallDecoder, decoder

from cleave.core.model.batch import Batch
from cleave.core.model.shard import Shard, most_slices
from cleave.core.schedule.device_memory import Shelf
from cleave.core.schedule.tasks import DeviceId
from cleave.protocol.numbers import NumpyCodec
from cleave.server.operands import Staging
from cleave.server.resident_tasks import PassRun

steady = settings(max_examples=40, deadline=None, derandomize=True)
MODELS = {"whole": decoder(), "adapters": decoder(rank=2), "no head": decoder(has_head=False)}


def staging() -> Staging:
    return Staging(NumpyCodec(), lambda operands: None)


def held(model: SmallDecoder, shard: Shard, batch: Batch, at: Staging) -> Resident:
    return resident(model.decoder, shard, batch, at, is_trained=True)


@st.composite
def columns(draw: st.DrawFn) -> tuple[str, Shard]:
    name = draw(st.sampled_from(sorted(MODELS)))
    model = MODELS[name]
    total = len(model.decoder.parts) + (model.decoder.head is not None)
    first = draw(st.integers(0, total - 1))
    if draw(st.booleans()):
        return name, Shard(first=first, count=draw(st.integers(1, total - first)))
    of = draw(st.integers(1, min(4, most_slices(model.decoder, first))))
    return name, Shard(first=first, count=1, index=draw(st.integers(0, of - 1)), of=of)


@steady
@given(columns(), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_with_all_slots_taken_every_unit_still_finds_room(
    column: tuple[str, Shard], chunk: int, open_sequences: int, is_rotary: bool
) -> None:
    """On shelves of just the bytes that were counted: states and gradients stay, and each unit fits beside them."""
    model, shard = MODELS[column[0]], column[1]
    at = staging()
    rotary = np.zeros((6, 8), np.float32) if is_rotary else None
    batch = model.batch(at, mask=np.ones((4, 6), np.float32), rotary=rotary)
    run = _laid_out(model, shard, batch, at, chunk)
    shelves: dict[Shard, Shelf] = {}
    run.flow.desks.remove(DeviceId("ann"))
    for place in run.flow.shards:
        run.flow.add_desk(place, Desk(DeviceId("ann"), open_sequences, 1.0))
        shelves[place] = Shelf(run.need_bytes(place, open_sequences))
    units, went = run.flow.begin(), 0
    while units:
        unit = units.pop(0)
        seat, shelf, task = unit.seat, shelves[unit.seat.shard], run.unit_task(unit)
        assert shelf.place(task) is not None, "there is room"
        shelf.unplace(task)
        went += 1
        units += run.flow.done(unit)
        if run.flow.is_over(seat):
            shelf.release([run.states.pop(seat).id])
    assert went == 2 * batch.sequences * -(-batch.sequence // chunk) * len(shelves)


def _laid_out(model: SmallDecoder, shard: Shard, batch: Batch, at: Staging, chunk: int) -> PassRun:
    """A pass with this column among others, as a server lays it out."""
    run = PassRun(
        None,
        model.decoder,
        batch,
        format="fp32",
        staging=at,
        ids=itertools.count(),
        go_back=lambda run: None,
        send_ahead=lambda run, number, tensor: None,
    )
    run.course = "both"
    run.dy = None if model.decoder.head is not None else batch.x
    total = len(model.decoder.parts) + (model.decoder.head is not None)
    last = shard.first + shard.count
    stages = [(0, shard.first, 1), (shard.first, shard.count, shard.of), (last, total - last, 1)]
    plan = plan_of([stage_of(first, count, [["ann"]] * of) for first, count, of in stages if count], chunk)
    run.lay_out(plan, lambda device: 1 << 40, set())
    return run


@steady
@given(columns())
def test_what_is_trained_is_what_the_stack_says(column: tuple[str, Shard]) -> None:
    model, shard = MODELS[column[0]], column[1]
    at = staging()
    mine = held(model, shard, model.batch(at), at)
    numbers = {operand.id for operand in mine.operands}
    assert {weight for _, weight in mine.trained} <= numbers
    assert all(model.decoder.parameters[view.parameter].is_trained for view, _ in mine.trained)
    frozen = [view for view in shard.views(model.decoder) if not model.decoder.parameters[view.parameter].is_trained]
    assert len(mine.trained) + len(frozen) == len(numbers)
    assert mine.demand.trained_bytes == 4 * sum(view.area for view, _ in mine.trained)
    assert mine.demand.params == sum(view.area for view in shard.views(model.decoder))


def test_the_same_rectangle_has_the_same_number_in_every_pass() -> None:
    """So that weights that did not change are not sent again."""
    model, at = MODELS["whole"], staging()
    batch = model.batch(at)
    once, again = (held(model, Shard(first=0, count=5), batch, at) for _ in range(2))
    assert once.operands == again.operands


def test_devices_are_named_by_the_plan() -> None:
    model, at = MODELS["whole"], staging()
    run = _laid_out(model, Shard(first=0, count=5), model.batch(at), at, 4)
    assert list(run.flow.desks.devices) == [DeviceId("ann")]
