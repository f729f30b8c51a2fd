"""Small decoders of every family a fleet runs as a stack, with the features that matter: grouped heads, windows,
biases, tied and untied heads, fused projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = 61
_SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
_ROTARY = {**_SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 64}


def llama(**changes: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**_ROTARY, "tie_word_embeddings": False, **changes}))


def mistral(**changes: Any) -> nn.Module:
    return MistralForCausalLM(MistralConfig(**{**_ROTARY, "sliding_window": 5, "head_dim": 6, **changes}))


def qwen2(**changes: Any) -> nn.Module:
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**{**_ROTARY, **windows, "tie_word_embeddings": True, **changes}))


def opt(**changes: Any) -> nn.Module:
    own = {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64, "dropout": 0.0, "init_std": 0.2}
    return OPTForCausalLM(OPTConfig(**{**_SIZES, **own, **changes}))


def gpt2(**changes: Any) -> nn.Module:
    own = {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**_SIZES, **own, "eos_token_id": 0, **changes}))


_FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama-biased-tied": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": mistral,
    "qwen2": qwen2,
    "opt": opt,
    "gpt2": gpt2,
    "gpt2-scaled": lambda: gpt2(scale_attn_by_inverse_layer_idx=True, activation_function="relu"),
}
NAMES = tuple(_FAMILIES)


def families() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Each name with a function that makes its model, in training mode and with the same numbers every time."""
    for name in NAMES:
        yield name, lambda name=name: make(name)


def make(name: str) -> nn.Module:
    """Make a model with noise on every parameter: norms of ones and biases of zeros would hide mistakes."""
    torch.manual_seed(1)
    model = _FAMILIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def tokens(index: int, sequences: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(1, VOCAB, (sequences, length), generator=torch.Generator().manual_seed(index))
