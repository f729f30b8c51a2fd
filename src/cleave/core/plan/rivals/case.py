"""The step that all ways are compared on, and what one way is: its time, or why it does not fit.

Rivals keep weights and optimizer on devices. What they compute and hold is counted here once: FLOPs of a layer and of
the head, bytes of their states, bytes of activations. Every assumption that had to be made favors them: no fixed cost
per task or per byte, no server link, an update that takes no time, devices that reach each other directly at the rates
of their own links (behind NAT that takes a relay or hole punching, and neither torch nor gloo has one).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from cleave.core.cost.rates import Server
from cleave.core.cost.resident import effective_flops_per_s, seen_keys
from cleave.core.cost.terms import RUNTIME_BYTES, Terms, lean_terms
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.core.model.shapes import ModelShape
from cleave.core.model.sublayers import Sublayer, sublayers_of

RIVAL_WIRE: WireFormat = "bf16"
"""Rivals send 16-bit numbers, whatever wire Cleave uses: none of them has fewer."""
WEIGHT_BYTES = 2
"""A weight at work, in 16 bits."""
TRAINED_BYTES = 14
"""On top of that for a trained one: gradient in 16 bits, fp32 master copy, two moments of Adam (ZeRO,
arXiv:1910.02054: 16 bytes a parameter in all)."""
LAYER_NUMBERS_BYTES = 34
"""Activations of a layer that backward needs, per row and hidden number, in 16 bits (Korthikanti et al., 2022,
arXiv:2205.05198), without its term for attention scores, which fused attention does not keep."""
LOGIT_BYTES = 4
"""A logit and its gradient, in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A layer, an end of the model, or all of it."""

    params: float
    trained: float
    forward_flops: float
    """per row; the same for backward below, which does not include recomputing forward"""
    backward_flops: float

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer state on a device."""
        return WEIGHT_BYTES * self.params + TRAINED_BYTES * self.trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    profiles: Profiles
    shape: ModelShape
    tokens: int
    sequence: int
    wire: WireFormat
    server: Server

    @property
    def terms(self) -> Terms:
        return lean_terms(RIVAL_WIRE)

    @property
    def sequences(self) -> float:
        return self.tokens / self.sequence

    @property
    def row_bytes(self) -> float:
        """Bytes on the wire of one token between two layers."""
        return self.shape.hidden * self.terms.activation_bytes

    @property
    def layer(self) -> Part:
        return _parts(self.shape, self.sequence)[0]

    @property
    def head(self) -> Part:
        return _parts(self.shape, self.sequence)[1]

    @property
    def table(self) -> Part:
        """Token and position tables: looking up costs no FLOPs."""
        params = self.shape.vocab * self.shape.embed_dim + self.shape.position_rows * self.shape.hidden
        trained = 0 if self.shape.adapter_rank else params
        return Part(params=params, trained=trained, forward_flops=0.0, backward_flops=0.0)

    @property
    def whole(self) -> Part:
        """The whole model; a table that is also the head counts once."""
        layer, head, layers = self.layer, self.head, self.shape.layers
        adapters = layers * (self.shape.attention_adapter_params + self.shape.mlp_adapter_params)
        return Part(
            params=self.shape.params + adapters,
            trained=adapters or self.shape.params,
            forward_flops=layers * layer.forward_flops + head.forward_flops,
            backward_flops=layers * layer.backward_flops + head.backward_flops,
        )

    def compute_s(self, part: Part, rows: float, *, recompute: bool) -> tuple[Floats, Floats]:
        """Seconds per device for `rows` tokens, forward and backward."""
        speed = effective_flops_per_s(self.profiles.flops_per_s, max(int(rows), 1), self.terms)
        again = part.forward_flops if recompute else 0.0
        return rows * part.forward_flops / speed, rows * (part.backward_flops + again) / speed

    def step_flops(self, *, recompute: bool) -> tuple[float, float]:
        """FLOPs of a step, forward and backward; the head is never recomputed."""
        again = self.shape.layers * self.layer.forward_flops if recompute else 0.0
        return self.tokens * self.whole.forward_flops, self.tokens * (self.whole.backward_flops + again)

    def activation_bytes(self, layers: float, rows: float, *, recompute: bool) -> float:
        """Activations of `rows` tokens in `layers`: all of them, or each layer's input and all of one layer."""
        full = LAYER_NUMBERS_BYTES * self.shape.hidden * rows
        return 2 * self.shape.hidden * rows * layers + full if recompute else full * layers

    def logit_bytes(self, rows: float) -> float:
        return LOGIT_BYTES * self.shape.vocab * rows

    def replica_bytes(self, rows: float, *, recompute: bool) -> float:
        """Memory of the whole model on one device, with `rows` tokens at a time."""
        kept = self.activation_bytes(self.shape.layers, rows, recompute=recompute)
        return RUNTIME_BYTES + self.whole.state_bytes + kept + self.logit_bytes(rows)

    def medium_s(self, moved_bytes: Floats) -> float:
        """Seconds of the busiest shared medium, given the bytes that each device sends and receives."""
        busiest_s = 0.0
        for name in set(self.profiles.medium) - {""}:
            members = np.array([medium == name for medium in self.profiles.medium])
            capacity = float(self.profiles.medium_bytes_per_s[members][0])
            busiest_s = max(busiest_s, float(moved_bytes[members].sum()) / capacity)
        return busiest_s


@lru_cache
def _parts(shape: ModelShape, sequence: int) -> tuple[Part, Part]:
    """A layer and the head."""
    sublayers = sublayers_of(shape)
    return _part(sublayers[:2], sequence), _part(sublayers[-1:], sequence)


def _part(sublayers: tuple[Sublayer, ...], sequence: int) -> Part:
    products = sum(one.products for one in sublayers)
    scores = sum(
        one.inner * seen_keys(0, sequence, one.window) / sequence for one in sublayers if one.kind == "attention"
    )
    return Part(
        params=sum(one.params for one in sublayers),
        trained=sum(one.trained for one in sublayers),
        forward_flops=2 * (products + 2 * scores),
        backward_flops=2 * (products + sum(one.gradient_products for one in sublayers) + 4 * scores),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One way to do the step."""

    name: str
    step_s: float
    """infinite if it does not fit"""
    arrangement: str
    """how it would be done, or why it does not fit"""
    is_ours: bool = False
    """Cleave can run it: columns, or products over the whole fleet"""
    spares: str = ""
    """what it does not pay for and Cleave does"""

    @property
    def fits(self) -> bool:
        return self.step_s < inf


def plural(count: float, noun: str) -> str:
    return f"{count:,.0f} {noun}" if round(count) == 1 else f"{count:,.0f} {noun}s"


def too_small(what: str, needed_bytes: float, profiles: Profiles, devices: int = 1) -> str:
    """Why something that takes so many devices does not fit, with both sizes."""
    largest = float(np.sort(profiles.memory_bytes)[-min(devices, len(profiles))])
    whose = "the largest device offers" if devices == 1 else f"the {devices:,} largest devices offer at least"
    return f"{what} needs {needed_bytes / 1e9:.3g} GB, {whose} {largest / 1e9:.3g} GB"
