"""Laws of one block on a device: however its strips arrive, its rectangles tile it once and equal the product."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.model.batch import Matrix
from cleave.core.schedule.rectangles import Rectangle, total, within, without
from cleave.device.kernels import Kernel, NumpyKernel, TorchKernel
from cleave.device.programs.gemm import GemmTask
from cleave.device.store import OperandStore
from cleave.errors import ProtocolError
from cleave.protocol.frames import PAYLOAD_BYTES
from cleave.protocol.messages import Store as StoreMessage
from cleave.protocol.programs import GemmProgram, Layout

steady = settings(max_examples=40, deadline=None, derandomize=True)
layouts: st.SearchStrategy[Layout] = st.sampled_from(["nt", "nn", "tn"])


def shapes(layout: Layout, rows: int, cols: int, inner: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of a and b as they are stored."""
    match layout:
        case "nt":
            return (rows, inner), (cols, inner)
        case "nn":
            return (rows, inner), (inner, cols)
        case "tn":
            return (inner, rows), (inner, cols)


def oriented(layout: Layout, a: Matrix, b: Matrix) -> Matrix:
    match layout:
        case "nt":
            return a @ b.T
        case "nn":
            return a @ b
        case "tn":
            return a.T @ b


class Bench:
    """One task with its operands; `arrive` brings the next rows of one of them."""

    def __init__(self, layout: Layout, rows: int, cols: int, inners: list[int], seed: int, kernel: Kernel) -> None:
        rng = np.random.default_rng(seed)
        self.operands: dict[int, Matrix] = {}
        terms: list[tuple[int, int]] = []
        self.expected = np.zeros((rows, cols), dtype=np.float32)
        for inner in inners:  # small integers, whose sums are exact in any order
            a, b = (rng.integers(-3, 4, size).astype(np.float32) for size in shapes(layout, rows, cols, inner))
            number = len(self.operands) + 1
            self.operands[number], self.operands[number + 1] = a, b
            terms.append((number, number + 1))
            self.expected += oriented(layout, a, b)
        self.arrived = dict.fromkeys(self.operands, 0)
        self.store = OperandStore(kernel, sum(4 * matrix.size for matrix in self.operands.values()))
        program = GemmProgram(layout=layout, terms=tuple(terms), rows=rows, cols=cols)
        self.task = GemmTask(program, self.store, kernel)
        self.total_flops = 2.0 * rows * cols * sum(inners)
        self.output = np.full((rows, cols), np.nan, dtype=np.float32)
        self.missing = [Rectangle(0, rows, 0, cols)]
        self.flops = 0.0
        self.parts: list[Rectangle] = []

    def coming(self) -> list[int]:
        return [number for number, matrix in self.operands.items() if self.arrived[number] < len(matrix)]

    def arrive(self, operand: int, rows: int) -> None:
        matrix, first = self.operands[operand], self.arrived[operand]
        strip = matrix[first : first + rows]
        self.store.write(
            StoreMessage(
                operand=operand,
                rows=matrix.shape[0],
                cols=matrix.shape[1],
                format="fp32",
                first_row=first,
                strip_rows=len(strip),
                payload=strip.nbytes,
            ),
            strip.tobytes(),
        )
        self.arrived[operand] += len(strip)

    def compute(self, most: int = 1 << 30) -> None:
        for _ in range(most):
            chunk = self.task.next_chunk()
            if chunk is None:
                return
            result = chunk.run()
            self.flops += chunk.flops
            if chunk.part is None:
                continue
            assert total(within(self.missing, chunk.part)) == chunk.part.area > 0, "parts lie in the block, each once"
            self.missing = without(self.missing, chunk.part)
            self.parts.append(chunk.part)
            part = chunk.part
            self.output[part.top : part.bottom, part.left : part.right] = np.asarray(result)

    def check(self) -> None:
        self.compute()
        assert self.task.finished
        assert self.missing == []
        assert self.task.next_chunk() is None
        np.testing.assert_array_equal(self.output, self.expected)
        assert self.flops == self.total_flops


@steady
@given(
    layouts,
    st.integers(1, 90),
    st.integers(1, 40),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(0, 2**31),
    st.data(),
)
def test_any_interleaving_of_strips_gives_the_product(
    layout: Layout, rows: int, cols: int, inners: list[int], seed: int, data: st.DataObject
) -> None:
    bench = Bench(layout, rows, cols, inners[:1] if layout == "tn" else inners, seed, NumpyKernel())
    while coming := bench.coming():
        assert not bench.task.finished
        bench.arrive(data.draw(st.sampled_from(coming)), data.draw(st.integers(1, 40)))
        bench.compute(data.draw(st.integers(0, 3)))
    bench.check()


LARGE: list[tuple[Layout, int, int, list[int]]] = [
    ("nt", 2600, 1900, [40]),
    ("nt", 30, 40_000, [8, 8]),
    ("nt", 40_000, 30, [8]),
    ("nn", 1900, 2600, [40, 8, 24]),
    ("tn", 1900, 2600, [1300]),
    ("tn", 3, 5, [2600]),
    ("nn", 130, 20_000, [60]),
    ("nn", 520, 30_000, [3]),
    ("tn", 520, 30_000, [3]),
]


@pytest.mark.parametrize("kernel", ["numpy", "torch"])
@pytest.mark.parametrize(("layout", "rows", "cols", "inners"), LARGE)
def test_large_blocks_are_returned_in_several_rectangles_of_limited_size(
    layout: Layout, rows: int, cols: int, inners: list[int], kernel: str
) -> None:
    bench = Bench(layout, rows, cols, inners, 1, NumpyKernel() if kernel == "numpy" else TorchKernel("cpu"))
    while coming := bench.coming():
        for number in coming:
            bench.arrive(number, 700)
            bench.compute()
    bench.check()
    assert all(4 * part.area <= PAYLOAD_BYTES / 4 for part in bench.parts)
    if rows * cols > 5_000_000:
        assert len(bench.parts) > 1


def test_the_finished_square_grows_as_strips_alternate() -> None:
    """After half of both operands, a quarter of an nt block is done."""
    bench = Bench("nt", 4096, 4096, [2], 0, NumpyKernel())
    done: list[int] = []
    for number in (1, 2, 2, 1):
        bench.arrive(number, 2048)
        bench.compute()
        done.append(4 * sum(part.area for part in bench.parts) // 4096**2)
    assert done == [0, 1, 2, 4]
    bench.check()


def test_rows_are_returned_as_they_arrive_once_b_is_complete() -> None:
    bench = Bench("nn", 8, 5, [4], 0, NumpyKernel())
    bench.arrive(1, 8)
    bench.arrive(2, 3)
    bench.compute()
    assert bench.parts == []
    bench.arrive(2, 1)
    bench.compute()
    assert bench.parts == [Rectangle(0, 8, 0, 5)]


def test_a_sum_over_inner_rows_is_returned_at_the_end() -> None:
    bench = Bench("tn", 4, 5, [4200], 0, NumpyKernel())
    for number in (1, 2):
        bench.arrive(number, 4100)
    bench.compute()
    assert bench.parts == []
    assert bench.flops > 0.9 * bench.total_flops, "but most of it is computed before"
    for number in (1, 2):
        bench.arrive(number, 100)
    bench.check()


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize(("rows", "cols"), [(3, 5), (4, 4), (0, 5), (4, -5), (1 << 40, 5)])
def test_operands_that_do_not_match_the_block_are_refused(layout: Layout, rows: int, cols: int) -> None:
    bench = Bench(layout, 4, 5, [6], 0, NumpyKernel())
    for number in (1, 2):
        bench.arrive(number, 10)
    program = GemmProgram(layout=layout, terms=((1, 2),), rows=rows, cols=cols)
    with pytest.raises(ProtocolError, match="do not make a block"):
        GemmTask(program, bench.store, NumpyKernel()).next_chunk()


def test_a_sum_of_transposed_terms_is_refused() -> None:
    bench = Bench("nt", 4, 4, [4, 4], 0, NumpyKernel())
    for number in bench.operands:
        bench.arrive(number, 4)
    with pytest.raises(ProtocolError):
        GemmTask(
            GemmProgram(layout="tn", terms=((1, 2), (3, 4)), rows=4, cols=4), bench.store, NumpyKernel()
        ).next_chunk()


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_a_block_without_terms_is_refused(layout: Layout) -> None:
    with pytest.raises(ProtocolError):
        GemmTask(
            GemmProgram(layout=layout, terms=(), rows=4, cols=4), OperandStore(NumpyKernel(), 1), NumpyKernel()
        ).next_chunk()


@steady
@given(layouts, st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**31))
def test_torch_and_numpy_give_the_same_products(
    layout: Layout, rows: int, cols: int, inner: int, terms: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kernels: tuple[Kernel, Kernel] = NumpyKernel(), TorchKernel("cpu")
    pairs = [
        tuple(rng.standard_normal(shape, dtype=np.float32) for shape in shapes(layout, rows, cols, inner))
        for _ in range(terms)
    ]
    results: list[Matrix] = []
    for kernel in kernels:
        held = []
        for pair in pairs:
            arrays = tuple(kernel.allocate(*matrix.shape) for matrix in pair)
            for array, matrix in zip(arrays, pair, strict=True):
                kernel.write(array, matrix.tobytes(), "fp32")
            held.append(arrays)
        encoded = kernel.encode(kernel.multiply(layout, held), "fp32")
        results.append(encoded.view("<f4").reshape(rows, cols))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-4)
    expected = sum(oriented(layout, a.astype(np.float64), b.astype(np.float64)) for a, b in pairs)
    np.testing.assert_allclose(results[0], expected, rtol=1e-4, atol=1e-4)
