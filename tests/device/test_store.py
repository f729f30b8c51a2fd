"""Laws of the store: it takes strips in order, within the memory offered, and refuses the rest with a reason."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.cost.resident import state_bytes
from cleave.core.cost.wire import WireFormat, encoded_bytes
from cleave.core.model.batch import Matrix
from cleave.device.kernels import NumpyKernel
from cleave.device.store import OperandStore
from cleave.errors import ProtocolError
from cleave.protocol.messages import Store as StoreMessage
from cleave.protocol.numbers import Encoded, NumpyCodec


def strip(
    operand: int, matrix: Matrix, first: int, last: int, format: WireFormat = "fp32"
) -> tuple[StoreMessage, Encoded]:
    payload = NumpyCodec().encode(matrix[first:last], format)
    rows, cols = matrix.shape
    return (
        StoreMessage(
            operand=operand,
            rows=rows,
            cols=cols,
            format=format,
            first_row=first,
            strip_rows=last - first,
            payload=len(payload),
        ),
        payload,
    )


def header(*, rows: int = 4, cols: int = 3, first_row: int = 0, strip_rows: int = 4, operand: int = 1) -> StoreMessage:
    return StoreMessage(
        operand=operand, rows=rows, cols=cols, format="fp32", first_row=first_row, strip_rows=strip_rows
    )


def numbers(rows: int, cols: int) -> Matrix:
    return np.arange(rows * cols, dtype=np.float32).reshape(rows, cols)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(1, 6), st.lists(st.integers(1, 5)), st.sampled_from(["fp32", "bf16", "fp16"]))
def test_strips_in_order_give_the_operand(rows: int, cols: int, heights: list[int], format: WireFormat) -> None:
    store, matrix = OperandStore(NumpyKernel(), 4 * rows * cols), numbers(rows, cols)
    top = 0
    for height in [*heights, rows]:
        bottom = min(top + height, rows)
        if top == bottom:
            break
        message, payload = strip(7, matrix, top, bottom, format)
        store.write(message, payload.data)
        top = bottom
        held = store.get(7)
        assert held is not None
        assert held.ready_rows == top
        assert held.is_whole == (top == rows)
        np.testing.assert_array_equal(held.array[:top], matrix[:top])
        assert store.used_bytes == held.bytes == 4 * rows * cols, "the first strip reserves memory for all"


def test_memory_beyond_the_cap_is_refused_and_freed_by_a_drop() -> None:
    store, matrix = OperandStore(NumpyKernel(), 100), numbers(4, 5)
    message, payload = strip(1, matrix, 0, 4)
    store.write(message, payload.data)
    assert store.used_bytes == 80
    with pytest.raises(ProtocolError, match=r"\b84\b.*\b20 of 100\b.*memory"):
        store.write(*strip(2, numbers(3, 7), 0, 3))
    assert store.used_bytes == 80, "a refused strip takes no memory"
    assert store.get(2) is None
    store.drop((1,))
    assert store.used_bytes == 0
    assert store.get(1) is None
    store.write(*strip(2, numbers(5, 5), 0, 5))
    assert store.used_bytes == 100, "the cap itself is allowed"


@pytest.mark.parametrize(
    "message",
    [
        header(first_row=1, strip_rows=1),
        header(strip_rows=5),
        header(strip_rows=0),
        header(strip_rows=-1),
        header(first_row=-1, strip_rows=1),
        header(first_row=4, strip_rows=1),
    ],
)
def test_a_first_strip_that_does_not_start_at_row_zero_or_fit_is_refused(message: StoreMessage) -> None:
    with pytest.raises(ProtocolError):
        OperandStore(NumpyKernel(), 1000).write(message, bytes(max(0, 12 * message.strip_rows)))


@pytest.mark.parametrize(
    "message",
    [
        header(first_row=0, strip_rows=2),
        header(first_row=3, strip_rows=1),
        header(first_row=2, strip_rows=3),
        header(first_row=2, strip_rows=0),
        header(first_row=2, strip_rows=2, rows=5),
        header(first_row=2, strip_rows=2, cols=4),
    ],
)
def test_a_strip_out_of_order_or_of_another_size_is_refused(message: StoreMessage) -> None:
    """Rows 0-2 of 4 x 3 are stored, so only rows 2-4 of 4 x 3 may come next."""
    store = OperandStore(NumpyKernel(), 1000)
    store.write(*strip(1, numbers(4, 3), 0, 2))
    with pytest.raises(ProtocolError, match="expected rows from 2 on of operand 1 \\(4 x 3\\)"):
        store.write(message, bytes(4 * message.strip_rows * message.cols))
    store.write(*strip(1, numbers(4, 3), 2, 4))
    with pytest.raises(ProtocolError):
        store.write(*strip(1, numbers(4, 3), 0, 4))


@pytest.mark.parametrize(("rows", "cols"), [(0, 3), (3, 0), (-1, -1), (-2, 3)])
def test_an_operand_of_size_zero_is_refused(rows: int, cols: int) -> None:
    store = OperandStore(NumpyKernel(), 1000)
    with pytest.raises(ProtocolError, match="at least 1 x 1"):
        store.write(header(rows=rows, cols=cols, strip_rows=1), b"")
    assert store.used_bytes == 0


@pytest.mark.parametrize("size", [0, 47, 49, 96])
def test_a_payload_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="expected 48 bytes"):
        OperandStore(NumpyKernel(), 1000).write(header(), bytes(size))


def test_a_size_beyond_all_memory_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ProtocolError, match=rf"\b{4 << 60}\b.*\b1000 of 1000\b.*memory"):
        OperandStore(NumpyKernel(), 1000).write(header(rows=1 << 40, cols=1 << 20, strip_rows=1), b"")


def test_dropping_absent_operands_changes_nothing() -> None:
    store = OperandStore(NumpyKernel(), 1000)
    store.write(*strip(1, numbers(4, 3), 0, 4))
    store.drop((2, 3))
    assert store.used_bytes == 48
    store.drop((1, 1))
    assert store.used_bytes == 0


def test_q8_strips_carry_their_own_scales() -> None:
    store, matrix = OperandStore(NumpyKernel(), 1000), numbers(4, 3) - 5
    for first in (0, 2):
        message, payload = strip(1, matrix, first, first + 2, "q8")
        assert len(payload) == encoded_bytes("q8", 2, 3)
        store.write(message, payload.data)
    held = store.get(1)
    assert held is not None
    np.testing.assert_allclose(held.array, matrix, atol=np.abs(matrix).max() / 252)


def test_clearing_also_forgets_states_and_accumulators() -> None:
    store = OperandStore(NumpyKernel(), 1000)
    store.make_state(1, (3,), 5)
    store.accumulator(2, 3, 4)
    assert store.used_bytes == state_bytes((3,), 5) + 48
    store.clear()
    assert (store.used_bytes, store.state(1), store.get(2)) == (0, None, None)


def test_countless_tiny_operands_are_refused_before_their_bookkeeping_fills_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cleave.device.store._MOST_HELD", 10)
    store, one = OperandStore(NumpyKernel(), 1 << 20), numbers(1, 1)
    for number in range(10):
        message, payload = strip(number, one, 0, 1)
        store.write(message, payload.data)
    message, payload = strip(10, one, 0, 1)
    with pytest.raises(ProtocolError, match="at most 10 operands"):
        store.write(message, payload.data)
    store.drop((3,))
    store.write(message, payload.data)
