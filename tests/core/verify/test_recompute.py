"""Laws of audits: on every wire, rounding is never mistaken for a lie, nor a lie for rounding."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.cost.wire import WireFormat
from cleave.core.verify.recompute import Matrix, disagreement, is_plausible, least_of
from cleave.protocol.numbers import NumpyCodec

FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
HONEST = 1e-5
"""Ten times the observed difference between kernels, in units of a row's root mean square."""
steady = settings(max_examples=60, deadline=None, derandomize=True)


def rounded(matrix: Matrix, format: WireFormat) -> Matrix:
    codec, values = NumpyCodec(), np.empty_like(matrix)
    codec.decode_into(codec.encode(matrix, format).data, format, values)
    return values


def drawn(rows: int, cols: int, seed: int, *, spread: float = 0.0, outlier: float = 1.0) -> Matrix:
    """Rows of unequal magnitude, with one large column."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(0, 1, (rows, cols)) * np.exp(spread * rng.normal(0, 1, (rows, 1)))
    matrix[:, 0] *= outlier
    return matrix.astype(np.float32)


def noisy(matrix: Matrix, seed: int) -> Matrix:
    rms = np.sqrt(np.square(matrix).mean(axis=1, keepdims=True))
    return matrix + (HONEST * rms * np.random.default_rng(seed).normal(0, 1, matrix.shape)).astype(np.float32)


@steady
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
    outlier=st.sampled_from([1.0, 1e3]),
    size=st.sampled_from([1.0, 1e-6, 1e3]),
    format=st.sampled_from(FORMATS),
)
def test_deviations_explained_by_rounding_are_right(
    rows: int, cols: int, seed: int, spread: float, outlier: float, size: float, format: WireFormat
) -> None:
    exact = drawn(rows, cols, seed, spread=spread, outlier=outlier) * np.float32(size)
    assert disagreement(rounded(noisy(exact, seed + 1), format), rounded(exact, format), format) <= 1


def test_any_result_agrees_with_itself() -> None:
    for format in FORMATS:
        for exact in (np.zeros((3, 4)), np.full((2, 3), 1e-30), np.full((2, 3), 60000.0), np.eye(5)):
            same = rounded(exact.astype(np.float32), format)
            assert disagreement(same, same, format) == 0


LIES = {
    "random": lambda exact, rng: rng.normal(0, exact.std(), exact.shape),
    "scaled": lambda exact, rng: exact * 1.1,
    "flipped": lambda exact, rng: -exact,
    "zeros": lambda exact, rng: np.zeros_like(exact),
    "stale": lambda exact, rng: np.roll(exact, 1, axis=0),
    "one row": lambda exact, rng: np.concatenate([exact[:-1], exact[-1:] * 1.1]),
    "one row of zeros": lambda exact, rng: np.concatenate([exact[:-1], 0 * exact[-1:]]),
    "one element": lambda exact, rng: exact + 3 * exact.std() * (np.arange(exact.size) == 7).reshape(exact.shape),
    "not a number": lambda exact, rng: np.where(np.arange(exact.size).reshape(exact.shape) == 7, np.nan, exact),
    "infinite": lambda exact, rng: np.where(np.arange(exact.size).reshape(exact.shape) == 7, np.inf, exact),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("lie", LIES)
def test_lies_are_judged_wrong(lie: str, format: WireFormat) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        exact = drawn(int(rng.integers(2, 60)), int(rng.integers(32, 300)), seed)
        told = LIES[lie](exact, rng).astype(np.float32)
        assert disagreement(rounded(told, format), rounded(exact, format), format) > 1


@pytest.mark.parametrize("format", FORMATS)
def test_skipping_a_layer_is_judged_wrong(format: WireFormat) -> None:
    """Returning x for x + f(x), where f(x) is a fiftieth of x: about one q8 step."""
    x, f = drawn(32, 256, 0), drawn(32, 256, 1) / np.float32(50)
    assert disagreement(rounded(x, format), rounded(x + f, format), format) > 1


@pytest.mark.parametrize("format", FORMATS)
def test_the_rounding_of_large_elements_does_not_hide_lies_about_others(format: WireFormat) -> None:
    exact = drawn(16, 256, 0, outlier=30.0)
    told = exact.copy()
    told[:, 1:] = drawn(16, 255, 1)
    assert disagreement(rounded(told, format), rounded(exact, format), format) > 1


def test_a_gradient_of_pure_rounding_is_judged_on_the_scale_of_the_others() -> None:
    weight, bias, other = drawn(64, 64, 0), drawn(1, 64, 1) * np.float32(1e-7), drawn(1, 64, 2) * np.float32(1e-7)
    least = least_of([weight, bias], "fp32")
    assert disagreement(other, bias, "fp32") > 1
    assert disagreement(other, bias, "fp32", least=least) <= 1
    assert disagreement(weight * np.float32(1.001), weight, "fp32", least=least) > 1


def test_rows_that_should_be_non_finite_are_not_judged() -> None:
    exact = drawn(8, 64, 0)
    exact[3, 5] = np.nan
    for format in FORMATS:
        told = exact.copy()
        told[3, 5] = np.inf
        assert disagreement(rounded(told, format), rounded(exact, format), format) <= 1
        told[4] *= np.float32(1.1)
        assert disagreement(rounded(told, format), rounded(exact, format), format) > 1, "other rows are judged"


def test_results_with_many_rows_are_judged_like_those_with_few() -> None:
    """Judging in bands makes no visible difference."""
    exact = drawn(4000, 100, 0)
    told = noisy(exact, 1)
    assert disagreement(told, exact, "fp32") <= 1
    told[3999] *= np.float32(1.1)
    assert disagreement(told, exact, "fp32") > 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e13, -1e30])
def test_numbers_that_no_model_has_are_implausible(bad: float) -> None:
    values = drawn(8, 64, 0)
    assert is_plausible(values * np.float32(1e6))
    values[7, 63] = bad
    assert not is_plausible(values)
