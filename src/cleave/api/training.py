"""`cleave.distribute`, `overlap` and `undistribute`: run a torch model on a fleet, and undo it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from cleave.api.checks import check_choice, check_type
from cleave.api.fleet import Fleet
from cleave.core.model.grain import GRAINS, Grain
from cleave.core.model.lease import LEASE_MODES, LeaseMode
from cleave.errors import InputError
from cleave.extras import install_command
from cleave.settings import GRAIN, LEASE

if TYPE_CHECKING:
    import torch

_Module = TypeVar("_Module", bound="torch.nn.Module")


def distribute(
    model: _Module, fleet: Fleet, *, grain: Grain = GRAIN, immediate: bool = False, lease: LeaseMode = LEASE
) -> _Module:
    """Compute a torch model's matrix products on a fleet; training loop, optimizer and Trainer stay yours.

    `grain` is the unit of work: `gemm`, a block of one product, for any model; `resident`, layers that stay on devices
    while tokens flow through, for decoders of the Llama, Mistral, Qwen2, OPT and GPT-2 families; `auto`, whichever the
    planner expects to be faster on this fleet. With resident layers, a model in training that is given labels returns
    the loss without logits. Gradients of weights are complete when `backward()` returns; use `immediate` for
    `torch.autograd.grad` with respect to weights.

    With `lease` "auto", your own devices (trust `own`) that hold layers alone may keep their weights and the states of
    SGD, Adam or AdamW, and update them; gradients and weights are fetched when something reads them.
    """
    check_choice("grain", grain, GRAINS)
    check_choice("lease", lease, LEASE_MODES)
    _check_model(model)
    check_type(fleet, Fleet, "a cleave.Fleet, made with Fleet.local or Fleet.serve")
    fleet.check_open()
    from cleave.train.offload.distribute import distribute as send

    cluster = fleet.cluster
    return send(
        model,
        cluster,
        offload=fleet.offload,
        tell=cluster.tell,
        immediate=immediate,
        grain=grain,
        may_lease=lease == "auto",
    )


def overlap(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Update each resident weight as soon as its gradient arrives, and send it out while others are still computed.

    `loss.backward()` then steps the optimizer parameter by parameter, and `optimizer.step()` does the rest. Do not
    combine it with clipping by global norm or with gradient accumulation. If it cannot be done (the optimizer looks at
    several parameters at once, or no layers are resident), nothing changes and the reason is returned.
    """
    _check_model(model)
    from cleave.train.offload import decoder as stack

    return stack.overlap(model, optimizer)


def undistribute(model: _Module) -> _Module:
    """Undo `distribute`; return the same model."""
    _check_model(model)
    from cleave.train.offload.distribute import undistribute as restore

    return restore(model)


def _check_model(model: object) -> None:
    try:
        from torch.nn import Module
    except ImportError:
        raise InputError(f"distributing a model needs torch; install it with: {install_command('train')}") from None
    check_type(model, Module, "a torch.nn.Module")
