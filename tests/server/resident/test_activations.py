"""Laws of activations between stages: however results arrive, the next stage receives their residual sum."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Batch, Matrix
from cleave.protocol.numbers import NumpyCodec
from cleave.server.operands import Operands, Tensor
from cleave.server.resident.activations import Activations

steady = settings(max_examples=60, deadline=None, derandomize=True)
HIDDEN = 3
PLENTY = 1 << 30


def numbers(rng: np.random.Generator, *shape: int) -> Matrix:
    """Small integers, whose sums are exact in any order."""
    return rng.integers(-8, 9, shape).astype(np.float32)


def no_operands() -> Operands:
    return Operands(NumpyCodec(), lambda released: None)


def batch(sequences: int, sequence: int, *, seed: int = 0, **options: Any) -> Batch[Tensor]:
    x = numbers(np.random.default_rng(seed), sequences * sequence, HIDDEN)
    return Batch(x=x, sequences=sequences, sequence=sequence, operands=(), **options)


def between(
    of: Batch[Tensor],
    slices: Sequence[int],
    chunk: int,
    *,
    has_head: bool = False,
    budget_bytes: int = PLENTY,
    format: WireFormat = "fp32",
) -> Activations:
    return Activations(
        of, slices, chunk=chunk, has_head=has_head, operands=no_operands(), format=format, budget_bytes=budget_bytes
    )


def values(tensor: Tensor) -> Matrix:
    return tensor.values((0, tensor.rows), (0, tensor.cols), NumpyCodec())


@steady
@given(
    slices=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    sequences=st.integers(1, 3),
    sequence=st.integers(1, 5),
    chunk=st.integers(1, 6),
    budget_bytes=st.sampled_from([0, 100, PLENTY]),
    seed=st.integers(0, 99),
)
def test_partial_sums_in_any_order_give_the_residual_sum(
    slices: list[int], sequences: int, sequence: int, chunk: int, budget_bytes: int, seed: int
) -> None:
    """Forward y = x + sum of slices, or y itself for a single slice; backward likewise. On disk as in memory."""
    rng, of = np.random.default_rng(seed), batch(sequences, sequence)
    found = between(of, slices, chunk, budget_bytes=budget_bytes)
    parts = [[numbers(rng, *of.x.shape) for _ in range(count)] for count in slices]
    expected = of.x
    for stage, mine in enumerate(parts):
        pieces = [(part, s, c) for part in range(len(mine)) for s in range(sequences) for c in range(found.chunks)]
        for index in rng.permutation(len(pieces)):
            part, at, piece = pieces[index]
            found.put_forward(stage, part, at, piece, mine[part][slice(*found.rows(at, piece))])
        for at in range(sequences):
            for piece in range(found.chunks):
                rows = slice(*found.rows(at, piece))
                np.testing.assert_array_equal(values(found.x(stage, at, piece)), expected[rows])
        expected = mine[0] if len(mine) == 1 else expected + sum(mine)
    np.testing.assert_array_equal(found.outputs, expected)

    dy = numbers(rng, *of.x.shape)
    found.expect_gradients(dy)
    expected = dy
    for stage in reversed(range(len(slices))):
        mine = parts[stage]
        pieces = [(part, s, c) for part in range(len(mine)) for s in range(sequences) for c in range(found.chunks)]
        for at in range(sequences):
            for piece in range(found.chunks):
                rows = slice(*found.rows(at, piece))
                np.testing.assert_array_equal(values(found.dy(stage, at, piece)), expected[rows])
        for index in rng.permutation(len(pieces)):
            part, at, piece = pieces[index]
            found.put_backward(stage, at, piece, mine[part][slice(*found.rows(at, piece))])
        expected = mine[0] if len(mine) == 1 else expected + sum(mine)
    np.testing.assert_array_equal(found.dx, expected)


@steady
@given(sequences=st.integers(1, 4), sequence=st.integers(1, 9), chunk=st.integers(1, 10))
def test_chunks_tile_the_rows_of_a_batch(sequences: int, sequence: int, chunk: int) -> None:
    found = between(batch(sequences, sequence), [1], chunk)
    rows = [row for at in range(sequences) for piece in range(found.chunks) for row in range(*found.rows(at, piece))]
    assert rows == list(range(sequences * sequence))


@steady
@given(
    cuts=st.sets(st.integers(1, 10), max_size=4),
    sequences=st.integers(1, 3),
    sequence=st.integers(1, 5),
    chunk=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_the_loss_is_that_of_the_whole_vocabulary_however_it_is_sliced(
    cuts: set[int], sequences: int, sequence: int, chunk: int, seed: int
) -> None:
    torch = pytest.importorskip("torch")
    words, rng = 11, np.random.default_rng(seed)
    tokens = sequences * sequence
    logits = rng.normal(0, 20, (tokens, words)).astype(np.float32)
    targets = rng.integers(-1, words, (tokens, 1)).astype(np.float32)
    scales = np.where(targets < 0, 0, 1 / tokens).astype(np.float32)
    bounds = [0, *sorted(cuts), words]
    found = between(
        batch(sequences, sequence, targets=targets, scales=scales), [1, len(bounds) - 1], chunk, has_head=True
    )
    for part, (first, last) in enumerate(itertools.pairwise(bounds)):
        mine = logits[:, first:last]
        has = (targets[:, 0] >= first) & (targets[:, 0] < last)
        seen = np.where(has, logits[np.arange(tokens), np.maximum(targets[:, 0], 0).astype(int)], 0)
        pair = np.stack([np.logaddexp.reduce(mine, axis=1), seen], axis=1).astype(np.float32)
        for at in range(sequences):
            for piece in range(found.chunks):
                found.put_forward(1, part, at, piece, pair[slice(*found.rows(at, piece))])
    theirs = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits), torch.from_numpy(targets[:, 0]).long(), ignore_index=-1, reduction="none"
    )
    np.testing.assert_allclose(found.outputs[:, 0], theirs.numpy(), rtol=1e-5, atol=1e-4)
    whole = np.logaddexp.reduce(logits.astype(np.float64), axis=1)
    for at in range(sequences):
        for piece in range(found.chunks):
            rows = slice(*found.rows(at, piece))
            given_back = values(found.dy(1, at, piece))
            np.testing.assert_allclose(given_back[:, 0], whole[rows], rtol=1e-5)
            np.testing.assert_array_equal(given_back[:, 1], scales[rows, 0])


def test_activations_beyond_the_budget_are_kept_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    of = batch(2, 8)
    size = of.x.nbytes
    found = between(of, [1, 1, 1], 8, budget_bytes=size + size // 2)
    for stage in range(3):
        for at in range(2):
            found.put_forward(stage, 0, at, 0, np.ones((8, HIDDEN), np.float32))
    kinds = [isinstance(found._x[stage], np.memmap) for stage in range(4)]  # pyright: ignore[reportPrivateUsage]
    assert kinds == [False, False, True, True], "the batch's own input, one stage within the budget, two beyond it"


def test_a_restarted_backward_starts_from_the_residual_again() -> None:
    """Devices were lost and the same plan starts over: gradients summed so far must not count."""
    of, ones = batch(1, 4), np.ones((4, HIDDEN), np.float32)
    found = between(of, [2], 4)
    for _ in range(2):
        found.expect_gradients(ones)
        found.put_backward(0, 0, 0, ones)
    found.put_backward(0, 0, 0, ones)
    np.testing.assert_array_equal(found.dx, 3 * ones)


def test_a_restarted_backward_sends_devices_the_new_gradients() -> None:
    of, ones = batch(1, 4), np.ones((4, HIDDEN), np.float32)
    found = between(of, [1, 1], 4)
    for value in (1, 2):
        found.expect_gradients(ones)
        found.put_backward(1, 0, 0, value * ones)
        np.testing.assert_array_equal(values(found.dy(0, 0, 0)), value * ones)


def test_an_unwanted_input_gradient_is_not_kept() -> None:
    of = batch(1, 4, wants_dx=False)
    found = between(of, [1], 4)
    found.expect_gradients(np.ones((4, HIDDEN), np.float32))
    found.put_backward(0, 0, 0, np.ones((4, HIDDEN), np.float32))
    assert -1 not in found._dy  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_chunk_knows_its_first_row_in_the_rotary_table(is_shared: bool) -> None:
    rows = 6 if is_shared else 12
    table = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    found = between(batch(2, 6, rotary=table), [1], 4)
    for at in range(2):
        for piece in range(2):
            place = found.rotary(at, piece)
            assert place is not None
            tensor, first = place
            assert first == piece * 4 + (0 if is_shared else at * 6)
            np.testing.assert_array_equal(values(tensor), table)


def test_each_sequence_has_its_own_mask_and_targets() -> None:
    mask = np.array([[1, 1, 0], [0, 1, 1]], np.float32)
    targets = np.arange(6, dtype=np.float32)[:, None]
    found = between(batch(2, 3, mask=mask, targets=targets, scales=targets), [1], 2, has_head=True)
    for at in range(2):
        tensor = found.mask(at)
        assert tensor is not None
        np.testing.assert_array_equal(values(tensor), mask[at : at + 1])
        assert found.mask(at) is tensor, "sent once"
        for piece in range(2):
            tensor = found.targets(at, piece)
            assert tensor is not None
            np.testing.assert_array_equal(values(tensor), targets[slice(*found.rows(at, piece))])


def test_released_tensors_are_staged_again_with_the_same_numbers() -> None:
    """A device may leave after a sequence is finished, and another may need its rows again."""
    found = between(batch(2, 4), [1], 4)
    first = found.x(0, 1, 0)
    before = values(first).copy()
    assert found.x(0, 1, 0) is first
    found.release(0, 1)
    assert found.x(0, 1, 0) is not first
    np.testing.assert_array_equal(values(found.x(0, 1, 0)), before)


@pytest.mark.parametrize("format", ["bf16", "fp16", "q8"])
def test_only_activations_are_rounded(format: WireFormat) -> None:
    """Positions, masks, targets and the head's gradients are few, and sensitive to rounding."""
    rng, tokens = np.random.default_rng(0), 8
    ones = np.ones((tokens, 1), np.float32)
    of = batch(2, 4, rotary=np.eye(4, dtype=np.float32), targets=ones, scales=ones, mask=np.ones((2, 4), np.float32))
    found = between(of, [1, 1], 4, has_head=True, format=format)
    found.put_forward(0, 0, 0, 0, rng.normal(0, 1, (4, HIDDEN)).astype(np.float32))
    rotary, mask, targets = found.rotary(0, 0), found.mask(0), found.targets(0, 0)
    assert rotary is not None
    assert mask is not None
    assert targets is not None
    assert [one.format for one in (rotary[0], mask, targets, found.dy(1, 0, 0))] == ["fp32"] * 4
    assert found.x(1, 0, 0).format == format
