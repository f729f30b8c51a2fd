"""The formulas of resident units: bytes, FLOPs and memory of a device that takes tokens through weights it holds.

A column is a run of sublayers; one sublayer may also be cut into equal slices. Whoever holds a column (or a slice)
gets x for every row and returns y; backward it gets dy and returns dx, so what happens inside never crosses a link.
Per row, with h hidden numbers: down 2h, up 2h, and h more where x was not kept for backward. Per step: the trained
weights down, their gradients up. Attention counts the causal average: a row looks at half of its sequence.
Like `cost.py` this knows no plans, no devices and no time; `core/planner` divides by rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cleave.core.cost.gemm import DEVICE_BYTES, THIN_ROWS, WIRE_BYTES, WireFormat
from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.model.shapes import ModelShape

SublayerKind = Literal["attention", "mlp", "head"]

RUNTIME_BYTES = 16e6
"""A device's own buffers beside everything counted here."""
FORWARD_ROW_BYTES = 4
"""The head's target of a row."""
LOGSUMEXP_BYTES = 8
"""What the head returns of a row forward (logsumexp, target logit, fp32), and gets back once slices are summed."""


_STATE_ARRAYS = 4  # keys, values and their gradients


def state_bytes(kv_widths: Sequence[int], sequence: int) -> int:
    """What a live device keeps of an open sequence, in fp32, given the width of the keys of each attention."""
    return _STATE_ARRAYS * DEVICE_BYTES * sequence * sum(kv_widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    kind: SublayerKind
    params: int
    """resident numbers"""
    trained: int
    """of them, and of adapters beside them, those sent anew each step and whose gradient comes back"""
    kv_width: int
    """attention: width of K, and of V; else 0"""
    inner: int
    """widest inner activation of a row: q width, ffn, vocabulary"""
    slices: int
    """the most slices it can be cut into: kv heads, ffn, vocabulary"""

    def allows(self, slices: int) -> bool:
        """Heads are few and stay whole, so they must go into slices evenly; columns and words are many."""
        return self.slices % slices == 0 if self.kind == "attention" and slices else slices <= self.slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Bytes of one number, by where it is."""

    activation_bytes: float
    """on the wire, as are weights and gradients"""
    weight_bytes: float
    gradient_bytes: float
    resident_bytes: float
    """of a parameter on the device"""
    accumulator_bytes: float
    """of a trained parameter's gradient on the device"""
    state_bytes: float
    """K, V and their gradients, per token of an open sequence and number of K"""
    working_bytes: float
    """activations on the device"""
    inner_numbers: float
    """at work per row of a chunk: of the widest inner activation, of the head's logits, of hidden numbers"""
    head_numbers: float
    hidden_numbers: float
    entering_numbers: float
    """per row and sublayer of a run: what entered it"""
    tables_bytes: float
    """per row of a sequence: positions, mask"""
    runtime_bytes: float
    """a device's own buffers beside everything counted here"""
    thin_rows: float
    """rows that take as long as reading their weights; 0: reading takes what memory allows"""


def live_terms(wire: WireFormat) -> Terms:
    """What live devices do: fp32 at rest, the wire's format on the way."""
    size = WIRE_BYTES[wire]
    return Terms(
        activation_bytes=size,
        weight_bytes=size,
        gradient_bytes=size,
        resident_bytes=4,
        accumulator_bytes=4,
        state_bytes=_STATE_ARRAYS * DEVICE_BYTES,
        working_bytes=4,
        inner_numbers=8,
        head_numbers=1,
        hidden_numbers=12,
        entering_numbers=1,
        tables_bytes=1028,
        runtime_bytes=0,
        thin_rows=THIN_ROWS,
    )


def lean_terms(wire: WireFormat) -> Terms:
    """The least a device can hold: 16-bit weights, gradients and activations, dK and dV in fp32."""
    size = WIRE_BYTES[wire]
    return Terms(
        activation_bytes=size,
        weight_bytes=size,
        gradient_bytes=size,
        resident_bytes=2,
        accumulator_bytes=2,
        state_bytes=12,
        working_bytes=2,
        inner_numbers=4,
        head_numbers=4,
        hidden_numbers=6,
        entering_numbers=0,
        tables_bytes=0,
        runtime_bytes=RUNTIME_BYTES,
        thin_rows=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """What columns ask of whoever holds one: an entry per column in every field."""

    params: Floats
    trained: Floats
    forward_flops_per_row: Floats
    flops_per_row: Floats
    """forward, once more in backward, and backward itself"""
    down_bytes_per_row: Floats
    up_bytes_per_row: Floats
    again_bytes_per_row: Floats
    """x once more, for each row that was not kept"""
    kept_bytes_per_row: Floats
    """what keeping x takes instead"""
    sync_down_bytes: Floats
    sync_up_bytes: Floats
    memory_bytes: Floats
    """with one open sequence and one chunk at work, no x kept"""
    state_bytes: Floats
    """of each open sequence more"""
    takes_sequences: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    """attention inside: rows come as whole sequences"""

    def __len__(self) -> int:
        return len(self.params)

    def take(self, chosen: Ints) -> Units:
        return Units(**{name: getattr(self, name)[chosen] for name in Units.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stack:
    """Sublayers in order, summed up from the first, so that any run of them is a difference."""

    sublayers: tuple[Sublayer, ...]
    hidden: int
    sequence: int
    terms: Terms
    sums: Floats
    """params, trained, kv_width, attention inner, heads: one row each, one column per cut"""
    widest: Floats
    """[first, last]: numbers at work inside the widest of sublayers first..last, per row"""

    def __len__(self) -> int:
        return len(self.sublayers)

    def kinds(self, first: Ints, count: Ints) -> tuple[Ints, Ints]:
        """Of runs of sublayers, as layers repeat: one run of each kind, and the kind of each run."""
        traits = np.vstack([self.sums[:, first + count] - self.sums[:, first], self.widest[first, first + count - 1]])
        _, runs, kind = np.unique(traits, axis=1, return_index=True, return_inverse=True)
        return runs, kind


def stack(sublayers: Sequence[Sublayer], *, hidden: int, sequence: int, terms: Terms) -> Stack:
    rows = [
        (s.params, s.trained, s.kv_width, s.inner if s.kind == "attention" else 0, 1 if s.kind == "head" else 0)
        for s in sublayers
    ]
    weights = {"attention": terms.inner_numbers, "mlp": terms.inner_numbers, "head": terms.head_numbers}
    inner = np.array([weights[s.kind] * s.inner for s in sublayers], dtype=np.float64)
    widest = np.maximum.accumulate(np.triu(np.tile(inner, (len(inner), 1))), axis=1)
    sums = np.concatenate([np.zeros((5, 1)), np.cumsum(np.array(rows, dtype=np.float64).T, axis=1)], axis=1)
    return Stack(sublayers=tuple(sublayers), hidden=hidden, sequence=sequence, terms=terms, sums=sums, widest=widest)


def units(of: Stack, first: Ints, count: Ints, slices: Ints, *, chunk: int) -> Units:
    """Columns of `count` sublayers from `first`, each cut into `slices`: what one slice asks."""
    terms, sequence = of.terms, of.sequence
    params, trained, kv_width, looking, heads = (of.sums[:, first + count] - of.sums[:, first]) / slices
    inner = of.widest[first, first + count - 1] / slices
    has_head, has_attention = heads > 0, looking > 0
    row_bytes = of.hidden * terms.activation_bytes
    scores = 2 * sequence * looking
    beside = (terms.hidden_numbers + terms.entering_numbers * count) * of.hidden
    working = inner + beside + np.where(has_attention, 2 * sequence, 0)
    return Units(
        params=params,
        trained=trained,
        forward_flops_per_row=2 * params + scores,
        flops_per_row=6 * params + 2 * trained + 4 * scores,
        down_bytes_per_row=row_bytes + np.where(has_head, FORWARD_ROW_BYTES + LOGSUMEXP_BYTES, row_bytes),
        up_bytes_per_row=row_bytes + np.where(has_head, LOGSUMEXP_BYTES, row_bytes),
        again_bytes_per_row=row_bytes + 0 * params,
        kept_bytes_per_row=of.hidden * terms.working_bytes + 0 * params,
        sync_down_bytes=terms.weight_bytes * trained,
        sync_up_bytes=terms.gradient_bytes * trained,
        memory_bytes=terms.runtime_bytes
        + terms.tables_bytes * sequence
        + terms.resident_bytes * params
        + terms.accumulator_bytes * trained
        + terms.state_bytes * sequence * kv_width
        + terms.working_bytes * chunk * working,
        state_bytes=terms.state_bytes * sequence * kv_width,
        takes_sequences=has_attention,
    )


def sublayers_of(shape: ModelShape, *, trained: bool = True) -> tuple[Sublayer, ...]:
    """Attention and MLP of every layer, then the head; the token table stays on the server."""
    share = 1 if trained else 0
    attention = Sublayer(
        kind="attention",
        params=shape.attention_params,
        trained=share * shape.attention_params,
        kv_width=shape.kv_width,
        inner=shape.q_width,
        slices=shape.kv_heads,
    )
    mlp = Sublayer(
        kind="mlp",
        params=shape.mlp_params,
        trained=share * shape.mlp_params,
        kv_width=0,
        inner=shape.ffn,
        slices=shape.ffn,
    )
    head_params = shape.head_gemm_params + shape.final_norm_params
    head = Sublayer(
        kind="head",
        params=head_params,
        trained=share * head_params,
        kv_width=0,
        inner=shape.vocab,
        slices=shape.vocab,
    )
    return (attention, mlp) * shape.layers + (head,)
