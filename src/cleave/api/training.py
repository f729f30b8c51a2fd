"""`cleave.distribute`, `overlap` and `undistribute`: run a torch model on a fleet, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from cleave.errors import InputError

if TYPE_CHECKING:
    import torch

    from cleave.api.fleet import Fleet

_Module = TypeVar("_Module", bound="torch.nn.Module")


def distribute(
    model: _Module, fleet: Fleet, *, grain: Literal["auto", "gemm", "resident"] = "auto", immediate: bool = False
) -> _Module:
    """Let a fleet compute any torch model's matrix products; loop, optimizer and Trainer stay yours.

    `grain` is what a unit of work is: `gemm` a block of one product, for any model; `resident` layers that stay on
    devices while tokens flow through, for the decoders of Llama, Mistral, Qwen2, OPT and GPT-2; `auto` whichever the
    planner finds faster on this fleet. With resident layers a model in training that is given labels returns the loss
    and no logits. Gradients of weights are complete when `backward()` returns; `immediate` is for
    `torch.autograd.grad` with respect to weights.
    """
    if grain not in ("auto", "gemm", "resident"):
        raise InputError(f"expected grain auto, gemm or resident, got {grain!r}")
    from cleave.train.offload.distribute import distribute as send
    from cleave.train.offload.linear import local_flops_per_s

    fleet.cluster.grains.local_flops_per_s = local_flops_per_s()
    fleet.cluster.grains.may_stay = fleet.offload == "auto"
    return send(model, fleet.cluster, offload=fleet.offload, say=fleet.say, immediate=immediate, grain=grain)


def overlap(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Update each resident weight as soon as its gradient is there, and send it out while others are still computed.

    `loss.backward()` then steps the optimizer, parameter by parameter, and `optimizer.step()` does the rest. Not for
    who clips gradients by their norm or adds up those of several backwards. Returns why it cannot be, if so: an
    optimizer that looks at several parameters at once, or a model without resident layers; all else works as before.
    """
    from cleave.train.offload import decoder as stack

    return stack.overlap(model, optimizer)


def undistribute(model: _Module) -> _Module:
    """Make every layer what it was before `distribute`."""
    from cleave.train.offload.distribute import undistribute as restore

    return restore(model)
