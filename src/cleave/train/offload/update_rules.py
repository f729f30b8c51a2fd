# pyright: standard
"""Torch optimizers as update rules: which can run on devices, with what settings, and where their states are.

The optimizer stays the user's own: settings are read from its parameter groups just before each step, so schedules work
as they are, and states that come back from devices go where it expects them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import optim

from cleave.core.model.update_rule import Adam, Rule, Sgd

Group = dict[str, Any]


def why_not(optimizer: optim.Optimizer) -> str | None:
    """Return why devices cannot run an optimizer; None if they can."""
    if type(optimizer) not in (optim.SGD, optim.Adam, optim.AdamW):
        return f"{type(optimizer).__name__} is not one of SGD, Adam and AdamW"
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return "amsgrad keeps a third state"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "a differentiable optimizer needs its gradients here"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "hooks on its steps may read or change gradients"
    return None


def state_names(group: Group) -> tuple[str, ...]:
    """Return the names of the states that a parameter of this group has."""
    if "betas" in group:
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if group["momentum"] else ()


def states(optimizer: optim.Optimizer, group: Group, parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a parameter's states, creating missing ones as the optimizer itself would, or zeros that it replaces."""
    own = optimizer.state[parameter]
    if "betas" in group and "step" not in own:
        own["step"] = torch.tensor(0.0, dtype=torch.float32)
    for name in state_names(group):
        if own.get(name) is None:
            own[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
            if name == "momentum_buffer":
                own[_FRESH] = True
    return tuple(own[name] for name in state_names(group))


_FRESH = "_cleave_is_fresh"
"""Marks a momentum buffer that no step has filled yet; removed with the first."""


def next_rule(optimizer: optim.Optimizer, group: Group, parameter: torch.Tensor) -> Rule:
    """Return the rule of the next step."""
    own = optimizer.state[parameter]
    if "betas" in group:
        return Adam(
            rate=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            step=int(own["step"].item()) + 1,
            weight_decay=float(group["weight_decay"]),
            is_decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, optim.AdamW))),
            is_ascent=bool(group["maximize"]),
        )
    return Sgd(
        rate=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        weight_decay=float(group["weight_decay"]),
        is_nesterov=bool(group["nesterov"]),
        is_ascent=bool(group["maximize"]),
        is_first=_FRESH in own,
    )


def count_step(optimizer: optim.Optimizer, parameter: torch.Tensor) -> None:
    """Note in the optimizer's state that a device does the next step."""
    own = optimizer.state[parameter]
    if "step" in own:
        own["step"] += 1
    own.pop(_FRESH, None)


def forget_unused(optimizer: optim.Optimizer, parameter: torch.Tensor) -> None:
    """Drop a momentum buffer that no step has filled: the optimizer starts its own."""
    own = optimizer.state.get(parameter, {})
    if own.pop(_FRESH, False):
        own["momentum_buffer"] = None


def apply(optimizer: optim.Optimizer, rule: Rule, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Do here what a device did: one step of a rule, with the optimizer's own arithmetic and states."""
    own = optimizer.state[parameter]
    group: Group = {"params": [parameter], "foreach": False}
    match rule:
        case Adam():
            own["step"].fill_(rule.step - 1)
            group |= {"lr": rule.rate, "betas": (rule.beta1, rule.beta2), "eps": rule.eps}
            group |= {"weight_decay": rule.weight_decay, "maximize": rule.is_ascent}
            again: optim.Optimizer = (optim.AdamW if rule.is_decoupled else optim.Adam)([group])
        case Sgd():
            if rule.is_first:
                own["momentum_buffer"] = None
            group |= {"lr": rule.rate, "momentum": rule.momentum, "dampening": rule.dampening}
            group |= {"weight_decay": rule.weight_decay, "nesterov": rule.is_nesterov, "maximize": rule.is_ascent}
            again = optim.SGD([group])
    again.state[parameter] = own
    waiting, parameter.grad = parameter.grad, gradient
    again.step()
    parameter.grad = waiting
