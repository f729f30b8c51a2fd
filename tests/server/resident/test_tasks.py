"""Laws of a shard's tasks on a device: no unit needs more memory than counted, and weights keep their numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plans import plan_of, stage_of
from tests.support.stacks import SmallDecoder, decoder

from cleave.core.model.batch import Batch
from cleave.core.model.keeping import KEEPINGS, Keeping
from cleave.core.model.shard import Shard, most_slices
from cleave.core.schedule.desks import Desk
from cleave.core.schedule.device_memory import DeviceMemory, Holders
from cleave.core.schedule.pipeline import Course, Pipeline
from cleave.core.schedule.tasks import DeviceId
from cleave.errors import InfeasibleError
from cleave.protocol.numbers import NumpyCodec
from cleave.server.contract import Run
from cleave.server.operands import Operands, Tensor
from cleave.server.resident.activations import Activations
from cleave.server.resident.held_shard import HeldShard, hold
from cleave.server.resident.tasks import ResidentTasks

steady = settings(max_examples=40, deadline=None, derandomize=True)
MODELS = {"whole": decoder(), "adapters": decoder(rank=2), "no head": decoder(has_head=False)}
ANN = DeviceId("ann")


def no_operands() -> Operands:
    return Operands(NumpyCodec(), lambda released: None)


def held(model: SmallDecoder, shard: Shard, batch: Batch[Tensor], operands: Operands) -> HeldShard:
    return hold(model.decoder, shard, batch, operands, is_trained=True)


@st.composite
def shards(draw: st.DrawFn) -> tuple[str, Shard]:
    name = draw(st.sampled_from(sorted(MODELS)))
    model = MODELS[name]
    total = len(model.decoder.parts) + (model.decoder.head is not None)
    first = draw(st.integers(0, total - 1))
    if draw(st.booleans()):
        return name, Shard(first=first, count=draw(st.integers(1, total - first)))
    of = draw(st.integers(1, min(4, most_slices(model.decoder, first))))
    return name, Shard(first=first, count=1, index=draw(st.integers(0, of - 1)), of=of)


class Layout:
    """The tasks and the pipeline of a pass with a given shard among others, all on one device."""

    def __init__(
        self,
        model: SmallDecoder,
        shard: Shard,
        batch: Batch[Tensor],
        operands: Operands,
        chunk: int,
        run: Run,
        course: Course = "both",
        keeps: Keeping = "nothing",
    ) -> None:
        total = len(model.decoder.parts) + (model.decoder.head is not None)
        last = shard.first + shard.count
        bounds = [(0, shard.first, 1), (shard.first, shard.count, shard.of), (last, total - last, 1)]
        plan = plan_of([stage_of(first, count, [["ann"]] * of, keeps) for first, count, of in bounds if count], chunk)
        stages = [stage.shards for stage in plan.stages]
        activations = Activations(
            batch,
            [len(slices) for slices in stages],
            chunk=chunk,
            has_head=model.decoder.head is not None,
            operands=operands,
            format="fp32",
        )
        activations.expect_gradients(None if model.decoder.head is not None else batch.x)
        self.tasks = ResidentTasks(
            run,
            model.decoder,
            batch,
            plan,
            activations,
            format="fp32",
            gradient_format="fp32",
            operands=operands,
            ids=itertools.count(1),
            course=course,
        )
        self.pipeline = Pipeline(stages, sequences=batch.sequences, chunks=activations.chunks, course=course)


class NoRun:
    """Stands for a run that is never asked."""


@pytest.fixture
def run() -> Run:
    """A placeholder run: tasks only refer to it."""
    return NoRun()  # type: ignore[return-value]


@steady
@given(shards(), st.integers(1, 8), st.integers(1, 4), st.booleans(), st.sampled_from(KEEPINGS))
def test_every_unit_fits_even_when_all_slots_are_taken(
    shard_of: tuple[str, Shard], chunk: int, open_sequences: int, is_rotary: bool, keeps: Keeping
) -> None:
    """In exactly the memory that was counted: states and gradients stay, and each unit fits next to them."""
    model, shard = MODELS[shard_of[0]], shard_of[1]
    operands = no_operands()
    rotary = np.zeros((6, 8), np.float32) if is_rotary else None
    batch = model.batch(operands, mask=np.ones((4, 6), np.float32), rotary=rotary)
    run = NoRun()
    layout = Layout(model, shard, batch, operands, chunk, run)  # type: ignore[arg-type]
    tasks, pipeline = layout.tasks, layout.pipeline
    memories: dict[Shard, DeviceMemory] = {}
    for place in pipeline.shards:
        pipeline.desks.add(place, Desk(ANN, open_sequences, 1.0, keeps))
        memories[place] = DeviceMemory(ANN, tasks.need_bytes(place, open_sequences, keeps), Holders())
    units, done = pipeline.begin(), 0
    while units:
        unit = units.pop(0)
        seat, memory, task = unit.seat, memories[unit.seat.shard], tasks.unit_task(unit)
        assert memory.place(task) is not None, "the unit fits"
        memory.unplace(task)
        done += 1
        pipeline.received(unit)
        units += pipeline.stored(unit)
        if pipeline.is_over(seat):
            memory.release(tasks.forget(seat)[1])
    assert done == 2 * batch.sequences * -(-batch.sequence // chunk) * len(memories)


def test_desks_get_as_many_slots_as_device_memory_allows(run: Run) -> None:
    model, operands = MODELS["whole"], no_operands()
    layout = Layout(model, Shard(first=0, count=5), model.batch(operands), operands, 4, run)
    (shard,) = layout.pipeline.shards
    two = layout.tasks.need_bytes(shard, 2)
    with pytest.raises(InfeasibleError):
        layout.tasks.set_desks(layout.pipeline, lambda device: layout.tasks.need_bytes(shard, 0) - 1)
    layout.tasks.set_desks(layout.pipeline, lambda device: two)
    assert [(desk.device, desk.slots) for desk in layout.pipeline.desks.at(shard)] == [(ANN, 2)]


@pytest.mark.parametrize(("course", "expected"), [("both", "all"), ("forward", "nothing"), ("backward", "all")])
def test_a_device_keeps_what_was_planned_where_backward_follows_at_once(
    run: Run, course: Course, expected: Keeping
) -> None:
    model, operands = MODELS["whole"], no_operands()
    layout = Layout(model, Shard(first=0, count=5), model.batch(operands), operands, 4, run, course, "all")
    (shard,) = layout.pipeline.shards
    layout.tasks.set_desks(layout.pipeline, lambda device: layout.tasks.need_bytes(shard, 2, "all"))
    (desk,) = layout.pipeline.desks.at(shard)
    assert desk.keeps == expected
    assert desk.slots == (2 if expected == "all" else 4)


def test_a_device_without_the_memory_to_keep_what_was_planned_keeps_nothing(run: Run) -> None:
    model, operands = MODELS["whole"], no_operands()
    layout = Layout(model, Shard(first=0, count=5), model.batch(operands), operands, 4, run, "both", "all")
    (shard,) = layout.pipeline.shards
    layout.tasks.set_desks(layout.pipeline, lambda device: layout.tasks.need_bytes(shard, 1, "all") - 1)
    (desk,) = layout.pipeline.desks.at(shard)
    assert desk.keeps == "nothing"
    assert desk.slots >= 1


@steady
@given(shards())
def test_a_shard_trains_exactly_the_parameters_its_decoder_trains(shard_of: tuple[str, Shard]) -> None:
    model, shard = MODELS[shard_of[0]], shard_of[1]
    operands = no_operands()
    mine = held(model, shard, model.batch(operands), operands)
    numbers = {operand.id for operand in mine.operands}
    assert {weight for _, weight in mine.trained} <= numbers
    assert all(model.decoder.parameters[view.parameter].is_trained for view, _ in mine.trained)
    frozen = [view for view in shard.views(model.decoder) if not model.decoder.parameters[view.parameter].is_trained]
    assert len(mine.trained) + len(frozen) == len(numbers)
    assert mine.demand.trained_bytes == 4 * sum(view.area for view, _ in mine.trained)
    assert mine.demand.params == sum(view.area for view in shard.views(model.decoder))


def test_the_same_rectangle_has_the_same_number_in_every_pass() -> None:
    """So that unchanged weights are not sent again."""
    model, operands = MODELS["whole"], no_operands()
    batch = model.batch(operands)
    once, again = (held(model, Shard(first=0, count=5), batch, operands) for _ in range(2))
    assert once.operands == again.operands
