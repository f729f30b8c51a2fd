# pyright: standard
"""What a wire costs in loss: training with numbers rounded exactly where the wire is, by the project's own codec.

`python benchmarks/wire_losses.py`: small Llamas on the bytes of Python's standard library, in plain torch and with the
wire simulated, from the same weights and batches; evaluation loss against plain torch of the same seed. No devices, no
network: what is rounded, and how often, follows `server/resident` and `train/offload/linear.py`.

- resident: a stage per sublayer. A stage's output is rounded on its way to the server and again on its way to the next
  stage, as the server encodes it anew; gradients likewise. Devices see rounded matrices, vectors in fp32, and return
  rounded weight gradients.
- gemm: X, W and dY of every product of a linear layer are rounded, and so are Y, dX and dW.

Trainings that differ in last bits alone may drift apart, in either direction: `noise` multiplies what is sent by
1 + 1e-6 times a random number and shows how far. Below that, this benchmark sees no cost; high
learning rates drift most.

`int8 a row` is the format that q8 replaced: one fp32 scale a row. `q8, logits too` drops the rule that the head's dY
travels in bf16 (`core/cost/streams.py`). Finished runs are kept in `--log`, so that a stopped benchmark can go on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from cleave.core.cost.streams import Stream, stream_format
from cleave.core.cost.wire import WireFormat
from cleave.train.data import library_documents
from cleave.train.offload.codec import TorchCodec

Grain = Literal["plain", "resident", "gemm"]
SIZES: Final = {"64 x 4": (64, 4), "128 x 6": (128, 6)}
WIRES: Final = ("noise", "fp32", "bf16", "q8", "q8, logits too", "int8 a row")
_HEADS, _SEQUENCE, _BATCH, _EVALUATED = 4, 128, 8, 256
_WARMUP: Final = 20
_CODEC = TorchCodec()


@dataclass(frozen=True)
class Wire:
    name: str

    def passed(self, tensor: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Return a tensor as it arrives."""
        matrix = tensor.detach().reshape(-1, tensor.shape[-1])
        if self.name == "noise":
            return tensor * (1 + 1e-6 * torch.randn(tensor.shape))
        if self.name == "int8 a row":
            scales = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
            return ((matrix / scales).round() * scales).view(tensor.shape)
        wire: WireFormat = "q8" if self.name.startswith("q8") else self.name  # type: ignore[assignment]
        format = wire if self.name == "q8, logits too" else stream_format(stream, wire)
        source, out = matrix.contiguous().numpy(), np.empty(matrix.shape, dtype=np.float32)
        _CODEC.decode_into(_CODEC.encode(source, format).data, format, out)
        return torch.from_numpy(out).view(tensor.shape)


class _Passage(torch.autograd.Function):
    """Round a tensor on its way forward and its gradient on its way back, each as often as it is sent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire, streams: tuple[Stream, Stream], times: int) -> torch.Tensor:
        ctx.wire, ctx.stream, ctx.times = wire, streams[1], times
        for _ in range(times):
            x = wire.passed(x, streams[0])
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        for _ in range(ctx.times):
            grad = ctx.wire.passed(grad, ctx.stream)
        return grad, None, None, None


class _Products(torch.autograd.Function):
    """The products of linear layers that share X, every operand and result rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire, dy_stream: Stream, *weights: torch.Tensor) -> Any:
        x, weights = wire.passed(x, "activation"), tuple(wire.passed(weight, "weight") for weight in weights)
        ctx.save_for_backward(x, *weights)
        ctx.wire, ctx.dy_stream = wire, dy_stream
        return tuple(wire.passed(x @ weight.T, "activation") for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        wire: Wire = ctx.wire
        dys = [wire.passed(grad, ctx.dy_stream) for grad in grads]
        each = torch.stack([dy @ weight for dy, weight in zip(dys, weights, strict=True)])
        dx = wire.passed(each.sum(0), "activation gradient")
        rows = x.reshape(-1, x.shape[-1])
        dws = [wire.passed(dy.reshape(-1, dy.shape[-1]).T @ rows, "weight gradient") for dy in dys]
        return dx, None, None, *dws


class Llama(nn.Module):
    """A decoder as plain as can be, with the wire where a grain has it."""

    def __init__(self, hidden: int, layers: int, grain: Grain, wire: Wire | None) -> None:
        super().__init__()
        self.grain, self.wire, self.layers, self.dim = grain, wire, layers, hidden // _HEADS
        ffn = 32 * round(hidden * 8 / 3 / 32)

        def matrix(rows: int, cols: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, cols) * 0.02)

        self.embedding, self.head = matrix(256, hidden), matrix(256, hidden)
        self.norms = nn.ParameterList([torch.ones(hidden) for _ in range(2 * layers + 1)])
        shapes = {"q": (hidden, hidden), "k": (hidden, hidden), "v": (hidden, hidden), "o": (hidden, hidden)}
        shapes |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
        self.matrices = nn.ParameterDict(
            {f"{name}{layer}": matrix(*shape) for layer in range(layers) for name, shape in shapes.items()}
        )
        angles = torch.outer(torch.arange(_SEQUENCE), 10000.0 ** (-torch.arange(0, self.dim, 2) / self.dim))
        self.cosines, self.sines = torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self._sent(F.embedding(words, self.embedding), 1)
        for layer in range(self.layers):
            x = self._sent(x + self._attention(self._normed(x, 2 * layer), layer))
            x = self._sent(x + self._mlp(self._normed(x, 2 * layer + 1), layer))
        (logits,) = self._products(self._normed(x, 2 * self.layers), "logit gradient", self.head)
        return logits

    def _attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        qkv = self._products(x, "activation gradient", *(self.matrices[f"{name}{layer}"] for name in "qkv"))
        q, k, v = (one.view(*x.shape[:2], _HEADS, self.dim).transpose(1, 2) for one in qkv)
        mixed = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        (out,) = self._products(
            mixed.transpose(1, 2).reshape(x.shape), "activation gradient", self.matrices[f"o{layer}"]
        )
        return out

    def _mlp(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        gate, up = self._products(x, "activation gradient", self.matrices[f"gate{layer}"], self.matrices[f"up{layer}"])
        (out,) = self._products(F.silu(gate) * up, "activation gradient", self.matrices[f"down{layer}"])
        return out

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        return x * self.cosines + torch.cat((-two, one), -1) * self.sines

    def _normed(self, x: torch.Tensor, index: int) -> torch.Tensor:
        weight = self.norms[index]
        if self.wire is not None and self.grain == "resident":
            weight = _Passage.apply(weight[None], self.wire, ("vector", "weight gradient"), 1)[0]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def _sent(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        """Pass between stages, through the server: sent to it and on, unless it comes from the server itself."""
        if self.wire is None or self.grain != "resident":
            return x
        return _Passage.apply(x, self.wire, ("activation", "activation gradient"), times)

    def _products(self, x: torch.Tensor, dy_stream: Stream, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.wire is not None and self.grain == "gemm":
            return _Products.apply(x, self.wire, dy_stream, *weights)
        if self.wire is not None:
            streams = ("weight", "weight gradient")
            weights = tuple(_Passage.apply(weight, self.wire, streams, 1) for weight in weights)
        return tuple(x @ weight.T for weight in weights)


def train(text: torch.Tensor, size: str, grain: Grain, wire: str | None, seed: int, steps: int, peak: float) -> float:
    """Train from a seed's weights on a seed's batches; return the loss on held-out text, computed without a wire."""
    torch.manual_seed(seed)
    model = Llama(*SIZES[size], grain, None if wire is None else Wire(wire))
    held_out = text[-len(text) // 20 :]
    learned = text[: -len(held_out)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    draw = torch.Generator().manual_seed(1000 + seed)
    for step in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = peak * cosine * min(1.0, (step + 1) / _WARMUP)
        loss = _loss(model, learned, torch.randint(len(learned) - _SEQUENCE - 1, (_BATCH,), generator=draw))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.wire = None
    starts = torch.randint(len(held_out) - _SEQUENCE - 1, (_EVALUATED,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return _loss(model, held_out, starts).item()


def _loss(model: Llama, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    windows = text[starts[:, None] + torch.arange(_SEQUENCE + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def _table(runs: dict[tuple[str, str, str, int], float], seeds: list[int], sizes: list[str]) -> str:
    lines = ["| model | grain | wire | evaluation loss above plain torch, % per seed | mean |", "|---|---|---|---|---|"]
    for size in sizes:
        for grain in ("resident", "gemm"):
            for wire in WIRES:
                found = [runs.get((size, grain, wire, seed)) for seed in seeds]
                if None in found:
                    continue
                plain = [runs[size, "plain", "", seed] for seed in seeds]
                cost = [100 * (one / other - 1) for one, other in zip(found, plain, strict=True)]  # type: ignore[operator]
                each = ", ".join(f"{value:+.3f}" for value in cost)
                lines.append(f"| {size} | {grain} | {wire} | {each} | {np.mean(cost):+.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluation loss with a simulated wire, against plain torch.")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run (default: 300)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="hidden x layers (default: both)"
    )
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES), help="formats (default: all)")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate (default: 0.001)")
    parser.add_argument("--log", type=Path, help="file of finished runs, one JSON object a line (default: none)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = torch.from_numpy(np.frombuffer("\0".join(library_documents()).encode(), dtype=np.uint8).copy())
    seeds = list(range(1, options.seeds + 1))
    runs: dict[tuple[str, str, str, int], float] = {}
    if options.log is not None and options.log.exists():
        for line in options.log.read_text().splitlines():
            run = json.loads(line)
            if (run["steps"], run["rate"]) == (options.steps, options.rate):
                runs[run["size"], run["grain"], run["wire"], run["seed"]] = run["loss"]
    # all of the first seed, then all of the second: a stopped benchmark has complete seeds
    cells: list[tuple[Grain, str]] = [("plain", ""), *((g, w) for g in ("resident", "gemm") for w in options.wires)]
    for seed in seeds:
        for size in options.sizes:
            for grain, wire in cells:
                key = (size, grain, wire, seed)
                if key in runs or (grain == "resident" and wire == "q8, logits too"):
                    continue  # resident heads send no logits
                started = time.perf_counter()
                runs[key] = train(text, size, grain, wire or None, seed, options.steps, options.rate)
                taken = time.perf_counter() - started
                print(f"{size}, {grain}, {wire}, seed {seed}: {runs[key]:.5f} ({taken:.0f} s)", flush=True)
                if options.log is not None:
                    record = dict(zip(("size", "grain", "wire", "seed"), key, strict=True))
                    with options.log.open("a") as log:
                        log.write(
                            json.dumps(record | {"steps": options.steps, "rate": options.rate, "loss": runs[key]})
                            + "\n"
                        )
    print(
        f"\n{len(text):,} bytes of text, {options.steps} steps of {_BATCH} x {_SEQUENCE} bytes, rate {options.rate:g}\n"
    )
    print(_table(runs, seeds, options.sizes))


if __name__ == "__main__":
    main()
