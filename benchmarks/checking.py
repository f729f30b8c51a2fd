"""What verifying every product costs a step: steps with and without it, in turns, on one fleet.

    python benchmarks/checking.py [--rounds 12]

Two device processes fill both cores of a small machine, so whatever CPU the server spends on checks shows up in the
step. *CPU* is what the checks themselves took; *step* is the median over rounds of checked time over unchecked time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import get_args
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cleave.api.fleet import Fleet
from cleave.api.training import distribute
from cleave.core.cost.wire import WireFormat
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import Task
from cleave.protocol.numbers import Matrix
from cleave.server.gemm.results import GemmResults

_MODELS = {"demo (hidden 256)": (256, 768, 4), "hidden 1,024": (1024, 2816, 2)}
_SEQUENCES, _SEQUENCE = 8, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 1], help="device processes, one thread each")
    parser.add_argument("--wires", nargs="+", default=["fp32", "bf16"], choices=get_args(WireFormat))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | devices | wire | step, checked | step, unchecked | checked / unchecked | CPU of checks / step |")
    print("|---|---|---|---|---|---|---|")
    for name, shape in _MODELS.items():
        for devices in options.devices:
            for wire in options.wires:
                found = _measured(shape, devices, wire, options.rounds)
                print(f"| {name} | {devices} | {wire} | {found} |", flush=True)


def _measured(shape: tuple[int, int, int], devices: int, wire: WireFormat, rounds: int) -> str:
    hidden, inner, layers = shape
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=_SEQUENCE,
    )
    torch.manual_seed(0)
    checked: list[float] = []
    unchecked: list[float] = []
    cpu: list[float] = []
    with Fleet.local(devices, wire=wire) as fleet:
        model = distribute(LlamaForCausalLM(config), fleet, grain="gemm")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            _step_s(model, optimizer)
        for _ in range(rounds):
            before = fleet.cluster.totals().checking_s
            checked.append(_step_s(model, optimizer))
            cpu.append(fleet.cluster.totals().checking_s - before)
            with mock.patch.object(GemmResults, "check", _decode_only):
                unchecked.append(_step_s(model, optimizer))
    ratio = statistics.median(a / b for a, b in zip(checked, unchecked, strict=True))
    share = statistics.median(c / s for c, s in zip(cpu, checked, strict=True))
    return f"{statistics.median(checked):.3f} s | {statistics.median(unchecked):.3f} s | {ratio - 1:+.1%} | {share:.1%}"


def _decode_only(self: GemmResults, task: Task, part: Rectangle, payload: object, *, is_strict: bool) -> Matrix:
    return self.decoded(payload, part)


def _step_s(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    tokens = torch.randint(0, 256, (_SEQUENCES, _SEQUENCE), generator=torch.Generator().manual_seed(0))
    started = time.perf_counter()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
