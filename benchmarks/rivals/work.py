# pyright: standard
"""The work that every rival does: a model from a seed, LoRA or not, seeded batches, AdamW.

Needs torch, transformers and peft alone, so that Cleave and its rivals build the very same weights from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEQUENCES: Final = 8
SEQUENCE: Final = 256
TOKENS: Final = SEQUENCES * SEQUENCE
_VOCABULARY: Final = 256
_HEAD_WIDTH: Final = 64
_SHAPES: Final = {"demo": (256, 768, 4), "demo10": (576, 1728, 8)}
"""Hidden width, width inside the MLP, layers: the model of `cleave train`, and one of ten times its parameters."""
MODELS: Final = tuple(_SHAPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step consists of."""

    model: str
    lora: bool

    @property
    def layers(self) -> int:
        return _SHAPES[self.model][2]

    @property
    def hidden(self) -> int:
        return _SHAPES[self.model][0]


def build(work: Work) -> Any:
    """Build the model, with the same weights in every process."""
    hidden, ffn, layers = _SHAPES[work.model]
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=hidden // _HEAD_WIDTH,
        num_key_value_heads=hidden // _HEAD_WIDTH,
        max_position_embeddings=1024,
        initializer_range=0.05,
    )
    config.use_cache = False
    model = LlamaForCausalLM(config)
    if not work.lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def batch(number: int) -> torch.Tensor:
    """The tokens of a step: walks through the alphabet, so that there is something to learn."""
    draw = torch.Generator().manual_seed(number)
    start = torch.randint(0, _VOCABULARY, (SEQUENCES, 1), generator=draw)
    strides = torch.randint(1, 9, (SEQUENCES, SEQUENCE - 1), generator=draw)
    return torch.cat([start, start + strides.cumsum(1)], dim=1) % _VOCABULARY


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, as transformers computes it from labels."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, _VOCABULARY).float(), tokens[:, 1:].reshape(-1))


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def sizes(work: Work) -> tuple[int, int]:
    """Count all weights, and those that are trained."""
    model = build(work)
    weights = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(count for count, _ in weights), sum(count for count, trained in weights if trained)
