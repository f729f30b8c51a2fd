"""Laws of the server's verdict as a whole: no honest result is refused, and every lie of some size is detected."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.verify.test_products import FORMATS, Data, Order, formats, multiply, operand, sent, size

from cleave.core.cost.wire import WireFormat
from cleave.core.verify.products import GROUP, Ints, Matrix, Rows, check, draw, glance, judge, project

LIES = ("random", "element", "scaled", "flipped", "stale", "zeros")


def judged(
    rng: np.random.Generator, c: Matrix, a: Matrix, b: Matrix, format: WireFormat, *, harder: bool = False
) -> Ints:
    terms = [(Rows(a), project(b, draw(rng, b.shape[1])))]
    return judge(c, terms, lambda: [(a, b)], format, rng, harder=harder)


@formats
def test_no_honest_block_is_refused_even_from_a_suspect(format: WireFormat) -> None:
    rng = np.random.default_rng(5)
    for number in range(500):
        m, k, n = size(rng, 64), size(rng, 600), size(rng, 400)
        a, b = (operand(rng, *shape, rng.choice(get_args(Data)), format) for shape in ((m, k), (k, n)))
        with np.errstate(over="ignore"):
            c = sent(multiply(a, b, rng.choice(get_args(Order))), format)
        assert not len(judged(rng, c, a, b, format, harder=number % 2 == 0)), (m, k, n)


@formats
@pytest.mark.parametrize("lie", LIES)
def test_every_lie_is_detected(format: WireFormat, lie: str) -> None:
    rng = np.random.default_rng(6)
    for _ in range(100):
        m, k, n = (int(rng.integers(low, 300)) for low in (16, 16, 64))
        a, b = operand(rng, m, k, "normal", format), operand(rng, k, n, "normal", format)
        c = a @ b
        match lie:
            case "random":
                c = rng.standard_normal(c.shape, dtype=np.float32) * c.std()
            case "element":
                c[rng.integers(m), rng.integers(n)] += 6 * c.std() if format == "q8" else 2 * c.std()
            case "scaled":
                c = c * np.float32(1.1)
            case "flipped":
                c = -c
            case "stale":
                c = operand(rng, m, k, "normal", format) @ b
            case _:
                c = np.zeros_like(c)
        assert len(judged(rng, sent(c, format), a, b, format))


@formats
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_results_of_finite_operands_are_refused(format: WireFormat, value: float) -> None:
    rng = np.random.default_rng(7)
    a, b = operand(rng, 40, 64, "normal", format), operand(rng, 64, 200, "normal", format)
    c = sent(a @ b, format)
    c[13, 150] = value
    assert judged(rng, c, a, b, format).tolist() == [13]


@formats
def test_rows_with_non_finite_operands_are_not_judged(format: WireFormat) -> None:
    rng = np.random.default_rng(8)
    a, b = operand(rng, 40, 64, "normal", "fp32"), operand(rng, 64, 200, "normal", "fp32")
    a[3, 5] = np.inf
    with np.errstate(invalid="ignore"):
        c = a @ b
    assert not len(judged(rng, c, a, b, "fp32"))
    c[4] += 1
    assert judged(rng, c, a, b, "fp32").tolist() == [4]


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_glance_doubts_any_row_wrong_by_more_than_its_tolerance(data: st.DataObject) -> None:
    """In fp32, where all columns form one group; for a sum of products, and for a rectangle of it."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    m, n = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 500))
    left = GROUP * data.draw(st.integers(0, (n - 1) // GROUP))
    inner = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
    pairs = [(operand(rng, m, k, "normal", "fp32"), operand(rng, n, k, "normal", "fp32").T) for k in inner]
    c = np.sum([a @ b for a, b in pairs], axis=0, dtype=np.float32)[:, left:]
    r = draw(rng, n)
    terms = [(Rows(a), project(b, r)) for a, b in pairs]
    row, col = data.draw(st.integers(0, m - 1)), data.draw(st.integers(0, n - left - 1))
    # the norm of B itself: where B r nearly cancels, rounding in C r is more than a bound from B r alone
    bound = sum(float(np.linalg.norm(a[row]) * np.linalg.norm(b[:, left:])) for a, b in pairs)
    c[row, col] += 4 * (40 + 2 * sum(inner) ** 0.5) * 2.0**-24 * bound + 1e-30
    assert row in glance(c, terms, "fp32", left)


def test_a_glance_doubts_no_honest_row_in_ten_thousand() -> None:
    rng = np.random.default_rng(10)
    doubts = 0
    for _ in range(50):
        a, b = operand(rng, 200, 256, "normal", "fp32"), operand(rng, 256, 300, "normal", "fp32")
        doubts += len(glance(a @ b, [(Rows(a), project(b, draw(rng, 300)))], "fp32"))
    assert doubts == 0


@pytest.mark.parametrize("format", FORMATS[1:])
def test_a_glance_doubts_everything_a_check_flags(format: WireFormat) -> None:
    rng = np.random.default_rng(9)
    for _ in range(200):
        m, k, n = size(rng, 64), size(rng, 300), size(rng, 400)
        a, b = operand(rng, m, k, "normal", format), operand(rng, k, n, "normal", format)
        c = a @ b
        c[rng.integers(m), rng.integers(n)] += np.float32(rng.exponential(0.5)) * c.std()
        c = sent(c, format)
        terms = [(Rows(a), project(b, draw(rng, n)))]
        assert set(check(c, terms, format).rows.tolist()) <= set(glance(c, terms, format).tolist())
