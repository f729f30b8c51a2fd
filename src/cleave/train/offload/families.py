# pyright: standard
"""Recognize decoder stacks that devices can run, and describe them.

`find` locates the base models of Llama, Mistral, Qwen2, OPT and GPT-2 inside any model. `describe` describes one as it
is at this moment, in terms of `core/model/decoder.py`, or says why it cannot. It is cheap enough to repeat on every
call, so adapters, dropout, hooks and frozen weights may change in between. Runs nothing.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cleave.core.model.decoder import Attention, Decoder, Head, Mlp, Parameter, Part
from cleave.train.offload.pieces import (
    UnknownError,
    ViewTable,
    check_dropout,
    check_hooks,
    check_kinds,
    describe_activation,
    describe_norm,
    describe_weight,
    shape,
)
from cleave.train.offload.swap import original


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLocation:
    """Location of a decoder stack inside a model."""

    base: nn.Module
    language_model: nn.Module | None
    """The causal LM around the base, whose loss may be computed with the stack."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Description:
    """A stack as devices see it, with the parameters it names."""

    stack: Decoder
    parameters: tuple[nn.Parameter, ...]
    """In the order of `stack.parameters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    language_model: str
    base: str
    """Attribute path from the language model to its base."""
    layers: str
    norm: str
    describe: Callable[[ViewTable, nn.Module, Any], tuple[Attention, Mlp]]


def find(model: nn.Module) -> list[StackLocation]:
    places: list[StackLocation] = []
    for base in model.modules():
        family = _family(base)
        if family is None:
            continue
        owners = (
            module
            for module in model.modules()
            if original(module).__name__ == family.language_model
            and original(module).__module__ == original(base).__module__
            and operator.attrgetter(family.base)(module) is base
        )
        places.append(StackLocation(base=base, language_model=next(owners, None)))
    return places


def layers(base: nn.Module) -> nn.ModuleList:
    family = _family(base)
    assert family is not None, "find gave it"
    return getattr(base, family.layers)


def describe(place: StackLocation, *, with_head: bool = False) -> Description | str:
    """Describe the stack as it would compute now, or say why not; with a head, include final norm and loss."""
    family = _family(place.base)
    assert family is not None, "find gave it"
    try:
        return _describe(family, place, with_head)
    except UnknownError as unknown:
        return str(unknown)


def _family(module: nn.Module) -> _Family | None:
    kind = original(module)
    return _FAMILIES.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def _describe(family: _Family, place: StackLocation, with_head: bool) -> Description:
    base: Any = place.base
    blocks: nn.ModuleList = getattr(base, family.layers)
    if not len(blocks) or len(set(blocks)) != base.config.num_hidden_layers:
        raise UnknownError(f"it has {len(blocks)} layers, but its config says {base.config.num_hidden_layers}")
    if base.config._attn_implementation not in ("sdpa", "eager"):
        raise UnknownError(
            f"its attention implementation is {base.config._attn_implementation}; load the model with sdpa or eager"
        )
    if base.training and getattr(base, "layerdrop", 0.0) > 0.0:
        raise UnknownError(f"layers are skipped at random with probability {base.layerdrop}; set layerdrop to 0")
    table = ViewTable()
    parts: list[Part] = []
    for block in blocks:
        if not _returns_tensor(original(block)):
            raise UnknownError(f"{original(block).__name__} returns a tuple; update transformers")
        check_hooks(block)
        parts += family.describe(table, block, base.config)
    head = _head(table, family, place) if with_head else None
    stack = Decoder(
        hidden=base.config.hidden_size,
        parts=tuple(parts),
        head=head,
        parameters=tuple(Parameter(*shape(one), is_trained=one.requires_grad) for one in table.parameters),
        views=tuple(table.views),
    )
    return Description(stack=stack, parameters=tuple(table.parameters))


def _head(table: ViewTable, family: _Family, place: StackLocation) -> Head:
    base: Any = place.base
    model: Any = place.language_model
    last = getattr(base, family.norm)
    if getattr(base, "project_out", None) is not None:
        raise UnknownError("it has a projection between its last norm and its head")
    check_hooks(base, deep=False)
    for module in (last, model.lm_head):
        if module is not None:
            check_hooks(module)
    norm = None if last is None else describe_norm(table, last)
    head = Head(norm=norm, weight=describe_weight(table, model.lm_head))
    if table.views[head.weight.weight].rows != (0, base.config.vocab_size):
        raise UnknownError("the vocabulary of its head differs from its config")
    return head


@functools.cache
def _returns_tensor(kind: Any) -> bool:
    annotation = inspect.signature(kind.forward).return_annotation
    return annotation is torch.Tensor or annotation == "torch.Tensor"


# ------------------------------------------------------------------------------------------------ families


def _llama(table: ViewTable, layer: Any, config: Any) -> tuple[Attention, Mlp]:
    """Describe a layer of Llama, Mistral or Qwen2, which share their attribute names."""
    attention, mlp = layer.self_attn, layer.mlp
    check_kinds(layer, self_attn="Attention", mlp="MLP", input_layernorm="RMSNorm", post_attention_layernorm="RMSNorm")
    check_dropout(attention, attention.attention_dropout, "attention_dropout")
    if hasattr(attention, "layer_type"):  # Qwen2
        window = attention.sliding_window
    else:
        window = getattr(config, "sliding_window", None) if original(layer).__name__.startswith("Mistral") else None
    return (
        Attention(
            norm=describe_norm(table, layer.input_layernorm),
            q=describe_weight(table, attention.q_proj),
            k=describe_weight(table, attention.k_proj),
            v=describe_weight(table, attention.v_proj),
            o=describe_weight(table, attention.o_proj),
            head_dim=attention.head_dim,
            scale=attention.scaling,
            is_rotary=True,
            window=window,
        ),
        Mlp(
            norm=describe_norm(table, layer.post_attention_layernorm),
            gate=describe_weight(table, mlp.gate_proj),
            up=describe_weight(table, mlp.up_proj),
            down=describe_weight(table, mlp.down_proj),
            activation=describe_activation(mlp.act_fn),
        ),
    )


def _opt(table: ViewTable, layer: Any, config: Any) -> tuple[Attention, Mlp]:
    attention = layer.self_attn
    check_kinds(layer, self_attn="Attention")
    if not layer.do_layer_norm_before:
        raise UnknownError("its norms come after the layers, as in OPT-350m, which devices do not support")
    check_dropout(layer, layer.dropout, "dropout")
    check_dropout(attention, attention.dropout, "attention_dropout")
    return (
        Attention(
            norm=describe_norm(table, layer.self_attn_layer_norm),
            q=describe_weight(table, attention.q_proj),
            k=describe_weight(table, attention.k_proj),
            v=describe_weight(table, attention.v_proj),
            o=describe_weight(table, attention.out_proj),
            head_dim=attention.head_dim,
            scale=attention.scaling,
        ),
        Mlp(
            norm=describe_norm(table, layer.final_layer_norm),
            up=describe_weight(table, layer.fc1),
            down=describe_weight(table, layer.fc2),
            activation=describe_activation(layer.activation_fn),
        ),
    )


def _gpt2(table: ViewTable, layer: Any, config: Any) -> tuple[Attention, Mlp]:
    attention, mlp = layer.attn, layer.mlp
    check_kinds(layer, attn="Attention", mlp="MLP")
    check_dropout(attention, attention.attn_dropout.p, "attn_pdrop")
    check_dropout(attention, attention.resid_dropout.p, "resid_pdrop")
    check_dropout(mlp, mlp.dropout.p, "resid_pdrop")
    return (
        Attention(
            norm=describe_norm(table, layer.ln_1),
            q=describe_weight(table, attention.c_attn, 0, 3),
            k=describe_weight(table, attention.c_attn, 1, 3),
            v=describe_weight(table, attention.c_attn, 2, 3),
            o=describe_weight(table, attention.c_proj),
            head_dim=attention.head_dim,
            scale=attention.scaling,
        ),
        Mlp(
            norm=describe_norm(table, layer.ln_2),
            up=describe_weight(table, mlp.c_fc),
            down=describe_weight(table, mlp.c_proj),
            activation=describe_activation(mlp.act),
        ),
    )


_FAMILIES = {
    "LlamaModel": _Family(
        language_model="LlamaForCausalLM", base="model", layers="layers", norm="norm", describe=_llama
    ),
    "MistralModel": _Family(
        language_model="MistralForCausalLM", base="model", layers="layers", norm="norm", describe=_llama
    ),
    "Qwen2Model": _Family(
        language_model="Qwen2ForCausalLM", base="model", layers="layers", norm="norm", describe=_llama
    ),
    "OPTDecoder": _Family(
        language_model="OPTForCausalLM", base="model.decoder", layers="layers", norm="final_layer_norm", describe=_opt
    ),
    "GPT2Model": _Family(language_model="GPT2LMHeadModel", base="transformer", layers="h", norm="ln_f", describe=_gpt2),
}
