"""Verification of products (`core/verify`): honest blocks refused, lies caught, the smallest lie caught, and its cost.

Blocks pass through the real codec; honest ones come from several kinds of data and summation orders.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from math import exp, log, sqrt
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from cleave.core.cost.wire import BLOCK, WireFormat
from cleave.core.verify.products import (
    GROUP,
    Matrix,
    Projection,
    Rows,
    check,
    draw,
    glance,
    judge,
    peaks,
    project,
    recheck,
    recheck_peaks,
)
from cleave.protocol.numbers import NumpyCodec

Say = Callable[[str], None]
FORMATS: tuple[WireFormat, ...] = ("fp32", "bf16", "fp16", "q8")
Data = Literal["normal", "positive", "offset", "wide", "tiny", "sparse", "outliers"]
Order = Literal["blas", "split", "sequential"]
Lie = Literal["random", "element", "scaled", "flipped", "stale", "zeros"]
DATA: tuple[Data, ...] = get_args(Data)
ORDERS: tuple[Order, ...] = get_args(Order)
T = TypeVar("T")
_LIES: tuple[tuple[Lie, int], ...] = (
    ("random", 0),
    ("element", 2),
    ("element", 6),
    ("scaled", 0),
    ("flipped", 0),
    ("stale", 0),
    ("zeros", 0),
)
_CODEC = NumpyCodec()
_RECTANGLE = 1 << 20  # elements, as devices return them


def run(scenario: dict[str, Any], say: Say) -> None:
    rng = np.random.default_rng(scenario["seed"])
    _honest(scenario["honest_blocks"], rng, say)
    _lies(scenario["lies"], rng, say)
    _smallest(scenario["elements"], rng, say)
    _pairs(scenario["pairs"], rng, say)
    _cost(scenario["shapes"], scenario["repeats"], rng, say)


def sent(matrix: Matrix, format: WireFormat) -> Matrix:
    out = np.empty(matrix.shape, dtype=np.float32)
    _CODEC.decode_into(_CODEC.encode(matrix, format).data, format, out)
    return out


def _operand(rng: np.random.Generator, rows: int, cols: int, data: Data, format: WireFormat) -> Matrix:
    numbers = rng.standard_normal((rows, cols), dtype=np.float32)
    match data:
        case "normal":
            pass
        case "positive":
            numbers = np.abs(numbers)
        case "offset":
            numbers += np.float32(10)
        case "wide":
            numbers *= np.exp2(-60 * rng.random(numbers.shape, dtype=np.float32))
        case "tiny":
            numbers *= np.float32(2.0 ** rng.integers(-140, -10))
        case "sparse":
            numbers *= rng.random((rows, 1)) < 0.5
            numbers *= rng.random((rows, cols)) < 0.2
        case "outliers":
            numbers[:, rng.integers(cols)] *= 30
            numbers[rng.integers(rows)] *= 30
    return sent(numbers, format)


def _multiply(a: Matrix, b: Matrix, order: Order) -> Matrix:
    match order:
        case "blas":
            return a @ b
        case "split":
            size = max(1, len(b) // 8)
            return np.sum([a[:, k : k + size] @ b[k : k + size] for k in range(0, len(b), size)], axis=0)
        case "sequential":
            total = np.zeros((len(a), b.shape[1]), dtype=np.float32)
            for k in range(len(b)):
                total += a[:, k, None] * b[k]
            return total


# ------------------------------------------------------------------------------------------------------ honest


def _honest(blocks: int, rng: np.random.Generator, say: Say) -> None:
    say("## Honest blocks\n")
    say("Seven kinds of data for each operand, three orders of summation, sums of 1 to 16,384 products. Worst: largest")
    say("error over tolerance. Blocks whose results overflow the wire are rightly flagged, and left to the recheck.")
    say("Refused: by all checks together (`judge`), as on the server; one in ten is checked as a suspect's.\n")
    say("| format | blocks | tests (row x group) | flagged by check | worst | overflowed | refused |")
    say("|---|---|---|---|---|---|---|")
    for format in FORMATS:
        tests = flagged = overflowed = refused = 0
        worst = 0.0
        for _ in range(blocks):
            m, k, n, order = _shape(rng)
            a, b = _operand(rng, m, k, _pick(rng, DATA), format), _operand(rng, k, n, _pick(rng, DATA), format)
            with np.errstate(over="ignore"):
                c = sent(_multiply(a, b, order), format)
            verdict = check(c, [(Rows(a), project(b, draw(rng, n)))], format)
            assert verdict.unchecked == 0
            if not np.isfinite(c).all():
                overflowed += 1
            else:
                tests += m * -(-n // GROUP)
                flagged += not verdict.ok
                worst = max(worst, verdict.worst)
            refused += not _is_right(c, a, b, format, rng, harder=rng.random() < 0.1)
        say(f"| {format} | {blocks:,} | {tests:,} | {flagged} | {worst:.2f} | {overflowed} | {refused} |")


def _shape(rng: np.random.Generator) -> tuple[int, int, int, Order]:
    kind = rng.random()
    if kind < 0.005:  # long sums
        return 8, int(rng.integers(4096, 16385)), 128, _pick(rng, ORDERS)
    if kind < 0.3:
        m, k, n = (int(exp(rng.uniform(0, log(most)))) for most in (64, 512, 300))
        return m, k, n, _pick(rng, ORDERS)
    m, k, n = int(rng.integers(1, 512)), int(exp(rng.uniform(0, log(1024)))), int(rng.integers(1, 1024))
    return m, k, n, _pick(rng, ORDERS[:2])


def _pick(rng: np.random.Generator, choices: tuple[T, ...]) -> T:
    return choices[int(rng.integers(len(choices)))]


# -------------------------------------------------------------------------------------------------------- lies


def _lies(count: int, rng: np.random.Generator, say: Say) -> None:
    for title, least, most in (
        ("16 to 300 rows, inner and columns (at least 64)", (16, 16, 64), 300),
        ("tiny: 1 to 8 of each", (1, 1, 1), 9),
    ):
        say(f"\n## Lies caught: {title}\n")
        say(f"Out of {count:,} each. One element is wrong by two or six times the tolerance of its test.\n")
        say("| format | random | element x2 | element x6 | scaled by 1.1 | sign flipped | stale | zeros |")
        say("|---|---|---|---|---|---|---|---|")
        for format in FORMATS:
            cells: list[str] = []
            for lie, factor in _LIES:
                caught = 0
                for _ in range(count):
                    m, k, n = (int(rng.integers(low, most)) for low in least)
                    a, b = _operand(rng, m, k, "normal", format), _operand(rng, k, n, "normal", format)
                    told = sent(_lie(rng, a, b, lie, factor, format), format)
                    caught += not _is_right(told, a, b, format, rng)
                cells.append(f"{100 * caught / count:.1f} %")
            say(f"| {format} | {' | '.join(cells)} |")


def _is_right(
    c: Matrix, a: Matrix, b: Matrix, format: WireFormat, rng: np.random.Generator, *, harder: bool = False
) -> bool:
    """The server's verdict."""
    terms = [(Rows(a), project(b, draw(rng, c.shape[1])))]
    return not len(judge(c, terms, lambda: [(a, b)], format, rng, harder=harder))


def _lie(rng: np.random.Generator, a: Matrix, b: Matrix, lie: Lie, factor: int, format: WireFormat) -> Matrix:
    c = a @ b
    match lie:
        case "random":
            return rng.standard_normal(c.shape, dtype=np.float32) * np.float32(np.linalg.norm(c) / sqrt(c.size))
        case "element":
            row, col = int(rng.integers(len(a))), int(rng.integers(len(b.T)))
            c[row, col] += factor * _tolerance(a, b, c, row, col, format)
            return c
        case "scaled":
            return c * np.float32(1.1)
        case "flipped":
            return -c
        case "stale":
            return _operand(rng, len(a), len(b), "normal", format) @ b
        case "zeros":
            return np.zeros_like(c)


def _tolerance(a: Matrix, b: Matrix, c: Matrix, row: int, col: int, format: WireFormat) -> float:
    """Tolerance of one test, by the formula."""
    group = slice(col - col % GROUP, col - col % GROUP + GROUP) if format != "fp32" else slice(0, len(c.T))
    part = c[row, group]
    bound = float(np.linalg.norm(a[row]) * np.linalg.norm(b[:, group]))
    arithmetic = (40 + 2 * sqrt(len(b))) * 2.0**-24 * bound
    match format:
        case "fp32":
            return arithmetic
        case "q8":
            steps = np.maximum.reduceat(np.abs(part), np.arange(0, len(part), BLOCK)) / 126
            widths = np.minimum(BLOCK, len(part) - np.arange(0, len(part), BLOCK))
            factor = min(8 / sqrt(12), 0.51 * sqrt(len(part)))
            return arithmetic + factor * sqrt(float((13 / 12 * widths * np.square(steps)).sum()))
        case "bf16" | "fp16":
            unit = 2.0**-8 if format == "bf16" else 2.0**-11
            floor = 2.0**-25 * len(part) if format == "fp16" else 0.0
            return arithmetic + 4 * unit * float(np.linalg.norm(part)) + floor


def _smallest(elements: int, rng: np.random.Generator, say: Say) -> None:
    say("\n## The smallest single wrong element that is caught, in units of the rms of the block\n")
    say(f"Median and largest over {elements} elements of blocks of 32 x K x 1,024, normal data. Narrow: in groups")
    say("of 32 columns. Recheck: its row is recomputed (10 elements).\n")
    say("| format | K | check | narrow check | recheck |")
    say("|---|---|---|---|---|")
    for format in FORMATS:
        for k in (256, 1024, 4096):
            a, b = _operand(rng, 32, k, "normal", format), _operand(rng, k, 1024, "normal", format)
            c = a @ b
            found: list[list[float]] = [[], [], []]
            for number in range(elements):
                row = int(rng.integers(32))
                a_row, c_row = a[row : row + 1], c[row : row + 1]
                wrong = np.zeros_like(c_row)
                wrong[0, rng.integers(1024)] = rng.choice([-1, 1]) * c.std()
                r = draw(rng, 1024)
                for groups, group in zip(found, (GROUP, 32), strict=False):
                    groups.append(_threshold(_checked(a_row, project(b, r, group), c_row, wrong, format)))
                if number < 10:
                    found[2].append(_threshold(_rechecked(a_row, b, c_row, wrong, format)))
            cells = " | ".join(f"{statistics.median(sizes):.2g}, {max(sizes):.2g}" for sizes in found)
            say(f"| {format} | {k:,} | {cells} |")


def _checked(a: Matrix, seen: Projection, c: Matrix, wrong: Matrix, format: WireFormat) -> Callable[[float], bool]:
    return lambda size: not check(sent(_sum(c, size, wrong), format), [(Rows(a), seen)], format).ok


def _rechecked(a: Matrix, b: Matrix, c: Matrix, wrong: Matrix, format: WireFormat) -> Callable[[float], bool]:
    row = np.arange(1)
    return lambda size: recheck(sent(_sum(c, size, wrong), format), [(a, b)], row, format).size > 0


def _sum(c: Matrix, size: float, wrong: Matrix) -> Matrix:
    return (c + size * wrong).astype(np.float32)


def _threshold(caught: Callable[[float], bool]) -> float:
    low, high = 1e-6, 100.0
    while high / low > 1.05:
        middle = sqrt(low * high)
        low, high = (low, middle) if caught(middle) else (middle, high)
    return high


def _pairs(pairs: int, rng: np.random.Generator, say: Say) -> None:
    say("\n## Two wrong elements that cancel: how many escape\n")
    say(f"{pairs:,} pairs, +d and -d in one group of a row of 1 x 256 x 128; d in tolerances of the honest row.")
    say("Derived: at most tolerance / d, with the tolerance of the row as returned. Bought: d = |A_i| |B|_F, which")
    say("buys the most. Signs: the same with r of +-1. Peaks: a block of 64 such rows, with 8 peaks rechecked.\n")
    say("| format | d = 5, derived | d = 50, derived | bought, derived | signs, d = 50 | peaks |")
    say("|---|---|---|---|---|---|")
    for format in FORMATS:
        cells: list[str] = []
        for factor, signs in ((5.0, False), (50.0, False), (0.0, False), (50.0, True)):
            escaped, derived = 0, 0.0
            for _ in range(pairs):
                a, b = _operand(rng, 1, 256, "normal", format), _operand(rng, 256, GROUP, "normal", format)
                c = a @ b
                bound = float(np.linalg.norm(a) * np.linalg.norm(b))
                wrong = factor * _tolerance(a, b, c, 0, 0, format) if factor else bound
                one, two = rng.choice(GROUP, 2, replace=False)
                c[0, one] += wrong
                c[0, two] -= wrong
                r = draw(rng, GROUP)
                verdict = check(sent(c, format), [(Rows(a), project(b, np.sign(r) if signs else r))], format)
                escaped += verdict.ok
                derived += verdict.tolerance / wrong / pairs
            cells.append(f"{100 * escaped / pairs:.2f} %" + ("" if signs else f", {100 * derived:.2f} %"))
        seen = 0
        for _ in range(100):
            a, b = _operand(rng, 64, 256, "normal", format), _operand(rng, 256, GROUP, "normal", format)
            c = np.zeros((64, GROUP), dtype=np.float32)
            c[:, 3], c[:, 9] = 2000, -2000
            c = sent(c, format)
            seen += recheck_peaks(c, [(a, b)], *peaks(c, rng)).size > 0
        say(f"| {format} | {' | '.join(cells)} | caught {seen} % |")


# -------------------------------------------------------------------------------------------------------- cost


def _cost(shapes: list[list[int]], repeats: int, rng: np.random.Generator, say: Say) -> None:
    say("\n## Cost, in percent of the product (fp32, one thread, best of runs)\n")
    say("Results come in rectangles of 4 MB. Project: B r, once per slice of B, shared by all users. Glance: for every")
    say("result. Decode: the result (needed anyway), and both operands as devices see them; numpy's codec.\n")
    say("| M, K, N | product | format | glance | project | both | decode result | decode operands |")
    say("|---|---|---|---|---|---|---|---|")
    for m, k, n in shapes:
        a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (n, k)))
        c, r = a @ b.T, draw(rng, n)
        product = _best(np.matmul, (a, b.T), repeats)
        projecting = _best(project, (b.T, r), repeats)
        for format in FORMATS:
            checking = _best(_glance_whole, (c, Rows(a), project(b.T, r), format), repeats)
            result, *operands = (_decoding(matrix, format, repeats) for matrix in (c, a, b))
            parts = (checking, projecting, checking + projecting, result, sum(operands))
            cells = " | ".join(f"{100 * part / product:.1f}" for part in parts)
            say(f"| {m}, {k}, {n} | {1e3 * product:.1f} ms | {format} | {cells} |")


def _glance_whole(c: Matrix, rows: Rows, projection: Projection, format: WireFormat) -> None:
    height = max(1, _RECTANGLE // c.shape[1])
    for top in range(0, len(c), height):
        assert not len(glance(c[top : top + height], [(rows.take(slice(top, top + height)), projection)], format))


def _decoding(matrix: Matrix, format: WireFormat, repeats: int) -> float:
    if format == "fp32":
        return 0.0  # it is a view
    return _best(_CODEC.decode_into, (_CODEC.encode(matrix, format).data, format, np.empty_like(matrix)), repeats)


def _best(work: Callable[..., object], arguments: tuple[object, ...], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work(*arguments)
        times.append(time.perf_counter() - start)
    return min(times[1:])
