# pyright: standard
"""What a wire costs in loss: training with numbers rounded exactly where the wire is, by the project's own codec.

`python benchmarks/wire_losses.py`: small Llamas on the bytes of Python's standard library, with the wire simulated,
against plain torch from the same state on the same batches. No devices, no network: what is rounded, and how often,
follows `server/resident` and `train/offload/linear.py`.

- resident: a stage per sublayer. A stage's output is rounded on its way to the server and again on its way to the next
  stage, as the server encodes it anew; gradients likewise. Devices see rounded matrices, vectors in fp32, and return
  rounded weight gradients.
- gemm: X, W and dY of every product of a linear layer are rounded, and so are Y, dX and dW.

While the loss falls steeply, trainings that differ in last bits drift apart by 1 %, in either direction, and a cost of
0.1 % cannot be seen. So all runs of a seed share a start: `--shared` steps of plain torch at the full rate, past the
steep fall. Then each goes on with its wire for `--steps` while the rate falls to zero. `perturbed start` is the
control: plain torch from weights with a random error of bf16's size. What it shows, up or down, is drift.

`int8 a row` is the format that q8 replaced: one fp32 scale a row. `q8, logits too` drops the rule that the head's dY
travels in bf16 (`core/cost/streams.py`). The wires of `SMALLER` are not part of the project. Finished runs are kept in
`--log`, so that a stopped benchmark can go on; one seed is complete before the next begins.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from cleave.core.cost.streams import Stream, stream_format
from cleave.core.cost.wire import BLOCK, WireFormat
from cleave.train.data import library_documents
from cleave.train.offload.codec import TorchCodec

Grain = Literal["plain", "resident", "gemm"]
Run = tuple[str, Grain, str, int]
"""Size, grain, wire, seed."""
State = tuple[dict[str, Any], dict[str, Any]]
"""What a model and its optimizer hold."""
SIZES: Final = {"64 x 2": (64, 2), "96 x 3": (96, 3), "64 x 4": (64, 4), "128 x 6": (128, 6)}
SMALLER: Final = ("q8, stochastic", "q8, int6 backward", "q8, int4 deltas", "q8, logits too")
"""q8 with stochastic rounding, with all gradients in 6 bits, and with weights as 4-bit deltas to the device's copy."""
_PERTURBED: Final = "perturbed start"
PASSES: Final[tuple[tuple[tuple[Grain, str], ...], ...]] = (
    (("plain", ""), ("plain", _PERTURBED), ("resident", "q8"), ("gemm", "q8")),
    (("gemm", "bf16"), ("gemm", "int8 a row")),
    (("resident", "q8, int4 deltas"), ("resident", "q8, int6 backward")),
    (("resident", "bf16"), ("resident", "int8 a row")),
    (("gemm", "q8, int6 backward"), ("gemm", "q8, stochastic"), ("gemm", "q8, logits too")),
)
"""Grains and wires in the order of interest: a stopped benchmark has the first ones, with all their seeds."""
_HEADS, _SEQUENCE, _BATCH, _EVALUATED = 4, 64, 8, 1024
_WARMUP: Final = 20
_CODEC = TorchCodec()


@dataclass(frozen=True)
class Wire:
    name: str
    _copies: dict[int, torch.Tensor] = field(default_factory=dict)
    """Weights as the device holds them, by address, where deltas travel."""

    def passed(self, tensor: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Return a tensor as it arrives."""
        matrix = tensor.detach().reshape(-1, tensor.shape[-1])
        return self._passed(matrix, stream).view(tensor.shape)

    def _passed(self, matrix: torch.Tensor, stream: Stream) -> torch.Tensor:
        match self.name:
            case "int8 a row":
                scales = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
                return (matrix / scales).round() * scales
            case "q8, logits too":
                return _through(matrix, "q8")
            case "q8, stochastic" if stream_format(stream, "q8") == "q8":
                return _in_blocks(matrix, 8, is_stochastic=True)
            case "q8, int6 backward" if stream in ("activation gradient", "weight gradient"):
                return _in_blocks(matrix, 6)
            case "q8, int4 deltas" if stream == "weight":
                held = self._copies.get(matrix.data_ptr())
                new = _through(matrix, "q8") if held is None else held + _in_blocks(matrix - held, 4)
                self._copies[matrix.data_ptr()] = new
                return new
            case name:
                wire: WireFormat = "q8" if name.startswith("q8") else name  # type: ignore[assignment]
                return _through(matrix, stream_format(stream, wire))


def _through(matrix: torch.Tensor, format: WireFormat) -> torch.Tensor:
    """Encode and decode as devices and the server do."""
    source, out = matrix.contiguous().numpy(), np.empty(matrix.shape, dtype=np.float32)
    _CODEC.decode_into(_CODEC.encode(source, format).data, format, out)
    return torch.from_numpy(out)


def _in_blocks(matrix: torch.Tensor, bits: int, is_stochastic: bool = False) -> torch.Tensor:
    """Round to integers in blocks with a scale, as q8 does but with any number of bits."""
    rows, cols = matrix.shape
    blocks = F.pad(matrix, (0, -cols % BLOCK)).view(rows, -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True).clamp(min=2.0**-120) / (2 ** (bits - 1) - 1)
    scales = ((scales.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)  # up to bf16
    steps = blocks / scales
    steps = (steps + torch.rand(steps.shape)).floor() if is_stochastic else steps.round()
    return (steps * scales).view(rows, -1)[:, :cols]


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


@dataclass(frozen=True)
class Text:
    learned: torch.Tensor
    held_out: torch.Tensor

    @staticmethod
    def of_library() -> Text:
        text = torch.from_numpy(np.frombuffer("\0".join(library_documents()).encode(), dtype=np.uint8).copy())
        return Text(text[: -len(text) // 20], text[-len(text) // 20 :])


def start(text: Text, size: str, seed: int, steps: int, peak: float) -> State:
    """Train without a wire from a seed's weights, at the full rate."""
    torch.manual_seed(seed)
    model = Llama(*SIZES[size], "plain", None)
    rates = [peak * min(1.0, (step + 1) / _WARMUP) for step in range(steps)]
    return _trained(model, None, text, rates, torch.Generator().manual_seed(1000 + seed))


def finish(text: Text, size: str, grain: Grain, wire: str, seed: int, state: State, rates: list[float]) -> float:
    """Go on with a wire; return the loss on held-out text, computed without one."""
    torch.manual_seed(2000 + seed)
    model = Llama(*SIZES[size], grain, Wire(wire) if wire and grain != "plain" else None)
    model.load_state_dict(state[0])
    if wire == _PERTURBED:
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 1 + 2**-8 * (torch.rand(weight.shape) - 0.5)
    _trained(model, state[1], text, rates, torch.Generator().manual_seed(3000 + seed))
    model.wire = None
    starts = _starts(text.held_out, _EVALUATED, torch.Generator().manual_seed(7))
    with torch.no_grad():
        return float(np.mean([_loss(model, text.held_out, some).item() for some in starts.split(64)]))


def _trained(model: Llama, state: Any, text: Text, rates: list[float], draw: torch.Generator) -> State:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        loss = _loss(model, text.learned, _starts(text.learned, _BATCH, draw))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def _starts(text: torch.Tensor, count: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(len(text) - _SEQUENCE - 1, (count,), generator=draw)


def _loss(model: Llama, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    windows = text[starts[:, None] + torch.arange(_SEQUENCE + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def _order(sizes: list[str], seeds: int) -> Iterator[Run]:
    for cells in PASSES:
        for seed in range(1, seeds + 1):
            for size in sizes:
                for grain, wire in cells:
                    if wire not in SMALLER or size == sizes[0]:
                        yield size, grain, wire, seed


def _table(runs: dict[Run, float], sizes: list[str]) -> str:
    lines = [
        "| model | grain | wire | evaluation loss above plain torch, % per seed | mean | standard error |",
        "|---|---|---|---|---|---|",
    ]
    for size in sizes:
        for grain, wire in (cell for cells in PASSES for cell in cells):
            costs = [
                100 * (loss / runs[size, "plain", "", seed] - 1)
                for (*cell, seed), loss in sorted(runs.items(), key=lambda run: run[0][3])
                if cell == [size, grain, wire]
            ]
            if not costs or not wire:
                continue
            each = ", ".join(f"{cost:+.3f}" for cost in costs)
            error = f"{np.std(costs, ddof=1) / math.sqrt(len(costs)):.3f}" if len(costs) > 1 else "-"
            lines.append(f"| {size} | {grain} | {wire} | {each} | {np.mean(costs):+.3f} | {error} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluation loss with a simulated wire, against plain torch.")
    parser.add_argument("--shared", type=int, default=500, help="steps before the wire begins (default: 500)")
    parser.add_argument("--steps", type=int, default=300, help="steps with the wire (default: 300)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES)[:2], help="hidden x layers")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (default: 0.002)")
    parser.add_argument("--log", type=Path, help="file of finished runs, one JSON object a line (default: none)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text, log = Text.of_library(), cast("Path | None", options.log)
    settings = {"shared": options.shared, "steps": options.steps, "rate": options.rate}
    runs: dict[Run, float] = {}
    if log is not None and log.exists():
        for run in map(json.loads, log.read_text().splitlines()):
            if settings.items() <= run.items():
                runs[run["size"], run["grain"], run["wire"], run["seed"]] = run["loss"]
    rates = [options.rate * 0.5 * (1 + math.cos(math.pi * step / options.steps)) for step in range(options.steps)]
    states: dict[tuple[str, int], State] = {}
    for run in _order(options.sizes, options.seeds):
        size, grain, wire, seed = run
        if run in runs:
            continue
        if (size, seed) not in states:
            states[size, seed] = start(text, size, seed, options.shared, options.rate)
        started = time.process_time()
        runs[run] = finish(text, size, grain, wire, seed, states[size, seed], rates)
        record = dict(zip(("size", "grain", "wire", "seed"), run, strict=True)) | settings | {"loss": runs[run]}
        print(record, f"{time.process_time() - started:.0f} s", flush=True)
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps(record) + "\n")
    print(f"\n{settings}, batches of {_BATCH} x {_SEQUENCE} bytes, {_EVALUATED} windows evaluated\n")
    print(_table(runs, options.sizes))


if __name__ == "__main__":
    main()
