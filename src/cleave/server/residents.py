"""What a column holds on a device: its parts in terms of operands, and what they take in memory and operations."""

from __future__ import annotations

from dataclasses import dataclass

from cleave.core.cost.gemm import DEVICE_BYTES
from cleave.core.cost.resident import SublayerKind, state_bytes
from cleave.core.schedule.pipeline import Direction
from cleave.core.schedule.tasks import Operand
from cleave.protocol.decoder import Batch, Stack, View
from cleave.protocol.programs import Head, Part
from cleave.server.operands import Staging
from cleave.server.segments import Share, inner_width, kind_of

_ENTERING = 8  # x, dy, results and copies, beside what enters each part
_INSIDE: dict[SublayerKind, int] = {"attention": 8, "mlp": 6, "head": 1}
"""Inner activations at work at once; the planner counts at least as many (`core/units.live_terms`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    parts: tuple[Part, ...]
    head: Head | None
    operands: tuple[Operand, ...]
    """The weights, each once."""
    trained: tuple[tuple[View, int], ...]
    """Rectangles whose gradients are wanted, with the operands of their weights."""
    is_slice: bool
    hidden: int
    gemm_params: int
    query_widths: int
    """Of all attentions together."""
    kv_widths: tuple[int, ...]
    inside: int
    """Numbers at work per row inside the widest part."""

    @property
    def weight_bytes(self) -> int:
        return sum(operand.bytes for operand in self.operands)

    @property
    def trained_bytes(self) -> int:
        return sum(view.area for view, _ in self.trained) * DEVICE_BYTES

    def state_bytes(self, sequence: int) -> int:
        return state_bytes(self.kv_widths, sequence)

    def room_bytes(self, rows: int, sequence: int) -> int:
        """A unit's result and what is computed on the way: every part's input, one part's inside, a row of scores."""
        entering = (len(self.parts) + _ENTERING) * self.hidden
        return DEVICE_BYTES * rows * (entering + self.inside + (sequence if self.kv_widths else 0))

    def need_bytes(self, chunk: int, batch: Batch, open_sequences: int, is_trained: bool) -> int:
        """All of it on one device: weights, gradients, states, and two units with what they read."""
        rows = min(chunk, batch.sequence)
        unit = self.room_bytes(rows, batch.sequence) + 2 * rows * self.hidden * DEVICE_BYTES
        tables = DEVICE_BYTES * (0 if batch.rotary is None else batch.rotary.size) + DEVICE_BYTES * batch.sequence
        gradients = self.trained_bytes if is_trained else 0
        return self.weight_bytes + gradients + open_sequences * self.state_bytes(batch.sequence) + unit + tables

    def flops(self, rows: int, sequence: int, direction: Direction) -> float:
        """Forward, or forward again and backward; attention at the average length a causal mask leaves."""
        once = 2.0 * rows * self.gemm_params + 2.0 * rows * sequence * self.query_widths
        if direction == "forward":
            return once
        trained = sum(view.area for view, _ in self.trained)
        return 2 * once + 2.0 * rows * trained


def slots(held: Resident, memory_bytes: int, chunk: int, batch: Batch, is_trained: bool, share: int = 1) -> int:
    """How many sequences a device can have open at once in one of `share` columns; 0: it cannot serve it."""
    left = memory_bytes - held.need_bytes(chunk, batch, 0, is_trained)
    state = held.state_bytes(batch.sequence)
    if left < 0:
        return 0
    return min(batch.sequences, left // (state * share) if state else batch.sequences)


def resident(stack: Stack, share: Share, batch: Batch, staging: Staging) -> Resident:
    operands: dict[int, Operand] = {}
    views: dict[View, int] = {}

    def name(view: View) -> int:
        operand = staging.slice(batch.operands[view.parameter], view.rows, view.cols).operand
        operands[operand.id] = operand
        views[view] = operand.id
        return operand.id

    parts, head = share.described(stack, name)
    attentions = list(share.attentions(stack))
    queries = [_width(stack, part.q.weight, is_transposed=part.q.is_transposed) // share.of for part in attentions]
    return Resident(
        parts=parts,
        head=head,
        operands=tuple(operands.values()),
        trained=tuple((view, id) for view, id in views.items() if stack.parameters[view.parameter].is_trained),
        is_slice=share.of > 1,
        hidden=stack.hidden,
        gemm_params=sum(view.area for view in views if view.height > 1),
        query_widths=sum(queries),
        kv_widths=tuple(share.kv_widths(stack)),
        inside=max(
            -(-_INSIDE[kind_of(stack, sublayer)] * inner_width(stack, sublayer) // share.of)
            for sublayer in range(share.first, share.first + share.count)
        ),
    )


def _width(stack: Stack, number: int, *, is_transposed: bool) -> int:
    view = stack.views[number]
    return view.width if is_transposed else view.height
