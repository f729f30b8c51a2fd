"""Laws of tasks on leased weights: when they wait, what they change and leave alone, what they refuse."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.device.test_worker import joined
from tests.support.device_bench import Bench
from tests.support.one_layer import CHUNK, HIDDEN, Layer

from cleave.core.cost.update import copy_flops, square_sum_flops, update_flops
from cleave.core.model.batch import Matrix
from cleave.core.model.update_rule import Adam, Rule, Sgd
from cleave.device.kernels import NumpyKernel, TorchKernel
from cleave.device.programs.resident import make_task
from cleave.device.replay import replay
from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.programs import Collect, Copy, Leased, Program, SquareSum, Update

ROWS, COLS = 5, 7
SGD, MOMENTUM = Sgd(rate=0.5), Sgd(rate=0.5, momentum=0.5)
ADAM = Adam(rate=0.5, beta1=0.5, beta2=0.75, eps=0.0, step=1)


class Lease:
    """A weight of ones on a bench, with states of zeros, and a gradient that may be missing."""

    def __init__(self, rule: Rule = SGD, states: int = 0, *, bench: Bench | None = None) -> None:
        self.bench, self.rule = bench or Bench(), rule
        self.weight = self.bench.put(np.ones((ROWS, COLS), dtype=np.float32))
        self.states = tuple(self.bench.put(np.zeros((ROWS, COLS), dtype=np.float32)) for _ in range(states))
        self.accumulator = self.bench.number()

    def backward(self, gradient: float = 2.0, shape: tuple[int, int] = (ROWS, COLS)) -> None:
        self.bench.store.accumulator(self.accumulator, *shape).array[...] = gradient

    def update(self, **changed: Any) -> Update:
        leased = Leased(self.weight, self.accumulator, self.states)
        return msgspec.structs.replace(Update(rule=self.rule, weights=(leased,)), **changed)

    def read(self, number: int) -> Matrix:
        return self.bench.done(Collect(accumulator=number, rows=ROWS, cols=COLS))


def full(value: float) -> Matrix:
    return np.full((ROWS, COLS), value, dtype=np.float32)


# ------------------------------------------------------------------------------------------------ what they do


@pytest.mark.parametrize("kernel", [NumpyKernel(), TorchKernel("cpu")], ids=lambda kernel: kernel.name)
def test_an_update_changes_weights_and_states_and_leaves_gradients_alone(kernel: Any) -> None:
    lease = Lease(ADAM, 2, bench=Bench(kernel=kernel))
    lease.backward(2.0)
    np.testing.assert_array_equal(lease.bench.done(lease.update(scale=0.5)), [[0]])
    np.testing.assert_array_equal(lease.read(lease.weight), full(0.5))
    np.testing.assert_array_equal(lease.read(lease.states[0]), full(0.5))
    np.testing.assert_array_equal(lease.read(lease.states[1]), full(0.25))
    np.testing.assert_array_equal(lease.read(lease.accumulator), full(2.0))
    assert lease.bench.flops == update_flops(ADAM, ROWS * COLS)


def test_layers_run_with_the_updated_weights() -> None:
    layer = Layer()
    before = [layer.bench.done(unit) for unit in layer.forward()]
    weight, accumulator = layer.mlp.down.weight, layer.bench.number()
    for unit in layer.backward({weight: accumulator}):
        layer.bench.done(unit)
    leased = Leased(weight, accumulator)
    layer.bench.done(Update(rule=SGD, weights=(leased,)))
    updated = layer.bench.operands[weight] - np.float32(0.5) * layer.bench.collect(weight, accumulator)
    np.testing.assert_allclose(layer.bench.collect(weight, weight), updated, rtol=1e-6)
    layer.bench.store.drop((layer.state,))
    after = [layer.bench.done(unit) for unit in layer.forward()]
    assert not np.allclose(before[-1], after[-1], atol=1e-2)
    fresh = Layer()
    fresh.bench.store.drop((weight,))
    message = messages.Store(
        operand=weight, rows=len(updated), cols=updated.shape[1], format="fp32", first_row=0, strip_rows=len(updated)
    )
    fresh.bench.store.write(message, updated.tobytes())
    for ours, theirs in zip(after, (fresh.bench.done(unit) for unit in fresh.forward()), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_square_sums_come_in_the_order_of_the_accumulators() -> None:
    one = Lease()
    two = Lease(bench=one.bench)
    one.backward(2.0)
    two.backward(-3.0)
    bench = one.bench
    found = bench.done(SquareSum(accumulators=(two.accumulator, one.accumulator)))
    np.testing.assert_array_equal(found, [[9 * ROWS * COLS, 4 * ROWS * COLS]])
    assert bench.flops == square_sum_flops(2 * ROWS * COLS)
    np.testing.assert_array_equal(one.read(one.accumulator), full(2.0))


def test_a_square_sum_beyond_fp32_is_infinite() -> None:
    lease = Lease()
    lease.backward(1e30)
    with np.errstate(all="raise"):
        assert lease.bench.done(SquareSum(accumulators=(lease.accumulator,))) == math.inf


def test_a_copy_stays_as_it_was_while_updates_go_on() -> None:
    lease = Lease(MOMENTUM, 1)
    lease.backward()
    numbers = lease.bench.number(), lease.bench.number()
    used = lease.bench.store.used_bytes
    copy = Copy(copies=((lease.weight, numbers[0]), (lease.states[0], numbers[1])))
    np.testing.assert_array_equal(lease.bench.done(copy), [[0]])
    assert lease.bench.store.used_bytes == used + 2 * 4 * ROWS * COLS
    assert lease.bench.flops == copy_flops(2 * ROWS * COLS)
    lease.bench.done(lease.update())
    np.testing.assert_array_equal(lease.read(numbers[0]), full(1.0))
    np.testing.assert_array_equal(lease.read(numbers[1]), full(0.0))
    np.testing.assert_array_equal(lease.read(lease.weight), full(0.0))
    lease.bench.store.drop(numbers)
    assert lease.bench.store.used_bytes == used


def test_a_replayed_update_gives_what_the_device_has_to_the_last_bit() -> None:
    """A column whose device left is rebuilt from a snapshot and what was sent since."""
    layer = Layer()
    weight, accumulator = layer.mlp.up.weight, layer.bench.number()
    states = tuple(layer.bench.put(np.zeros_like(layer.bench.operands[weight])) for _ in range(2))
    rows, cols = layer.bench.operands[weight].shape
    rule = Adam(rate=0.01, beta1=0.9, beta2=0.99, eps=1e-8, step=1)
    programs: list[Program] = [
        *layer.forward(),
        *layer.backward({weight: accumulator}),
        SquareSum(accumulators=(accumulator,)),
        Update(rule=rule, weights=(Leased(weight, accumulator, states),), scale=0.7),
        *(Collect(accumulator=number, rows=rows, cols=cols) for number in (weight, *states)),
    ]
    inbox: list[tuple[Any, bytes]] = []
    for number, matrix in layer.bench.operands.items():
        size = len(matrix)
        header = messages.Store(
            operand=number, rows=size, cols=matrix.shape[1], format="fp32", first_row=0, strip_rows=size
        )
        inbox.append((header, matrix.tobytes()))
    inbox += [
        (messages.RunTask(task=i, priority=1, program=each, format="fp32"), b"") for i, each in enumerate(programs)
    ]
    expected = [layer.bench.done(program) for program in programs]
    for found, right in zip(replay(inbox), expected, strict=True):
        np.testing.assert_array_equal(found, right)


# ------------------------------------------------------------------------------------------------ waiting, memory


def test_tasks_wait_for_accumulators_and_for_all_rows() -> None:
    lease = Lease(MOMENTUM, 1)
    late = lease.bench.number()
    sums = SquareSum(accumulators=(lease.accumulator,))
    header = messages.Store(operand=late, rows=ROWS, cols=COLS, format="fp32", first_row=0, strip_rows=2)
    lease.states = (late,)
    copy = Copy(copies=((late, lease.bench.number()),))
    read = Collect(accumulator=late, rows=ROWS, cols=COLS)
    assert all(lease.bench.run(program) is None for program in (lease.update(), sums, copy, read))
    lease.backward()
    assert lease.bench.run(lease.update()) is None, "a state is missing"
    lease.bench.store.write(header, bytes(4 * 2 * COLS))
    assert all(lease.bench.run(program) is None for program in (lease.update(), copy, read))
    rest = msgspec.structs.replace(header, first_row=2, strip_rows=ROWS - 2)
    lease.bench.store.write(rest, bytes(4 * (ROWS - 2) * COLS))
    for program in (sums, copy, read, lease.update()):
        lease.bench.done(program)


def test_a_task_runs_once_and_takes_little_memory() -> None:
    lease = Lease(ADAM, 2)
    lease.backward()
    for program, scratch in (
        (SquareSum(accumulators=(lease.accumulator,)), 1),
        (lease.update(), 2),
        (Copy(copies=((lease.weight, 99),)), 0),
    ):
        task = make_task(program, lease.bench.store, lease.bench.kernel)
        assert task.room_bytes == 4
        assert task.next_chunk() is not None
        assert task.room_bytes == 4 + scratch * 4 * ROWS * COLS
        assert task.finished
        assert not task.only_returns
        assert task.next_chunk() is None


def test_temporaries_do_not_grow_with_weights() -> None:
    lease = Lease(bench=Bench(memory_bytes=1 << 30))
    lease.weight = lease.bench.put(np.ones((1000, 1000), dtype=np.float32))
    lease.backward(shape=(1000, 1000))
    task = make_task(lease.update(), lease.bench.store, lease.bench.kernel)
    assert task.next_chunk() is not None
    assert task.room_bytes == 4 + 2 * 4 * lease.bench.kernel.tile_elements < 1e6 * 4


def test_the_memory_of_a_dropped_weight_is_not_reused_while_an_update_may_write_to_it() -> None:
    lease = Lease(MOMENTUM, 1)
    lease.backward()
    chunk = make_task(lease.update(), lease.bench.store, lease.bench.kernel).next_chunk()
    assert chunk is not None
    lease.bench.store.drop((lease.weight, lease.accumulator, *lease.states))
    fresh = [lease.bench.put(full(3.0)) for _ in range(3)]
    chunk.run()
    for number in fresh:
        np.testing.assert_array_equal(lease.read(number), full(3.0))


def test_the_memory_of_a_dropped_weight_is_not_reused_while_it_is_being_returned() -> None:
    lease = Lease()
    read = Collect(accumulator=lease.weight, rows=ROWS, cols=COLS)
    chunk = make_task(read, lease.bench.store, lease.bench.kernel).next_chunk()
    assert chunk is not None
    lease.bench.store.drop((lease.weight,))
    lease.bench.put(full(3.0))
    np.testing.assert_array_equal(chunk.run(), full(1.0))


def test_a_weight_can_be_read_in_pieces() -> None:
    lease = Lease()
    matrix = np.arange(ROWS * COLS, dtype=np.float32).reshape(ROWS, COLS)
    number = lease.bench.put(matrix)
    for first, rows in ((0, 1), (1, ROWS - 1), (ROWS - 1, 1)):
        piece = lease.bench.done(Collect(accumulator=number, rows=rows, cols=COLS, first_row=first))
        np.testing.assert_array_equal(piece, matrix[first : first + rows])


@pytest.mark.parametrize(("first", "rows"), [(-1, 1), (1, ROWS), (ROWS, 1), (0, ROWS + 1)])
def test_rows_that_a_weight_does_not_have_cannot_be_read(first: int, rows: int) -> None:
    lease = Lease()
    with pytest.raises(ProtocolError, match=f"row.*{first}|{first}.*row"):
        lease.bench.run(Collect(accumulator=lease.weight, rows=rows, cols=COLS, first_row=first))


def test_a_copy_beyond_the_memory_is_refused() -> None:
    size = 4 * ROWS * COLS
    lease = Lease(bench=Bench(memory_bytes=2 * size - 1))
    with pytest.raises(ProtocolError, match=rf"\b{size}\b.*\b{size - 1} of {2 * size - 1}\b.*memory"):
        lease.bench.run(Copy(copies=((lease.weight, 99),)))


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("rule", "states", "facts"),
    [
        (SGD, 1, "0 states.*got 1"),
        (MOMENTUM, 0, "1 states.*got 0"),
        (ADAM, 1, "2 states.*got 1"),
        (Sgd(rate=math.nan), 0, "rate.*nan"),
        (Sgd(rate=1e10), 0, "rate.*1e\\+09"),
        (Sgd(rate=0.1, weight_decay=math.inf), 0, "weight_decay.*inf"),
        (Sgd(rate=0.1, momentum=-math.inf), 1, "momentum.*inf"),
        (Sgd(rate=0.1, momentum=0.5, dampening=math.nan), 1, "dampening.*nan"),
        (msgspec.structs.replace(ADAM, beta1=1.0), 2, "below 1.*1.0"),
        (msgspec.structs.replace(ADAM, beta2=math.nan), 2, "below 1.*nan"),
        (msgspec.structs.replace(ADAM, beta2=-0.1), 2, "below 1.*-0.1"),
        (msgspec.structs.replace(ADAM, step=0), 2, "step.* 0"),
        (msgspec.structs.replace(ADAM, eps=-1.0), 2, "eps.*-1.0"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused_at_once(rule: Rule, states: int, facts: str) -> None:
    lease = Lease(rule, states)
    with pytest.raises(ProtocolError, match=facts):
        make_task(lease.update(), lease.bench.store, lease.bench.kernel)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1e10])
def test_a_scale_beyond_the_limits_is_refused(scale: float) -> None:
    with pytest.raises(ProtocolError, match="scale"):
        Lease().bench.run(Lease().update(scale=scale))


@pytest.mark.parametrize(
    "program",
    [
        SquareSum(accumulators=()),
        SquareSum(accumulators=(1, 1)),
        Copy(copies=()),
        Copy(copies=((1, 1),)),
        Copy(copies=((1, 8), (1, 9))),
        Copy(copies=((1, 8), (2, 8))),
        Update(rule=SGD, weights=()),
        Update(rule=SGD, weights=(Leased(1, 1),)),
        Update(rule=SGD, weights=(Leased(1, 8), Leased(1, 9))),
        Update(rule=SGD, weights=(Leased(1, 8), Leased(2, 8))),
        Update(rule=MOMENTUM, weights=(Leased(1, 8, (1,)),)),
        Update(rule=ADAM, weights=(Leased(1, 8, (2, 2)),)),
    ],
    ids=str,
)
def test_a_program_without_operands_or_with_one_twice_is_refused(program: Program) -> None:
    with pytest.raises(ProtocolError, match="none twice"):
        Bench().run(program)


def test_operands_of_the_wrong_kind_are_refused() -> None:
    lease = Lease(MOMENTUM, 1)
    lease.backward()
    weight, made, (state,) = lease.weight, lease.accumulator, lease.states
    for program in (
        SquareSum(accumulators=(weight,)),
        Copy(copies=((made, 99),)),
        Update(rule=SGD, weights=(Leased(weight, state),)),
        Update(rule=SGD, weights=(Leased(made, weight),)),
        Update(rule=MOMENTUM, weights=(Leased(weight, 98, (made,)),)),
    ):
        with pytest.raises(ProtocolError, match=r"operand \d+"):
            lease.bench.run(program)
    for taken in (made, state):
        with pytest.raises(ProtocolError, match=f"free, got {taken}"):
            lease.bench.run(Copy(copies=((weight, taken),)))


@pytest.mark.parametrize("odd", ["state", "accumulator"])
def test_operands_of_unequal_shapes_are_refused_before_anything_changes(odd: str) -> None:
    lease = Lease(MOMENTUM, 1)
    if odd == "state":
        lease.states = (lease.bench.put(np.zeros((COLS, ROWS), dtype=np.float32)),)
    lease.backward(shape=(COLS, ROWS) if odd == "accumulator" else (ROWS, COLS))
    with pytest.raises(ProtocolError, match=rf"{ROWS} x {COLS}.*{COLS} x {ROWS}"):
        lease.bench.run(lease.update())
    np.testing.assert_array_equal(lease.read(lease.weight), full(1.0))


# ------------------------------------------------------------------------------------------------ through a worker


async def test_a_worker_steps_and_returns_what_it_changed() -> None:
    layer = Layer()
    weight, accumulator, copy = layer.mlp.gate, layer.bench.number(), layer.bench.number()
    assert weight is not None
    programs: list[Program] = [*layer.forward(), *layer.backward({weight.weight: accumulator})]
    matrix = layer.bench.operands[weight.weight]
    rows, cols = matrix.shape
    lease: list[tuple[Program, tuple[int, int]]] = [
        (SquareSum(accumulators=(accumulator,)), (1, 1)),
        (Copy(copies=((weight.weight, copy),)), (1, 1)),
        (Update(rule=SGD, weights=(Leased(weight.weight, accumulator),)), (1, 1)),
        (Collect(accumulator=accumulator, rows=rows, cols=cols), (rows, cols)),
        (Collect(accumulator=copy, rows=rows, cols=cols), (rows, cols)),
        (Collect(accumulator=weight.weight, rows=rows, cols=cols), (rows, cols)),
    ]
    async with joined() as script:
        for number, each in layer.bench.operands.items():
            await script.store(number, each)
        for task, program in enumerate(programs):
            await script.channel.send(messages.RunTask(task=task, priority=1, program=program, format="fp32"))
            await script.results(task, (CHUNK, HIDDEN))
        found: list[Matrix] = []
        for task, (program, shape) in enumerate(lease, len(programs)):
            await script.channel.send(messages.RunTask(task=task, priority=1, program=program, format="fp32"))
            found.append(await script.results(task, shape))
        store = script.worker._store  # pyright: ignore[reportPrivateUsage]
        assert store.result_bytes == 0
    total, _, _, gradient, copied, updated = found
    np.testing.assert_allclose(total, [[(gradient.astype(np.float64) ** 2).sum()]], rtol=1e-6)
    np.testing.assert_array_equal(copied, matrix)
    np.testing.assert_allclose(updated, matrix - 0.5 * gradient, atol=1e-6)
