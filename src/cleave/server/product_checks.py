"""Results against their operands, as they arrive: decoded, checked by projection (`core/verify`), handed on.

What a check needs of the operands is kept as long as their product is under way: one random vector for each range of
output columns, never told to anyone; the projection of each slice of b, shared by all devices that multiply with it;
the rows of each slice of a. Operands are taken as rounded for the wire, as devices see them.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

import numpy as np

from cleave.core.cost.gemm import WireFormat
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.verify import products as verify
from cleave.errors import ProtocolError, WrongResult
from cleave.protocol.frames import Buffer
from cleave.protocol.messages import CHECKED_COLUMNS, Result
from cleave.protocol.numbers import Codec, Matrix
from cleave.protocol.programs import Layout
from cleave.server.operands import Range
from cleave.server.products import Cut, Piece

assert CHECKED_COLUMNS == verify.GROUP


@dataclass(slots=True)
class Evidence:
    """What checks of one product share."""

    vectors: dict[tuple[int, Range], Matrix] = field(default_factory=lambda: dict[tuple[int, Range], Matrix]())
    projections: dict[tuple[int, Cut], verify.Projection] = field(
        default_factory=lambda: dict[tuple[int, Cut], verify.Projection]()
    )
    rows: dict[Cut, verify.Rows] = field(default_factory=lambda: dict[Cut, verify.Rows]())
    exact: dict[Cut, Matrix] = field(default_factory=lambda: dict[Cut, Matrix]())
    """Slices of b, where rows were computed again."""


class Inspector:
    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._rng = np.random.default_rng(secrets.randbits(128))
        self.busy_s = 0.0

    def inspect(
        self,
        piece: Piece,
        layout: Layout,
        format: WireFormat,
        evidence: Evidence,
        part: Rectangle,
        result: Result,
        payload: Buffer,
        *,
        harder: bool,
    ) -> Matrix:
        """The numbers of a rectangle of a piece; WrongResult where its operands do not give them."""
        started = time.thread_time()
        try:
            width = piece.cols[1] - piece.cols[0]
            if result.format != format:
                raise ProtocolError(f"expected a result in {format}, got {result.format}")
            if part.left % CHECKED_COLUMNS or (part.right % CHECKED_COLUMNS and part.right != width):
                raise ProtocolError(
                    f"expected columns from and to multiples of {CHECKED_COLUMNS}, got {part.left}-{part.right}"
                )
            values = self._decoded(payload, format, part)
            rows = slice(part.top, part.bottom)
            terms = [
                (self._rows(a, layout, evidence).take(rows), self._seen(piece, b, layout, evidence))
                for a, b in piece.terms
            ]

            def exact() -> list[tuple[Matrix, Matrix]]:
                sides = [self._exact(b, layout, evidence)[:, part.left : part.right] for _, b in piece.terms]
                return [(rows_of_a.matrix, side) for (rows_of_a, _), side in zip(terms, sides, strict=True)]

            wrong = verify.judge(values, terms, exact, format, self._rng, left=part.left, harder=harder)
            if len(wrong):
                raise WrongResult(
                    f"row {int(wrong[0])} of a rectangle of {part.rows} x {part.cols} is not what its operands give"
                )
            return values
        finally:
            self.busy_s += time.thread_time() - started

    def _decoded(self, payload: Buffer, format: WireFormat, part: Rectangle) -> Matrix:
        if format == "fp32":
            return np.frombuffer(payload, dtype="<f4").reshape(part.rows, part.cols)
        values = np.empty((part.rows, part.cols), dtype=np.float32)
        self._codec.decode_into(payload, format, values)
        return values

    def _rows(self, a: Cut, layout: Layout, evidence: Evidence) -> verify.Rows:
        found = evidence.rows.get(a)
        if found is None:
            matrix = a.tensor.values(a.rows, a.cols, self._codec)
            found = evidence.rows[a] = verify.Rows(matrix.T if layout == "tn" else matrix)
        return found

    def _seen(self, piece: Piece, b: Cut, layout: Layout, evidence: Evidence) -> verify.Projection:
        key = (piece.output, piece.cols)
        r = evidence.vectors.get(key)
        if r is None:
            r = evidence.vectors[key] = verify.draw(self._rng, piece.cols[1] - piece.cols[0])
        found = evidence.projections.get((piece.output, b))
        if found is None:
            found = evidence.projections[piece.output, b] = verify.project(self._oriented(b, layout), r)
        return found

    def _exact(self, b: Cut, layout: Layout, evidence: Evidence) -> Matrix:
        found = evidence.exact.get(b)
        if found is None:
            found = evidence.exact[b] = self._oriented(b, layout)
        return found

    def _oriented(self, b: Cut, layout: Layout) -> Matrix:
        matrix = b.tensor.values(b.rows, b.cols, self._codec)
        return matrix.T if layout == "nt" else matrix
