"""Laws of pieces: however a product is tiled, its pieces add up to it, and any part of a piece is again a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.fleet.profiles import DeviceId
from cleave.core.model.batch import Matrix
from cleave.core.model.gemms import Role
from cleave.core.plan.gemm.layer import Block, Extent, fit
from cleave.protocol.programs import Layout
from cleave.server.gemm.product import LAYOUTS, Piece, Product
from cleave.server.operands import Cut, Range, Tensor

steady = settings(max_examples=60, deadline=None, derandomize=True)
roles: st.SearchStrategy[Role] = st.sampled_from(["forward", "grad_input", "grad_weight"])
sizes = st.integers(1, 9)


@dataclass(frozen=True)
class Case:
    """A product, the numbers behind its tensors, and the expected outputs."""

    product: Product
    numbers: dict[int, Matrix]
    expected: list[Matrix]

    def values(self, cut: Cut) -> Matrix:
        return self.numbers[id(cut.tensor)][slice(*cut.rows), slice(*cut.cols)]


def case(role: Role, tokens: int, width: int, members: Sequence[int], seed: int) -> Case:
    """A case of small integers, whose sums are exact in any order."""
    rng = np.random.default_rng(seed)

    def draw(rows: int, cols: int) -> Matrix:
        return rng.integers(-4, 5, (rows, cols)).astype(np.float32)

    x, weights = draw(tokens, width), [draw(out, width) for out in members]
    gradients = [draw(tokens, out) for out in members]
    match role:
        case "forward":
            a, b = [x], weights
            expected = [x @ w.T for w in weights]
        case "grad_input":
            a, b = gradients, weights
            expected = [sum((dy @ w for dy, w in zip(gradients, weights, strict=True)), np.zeros_like(x))]
        case "grad_weight":
            a, b = gradients, [x]
            expected = [dy.T @ x for dy in gradients]
    tensors = [Tensor(*matrix.shape, "fp32") for matrix in (*a, *b)]
    numbers = {id(tensor): matrix for tensor, matrix in zip(tensors, (*a, *b), strict=True)}
    return Case(Product(role, tuple(tensors[: len(a)]), tuple(tensors[len(a) :])), numbers, expected)


cases = st.builds(
    case, roles, tokens=sizes, width=sizes, members=st.lists(sizes, min_size=1, max_size=3), seed=st.integers(0, 2**31)
)


def tilings_of(case: Case) -> st.SearchStrategy[list[Extent]]:
    """Tilings made by repeatedly cutting blocks in two along some axis."""
    gemm = case.product.gemm
    whole = Extent((0, gemm.m), (0, gemm.n), (0, gemm.k))
    cuts = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["rows", "cols", "inner"]), st.floats(0.1, 0.9)))

    def cut(steps: list[tuple[int, str, float]]) -> list[Extent]:
        blocks = [whole]
        for which, axis, where in steps[:12]:
            block = blocks.pop(which % len(blocks))
            start, end = getattr(block, axis)
            middle = start + int((end - start) * where)
            halves = (block._replace(**{axis: (start, middle)}), block._replace(**{axis: (middle, end)}))
            blocks += [half for half in halves if getattr(half, axis)[0] < getattr(half, axis)[1]]
        return blocks

    return cuts.map(cut)


def multiply(layout: Layout, a: Matrix, b: Matrix) -> Matrix:
    match layout:
        case "nt":
            return a @ b.T
        case "nn":
            return a @ b
        case "tn":
            return a.T @ b


def computed(case: Case, piece: Piece) -> Matrix:
    layout = LAYOUTS[case.product.role]
    return np.sum([multiply(layout, case.values(a), case.values(b)) for a, b in piece.terms], axis=0)


def replayed(case: Case, extents: list[Extent]) -> list[Matrix]:
    """Outputs assembled as by the cluster: partial pieces are added, others written."""
    outputs = [np.zeros(shape, dtype=np.float32) for shape in case.product.outputs]
    written = [np.zeros(shape, dtype=int) for shape in case.product.outputs]
    for extent in extents:
        for piece in case.product.pieces(extent):
            where = slice(*piece.rows), slice(*piece.cols)
            if piece.is_partial:
                outputs[piece.output][where] += computed(case, piece)
            else:
                written[piece.output][where] += 1
                outputs[piece.output][where] = computed(case, piece)
    assert all((times <= 1).all() for times in written), "a whole element is written once"
    return outputs


@steady
@given(cases, st.data())
def test_pieces_of_any_tiling_add_up_to_the_product(case: Case, data: st.DataObject) -> None:
    blocks = data.draw(tilings_of(case))
    for output, expected in zip(replayed(case, blocks), case.expected, strict=True):
        np.testing.assert_array_equal(output, expected)


@steady
@given(cases, st.floats(12.0, 600.0))
def test_pieces_of_a_product_cut_to_a_memory_add_up_to_it(case: Case, memory: float) -> None:
    gemm = case.product.gemm
    blocks = fit(Block(DeviceId("ann"), (0, gemm.m), (0, gemm.n), (0, gemm.k)), memory)
    extents = [block.extent for block in blocks]
    for output, expected in zip(replayed(case, extents), case.expected, strict=True):
        np.testing.assert_array_equal(output, expected)


@steady
@given(cases, st.data())
def test_any_part_of_a_piece_can_be_computed_as_a_block(case: Case, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from(data.draw(tilings_of(case))))
    piece = data.draw(st.sampled_from(list(case.product.pieces(block))))

    def some(of: Range) -> Range:
        start = data.draw(st.integers(0, of[1] - of[0] - 1))
        return start, data.draw(st.integers(start + 1, of[1] - of[0]))

    rows, cols = some(piece.rows), some(piece.cols)
    (again,) = case.product.pieces(case.product.extent(piece, rows, cols))
    assert again.output == piece.output
    assert again.rows == (piece.rows[0] + rows[0], piece.rows[0] + rows[1])
    assert again.cols == (piece.cols[0] + cols[0], piece.cols[0] + cols[1])
    assert (again.inner, again.is_partial) == (piece.inner, piece.is_partial)
    np.testing.assert_array_equal(computed(case, again), computed(case, piece)[slice(*rows), slice(*cols)])


@steady
@given(cases)
def test_the_whole_product_has_one_whole_piece_for_each_output(case: Case) -> None:
    product, gemm = case.product, case.product.gemm
    pieces = list(product.pieces(Extent((0, gemm.m), (0, gemm.n), (0, gemm.k))))
    shapes = [(piece.rows[1] - piece.rows[0], piece.cols[1] - piece.cols[0]) for piece in pieces]
    assert [piece.output for piece in pieces] == list(range(len(product.outputs)))
    assert shapes == product.outputs
    assert not any(piece.is_partial for piece in pieces)


def test_a_block_across_grouped_layers_is_cut_at_their_borders() -> None:
    """A block of columns 1-6 of two layers 4 and 5 wide is columns 1-4 of one and 0-2 of the other."""
    made = case("forward", 3, 2, [4, 5], 0)
    first, second = made.product.pieces(Extent((0, 3), (1, 6), (0, 2)))
    assert (first.output, first.cols) == (0, (1, 4))
    assert (second.output, second.cols) == (1, (0, 2))
    assert first.terms[0][0] == second.terms[0][0], "both read the same slice of X"
