"""Devices and a small Llama-like model for runs of the real engine in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cleave.core.cost.rates import Pace
from cleave.core.model.decoder import Decoder
from cleave.core.model.shapes import ModelShape, named
from cleave.sim.devices import Device
from cleave.sim.stack import decoder_of

_HEAD = 64


def uneven(count: int) -> Iterator[Device]:
    """Devices of different speeds, with 256 MB each."""
    for number in range(count):
        pace = Pace(2e10 * (1 + number % 5), 4e6 * (1 + number % 7), 2e6 * (1 + number % 3), 0.01)
        yield Device(pace, memory_bytes=256 << 20)


def shape(*, layers: int = 6, hidden: int = 512, inner: int = 1536, words: int = 4096) -> ModelShape:
    return replace(
        named("llama-2-7b"),
        name="small",
        layers=layers,
        hidden=hidden,
        embed_dim=hidden,
        ffn=inner,
        heads=hidden // _HEAD,
        kv_heads=hidden // _HEAD,
        head_dim=_HEAD,
        vocab=words,
    )


def decoder(
    *, layers: int = 6, hidden: int = 512, inner: int = 1536, words: int = 4096, has_head: bool = True
) -> Decoder:
    return decoder_of(shape(layers=layers, hidden=hidden, inner=inner, words=words), has_head=has_head)
