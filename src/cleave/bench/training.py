# pyright: standard
"""The training that cells measure: a seeded model, seeded batches, AdamW; with or without devices.

The same function trains over a fleet and in plain torch, so that losses can be compared step by step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from cleave.api.training import overlap
from cleave.bench.scenario import Cell, ModelSetting
from cleave.errors import CleaveError, InputError
from cleave.extras import install_command
from cleave.train.models import build_model

_HEAD_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    number: int
    seconds: float
    batch_s: float
    loss: float


def build(cell: Cell) -> torch.nn.Module:
    """Build the cell's model, with the same weights each time; of one in LoRA, only adapters are trained."""
    model = _whole_model(cell.model, cell.sequence, cell.seed)
    if cell.mode == "full":
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise InputError(f"LoRA needs peft, which is not installed; run {install_command('train', 'peft')}") from None
    torch.manual_seed(cell.seed)
    rank = int(cell.mode.removeprefix("lora-"))
    return get_peft_model(model, LoraConfig(r=rank, lora_dropout=0.0))  # of each family's usual layers


def train(model: torch.nn.Module, cell: Cell) -> Iterator[TimedStep]:
    """Train, yielding after each step; the caller's time between steps is not measured."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=cell.learning_rate)
    if cell.overlap and (reason := overlap(model, optimizer)) is not None:
        raise CleaveError(f"weights cannot be updated during backward: {reason}")
    vocabulary = int(_config(model).vocab_size)
    for number in range(1, cell.steps + 1):
        batch = _batch(cell, vocabulary, number)
        started_s = time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        batch_s = time.perf_counter() - started_s
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - started_s
        yield TimedStep(number=number, seconds=seconds, batch_s=batch_s, loss=loss.item())


def parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Count parameters: all, and those that are trained."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def _whole_model(setting: ModelSetting, sequence: int, seed: int) -> Any:
    if setting.name is not None:
        model, _ = build_model(setting.name, "fp32", seed)
        return model
    assert setting.hidden is not None
    heads = setting.heads or max(1, setting.hidden // _HEAD_WIDTH)
    config = LlamaConfig(
        vocab_size=setting.vocab,
        hidden_size=setting.hidden,
        intermediate_size=setting.ffn or 3 * setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=heads,
        num_key_value_heads=setting.kv_heads or heads,
        max_position_embeddings=max(sequence, 1024),
    )
    config.use_cache = False
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _batch(cell: Cell, vocabulary: int, number: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1_000_003 * cell.seed + number)
    return torch.randint(0, vocabulary, (cell.tokens // cell.sequence, cell.sequence), generator=draw)


def _config(model: torch.nn.Module) -> Any:
    return model.config
