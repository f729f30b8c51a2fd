# pyright: standard
"""Describe the building blocks of decoder layers for devices: linear layers, LoRA, norms, activations.

Each function turns a module into its description or raises `UnknownError` with the reason. Modules may already be
distributed. `families.py` knows which blocks a layer has, and where.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import nn

from cleave.core.model.decoder import Activation, Norm, Range, View, Weight
from cleave.train.offload.swap import original

try:
    from transformers.pytorch_utils import Conv1D as Conv1D
except ImportError:  # transformers is optional
    Conv1D = None

SENT = {torch.float32, torch.bfloat16, torch.float16}
"""Dtypes that can be sent."""

_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
}


class UnknownError(Exception):
    """A module that cannot be described: why, and what would help."""


class ViewTable:
    """Assigns numbers to parameters, each once, and to views of them."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.views: list[View] = []
        self._numbers: dict[int, int] = {}

    def view(self, parameter: Any, rows: Range | None = None, cols: Range | None = None) -> int:
        if not isinstance(parameter, nn.Parameter) or parameter.dtype not in SENT or parameter.device.type == "meta":
            raise UnknownError(
                "a weight is not a plain 16- or 32-bit parameter (it may be quantized, or computed from others)"
            )
        number = self._numbers.setdefault(id(parameter), len(self.parameters))
        if number == len(self.parameters):
            self.parameters.append(parameter)
        height, width = shape(parameter)
        self.views.append(View(number, rows or (0, height), cols or (0, width)))
        return len(self.views) - 1


def shape(parameter: torch.Tensor) -> tuple[int, int]:
    return (1, parameter.shape[0]) if parameter.dim() == 1 else (parameter.shape[0], parameter.shape[1])


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes exactly X W^T + b; a subclass with its own forward does not qualify."""
    plain = {nn.Linear.forward} | ({Conv1D.forward} if Conv1D is not None else set())
    return isinstance(module, nn.Linear | (Conv1D or nn.Linear)) and original(module).forward in plain


def check_hooks(module: nn.Module, *, deep: bool = True) -> None:
    for name, inner in module.named_modules() if deep else [("", module)]:
        hooks = [*inner._forward_hooks.values(), *inner._forward_pre_hooks.values()]
        hooks += [*inner._backward_hooks.values(), *inner._backward_pre_hooks.values()]
        # transformers installs this one on every layer; it does nothing unless hidden states are requested
        hooks = [hook for hook in hooks if getattr(hook, "__name__", "") != "output_capturing_hook"]
        if hooks or "forward" in inner.__dict__:
            raise UnknownError(f"{name or type(module).__name__} has hooks, which would never be called; remove them")


def check_kinds(layer: nn.Module, **kinds: str) -> None:
    """Check that a layer's submodules are those of its family."""
    family = original(layer).__name__.removesuffix("DecoderLayer").removesuffix("Block")
    for name, kind in kinds.items():
        came = original(getattr(layer, name)).__name__
        if came != family + kind:
            raise UnknownError(f"{name} is a {came}, not a {family}{kind}")


def check_dropout(module: nn.Module, probability: float, name: str) -> None:
    if module.training and probability > 0.0:
        advice = f"load the model (or its adapters) with {name}=0.0, or give cleave train --dropout 0"
        raise UnknownError(f"dropout {probability:g} is active, which devices do not support; {advice}")


def describe_activation(module: nn.Module) -> Activation:
    name = original(module).__name__
    if name not in _ACTIVATIONS:
        raise UnknownError(
            f"its activation {name} is not supported on devices (supported: {', '.join(sorted(_ACTIVATIONS))})"
        )
    return _ACTIVATIONS[name]


def describe_norm(table: ViewTable, module: Any) -> Norm:
    if type(module) is nn.LayerNorm:
        if module.weight is None:
            raise UnknownError("its norms have no weights")
        bias = None if module.bias is None else table.view(module.bias)
        return Norm(kind="layer", eps=module.eps, weight=table.view(module.weight), bias=bias)
    if not original(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
        raise UnknownError(f"its norm {type(module).__name__} is not supported on devices")
    return Norm(kind="rms", eps=module.variance_epsilon, weight=table.view(module.weight))


def describe_weight(table: ViewTable, module: Any, part: int = 0, of: int = 1) -> Weight:
    """Describe slice `part` of `of` equal slices of a linear layer's outputs."""
    lora = module if _is_lora(module) else None
    module = module if lora is None else lora.base_layer
    if not is_linear(module):
        raise UnknownError(f"{type(module).__name__} is not a plain linear layer")
    is_transposed = Conv1D is not None and isinstance(module, Conv1D)
    outputs = module.weight.shape[1 if is_transposed else 0]
    share = (part * outputs // of, (part + 1) * outputs // of)
    described = Weight(
        weight=table.view(module.weight, *((None, share) if is_transposed else (share, None))),
        is_transposed=is_transposed,
        bias=None if module.bias is None else table.view(module.bias, None, share),
    )
    name = None if lora is None else _adapter(lora)
    if lora is None or name is None:
        return described
    down, up = table.view(lora.lora_A[name].weight), table.view(lora.lora_B[name].weight, share)
    return msgspec.structs.replace(described, adapter=(down, up), scale=float(lora.scaling[name]))


def _is_lora(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Linear" and kind.__module__.startswith("peft.tuners.lora.")


def _adapter(lora: Any) -> str | None:
    """Return the name of the active adapter, if any."""
    if lora.disable_adapters and lora.merged:
        raise UnknownError("its adapters are merged and disabled; unmerge them")
    if lora.disable_adapters or lora.merged:
        return None
    active = [name for name in lora.active_adapters if name in lora.lora_A]
    if not active:
        return None
    if len(active) > 1:
        raise UnknownError(f"{len(active)} adapters are active at once; activate one")
    (name,) = active
    if name in getattr(lora, "lora_variant", {}) or getattr(lora, "use_dora", {}).get(name):
        raise UnknownError("its adapters are a variant of LoRA, not plain LoRA")
    dropout = lora.lora_dropout[name]
    if not isinstance(dropout, nn.Identity):
        check_dropout(dropout, getattr(dropout, "p", 1.0), "lora_dropout")
    for inner in (lora.lora_A[name], lora.lora_B[name]):
        if not is_linear(inner) or inner.bias is not None:
            raise UnknownError("its adapters have biases, or are not plain linear layers")
    return name
