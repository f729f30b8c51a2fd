"""Laws of a product's numbers: outputs are right whatever wrong, late or repeated results arrived on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from cleave.core.model.batch import Matrix
from cleave.core.plan.gemm.layer import Extent
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import Task, TaskId
from cleave.errors import WrongResult
from cleave.protocol.numbers import NumpyCodec
from cleave.server.gemm.product import Piece, Product
from cleave.server.gemm.results import Checker, Fresh, GemmResults
from cleave.server.operands import Tensor

ROWS, COLS, INNER = 12, 256, 32
CODEC = NumpyCodec()


@dataclass(frozen=True)
class Work:
    piece: Piece


@dataclass(frozen=True)
class Job:
    """As much of a task as results look at."""

    id: TaskId
    work: Work


class Bench:
    """A bf16 product, Y = X W^T, with its results and the rounded numbers they should be."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal((rows, INNER), dtype=np.float32) for rows in (ROWS, COLS))
        a, b = Tensor(ROWS, INNER, "bf16"), Tensor(COLS, INNER, "bf16")
        a.bind(x)
        b.bind(w)
        self.product = Product("forward", (a,), (b,))
        self.results = GemmResults(self.product, "bf16", Checker(CODEC), has_sums=False)
        for output in self.results.outputs:
            output.fill(np.nan)
        whole = (0, ROWS), (0, COLS)
        exact = a.values((0, ROWS), (0, INNER), CODEC) @ b.values((0, COLS), (0, INNER), CODEC).T
        self.encoded = CODEC.encode(exact, "bf16")
        self.expected: Matrix = np.empty((ROWS, COLS), dtype=np.float32)
        CODEC.decode_into(self.encoded.data, "bf16", self.expected)
        self.piece = next(self.product.pieces(Extent(*whole, (0, INNER))))
        self.part = Rectangle(0, ROWS, 0, COLS)

    def task(self, number: int, piece: Piece | None = None) -> Task:
        return cast("Task", Job(TaskId(number), Work(piece or self.piece)))

    def check(self, task: Task, payload: Any) -> Matrix:
        return self.results.check(task, self.part, payload, is_strict=False)

    def keep(self, values: Matrix) -> None:
        self.results.keep(Fresh(self.piece, self.part, (self.part,), values))

    @property
    def wrong(self) -> memoryview:
        return CODEC.encode(-self.expected, "bf16").data


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_right_result_is_stored_as_it_is(bench: Bench, is_alone: bool) -> None:
    if is_alone:
        bench.results.leave_alone([TaskId(1)])
    bench.keep(bench.check(bench.task(1), bench.encoded.data))
    np.testing.assert_array_equal(bench.results.outputs[0], bench.expected)


def test_a_wrong_result_leaves_no_trace_once_others_have_computed_it(bench: Bench) -> None:
    bench.results.leave_alone([TaskId(1)])
    with pytest.raises(WrongResult):
        bench.check(bench.task(1), bench.wrong)
    bench.results.share(TaskId(1))
    bench.keep(bench.check(bench.task(2), bench.encoded.data))
    np.testing.assert_array_equal(bench.results.outputs[0], bench.expected)


def test_a_late_wrong_result_does_not_touch_what_others_have_stored(bench: Bench) -> None:
    bench.results.leave_alone([TaskId(1)])
    bench.results.share(TaskId(1))  # hedged, or given to another device
    bench.keep(bench.check(bench.task(2), bench.encoded.data))
    with pytest.raises(WrongResult):
        bench.check(bench.task(1), bench.wrong)
    np.testing.assert_array_equal(bench.results.outputs[0], bench.expected)


def test_a_sum_that_replaces_a_wrong_result_starts_from_zero(bench: Bench) -> None:
    bench.results.leave_alone([TaskId(1)])
    with pytest.raises(WrongResult):
        bench.check(bench.task(1), bench.wrong)
    bench.results.share(TaskId(1))
    bench.results.clear(bench.piece)
    cuts = [(0, INNER // 2), (INNER // 2, INNER)]
    for number, inner in enumerate(cuts, start=2):
        (half,) = bench.product.pieces(Extent((0, ROWS), (0, COLS), inner))
        ((a, b),) = half.terms
        values = a.tensor.values(a.rows, a.cols, CODEC) @ b.tensor.values(b.rows, b.cols, CODEC).T
        checked = bench.check(bench.task(number, half), CODEC.encode(values, "bf16").data)
        bench.results.keep(Fresh(half, bench.part, (bench.part,), checked))
    np.testing.assert_allclose(bench.results.outputs[0], bench.expected, rtol=2e-2, atol=5e-2)
