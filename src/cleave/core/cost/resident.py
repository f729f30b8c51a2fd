"""Laws of resident shards: FLOPs, bytes and memory of a device that takes tokens through weights it holds.

Forward, a device with a shard receives x for every row and returns y; backward, it receives dy and returns dx. Inner
activations never cross a link. Per row, with h hidden numbers: down 2h, up 2h, and h more down if x was not kept for
backward. Per step: the trained weights down, their gradients up.

Each quantity has one function, vectorized. `shard_costs` applies them to many shards of a model, for planners;
`demand.py` to one shard of a decoder, for the server. The FLOPs of live devices are those of `device/programs`, product
by product. This module knows no plans, devices or time; `core/plan` divides by rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from cleave.core.cost.rates import Real, read_bytes_per_s, thin_effort
from cleave.core.cost.terms import STATE_NUMBER_BYTES, Terms
from cleave.core.cost.wire import DEVICE_BYTES
from cleave.core.fleet.profiles import Bools, Floats, Ints, Profiles
from cleave.core.model.keeping import KEEPINGS, Keeping
from cleave.core.model.sublayers import Sublayer

TARGET_BYTES = 4
"""The head's target, per row."""
LOGSUMEXP_BYTES = 8
"""Forward result of the head per row (logsumexp, target logit, fp32), which it gets back once slices are summed."""
STACK_BYTES = 64 << 10
"""Encoded gradients that one task reads together: a task costs devices and server more than a few kilobytes do. Larger
stacks would leave less that a departed device's gradients can still be added to."""
_MATRICES, _WIDTHS = 4, 2
"""Trained matrices of a usual sublayer, and different widths among its small ones: only equal widths are stacked."""


class Products(NamedTuple):
    """Multiply-adds per row, for one shard or many."""

    weights: Real
    gradients: Real
    rebuilt: Real
    """recomputed inside sublayers, backward"""
    passed: Real
    """recomputed to get the inputs of later sublayers, backward"""
    scores: Real
    """one product of scores: q width x keys seen"""
    passed_scores: Real
    """the same, in attentions that are recomputed to get later inputs"""
    logits: Real = 0.0
    """part of `rebuilt` that is recomputed whatever a device keeps"""


def forward_flops(of: Products) -> Real:
    """FLOPs per row; scores and contexts take two products of scores."""
    return 2 * (of.weights + 2 * of.scores)


def backward_flops(of: Products, keeps: Keeping = "nothing") -> Real:
    """FLOPs per row: input gradients, weight gradients, and recomputation of what was not kept.

    Six products of scores: scores and contexts again, and the gradients of V, of the scores, of Q and of K; kept
    contexts spare one.
    """
    match keeps:
        case "nothing":
            again = of.rebuilt + of.passed + 2 * of.passed_scores + 6 * of.scores
        case "inputs":
            again = of.rebuilt + 6 * of.scores
        case "all":
            again = of.logits + 5 * of.scores
    return 2 * (of.weights + of.gradients + again)


def readings(sublayers: int, gradient_bytes: float) -> int:
    """Tasks that read the gradients of some sublayers: one for each matrix, or stack of small ones."""
    return min(_MATRICES * sublayers, max(_WIDTHS, ceil(gradient_bytes / STACK_BYTES)))


def kept_numbers(keeps: Keeping, *, hidden: int, sublayers: Real, inside: Real) -> Real:
    """Numbers per row that a device keeps for backward besides K and V; the first sublayer's input is an operand."""
    inputs = hidden * (sublayers - 1)
    match keeps:
        case "nothing":
            return 0 * inputs
        case "inputs":
            return inputs
        case "all":
            return inputs + inside


def seen_keys(first_row: int, rows: int, window: int | None = None) -> float:
    """Total keys seen by rows of a causal attention: row i sees itself and earlier ones, at most `window`."""
    rising = rows if window is None else min(max(window - first_row, 0), rows)
    return rising * (2 * first_row + rising + 1) / 2 + (rows - rising) * (window or 0)


def sequence_bytes(number_bytes: float, kv_width: Real, sequence: int) -> Real:
    """Bytes of an open sequence: K, V and their gradients, `number_bytes` per token and element of K."""
    return number_bytes * sequence * kv_width


def state_bytes(kv_widths: Sequence[int], sequence: int, kept: int = 0) -> int:
    """Bytes of an open sequence on a live device, given the width of K in each attention and `kept_numbers`."""
    return int(sequence_bytes(STATE_NUMBER_BYTES, sum(kv_widths), sequence)) + DEVICE_BYTES * sequence * kept


def workspace_bytes(terms: Terms, rows: Real, *, parts: Real, hidden: int, inside: Real, keys: Real) -> Real:
    """Bytes of a unit's result and intermediates: every part's input, and the inside of the widest sublayer.

    `inside` is in numbers per row (see `inside_numbers`); `keys` is how many a row may see.
    """
    entering = (terms.hidden_numbers + terms.entering_numbers * parts) * hidden
    return terms.working_bytes * rows * (entering + inside + terms.score_numbers * keys)


def memory_bytes(
    terms: Terms, *, params: Real, trained: Real, states: Real, workspace: Real, moved: Real, tables: Real
) -> Real:
    """Bytes of a shard on a device: weights, gradients, open sequences, and a unit with its inputs."""
    held = terms.resident_bytes * params + terms.accumulator_bytes * trained
    return terms.runtime_bytes + held + states + workspace + moved + tables


def effective_flops_per_s(flops_per_s: Floats, chunk: int, terms: Terms) -> Floats:
    """FLOP/s including the reading of weights, once per chunk: the smaller the chunk, the more that costs."""
    if terms.is_thin:
        return flops_per_s / thin_effort(chunk)
    read_s = terms.resident_bytes / read_bytes_per_s(flops_per_s)
    return 1 / (1 / flops_per_s + read_s / (2 * chunk))


def compute_s_per_row(
    of: ShardCosts, profiles: Profiles, chunk: int, terms: Terms, keeps: Ints | None = None
) -> Floats:
    """[shard, device]: seconds of a device's processor per row, forward and backward.

    A chunk is a task each way, whose fixed cost its rows share; every byte moved is handled once. `keeps` has an index
    into KEEPINGS for every shard and device; without it, devices keep nothing.
    """
    flops = of.flops_per_row[:, None] if keeps is None else of.flops_keeping(keeps)
    return task_s_per_row(of, profiles, chunk) + flops / effective_flops_per_s(profiles.flops_per_s, chunk, terms)


def task_s_per_row(of: ShardCosts, profiles: Profiles, chunk: int) -> Floats:
    """[shard, device]: the part of `compute_s_per_row` that is not arithmetic."""
    moved = (of.down_bytes_per_row + of.up_bytes_per_row)[:, None]
    return 2 * profiles.task_s / chunk + moved * profiles.byte_s


def inside_numbers(sublayer: Sublayer, terms: Terms) -> float:
    each = {"attention": terms.attention_numbers, "mlp": terms.mlp_numbers, "head": terms.head_numbers}
    return each[sublayer.kind] * sublayer.inner


# ------------------------------------------------------------------------------------------------ many shards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SublayerSums:
    """Prefix sums over the sublayers, so that any run of them is a difference."""

    sublayers: tuple[Sublayer, ...]
    hidden: int
    sequence: int
    terms: Terms
    sums: Floats
    """one row per field of `_SUMMED`, one column per cut"""
    widest: Floats
    """[first, last]: numbers at work inside the widest of sublayers first..last, per row"""
    lengths: Floats
    """maximum number of slices per sublayer"""
    wants_dx: bool
    """whether the first sublayer returns the gradient of its input"""

    def __len__(self) -> int:
        return len(self.sublayers)

    @property
    def is_trained(self) -> bool:
        return any(one.trained for one in self.sublayers)

    def differences(self, first: Ints, count: Ints) -> dict[str, Floats]:
        found = self.sums[:, first + count] - self.sums[:, first]
        return dict(zip(_SUMMED, found, strict=True))

    def kinds(self, first: Ints, count: Ints) -> tuple[Ints, Ints]:
        """Group runs of sublayers by kind, as layers repeat: one run of each kind, and the kind of each run."""
        _, runs, kind = np.unique(self.traits(first, count), axis=1, return_index=True, return_inverse=True)
        return runs, kind

    def traits(self, first: Ints, count: Ints) -> Floats:
        """Everything that costs depend on, one column per run; runs with equal columns cost the same."""
        last = first + count - 1
        whole, end = self.sums[:, last + 1] - self.sums[:, first], self.sums[:, last + 1] - self.sums[:, last]
        returns_dx = ((first > 0) | self.wants_dx).astype(np.float64)
        return np.vstack([whole, end, self.widest[first, last], self.lengths[first], returns_dx])


_SUMMED = (
    "params", "trained", "unleased", "undivided", "undivided_trained", "kv_width", "products", "gradient_products",
    "rebuilt_products", "passed_products", "inside", "scores", "heads",
)  # fmt: skip


def sum_up(of: Sequence[Sublayer], *, hidden: int, sequence: int, terms: Terms, wants_dx: bool = True) -> SublayerSums:
    each_keys = {window: seen_keys(0, sequence, window) / sequence for window in {s.window for s in of}}
    rows = [
        (
            *(getattr(s, name) for name in _SUMMED[:-2]),
            s.inner * each_keys[s.window] if s.kind == "attention" else 0,
            1 if s.kind == "head" else 0,
        )
        for s in of
    ]
    inside = np.array([inside_numbers(s, terms) for s in of], dtype=np.float64)
    widest = np.maximum.accumulate(np.triu(np.tile(inside, (len(inside), 1))), axis=1)
    table = np.array(rows, dtype=np.float64).T
    return SublayerSums(
        sublayers=tuple(of),
        hidden=hidden,
        sequence=sequence,
        terms=terms,
        sums=np.concatenate([np.zeros((len(_SUMMED), 1)), np.cumsum(table, axis=1)], axis=1),
        widest=widest,
        lengths=np.array([s.slices for s in of], dtype=np.float64),
        wants_dx=wants_dx,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardCosts:
    """Demands of shards on their devices: one entry per shard in every field."""

    params: Floats
    trained: Floats
    lent: Floats
    """the part of `trained` that a single holder can keep with its optimizer; none of a slice"""
    flops_per_row: Floats
    """forward and backward, if devices keep nothing"""
    spared_flops_per_row: Floats
    """[shard, keeping]: what a device does not recompute"""
    kept_bytes: Floats
    """[shard, keeping]: memory for that, per open sequence"""
    forward_flops_per_row: Floats
    down_bytes_per_row: Floats
    up_bytes_per_row: Floats
    again_bytes_per_row: Floats
    """sending x again, for each row that was not kept"""
    kept_bytes_per_row: Floats
    """memory for keeping x instead"""
    sync_down_bytes: Floats
    sync_up_bytes: Floats
    memory_bytes: Floats
    """with one open sequence and one chunk at work, no x kept"""
    state_bytes: Floats
    """per additional open sequence"""
    takes_sequences: Bools
    """the shard has attention: rows come as whole sequences"""

    def __len__(self) -> int:
        return len(self.params)

    def flops_keeping(self, keeps: Ints) -> Floats:
        """[shard, device]: `flops_per_row` of devices that keep so much."""
        return self.flops_per_row[:, None] - np.take_along_axis(self.spared_flops_per_row, keeps, axis=1)

    def state_keeping(self, keeps: Ints) -> Floats:
        """[shard, device]: `state_bytes` of devices that keep so much."""
        return self.state_bytes[:, None] + np.take_along_axis(self.kept_bytes, keeps, axis=1)

    def take(self, chosen: Ints) -> ShardCosts:
        return ShardCosts(**{name: getattr(self, name)[chosen] for name in ShardCosts.__slots__})


def shard_costs(of: SublayerSums, first: Ints, count: Ints, slices: Ints, *, chunk: int) -> ShardCosts:
    """Costs of shards of `count` sublayers from `first`, each cut into `slices`: those of the largest slice."""
    terms, sequence, hidden = of.terms, of.sequence, of.hidden
    run = of.differences(first, count)
    last = of.differences(first + count - 1, np.ones_like(count))
    lengths = of.lengths[first]
    part = np.where(slices > 1, np.ceil(lengths / slices) / lengths, 1.0)
    params = run["params"] * part + run["undivided"] * (1 - part)
    trained = run["trained"] * part + run["undivided_trained"] * (1 - part)
    is_once = terms.recomputes == "once"
    products = Products(
        weights=part * run["products"],
        gradients=part * run["gradient_products"],
        rebuilt=part * run["products" if is_once else "rebuilt_products"],
        passed=0.0 if is_once else part * (run["passed_products"] - last["passed_products"]),
        scores=part * run["scores"],
        passed_scores=0.0 if is_once else part * (run["scores"] - last["scores"]),
        logits=part * last["products"] * last["heads"],
    )
    has_head, has_attention, has_dx = run["heads"] > 0, run["scores"] > 0, (first > 0) | of.wants_dx
    states = sequence_bytes(terms.state_bytes, part * run["kv_width"], sequence)
    workspace = workspace_bytes(
        terms,
        chunk,
        parts=count - run["heads"],
        hidden=hidden,
        inside=part * of.widest[first, first + count - 1],
        keys=np.where(has_attention, sequence, 0),
    )
    row_bytes = hidden * terms.activation_bytes
    forward, backward = np.asarray(forward_flops(products)), np.asarray(backward_flops(products))
    kept = [
        np.asarray(kept_numbers(keeps, hidden=hidden, sublayers=count.astype(np.float64), inside=part * run["inside"]))
        for keeps in KEEPINGS
    ]
    return ShardCosts(
        params=params,
        trained=trained,
        lent=np.where(slices == 1, run["trained"] - run["unleased"], 0.0),
        flops_per_row=forward + backward,
        spared_flops_per_row=np.stack([backward - backward_flops(products, keeps) for keeps in KEEPINGS], axis=1),
        kept_bytes=terms.working_bytes * sequence * np.stack(kept, axis=1),
        forward_flops_per_row=forward,
        down_bytes_per_row=row_bytes + np.where(has_head, TARGET_BYTES + LOGSUMEXP_BYTES, row_bytes),
        up_bytes_per_row=np.where(has_dx, row_bytes, 0) + np.where(has_head, LOGSUMEXP_BYTES, row_bytes),
        again_bytes_per_row=row_bytes + 0 * params,
        kept_bytes_per_row=hidden * terms.working_bytes + 0 * params,
        sync_down_bytes=terms.weight_bytes * trained,
        sync_up_bytes=terms.gradient_bytes * trained,
        memory_bytes=np.asarray(
            memory_bytes(
                terms,
                params=params,
                trained=trained,
                states=states,
                workspace=workspace,
                moved=moved_bytes(terms, chunk, hidden),
                tables=terms.tables_bytes * sequence,
            )
        ),
        state_bytes=np.asarray(states),
        takes_sequences=has_attention,
    )


def moved_bytes(terms: Terms, rows: int, hidden: int) -> float:
    return terms.working_bytes * terms.moved_numbers * rows * hidden
