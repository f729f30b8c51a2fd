"""The numbers of one product: results are decoded, checked by projection and written or added into its outputs.

Called off the loop, from several threads. Results of tasks that have their part of the output to themselves are decoded
where they belong, before they are checked: what a wrong one leaves there is overwritten by whoever computes it again.
What checks need of the operands is kept while the product is in progress:
one random vector per range of output columns, never sent to anyone; the projection of each slice of b, shared by all
devices that multiply with it; the rows of each slice of a. Operands are rounded for the wire, as devices see them.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import numpy as np

from cleave.core.cost.wire import WireFormat
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import Task, TaskId
from cleave.core.verify import products as verify
from cleave.errors import ProtocolError, WrongResult
from cleave.protocol.frames import Buffer
from cleave.protocol.messages import CHECKED_COLUMNS
from cleave.protocol.numbers import Codec, Matrix
from cleave.server.gemm.product import LAYOUTS, Piece, Product
from cleave.server.operands import Cut

assert CHECKED_COLUMNS == verify.GROUP

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, eq=False)
class Fresh:
    """Checked numbers of a piece, and the parts of them that were accepted."""

    piece: Piece
    part: Rectangle
    accepted: tuple[Rectangle, ...]
    values: Matrix


class Checker:
    """State shared by the checks of all products: the codec, random numbers, and the time spent."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._seeds = np.random.SeedSequence(secrets.randbits(128))
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """CPU seconds spent on checks."""
        return self._busy_s

    def spend(self, seconds: float) -> None:
        with self._lock:
            self._busy_s += seconds

    @property
    def rng(self) -> np.random.Generator:
        """The calling thread's generator; generators are not shared between threads."""
        found: np.random.Generator | None = getattr(self._of_thread, "rng", None)
        if found is None:
            with self._lock:
                found = self._of_thread.rng = np.random.default_rng(self._seeds.spawn(1)[0])
        return found


class GemmResults:
    def __init__(self, product: Product, format: WireFormat, checker: Checker, *, has_sums: bool = True) -> None:
        """With `has_sums` the outputs begin at zero, for pieces that are added up."""
        self._product, self._checker = product, checker
        self._layout = LAYOUTS[product.role]
        self._format: WireFormat = format
        start = np.zeros if has_sums else np.empty
        self.outputs: list[Matrix] = [start(shape, dtype=np.float32) for shape in product.outputs]
        self._alone: set[TaskId] = set()
        """Tasks whose part of the output nobody else writes."""
        self._placing = 0
        """Results of such tasks being decoded into the output."""
        self._placed = threading.Condition()
        self._adding = threading.Lock()
        self._finding = threading.Lock()
        self._evidence: dict[Hashable, tuple[threading.Lock, list[object]]] = {}

    # -------------------------------------------------------------------------------------------- the loop

    def leave_alone(self, tasks: Iterable[TaskId]) -> None:
        """Let tasks have their part of the output to themselves."""
        if self._format != "fp32":  # which is not decoded
            self._alone.update(tasks)

    def share(self, task: TaskId) -> None:
        """Let others compute what this task does, too, or instead."""
        with self._placed:
            self._alone.discard(task)

    def clear(self, piece: Piece) -> None:
        """Set a part of the output to zero before pieces of a sum are added; its tasks so far are shared."""
        with self._placed:
            self._placed.wait_for(lambda: not self._placing)
        self._region(piece)[...] = 0

    # -------------------------------------------------------------------------------------------- any thread

    def keep(self, item: object) -> None:
        fresh = cast("Fresh", item)
        piece, out = fresh.piece, self._region(fresh.piece)
        if np.may_share_memory(fresh.values, out):
            return  # decoded where it belongs
        if not piece.is_partial:  # a task that shares this part may still be decoding into it
            with self._placed:
                self._placed.wait_for(lambda: not self._placing)
        for accepted in fresh.accepted:
            target = out[accepted.top : accepted.bottom, accepted.left : accepted.right]
            inside = accepted.moved(-fresh.part.top, -fresh.part.left)
            source = fresh.values[inside.top : inside.bottom, inside.left : inside.right]
            if piece.is_partial:
                with self._adding:  # other pieces add to the same elements
                    np.add(target, source, out=target)
            else:
                np.copyto(target, source)

    def audit(self, case: object) -> str:
        raise AssertionError("products are checked, not audited")

    def check(self, task: Task, part: Rectangle, payload: object, *, is_strict: bool) -> Matrix:
        """Decode a rectangle of a piece; raise WrongResult if its operands do not give these numbers."""
        piece = cast("_HasPiece", task.work).piece
        started = time.thread_time()
        try:
            width = piece.cols[1] - piece.cols[0]
            if part.left % CHECKED_COLUMNS or (part.right % CHECKED_COLUMNS and part.right != width):
                raise ProtocolError(
                    f"expected columns between multiples of {CHECKED_COLUMNS}, got {part.left}-{part.right}"
                )
            values = self._decoded_in_place(task, piece, payload, part)
            rows = slice(part.top, part.bottom)
            terms = [(self._rows(a).take(rows), self._seen(piece, b)) for a, b in piece.terms]

            def exact() -> list[tuple[Matrix, Matrix]]:
                sides = [self._exact(b)[:, part.left : part.right] for _, b in piece.terms]
                return [(rows_of_a.matrix, side) for (rows_of_a, _), side in zip(terms, sides, strict=True)]

            wrong = verify.judge(
                values, terms, exact, self._format, self._checker.rng, left=part.left, harder=is_strict
            )
            if len(wrong):
                raise WrongResult(
                    f"row {int(wrong[0])} of a rectangle of {part.rows} x {part.cols} does not match its operands"
                )
            return values
        finally:
            self._checker.spend(time.thread_time() - started)

    def _region(self, piece: Piece) -> Matrix:
        return self.outputs[piece.output][slice(*piece.rows), slice(*piece.cols)]

    def _decoded_in_place(self, task: Task, piece: Piece, payload: object, part: Rectangle) -> Matrix:
        """Decode a rectangle into the output if its task has that to itself, else into memory of its own."""
        with self._placed:
            is_alone = task.id in self._alone
            self._placing += is_alone
        if not is_alone:
            return self.decoded(payload, part)
        try:
            values = self._region(piece)[part.top : part.bottom, part.left : part.right]
            self._checker.codec.decode_into(cast("Buffer", payload), self._format, values)
            return values
        finally:
            with self._placed:
                self._placing -= 1
                self._placed.notify_all()

    def decoded(self, payload: object, part: Rectangle) -> Matrix:
        """Decode a rectangle without checking it."""
        payload = cast("Buffer", payload)
        if self._format == "fp32":
            return np.frombuffer(payload, dtype="<f4").reshape(part.rows, part.cols)
        values = np.empty((part.rows, part.cols), dtype=np.float32)
        self._checker.codec.decode_into(payload, self._format, values)
        return values

    # -------------------------------------------------------------------------------------------- shared evidence

    def _once(self, key: Hashable, make: Callable[[], _Found]) -> _Found:
        """Return evidence that several checks share, made by the first of them; only those that need it wait."""
        with self._finding:
            lock, found = self._evidence.setdefault(key, (threading.Lock(), []))
        with lock:
            if not found:
                found.append(make())
            return cast("_Found", found[0])

    def _rows(self, a: Cut) -> verify.Rows:
        def make() -> verify.Rows:
            matrix = a.tensor.values(a.rows, a.cols, self._checker.codec)
            return verify.Rows(matrix.T if self._layout == "tn" else matrix)

        return self._once(("rows", a), make)

    def _seen(self, piece: Piece, b: Cut) -> verify.Projection:
        def draw() -> Matrix:
            return verify.draw(self._checker.rng, piece.cols[1] - piece.cols[0])

        r = self._once(("vector", piece.output, piece.cols), draw)
        return self._once(("projection", piece.output, b), lambda: verify.project(self._oriented(b), r))

    def _exact(self, b: Cut) -> Matrix:
        return self._once(("exact", b), lambda: self._oriented(b))

    def _oriented(self, b: Cut) -> Matrix:
        matrix = b.tensor.values(b.rows, b.cols, self._checker.codec)
        return matrix.T if self._layout == "nt" else matrix


class UncheckedResults(GemmResults):
    """Results of a scale test, taken as they come: devices that compute nothing would fail every check."""

    def check(self, task: Task, part: Rectangle, payload: object, *, is_strict: bool) -> Matrix:
        return self.decoded(payload, part)


class _HasPiece(Protocol):
    """What a task's work tells a check."""

    @property
    def piece(self) -> Piece: ...
