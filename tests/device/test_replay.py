"""Laws of replays: they reproduce a device's results, whatever kernel multiplied, on every wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.device_bench import Bench, Journey, assert_close
from tests.support.one_layer import CHUNK, PLAIN, Layer
from tests.support.plain_parts import Maker, rotary_table

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Matrix
from cleave.core.verify.recompute import disagreement, least_of
from cleave.device.kernels import NumpyKernel, TorchKernel
from cleave.device.replay import replay
from cleave.errors import ProtocolError
from cleave.protocol.messages import Drop, RunTask, Store
from cleave.protocol.numbers import NumpyCodec
from cleave.protocol.programs import Collect, GemmProgram, Program

FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
Message = tuple[Store | RunTask | Drop, bytes]


def stores(bench: Bench, format: WireFormat = "fp32") -> Iterator[Message]:
    for number, matrix in bench.operands.items():
        rows, cols = matrix.shape
        data = NumpyCodec().encode(matrix, format).tobytes()
        yield Store(operand=number, rows=rows, cols=cols, format=format, first_row=0, strip_rows=rows), data


def runs(programs: list[Program], format: WireFormat = "fp32") -> Iterator[Message]:
    for number, program in enumerate(programs):
        yield RunTask(task=number, priority=0, program=program, format=format), b""


def through(layers: int, hidden: int, rows: int, chunk: int, seed: int) -> tuple[Bench, list[Program], int]:
    """A bench, the programs of a pass through some layers (with key biases) and back that ends by reading every
    gradient, and the number of programs before those reads."""
    bench = Bench()
    maker = Maker(bench, hidden, seed)
    plain = {**PLAIN, "bias": True}
    parts = []
    for _ in range(layers):
        parts += [
            maker.attention(4, 2, hidden // 4, "layer", is_rotary=True, **plain),
            maker.mlp(2 * hidden, "rms", "silu", gated=True, **plain),
        ]
    journey = Journey(bench=bench, parts=tuple(parts), rotary=rotary_table(rows, hidden // 4))
    x, dy, state = maker.normal(rows, hidden), maker.normal(rows, hidden), bench.number()
    accumulators = {number: bench.number() for number in maker.trained}
    units: list[Program] = [*journey.forward(x, chunk, state), *journey.backward(x, dy, chunk, accumulators, state)]
    reads: list[Program] = [
        Collect(accumulator=made, rows=bench.operands[number].shape[0], cols=bench.operands[number].shape[1])
        for number, made in accumulators.items()
    ]
    return bench, units + reads, len(units)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 4),
    hidden=st.sampled_from([16, 64]),
    rows=st.integers(1, 40),
    chunk=st.sampled_from([3, 8, 40]),
    seed=st.integers(0, 1000),
    format=st.sampled_from(FORMATS),
)
def test_torch_and_numpy_agree_within_audit_tolerance(
    layers: int, hidden: int, rows: int, chunk: int, seed: int, format: WireFormat
) -> None:
    bench, programs, units = through(layers, hidden, rows, chunk, seed)
    found, expected = (
        list(replay([*stores(bench), *runs(programs, format)], kernel))
        for kernel in (TorchKernel("cpu"), NumpyKernel())
    )
    least = least_of(expected[units:], format)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert disagreement(ours, theirs, format, least=least if number >= units else 0.0) < 0.3, programs[number]


def test_a_replay_gives_what_the_device_returns() -> None:
    layer = Layer()
    programs: list[Program] = [*layer.forward(), *layer.backward()]
    expected = [layer.bench.done(program) for program in programs]
    for found, result in zip(replay([*stores(layer.bench), *runs(programs)]), expected, strict=True):
        np.testing.assert_array_equal(found, result)


def test_rectangles_of_a_result_are_assembled() -> None:
    bench, rng = Bench(), np.random.default_rng(0)
    a, b = (rng.normal(0, 1, (rows, 3)).astype(np.float32) for rows in (1200, 5000))
    program = GemmProgram(layout="nt", terms=((bench.put(a), bench.put(b)),), rows=1200, cols=5000)
    (found,) = replay([*stores(bench), *runs([program])])
    assert_close(found, a @ b.T, 1e-6)


def test_results_are_rounded_to_the_requested_format() -> None:
    layer = Layer()
    first = layer.forward()[0]
    for format in FORMATS:
        (exact,) = replay([*stores(layer.bench), *runs([first])])
        (found,) = replay([*stores(layer.bench), *runs([first], format)])
        codec, rounded = NumpyCodec(), np.empty_like(exact)
        codec.decode_into(codec.encode(exact, format).data, format, rounded)
        np.testing.assert_array_equal(found, rounded)


def test_a_dropped_state_starts_over_in_a_replay() -> None:
    layer = Layer()
    first = layer.forward()[0]
    drop = Drop(operands=(layer.state,)), b""
    one, two = replay([*stores(layer.bench), *runs([first]), drop, *runs([first])])
    np.testing.assert_array_equal(one, two)


def test_a_replayed_task_that_would_have_to_wait_is_refused() -> None:
    layer = Layer()
    first, second, *_ = layer.forward()
    with pytest.raises(ProtocolError, match="has to wait"):
        list(replay([*stores(layer.bench), *runs([second])]))
    with pytest.raises(ProtocolError, match="has to wait"):
        list(replay(runs([first])))
    assert first.first_row == 0
    assert second.first_row == CHUNK
    with pytest.raises(ProtocolError):
        list(replay([*stores(layer.bench), *runs([msgspec.structs.replace(first, parts=())])]))


def test_results_are_computed_lazily() -> None:
    """So that no more than one result is held at a time."""
    layer = Layer()
    programs: list[Program] = [*layer.forward()]
    asked: list[str] = []

    def inbox() -> Iterator[Message]:
        yield from stores(layer.bench)
        for message in runs(programs):
            asked.append("run")
            yield message

    results: Iterator[Matrix] = replay(inbox())
    next(results)
    assert asked == ["run"]
