"""Bytes on the links over q8 are those that plans count, within 1 %, in both grains.

Plans count neither headers nor tables of positions, which are 1 to 2 % of a step where models are narrower than this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import cleave
from cleave import Fleet
from cleave.core.cost.gemm import layer_bytes
from cleave.core.model.gemms import Linear

TOKENS, HIDDEN, FFN, VOCAB = 512, 256, 512, 2048


@pytest.fixture(scope="module")
def alone() -> Iterator[Fleet]:
    """One device: nothing is reassigned, however slow the machine."""
    with Fleet.local(1, wire="q8", offload="always") as started:
        yield started


def model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
        )
    )


def measured(fleet: Fleet, train: Callable[[], object]) -> tuple[int, int]:
    """Bytes down and up of a step after the first."""
    train()
    before = fleet.cluster.totals()
    train()
    after = fleet.cluster.totals()
    return after.down_bytes - before.down_bytes, after.up_bytes - before.up_bytes


def training(distributed: nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.SGD(distributed.parameters(), lr=1e-3)
    batch = torch.randint(VOCAB, (TOKENS // 128, 128), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        distributed(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_gemms_move_the_bytes_of_their_plans(alone: Fleet) -> None:
    widths = [(HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN)] * 2
    layers = [Linear(tokens=TOKENS, in_width=k, out_width=n) for k, n in widths]
    layers.append(Linear(tokens=TOKENS, in_width=HIDDEN, out_width=VOCAB, is_head=True))
    down, up = (sum(column) for column in zip(*(layer_bytes(layer, 1, "q8") for layer in layers), strict=True))
    distributed = cleave.distribute(model(), alone, grain="gemm")
    assert measured(alone, training(distributed)) == pytest.approx((down, up), rel=0.01)
    cleave.undistribute(distributed)


def test_columns_move_the_bytes_of_their_plans(alone: Fleet) -> None:
    distributed = cleave.distribute(model(), alone, grain="resident", lease="never")
    found = measured(alone, training(distributed))
    plan = alone.cluster.planning.latest
    assert plan is not None
    assert found == pytest.approx((plan.down_bytes, plan.up_bytes), rel=0.01)
    cleave.undistribute(distributed)
