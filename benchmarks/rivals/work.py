# pyright: standard
"""The work that every rival does: a model from a seed, LoRA or not, seeded batches, AdamW.

Needs torch, transformers and peft alone, so that Cleave and its rivals build the very same weights from it.
"""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.rivals.shape import HEAD_WIDTH, LORA_RANK, SEQUENCE, SEQUENCES, VOCABULARY, Work
from transformers import LlamaConfig, LlamaForCausalLM


def build(work: Work) -> Any:
    """Build the model, with the same weights in every process."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=work.hidden,
        intermediate_size=work.ffn,
        num_hidden_layers=work.layers,
        num_attention_heads=work.hidden // HEAD_WIDTH,
        num_key_value_heads=work.hidden // HEAD_WIDTH,
        max_position_embeddings=1024,
        initializer_range=0.05,
    )
    config.use_cache = False
    model = LlamaForCausalLM(config)
    if not work.lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def batch(number: int) -> torch.Tensor:
    """The tokens of a step: walks through the alphabet, so that there is something to learn."""
    draw = torch.Generator().manual_seed(number)
    start = torch.randint(0, VOCABULARY, (SEQUENCES, 1), generator=draw)
    strides = torch.randint(1, 9, (SEQUENCES, SEQUENCE - 1), generator=draw)
    return torch.cat([start, start + strides.cumsum(1)], dim=1) % VOCABULARY


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, as transformers computes it from labels."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1))


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
