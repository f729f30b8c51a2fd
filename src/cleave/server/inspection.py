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

from cleave.core import verify
from cleave.core.cost import WireFormat
from cleave.core.rectangles import Rectangle
from cleave.errors import ProtocolError, WrongResult
from cleave.server.products import Cut, Piece
from cleave.server.staging import Range
from cleave.wire.frame import Buffer
from cleave.wire.messages import CHECKED_COLUMNS, Layout, Result
from cleave.wire.numbers import Codec, Matrix

_RECHECKED_ROWS = 8
"""Of those a check flags: computed again in fp64, so that nobody is accused for rounding."""
_SAMPLED_ROWS = 4
"""Of each rectangle of a suspect: computed again whatever the check says."""

assert CHECKED_COLUMNS == verify.GROUP


@dataclass(slots=True)
class Evidence:
    """What checks of one product share."""

    vectors: dict[tuple[int, Range], Matrix] = field(default_factory=lambda: dict[tuple[int, Range], Matrix]())
    projections: dict[tuple[int, Cut], verify.Projection] = field(
        default_factory=lambda: dict[tuple[int, Cut], verify.Projection]()
    )
    rows: dict[Cut, verify.Rows] = field(default_factory=lambda: dict[Cut, verify.Rows]())


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
            terms = [
                (
                    self._rows(a, layout, evidence).cut(part.top, part.bottom),
                    self._seen(piece, b, layout, evidence),
                )
                for a, b in piece.terms
            ]
            verdict = verify.check(values, terms, format, part.left)
            rows = verdict.rows[:_RECHECKED_ROWS]
            if harder:
                sample = self._rng.choice(part.rows, min(_SAMPLED_ROWS, part.rows), replace=False)
                rows = np.union1d(rows, sample)
            if len(rows):
                exact = [
                    (rows_of_a.matrix, self._oriented(b, layout)[:, part.left : part.right])
                    for (rows_of_a, _), (_, b) in zip(terms, piece.terms, strict=True)
                ]
                wrong = verify.recheck(values, exact, rows, format)
                if len(wrong):
                    raise WrongResult(
                        f"row {part.top + int(wrong[0])} of {part.rows} x {part.cols} is not what its operands give, "
                        f"off by {verdict.worst:.3g} times the tolerance where it is worst"
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
        if found is None or found.r is not r:
            found = evidence.projections[piece.output, b] = verify.project(self._oriented(b, layout), r)
        return found

    def _oriented(self, b: Cut, layout: Layout) -> Matrix:
        matrix = b.tensor.values(b.rows, b.cols, self._codec)
        return matrix.T if layout == "nt" else matrix
