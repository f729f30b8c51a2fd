"""Train a model too large for one device on local devices that share one Wi-Fi network: both grains, and plain torch.

`python benchmarks/home.py`: LoRA of rank 8 on q and v (with `--full`, all weights) on a Llama with random weights, real
processes and sockets, the link shaped by `transport/shaped.py`. Each device has less memory than the frozen weights
need. All train on the same batches from the same weights, so losses must agree. Medians exclude the first step, which
sends the resident weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cleave.api.fleet import Fleet
from cleave.api.training import distribute
from cleave.core.cost.wire import WireFormat
from cleave.errors import CleaveError
from cleave.transport.shaped import Link

Grain = Literal["gemm", "resident"]
GRAINS: tuple[Grain, ...] = ("gemm", "resident")
_MBIT_BYTES = 1e6 / 8
_VOCAB = 2048
_HEAD_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The model to train, and the size of a step."""

    hidden: int
    layers: int
    tokens: int
    sequence: int = 256
    full: bool = False
    """Train all weights; otherwise LoRA."""
    steps: int

    def model(self) -> Any:
        """Build the model, with the same weights each time."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=_VOCAB,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // _HEAD_WIDTH,
            num_key_value_heads=self.hidden // _HEAD_WIDTH,
            max_position_embeddings=self.sequence,
        )
        config.use_cache = False
        model = LlamaForCausalLM(config)
        if self.full:
            return model
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    def batch(self, number: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(number)
        return torch.randint(0, _VOCAB, (self.tokens // self.sequence, self.sequence), generator=draw)


@dataclass(slots=True)
class Figures:
    """Measurements per step."""

    taken_s: list[float] = field(default_factory=lambda: list[float]())
    losses: list[float] = field(default_factory=lambda: list[float]())
    down_bytes: list[int] = field(default_factory=lambda: list[int]())
    up_bytes: list[int] = field(default_factory=lambda: list[int]())
    predicted_s: float | None = None


def train(model: Any, work: Work, moved: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> Figures:
    figures = Figures()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    for number in range(work.steps):
        batch = work.batch(number)
        before, started_s = moved(), time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        figures.taken_s.append(time.perf_counter() - started_s)
        figures.losses.append(loss.item())
        after = moved()
        figures.down_bytes.append(after[0] - before[0])
        figures.up_bytes.append(after[1] - before[1])
    return figures


def train_over(fleet: Fleet, work: Work, grain: Grain) -> Figures:
    def moved() -> tuple[int, int]:
        totals = fleet.cluster.totals()
        return totals.down_bytes, totals.up_bytes

    figures = train(distribute(work.model(), fleet, grain=grain), work, moved)
    figures.predicted_s = fleet.cluster.planning.latest.step_s if fleet.cluster.planning.latest is not None else None
    return figures


def later(values: list[float] | list[int]) -> float:
    """The median without the first step, which differs from the others."""
    return statistics.median(values[1:])


def main() -> None:
    options = _parser().parse_args()
    work = Work(
        hidden=options.hidden, layers=options.layers, tokens=options.tokens, full=options.full, steps=options.steps
    )
    torch.set_num_threads(1)
    link = Link(medium_bytes_per_s=options.mbit * _MBIT_BYTES, latency_s=options.latency_ms / 1e3)
    weights_bytes = 4 * sum(weight.numel() for weight in work.model().parameters())
    kind = "all weights" if work.full else "LoRA of rank 8 on q and v"
    print(f"# {options.devices} devices on one {options.mbit:g} Mbit/s Wi-Fi: {kind}\n")
    print(f"hidden {work.hidden}, {work.layers} layers, {work.tokens} tokens per step, wire {options.wire}; weights")
    print(f"take {weights_bytes / 1e6:.0f} MB in fp32.", flush=True)
    plain = train(work.model(), work)
    rows = [f"| plain torch, one thread, no cap | {later(plain.taken_s):.2f} | {plain.taken_s[0]:.2f} | | | |"]
    losses = {"plain torch": plain.losses}
    for grain in options.grains:
        try:
            figures = _over_wifi(work, grain, link, options.devices, options.memory, options.wire, weights_bytes)
        except CleaveError as fault:
            rows.append(f"| {grain} | {fault} | | | | |")
            continue
        down, up = later(figures.down_bytes) / 1e6, later(figures.up_bytes) / 1e6
        predicted = "" if figures.predicted_s is None else f"{figures.predicted_s:.2f}"
        first = f"{figures.taken_s[0]:.2f}"
        rows.append(f"| {grain} | {later(figures.taken_s):.2f} | {first} | {predicted} | {down:.1f} | {up:.1f} |")
        losses[grain] = figures.losses
    print("\n| | s per step, median | s, first step | s, predicted | MB down per step | MB up per step |")
    print("|---|---|---|---|---|---|", *rows, sep="\n")
    print(f"\n| step | {' | '.join(f'loss, {name}' for name in losses)} |\n|---|{'---|' * len(losses)}")
    for number, each in enumerate(zip(*losses.values(), strict=True)):
        print(f"| {number + 1} | {' | '.join(f'{loss:.5f}' for loss in each)} |")


def _over_wifi(
    work: Work, grain: Grain, link: Link, devices: int, memory: str, wire: WireFormat, weights_bytes: int
) -> Figures:
    with Fleet.local(devices, wire=wire, offload="always", memory=memory, links=link) as fleet:
        held = max(member.memory_bytes for member in fleet.cluster.here())
        print(f"A device has {held / 1e6:.0f} MB of its {memory} for operands and results ({grain}).", flush=True)
        if held > weights_bytes:
            raise CleaveError(f"expected less memory than the weights take, got {held / 1e6:.0f} MB; lower --memory")
        return train_over(fleet, work, grain)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a model too large for one device over one shaped Wi-Fi.")
    parser.add_argument("--full", action="store_true", help="train all weights instead of LoRA")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=300.0, help="capacity of the medium, both ways together")
    parser.add_argument("--latency-ms", type=float, default=2.0)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8, help="steps; the first is a warm-up")
    parser.add_argument("--memory", default="170MB", help="memory of each device process")
    parser.add_argument("--wire", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--grains", nargs="+", choices=GRAINS, default=GRAINS)
    return parser


if __name__ == "__main__":
    main()
