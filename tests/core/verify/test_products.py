"""Laws of checking products: honest devices pass whatever the data, liars do not, and tolerance cannot be bought."""

from __future__ import annotations

from math import sqrt
from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.cost.wire import WireFormat
from cleave.core.verify.products import (
    GROUP,
    Matrix,
    Rows,
    Verdict,
    check,
    draw,
    peaks,
    project,
    recheck,
    recheck_peaks,
)
from cleave.protocol.numbers import NumpyCodec

FORMATS: tuple[WireFormat, ...] = ("fp32", "bf16", "fp16", "q8")
Data = Literal["normal", "positive", "wide", "tiny", "sparse", "outliers"]
Order = Literal["blas", "sequential", "split", "fp64"]
CODEC = NumpyCodec()
formats = pytest.mark.parametrize("format", FORMATS)


def sent(matrix: Matrix, format: WireFormat) -> Matrix:
    """A matrix as it arrives over the wire."""
    out = np.empty(matrix.shape, dtype=np.float32)
    CODEC.decode_into(CODEC.encode(matrix, format).data, format, out)
    return out


def operand(rng: np.random.Generator, rows: int, cols: int, data: Data, format: WireFormat) -> Matrix:
    numbers = rng.standard_normal((rows, cols), dtype=np.float32)
    match data:
        case "normal":
            pass
        case "positive":
            numbers = np.abs(numbers) + np.float32(rng.choice([0.0, 10.0]))
        case "wide":
            numbers *= np.exp2(rng.uniform(-60, 0, numbers.shape)).astype(np.float32)
        case "tiny":
            numbers *= np.float32(2.0 ** rng.integers(-140, -10))
        case "sparse":
            numbers *= rng.random((rows, 1)) < 0.5
            numbers *= rng.random((rows, cols)) < 0.2
        case "outliers":
            numbers[:, rng.integers(cols)] *= 100
            numbers[rng.integers(rows)] *= 100
    return sent(numbers, format)


def multiply(a: Matrix, b: Matrix, order: Order) -> Matrix:
    """A product as some device might compute it."""
    match order:
        case "blas":
            return a @ b
        case "sequential":
            total = np.zeros((len(a), b.shape[1]), dtype=np.float32)
            for k in range(len(b)):
                total += a[:, k, None] * b[k]
            return total
        case "split":
            cuts = range(0, len(b), 37)
            return np.sum([a[:, k : k + 37] @ b[k : k + 37] for k in cuts], axis=0, dtype=np.float32)
        case "fp64":
            return (a.astype(np.float64) @ b).astype(np.float32)


def looked_at(rng: np.random.Generator, c: Matrix, a: Matrix, b: Matrix, format: WireFormat) -> Verdict:
    return check(c, [(Rows(a), project(b, draw(rng, b.shape[1])))], format)


def size(rng: np.random.Generator, largest: int) -> int:
    return int(np.exp(rng.uniform(0, np.log(largest + 1))))


# ---------------------------------------------------------------------------------------------- honest devices


@formats
def test_no_honest_block_is_refused(format: WireFormat) -> None:
    rng = np.random.default_rng(3)
    for _ in range(1000):
        m, k, n = size(rng, 64), size(rng, 600), size(rng, 400)
        a, b = (operand(rng, *shape, rng.choice(get_args(Data)), format) for shape in ((m, k), (k, n)))
        if rng.random() < 0.5:
            b = np.asfortranarray(b)
        c = multiply(a, b, rng.choice(get_args(Order)))
        verdict = looked_at(rng, sent(c, format), a, b, format)
        if np.abs(c).max() < 65000:
            assert verdict.ok, (verdict, m, k, n)
        assert recheck(sent(c, format), [(a, b)], np.arange(m), format).size == 0
        assert verdict.unchecked == 0


@formats
@pytest.mark.parametrize("order", ["blas", "sequential", "split"])
def test_no_long_sum_of_positive_numbers_is_refused(format: WireFormat, order: Order) -> None:
    rng = np.random.default_rng(4)
    for inner in (4096, 16384):
        for offset in (0.0, 1.0):
            a, b = (rng.random(shape, dtype=np.float32) + np.float32(offset) for shape in ((8, inner), (inner, 150)))
            a, b = sent(a, format), sent(b, format)
            c = sent(multiply(a, b, order) / 8, format)
            a = a / np.float32(8)  # fp16 overflows at 65,504
            assert looked_at(rng, c, a, b, format).worst < 0.8
            assert recheck(c, [(a, b)], np.arange(8), format).size == 0


def test_the_servers_own_rounding_is_within_tolerance() -> None:
    """Equal columns make B r as large as possible, and C r a difference of large numbers."""
    rng = np.random.default_rng(14)
    for _ in range(100):
        a, b = (rng.normal(10, 0.5, shape).astype(np.float32) for shape in ((100, 399), (399, 300)))
        assert looked_at(rng, a @ b, a, b, "fp32").worst < 0.7


def test_even_the_worst_order_of_summation_passes_the_recheck() -> None:
    """Sums of equal numbers always round the same way: the check flags them, the recheck clears them."""
    rng = np.random.default_rng(15)
    a, b = np.full((4, 4096), 0.1, dtype=np.float32), np.full((4096, GROUP), 0.1, dtype=np.float32)
    c = multiply(a, b, "sequential")
    assert not all(looked_at(rng, c, a, b, "fp32").ok for _ in range(10))
    assert recheck(c, [(a, b)], np.arange(4), "fp32").size == 0


@formats
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_rectangle_of_a_sum_of_products_is_checked_by_itself(format: WireFormat, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    m, n = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 500))
    inner = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
    top, left = data.draw(st.integers(0, m - 1)), GROUP * data.draw(st.integers(0, (n - 1) // GROUP))
    bottom = data.draw(st.integers(top + 1, m))
    right = min(n, GROUP * data.draw(st.integers(left // GROUP + 1, -(-n // GROUP))))
    pairs = [(operand(rng, m, k, "normal", format), operand(rng, n, k, "normal", format).T) for k in inner]
    c = np.sum([a @ b for a, b in pairs], axis=0, dtype=np.float32)
    r = draw(rng, n)
    terms = [(Rows(a).take(slice(top, bottom)), project(b, r)) for a, b in pairs]
    part = sent(c[top:bottom, left:right], format)
    assert check(part, terms, format, left).ok
    part[data.draw(st.integers(0, len(part) - 1)), data.draw(st.integers(0, right - left - 1))] += 100 * np.abs(c).max()
    assert not check(part, terms, format, left).ok


def test_norms_are_right_beyond_the_squares_of_fp32() -> None:
    for scale in (1e-44, 1e-30, 1.0, 1e30):
        a = np.full((3, 200), scale, dtype=np.float32)
        a[1] = 0
        assert np.allclose(Rows(a).norms, [float(a[0, 0]) * sqrt(200), 0, float(a[0, 0]) * sqrt(200)], rtol=1e-5)
        projection = project(a, np.resize(np.array([1, -1], dtype=np.float32), 200))
        assert np.allclose(projection.norms, float(a[0, 0]) * np.sqrt([256, 144]), rtol=1e-5)


# -------------------------------------------------------------------------------------------------------- lies


@formats
@pytest.mark.parametrize("lie", ["random", "element", "scaled", "flipped", "stale", "zeros"])
def test_lies_are_caught(format: WireFormat, lie: str) -> None:
    rng = np.random.default_rng(5)
    for _ in range(100):
        m, k, n = (int(rng.integers(least, 300)) for least in (16, 16, 64))
        a, b, other = (operand(rng, *shape, "normal", format) for shape in ((m, k), (k, n), (m, k)))
        c = a @ b
        match lie:
            case "random":
                told = rng.permuted(c)
            case "element":
                told = c.copy()
                row, col = rng.integers(m), rng.integers(n)
                told[row, col] += 6 * tolerance(a, b, c, format)[row, col // GROUP]
            case "scaled":
                told = c * np.float32(1.1)
            case "flipped":
                told = -c
            case "stale":
                told = other @ b
            case _:
                told = np.zeros_like(c)
        assert looked_at(rng, sent(c, format), a, b, format).ok
        verdict = looked_at(rng, sent(told, format), a, b, format)
        assert not verdict.ok
        assert set(recheck(sent(told, format), [(a, b)], verdict.rows, format)) == set(verdict.rows)
        if lie == "element":
            assert (verdict.row, verdict.group, list(verdict.rows)) == (row, col // GROUP, [row])


def tolerance(a: Matrix, b: Matrix, c: Matrix, format: WireFormat) -> Matrix:
    """Upper limit of the tolerance by the formula, [rows, groups]."""
    groups = range(0, b.shape[1], GROUP)
    sizes = np.stack([np.linalg.norm(c[:, g : g + GROUP], axis=1) for g in groups], axis=1)
    bound = np.linalg.norm(a, axis=1)[:, None] * [np.linalg.norm(b[:, g : g + GROUP]) for g in groups]
    arithmetic = (40 + 2 * sqrt(len(b))) * 2.0**-24 * bound
    if format == "q8":
        return arithmetic + 8 * sqrt(1.2 * GROUP / 12) * np.abs(c).max(axis=1, keepdims=True) / 126
    return arithmetic + 4 * {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}[format] * sizes + GROUP * 2.0**-24


@formats
def test_wrong_elements_that_cancel_escape_as_rarely_as_derived(format: WireFormat) -> None:
    """With random signs alone, every second pair would escape."""
    rng = np.random.default_rng(6)
    a, b = operand(rng, 2, 64, "normal", format), operand(rng, 64, GROUP, "normal", format)
    c = a @ b
    wrong = 20 * float(tolerance(a, b, c, format)[0, 0])
    told = c.copy()
    told[0, 3] += wrong
    told[0, 77] -= wrong
    told = sent(told, format)
    trials = 1000
    escaped, allowed = 0, 0.0
    for _ in range(trials):
        verdict = looked_at(rng, told, a, b, format)
        escaped += verdict.ok
        allowed += verdict.tolerance / wrong / trials if not verdict.ok else 0.0
    assert escaped / trials < allowed + 4 * sqrt(allowed / trials)


@formats
@pytest.mark.parametrize("size", [1e2, 1e4, 1e8, 1e30])
def test_one_huge_element_buys_no_tolerance_for_itself_or_others(format: WireFormat, size: float) -> None:
    rng = np.random.default_rng(7)
    a, b = operand(rng, 20, 200, "normal", format), operand(rng, 200, 2 * GROUP, "normal", format)
    told = a @ b
    told[:, 5] = min(size, 6e4 if format == "fp16" else size)
    assert len(looked_at(rng, sent(told, format), a, b, format).rows) == 20
    told[:, GROUP:] = 0
    assert len(looked_at(rng, sent(told, format), a, b, format).rows) == 20


def test_q8_steps_inflated_by_huge_elements_are_detected_at_the_peaks() -> None:
    """Two huge elements that cancel make the q8 step of their block large enough to hide anything else in it."""
    rng = np.random.default_rng(8)
    a, b = operand(rng, 50, 200, "normal", "q8"), operand(rng, 200, 300, "normal", "q8")
    honest, told = sent(a @ b, "q8"), np.zeros((50, 300), dtype=np.float32)
    told[:, 5::32], told[:, 9::32] = 1000, -1000
    for c, liars in ((honest, 0), (sent(told, "q8"), 8)):
        rows, cols = peaks(c, rng)
        assert len(recheck_peaks(c, [(a, b)], rows, cols)) == liars


def test_no_honest_peak_is_taken_for_an_inflated_one() -> None:
    """Also where a neighbor in its block has overflowed."""
    rng = np.random.default_rng(16)
    for _ in range(300):
        m, k, n = size(rng, 64), size(rng, 600), size(rng, 400)
        a, b = (operand(rng, *shape, rng.choice(get_args(Data)), "q8") for shape in ((m, k), (k, n)))
        c = multiply(a, b, rng.choice(get_args(Order)))
        c[rng.integers(m), rng.integers(n)] = np.inf
        assert recheck_peaks(sent(c, "q8"), [(a, b)], *peaks(sent(c, "q8"), rng)).size == 0


def test_tolerance_follows_the_steps_of_single_blocks() -> None:
    """A large block beside three small ones does not hide errors in a group without it."""
    rng = np.random.default_rng(17)
    a, b = operand(rng, 20, 100, "normal", "q8"), operand(rng, 100, 2 * GROUP, "normal", "q8")
    b[:, :32] *= np.float32(1000)
    c = sent(a @ b, "q8")
    assert looked_at(rng, c, a, b, "q8").ok
    c[7, GROUP + 3] += 3 * c[7, GROUP:].std()
    assert list(looked_at(rng, c, a, b, "q8").rows) == [7]


# -------------------------------------------------------------------------------------------------- not finite


@formats
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_results_of_finite_operands_are_refused(format: WireFormat, value: float) -> None:
    rng = np.random.default_rng(9)
    a, b = operand(rng, 9, 30, "normal", format), operand(rng, 30, 200, "normal", format)
    c = sent(a @ b, format)
    c[4, 150] = value
    assert list(looked_at(rng, c, a, b, format).rows) == [4]
    assert list(recheck(c, [(a, b)], np.arange(9), format)) == [4]


@formats
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_with_non_finite_operands_are_reported_as_uncheckable(format: WireFormat, value: float) -> None:
    rng = np.random.default_rng(10)
    a, b = operand(rng, 9, 30, "normal", format), operand(rng, 30, 200, "normal", format)
    a[2, 3] = value
    a = sent(a, format)
    with np.errstate(invalid="ignore"):
        c = sent(a @ b, format)
    verdict = looked_at(rng, c, a, b, format)
    assert (verdict.ok, verdict.unchecked) == (True, 2)
    assert recheck(c, [(a, b)], np.arange(9), format).size == 0
    c[3] = 0
    assert list(looked_at(rng, c, a, b, format).rows) == [3]
    assert list(recheck(c, [(a, b)], np.arange(9), format)) == [3]


@formats
def test_honest_overflow_is_distinguished_from_a_lie(format: WireFormat) -> None:
    largest = 65504.0 if format == "fp16" else 3e38
    a = np.ones((3, 2), dtype=np.float32)
    b = np.zeros((2, 200), dtype=np.float32)
    b[:, 7] = largest * 0.9
    a[1], a[2] = -1, 0.001
    with np.errstate(over="ignore", invalid="ignore"):
        c = sent(a @ b, format)
    assert not np.isfinite(c[:2, 7]).any()
    assert list(looked_at(np.random.default_rng(0), c, a, b, format).rows) == [0, 1]
    assert recheck(c, [(a, b)], np.arange(3), format).size == 0
    if format == "fp16":
        c[1, 7] = np.inf  # the wrong sign
        assert list(recheck(c, [(a, b)], np.arange(3), format)) == [1]
    c[2, 7] = np.inf
    assert 2 in recheck(c, [(a, b)], np.arange(3), format)


# ---------------------------------------------------------------------------------------------------- suspects


@formats
def test_a_recheck_allows_no_element_more_than_its_own_rounding(format: WireFormat) -> None:
    rng = np.random.default_rng(11)
    a, b = operand(rng, 40, 100, "normal", format), operand(rng, 100, 300, "normal", format)
    c = a @ b
    rounding = {"fp32": 1e-4, "bf16": 2.0**-7, "fp16": 2.0**-10, "q8": 2 * np.abs(c[8]).max() / 126}[format]
    col = int(np.abs(c[8]).argsort()[150])
    told = c.copy()
    told[8, col] += rounding * (1 if format == "q8" else np.abs(c[8, col])) + 1e-3
    assert list(recheck(sent(told, format), [(a, b)], np.arange(40), format)) == [8]


def test_narrower_groups_detect_smaller_errors() -> None:
    rng = np.random.default_rng(12)
    a, b = operand(rng, 10, 200, "normal", "bf16"), operand(rng, 200, 512, "normal", "bf16")
    c = sent(a @ b, "bf16")
    r = draw(rng, 512)
    wide, narrow = (check(c, [(Rows(a), project(b, r, group))], "bf16") for group in (GROUP, 32))
    assert wide.ok
    assert narrow.ok
    assert narrow.tolerance < 0.8 * wide.tolerance


def test_random_vectors_stay_away_from_zero_and_vary_in_magnitude() -> None:
    r = draw(np.random.default_rng(13), 10_000)
    assert 0.5 <= np.abs(r).min() < 0.51
    assert 1.49 < np.abs(r).max() <= 1.5
    assert abs(np.sign(r).mean()) < 0.05
    assert abs(np.abs(r).mean() - 1) < 0.02
