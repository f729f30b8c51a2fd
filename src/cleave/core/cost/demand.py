"""Demands of one shard of a decoder on a live device: the laws of `resident.py` with the shard's exact numbers.

For the server, which cuts shards, reserves memory for them, sets deadlines and gives credit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cleave.core.cost.resident import (
    Products,
    backward_flops,
    forward_flops,
    inside_numbers,
    kept_numbers,
    memory_bytes,
    moved_bytes,
    seen_keys,
    sequence_bytes,
    workspace_bytes,
)
from cleave.core.cost.terms import Terms, live_terms
from cleave.core.cost.wire import DEVICE_BYTES
from cleave.core.model.batch import Batch, Direction
from cleave.core.model.decoder import Decoder
from cleave.core.model.keeping import Keeping
from cleave.core.model.shard import Shard
from cleave.core.model.sublayers import sublayers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardDemand:
    """Demands of a shard on its device, for sequences of one length."""

    hidden: int
    sequence: int
    terms: Terms
    sublayers: int
    parts: int
    """sublayers without the head"""
    params: int
    trained: int
    """numbers with a gradient; 0 if no gradients are computed"""
    kv_width: int
    inside: float
    """numbers at work per row inside the widest sublayer"""
    kept_inside: int
    """numbers per row inside all sublayers that can be kept for backward"""
    products: Products
    """with weights only: products of scores depend on a row's position"""
    rebuilt_products: int
    """multiply-adds of a row of which only K and V are recomputed"""
    scores: tuple[ScoreWidths, ...]

    @property
    def trained_bytes(self) -> int:
        return int(self.terms.accumulator_bytes * self.trained)

    def kept_numbers(self, keeps: Keeping) -> int:
        """Numbers per row that are kept for backward."""
        return int(kept_numbers(keeps, hidden=self.hidden, sublayers=self.sublayers, inside=self.kept_inside))

    def state_bytes(self, keeps: Keeping = "nothing") -> int:
        """Bytes per open sequence."""
        kept = self.terms.working_bytes * self.sequence * self.kept_numbers(keeps)
        return int(sequence_bytes(self.terms.state_bytes, self.kv_width, self.sequence) + kept)

    def workspace_bytes(self, rows: int) -> int:
        """Bytes of a unit on top of its operands."""
        keys = self.sequence if self.scores else 0
        return int(
            workspace_bytes(self.terms, rows, parts=self.parts, hidden=self.hidden, inside=self.inside, keys=keys)
        )

    def memory_bytes(self, chunk: int, open_sequences: int, tables_bytes: int, keeps: Keeping = "nothing") -> int:
        """Bytes of the whole shard with the given number of open sequences and one chunk at work."""
        rows = min(chunk, self.sequence)
        return int(
            memory_bytes(
                self.terms,
                params=self.params,
                trained=self.trained,
                states=open_sequences * self.state_bytes(keeps),
                workspace=self.workspace_bytes(rows),
                moved=moved_bytes(self.terms, rows, self.hidden),
                tables=tables_bytes,
            )
        )

    def sequences_within(
        self,
        room_bytes: int,
        chunk: int,
        tables_bytes: int,
        most: int,
        shards: int = 1,
        keeps: Keeping = "nothing",
    ) -> int:
        """How many sequences, up to `most`, can be open in the given memory; 0 also if the shard does not fit.

        Several `shards` on one device divide the memory left for open sequences equally.
        """
        left = room_bytes - self.memory_bytes(chunk, 0, tables_bytes)
        if left < 0:
            return 0
        each = self.state_bytes(keeps)
        return min(most, left // (each * shards)) if each else most

    def flops(
        self,
        direction: Direction,
        first_row: int,
        rows: int,
        *,
        is_silent: bool = False,
        keeps: Keeping = "nothing",
    ) -> float:
        """FLOPs of a unit: some rows of a sequence in one direction.

        A silent forward recomputes only K and V or, where a device keeps more for backward, all but the logits.
        """
        whole = passed = rebuilt = 0.0
        for window, width, passed_width, rebuilt_width in self.scores:
            keys = seen_keys(first_row, rows, window) / rows
            whole, passed, rebuilt = whole + width * keys, passed + passed_width * keys, rebuilt + rebuilt_width * keys
        row = self.products._replace(scores=whole, passed_scores=passed)
        if direction == "backward":
            return float(rows * backward_flops(row, keeps))
        if is_silent and keeps == "nothing":
            row = row._replace(weights=self.rebuilt_products, scores=rebuilt)
        elif is_silent:
            row = row._replace(weights=self.products.weights - self.products.logits)
        return float(rows * forward_flops(row))


class ScoreWidths(NamedTuple):
    """Summed query widths of all attentions with the same window."""

    window: int | None
    whole: int
    passed: int
    """attentions that backward recomputes to get the inputs of later sublayers"""
    rebuilt: int
    """attentions before the last, which recomputing K and V runs through"""


def shard_demand(decoder: Decoder, shard: Shard, sequence: int, *, is_trained: bool = True) -> ShardDemand:
    """The exact demand of a shard, slice or not; without `is_trained`, no gradients are computed."""
    of, terms = sublayers(decoder, shard, is_trained=is_trained), live_terms("fp32")
    attentions = [number for number, sublayer in enumerate(of) if sublayer.kind == "attention"]
    last = attentions[-1] if attentions else 0
    windows: dict[int | None, list[int]] = {}
    for number in attentions:
        widths = windows.setdefault(of[number].window, [0, 0, 0])
        for place, is_in in enumerate((True, number < len(of) - 1, number < last)):
            widths[place] += of[number].inner if is_in else 0
    return ShardDemand(
        hidden=decoder.hidden,
        sequence=sequence,
        terms=terms,
        sublayers=len(of),
        parts=sum(sublayer.kind != "head" for sublayer in of),
        params=sum(sublayer.params for sublayer in of),
        trained=sum(sublayer.trained for sublayer in of),
        kv_width=sum(sublayer.kv_width for sublayer in of),
        inside=max(inside_numbers(sublayer, terms) for sublayer in of),
        kept_inside=sum(sublayer.inside for sublayer in of),
        products=Products(
            weights=sum(sublayer.products for sublayer in of),
            gradients=sum(sublayer.gradient_products for sublayer in of),
            rebuilt=sum(sublayer.rebuilt_products for sublayer in of),
            passed=sum(sublayer.passed_products for sublayer in of[:-1]),
            scores=0.0,
            passed_scores=0.0,
            logits=sum(sublayer.products for sublayer in of if sublayer.kind == "head"),
        ),
        rebuilt_products=sum(sublayer.products for sublayer in of[: last + 1]) - of[last].passed_products
        if attentions
        else 0,
        scores=tuple(ScoreWidths(window, *widths) for window, widths in windows.items()),
    )


def tables_bytes(batch: Batch[object]) -> int:
    """Bytes of positions and mask on a device."""
    return DEVICE_BYTES * ((0 if batch.rotary is None else batch.rotary.size) + batch.sequence)
