"""Small models of every family, with the features that matter: grouped heads, tied heads, biases, Conv1D."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

VOCAB = 256


def llama(*, tied: bool = False, hidden: int = 64) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            max_position_embeddings=128,
        )
    )


def opt() -> nn.Module:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            dropout=0.0,
            attention_dropout=0.0,
            max_position_embeddings=128,
            word_embed_proj_dim=64,
        )
    )


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=128,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


FAMILIES = {
    "llama": llama,
    "tied-llama": lambda: llama(tied=True),
    "wide-llama": lambda: llama(hidden=128),
    "opt": opt,
    "gpt2": gpt2,
}


def make(family: str) -> nn.Module:
    torch.manual_seed(1)
    return FAMILIES[family]().train()


def tokens(index: int, batch: int = 2, length: int = 32) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(index))
