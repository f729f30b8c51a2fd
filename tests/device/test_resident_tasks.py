"""Laws of tasks on resident weights: when they wait, what they return, what they refuse, how much memory they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.device.test_worker import joined
from tests.support.device_bench import Bench, Journey, Went, assert_close
from tests.support.one_layer import CHUNK, HIDDEN, KEY_WIDTH, PLAIN, ROWS, Layer
from tests.support.plain_parts import Maker

from cleave.core.cost.resident import state_bytes
from cleave.core.model.decoder import weights_of
from cleave.core.model.keeping import KEEPINGS, Keeping
from cleave.device.kernels import NumpyKernel
from cleave.device.programs import gemm
from cleave.device.programs.gemm import bands
from cleave.device.programs.resident import make_task
from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.programs import Collect

# ------------------------------------------------------------------------------------------------ waiting


def test_rows_wait_for_earlier_rows_forward_and_later_rows_backward() -> None:
    layer = Layer()
    first, second, third = layer.forward()
    last, middle, start = layer.backward()
    run, done = layer.bench.run, layer.bench.done
    assert run(second) is None
    assert run(last) is None, "nothing has gone forward"
    done(first)
    assert run(third) is None
    done(second)
    assert run(last) is None, "not all rows have gone forward"
    done(third)
    assert run(third) is None, "backward has already run"
    assert run(start) is run(middle) is None
    done(last)
    assert run(start) is run(last) is None
    done(middle)
    done(start)


def test_a_dropped_state_starts_over() -> None:
    layer = Layer()
    units = layer.forward()
    before = [layer.bench.done(unit) for unit in units]
    layer.bench.store.drop((layer.state,))
    assert layer.bench.run(units[1]) is None
    for unit, expected in zip(units, before, strict=True):
        np.testing.assert_array_equal(layer.bench.done(unit), expected)


@pytest.mark.parametrize("keeps", KEEPINGS)
@pytest.mark.parametrize("chunk", [CHUNK, 3])
def test_a_silently_rebuilt_state_gives_the_same_backward(keeps: Keeping, chunk: int) -> None:
    layer = Layer()
    trained = layer.maker.trained
    expected = layer.journey.go(layer.x, layer.dy, CHUNK, trained)
    journey = replace(layer.journey, keeps=keeps)
    for unit in journey.forward(layer.x, chunk, layer.state, is_silent=True):
        np.testing.assert_array_equal(layer.bench.done(unit), [[0]])
    dx, gradients = journey.back(layer.x, layer.dy, CHUNK, trained, layer.state)
    assert_close(dx, expected.dx, 1e-6)
    for number in trained:
        assert_close(gradients[number], expected.gradients[number], 1e-6)


@pytest.mark.parametrize("keeps", ["inputs", "all"])
@pytest.mark.parametrize("chunk", [CHUNK, CHUNK - 1])
def test_what_a_device_keeps_changes_nothing_but_the_work(keeps: Keeping, chunk: int) -> None:
    """Also if backward is cut into other chunks than forward was: then what was kept does not fit, and is not used."""
    layer = Layer()
    trained = layer.maker.trained
    found: list[Went] = []
    for journey in (layer.journey, replace(layer.journey, keeps=keeps)):
        state = layer.bench.number()
        y = np.concatenate([layer.bench.done(unit) for unit in journey.forward(layer.x, CHUNK, state)])
        found.append(Went(y, *journey.back(layer.x, layer.dy, chunk, trained, state)))
    recomputed, kept = found
    np.testing.assert_array_equal(kept.y, recomputed.y)
    np.testing.assert_array_equal(kept.dx, recomputed.dx)
    for number in trained:
        np.testing.assert_array_equal(kept.gradients[number], recomputed.gradients[number])


def test_what_was_kept_is_not_used_with_weights_of_other_shapes() -> None:
    """A server may give the number of a weight to another one meanwhile: results are its own fault, a crash is ours."""
    layer = Layer()
    maker, bench = layer.maker, layer.bench
    narrow, wide = (maker.mlp(inner, "rms", "silu", gated=True, **PLAIN) for inner in (5, 9))
    journey = replace(layer.through(layer.attention, narrow, wide), keeps="all")
    for unit in journey.forward(layer.x, CHUNK, layer.state):
        bench.done(unit)
    for one, other in ((narrow, wide), (wide, narrow)):
        for weight, from_ in zip(weights_of(one), weights_of(other), strict=True):
            swap(bench, weight.weight, bench.operands[from_.weight])
    dx, _ = journey.back(layer.x, layer.dy, CHUNK, [], layer.state)
    assert np.isfinite(dx).all()


def swap(bench: Bench, number: int, matrix: Any) -> None:
    bench.store.drop((number,))
    rows, cols = matrix.shape
    message = messages.Store(operand=number, rows=rows, cols=cols, format="fp32", first_row=0, strip_rows=rows)
    bench.store.write(message, matrix.tobytes())


def test_units_of_a_sequence_agree_on_what_they_keep() -> None:
    layer = Layer()
    first, second, *_ = layer.forward()
    layer.bench.done(msgspec.structs.replace(first, keeps="inputs"))
    with pytest.raises(ProtocolError, match="kept"):
        layer.bench.run(second)


def test_a_task_waits_for_all_its_operands() -> None:
    layer = Layer()
    (unit, *_), weight = layer.forward(), layer.attention.v.weight
    matrix = layer.bench.operands[weight]
    layer.bench.store.drop((weight,))
    task = make_task(unit, layer.bench.store, layer.bench.kernel)
    assert task.next_chunk() is None
    for first in range(len(matrix)):
        assert task.next_chunk() is None
        message = messages.Store(
            operand=weight, rows=len(matrix), cols=HIDDEN, format="fp32", first_row=first, strip_rows=1
        )
        layer.bench.store.write(message, matrix[first : first + 1].tobytes())
    chunk = task.next_chunk()
    assert chunk is not None
    chunk.run()
    assert task.finished


@pytest.mark.parametrize("kind", ["mlp", "head"])
def test_parts_without_attention_wait_for_nothing(kind: str) -> None:
    layer = Layer()
    head = layer.maker.head(9, "rms", **PLAIN) if kind == "head" else None
    journey = Journey(
        bench=layer.bench,
        parts=(layer.mlp,) if head is None else (),
        head=head,
        targets=None if head is None else np.zeros((ROWS, 1), dtype=np.float32),
        is_slice=True,
    )
    dy = layer.dy if head is None else layer.dy[:, :2]
    used = layer.bench.store.used_bytes
    units = [*journey.forward(layer.x, CHUNK, layer.state), *journey.backward(layer.x, dy, CHUNK, {}, layer.state)]
    used = layer.bench.store.used_bytes
    for unit in reversed(units):
        layer.bench.done(unit)
    assert layer.bench.store.used_bytes == used, "nothing is kept either"


def test_a_failed_backward_is_never_added_to() -> None:
    """Half of its gradients may already be in the state, so the state must be rebuilt."""

    class Failing(NumpyKernel):
        fails = False

        def add_product(self, total: Any, a: Any, b: Any) -> None:
            if self.fails:
                raise MemoryError
            super().add_product(total, a, b)

    layer, kernel = Layer(), Failing()
    layer.bench.kernel = kernel
    for unit in layer.forward():
        layer.bench.done(unit)
    (last, *_) = layer.backward()
    kernel.fails = True
    chunk = make_task(last, layer.bench.store, kernel).next_chunk()
    assert chunk is not None
    with pytest.raises(MemoryError):
        chunk.run()
    kernel.fails = False
    assert layer.bench.run(last) is None
    layer.bench.store.drop((layer.state,))
    for unit in layer.forward():
        layer.bench.done(unit)
    layer.bench.done(last)


# ------------------------------------------------------------------------------------------------ returning


def test_gradients_of_several_sequences_add_up_until_they_are_collected() -> None:
    layer = Layer()
    alone = layer.journey.go(layer.x, layer.dy, CHUNK, layer.maker.trained)
    accumulators = {operand: layer.bench.number() for operand in layer.maker.trained}
    states = [layer.bench.number() for _ in range(2)]
    forward = [list(layer.journey.forward(layer.x, CHUNK, state)) for state in states]
    backward = [list(layer.journey.backward(layer.x, layer.dy, CHUNK, accumulators, state)) for state in states]
    for unit in (each for units in (*zip(*forward, strict=True), *zip(*backward, strict=True)) for each in units):
        layer.bench.done(unit)
    for operand, accumulator in accumulators.items():
        assert_close(layer.bench.collect(operand, accumulator), 2 * alone.gradients[operand], 1e-5)
        layer.bench.store.drop((accumulator,))
        rows, cols = layer.bench.operands[operand].shape
        assert layer.bench.run(Collect(accumulator=accumulator, rows=rows, cols=cols)) is None, "already collected"


def test_an_unwanted_input_gradient_is_not_returned() -> None:
    layer = Layer()
    for unit in layer.forward():
        layer.bench.done(unit)
    for unit in layer.backward():
        np.testing.assert_array_equal(layer.bench.done(msgspec.structs.replace(unit, wants_dx=False)), [[0]])


def test_large_results_are_computed_once_and_returned_in_bands() -> None:
    bench = Bench(memory_bytes=1 << 28)
    maker = Maker(bench, 2048, 0)
    part = maker.mlp(2, "rms", "relu", gated=False, **PLAIN)
    rows = 1500
    (unit,) = Journey(bench=bench, parts=(part,)).forward(maker.normal(rows, 2048), rows, bench.number())
    task = make_task(unit, bench.store, bench.kernel)
    assert not task.only_returns
    assert task.room_bytes == 0, "not known yet"
    seen, flops = [], []
    while (chunk := task.next_chunk()) is not None:
        chunk.run()
        seen.append(chunk.part)
        flops.append(chunk.flops)
        assert task.finished != task.only_returns
    assert seen == bands(rows, 2048)
    assert len(seen) == 3
    assert flops == [2.0 * rows * 2 * 2 * 2048, 0, 0]
    assert task.room_bytes > 4 * rows * 2048


# ------------------------------------------------------------------------------------------------ memory


def test_states_and_accumulators_count_as_memory_until_they_are_dropped() -> None:
    layer = Layer()
    forward, accumulator = layer.forward(), layer.bench.number()
    backward = layer.backward({layer.mlp.up.weight: accumulator})
    store = layer.bench.store
    used = store.used_bytes
    layer.bench.done(forward[0])
    state = state_bytes([KEY_WIDTH], ROWS)
    assert state == 4 * 4 * ROWS * KEY_WIDTH
    assert store.used_bytes == used + state
    for unit in forward[1:]:
        layer.bench.done(unit)
    layer.bench.done(backward[0])
    assert store.used_bytes == used + state + 4 * 9 * HIDDEN
    store.drop((layer.state, accumulator))
    assert store.used_bytes == used
    assert store.spare_bytes == 0, "a task may still write to a dropped array, so it is not reused"


@pytest.mark.parametrize("room", [0, state_bytes([KEY_WIDTH], ROWS) - 1])
def test_a_state_beyond_the_memory_is_refused(room: int) -> None:
    layer = Layer()
    unit = layer.forward()[0]
    memory = layer.bench.store.used_bytes + room
    layer.bench.store._memory_bytes = memory  # pyright: ignore[reportPrivateUsage]
    needed = state_bytes([KEY_WIDTH], ROWS)
    with pytest.raises(ProtocolError, match=rf"\b{needed}\b.*\b{room} of {memory}\b.*memory"):
        layer.bench.run(unit)
    assert layer.bench.store.state(layer.state) is None


def test_an_accumulator_beyond_the_memory_is_refused() -> None:
    layer = Layer()
    for unit in layer.forward():
        layer.bench.done(unit)
    unit = layer.backward({layer.mlp.up.weight: layer.bench.number()})[0]
    memory = layer.bench.store.used_bytes
    layer.bench.store._memory_bytes = memory  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ProtocolError, match=rf"\b{4 * 9 * HIDDEN}\b.*\b0 of {memory}\b.*memory"):
        layer.bench.run(unit)


def test_a_number_names_only_one_thing() -> None:
    layer = Layer()
    forward, accumulator = layer.forward(), layer.bench.number()
    weight = layer.mlp.up.weight
    with pytest.raises(ProtocolError, match="free"):
        layer.bench.run(msgspec.structs.replace(forward[0], state=weight))
    for unit in forward:
        layer.bench.done(unit)
    last = layer.backward({weight: accumulator})[0]
    for taken in (layer.state, weight, last.x):
        with pytest.raises(ProtocolError):
            layer.bench.run(msgspec.structs.replace(last, accumulators=((weight, taken),)))
    layer.bench.done(last)
    with pytest.raises(ProtocolError, match="accumulator"):
        layer.bench.run(msgspec.structs.replace(layer.backward()[1], x=accumulator))
    for made in (layer.state, accumulator):
        header = messages.Store(operand=made, rows=9, cols=HIDDEN, format="fp32", first_row=0, strip_rows=9)
        with pytest.raises(ProtocolError, match="made here"):
            layer.bench.store.write(header, bytes(4 * 9 * HIDDEN))
    for number in (accumulator, weight):
        with pytest.raises(ProtocolError, match=rf"operand {number}\b.*10 x {HIDDEN}.*9 x {HIDDEN}"):
            layer.bench.run(Collect(accumulator=number, rows=10, cols=HIDDEN))


def test_accumulators_of_one_width_are_returned_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    trained = [layer.mlp.up.weight, layer.attention.norm.weight, layer.attention.q.weight]
    accumulators = {operand: layer.bench.number() for operand in trained}
    for unit in (*layer.forward(), *layer.backward(accumulators)):
        layer.bench.done(unit)
    alone = [layer.bench.collect(operand, accumulator) for operand, accumulator in accumulators.items()]
    first, *below = accumulators.values()
    together = Collect(accumulator=first, rows=sum(map(len, alone)), cols=HIDDEN, below=tuple(below))
    np.testing.assert_array_equal(layer.bench.done(together), np.concatenate(alone))
    monkeypatch.setattr(gemm, "_RESULT_ELEMENTS", 4 * HIDDEN)  # bands that end within accumulators
    np.testing.assert_array_equal(layer.bench.done(together), np.concatenate(alone))
    with pytest.raises(ProtocolError, match="and 1 below it"):
        layer.bench.run(msgspec.structs.replace(together, below=together.below[1:]))


# ------------------------------------------------------------------------------------------------ through a worker


async def test_a_worker_takes_a_sequence_forward_and_back_in_any_order_of_messages() -> None:
    """All tasks first, in reverse order, and then their operands."""
    layer = Layer()
    expected = layer.journey.go(layer.x, layer.dy, CHUNK, layer.maker.trained)
    accumulators = {operand: layer.bench.number() for operand in layer.maker.trained}
    programs = [*layer.forward(), *layer.backward(accumulators)]
    async with joined() as script:
        for task, program in reversed(list(enumerate(programs))):
            await script.channel.send(messages.RunTask(task=task, priority=1, program=program, format="fp32"))
        for number, matrix in layer.bench.operands.items():
            await script.store(number, matrix, strip_rows=3)
        found = [await script.results(task, (CHUNK, HIDDEN)) for task in range(len(programs))]
        assert_close(np.concatenate(found[:3]), expected.y, 1e-6)
        assert_close(np.concatenate(found[:2:-1]), expected.dx, 1e-6)
        for operand, accumulator in accumulators.items():
            rows, cols = layer.bench.operands[operand].shape
            program = Collect(accumulator=accumulator, rows=rows, cols=cols)
            await script.channel.send(messages.RunTask(task=99, priority=1, program=program, format="fp32"))
            assert_close(await script.results(99, (rows, cols)), expected.gradients[operand], 1e-6)
        await script.channel.send(messages.Drop(operands=(layer.state, *accumulators.values())))
        await script.still_there()
        assert script.contribution.tasks == len(programs) + len(accumulators)
        assert script.contribution.flops > 0
        store = script.worker._store  # pyright: ignore[reportPrivateUsage]
        assert store.used_bytes == sum(matrix.nbytes for matrix in layer.bench.operands.values())
        assert store.result_bytes == 0


async def test_a_worker_refuses_a_server_whose_program_is_malformed() -> None:
    layer = Layer()
    async with joined() as script:
        program = msgspec.structs.replace(layer.forward()[0], parts=())
        await script.channel.send(messages.RunTask(task=1, priority=1, program=program, format="fp32"))
        assert isinstance(await script.fault(), ProtocolError)
