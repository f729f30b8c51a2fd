"""Arrangements to try on a fleet: which devices, how many stages and micro-batches, what on the wire. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["alone", "ddp", "gpipe", "1f1b", "fsdp"]
Wire = Literal["fp32", "fp16", "bf16"]
_SEQUENCES: Final = 8
_STAGES: Final = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One arrangement with its settings."""

    kind: Kind
    wire: Wire = "fp32"
    pipelines: tuple[tuple[int, ...], ...] = ()
    """Ranks of every pipeline, stage by stage; more than one: data parallel between the same stages."""
    micro_batches: int = 1
    """In each pipeline."""

    @property
    def rival(self) -> str:
        """The name under which the best of several settings is kept."""
        if len(self.pipelines) > 1:
            return f"{_LABELS[self.kind]} x data parallel (DT-FM)"
        return _LABELS[self.kind]

    @property
    def settings(self) -> str:
        if self.kind == "alone":
            return "no network"
        if not self.pipelines:
            return f"{self.wire} gradients"
        shape = " x ".join(str(number) for number in (len(self.pipelines), len(self.pipelines[0])) if number > 1)
        return f"{shape} stages, {self.micro_batches} micro-batches, {self.wire}"

    @property
    def name(self) -> str:
        return f"{self.rival}: {self.settings}"


_LABELS: Final[dict[Kind, str]] = {
    "alone": "one device alone",
    "ddp": "torch DDP",
    "gpipe": "torch GPipe",
    "1f1b": "torch 1F1B",
    "fsdp": "torch FSDP",
}


def order_by_uplink(ups: Sequence[float]) -> list[int]:
    """Order devices so that the slowest uplinks are at the ends and the fastest in the middle.

    The first stage sends activations only, the last gradients only, those between send both. Any number of the fastest
    devices is then a run of neighbors, in the same shape.
    """
    slowest_first = sorted(range(len(ups)), key=lambda device: ups[device])
    return slowest_first[0::2] + slowest_first[1::2][::-1]


def fastest(ups: Sequence[float], count: int) -> tuple[int, ...]:
    """The ranks with the `count` fastest uplinks, in order of rank."""
    return tuple(sorted(sorted(range(len(ups)), key=lambda rank: -ups[rank])[:count]))


def variants_of(ups: Sequence[float], layers: int) -> list[Variant]:
    """List what to try on ranks with these uplinks, from the quickest guess to the slowest."""
    count = len(ups)
    tried = [Variant(kind="alone", pipelines=(fastest(ups, 1),))]
    stages = [each for each in _STAGES if each <= min(count, layers)]
    for number in stages:
        ranks = (fastest(ups, number),)
        tried += [
            Variant(kind="gpipe", wire="bf16", pipelines=ranks, micro_batches=4),
            Variant(kind="gpipe", wire="bf16", pipelines=ranks, micro_batches=8),
            Variant(kind="1f1b", wire="bf16", pipelines=ranks, micro_batches=8),
            Variant(kind="gpipe", wire="fp32", pipelines=ranks, micro_batches=8),
        ]
    for number in stages:
        pipelines = count // number
        if pipelines > 1 and _SEQUENCES % pipelines == 0:
            chosen = fastest(ups, pipelines * number)
            by_speed = sorted(chosen, key=lambda rank: -ups[rank])
            groups = [tuple(sorted(by_speed[i * number : (i + 1) * number])) for i in range(pipelines)]
            tried.append(
                Variant(
                    kind="gpipe", wire="bf16", pipelines=tuple(groups), micro_batches=min(4, _SEQUENCES // pipelines)
                )
            )
    tried += [Variant(kind="ddp", wire="fp16"), Variant(kind="ddp"), Variant(kind="fsdp")]
    return tried


def least_step_s(variant: Variant, ups: Sequence[float], trained_bytes: float, weights_bytes: float) -> float:
    """Seconds that the bytes of a step take at least, by the slowest uplink: what is hopeless is not run.

    A ring sends 2 (n - 1) / n of the gradients from every device. FSDP gathers weights twice, forward and backward,
    and scatters gradients once, each (n - 1) / n of them.
    """
    count = len(ups)
    if variant.kind == "ddp":
        half = 0.5 if variant.wire == "fp16" else 1.0
        return 2 * (count - 1) / count * trained_bytes * half / min(ups)
    if variant.kind == "fsdp":
        return (count - 1) / count * (2 * weights_bytes + trained_bytes) / min(ups)
    return 0.0
