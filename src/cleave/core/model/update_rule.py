"""How a weight follows from its gradient: the optimizer's arithmetic and its settings in one step.

A rule travels to the devices that keep weights and optimizer state themselves, so a schedule, a parameter group or a
clipped gradient changes a number here and nothing else. Encodable as it is; knows no tensors.
"""

from __future__ import annotations

import math

import msgspec

from cleave.errors import ProtocolError

MOST = 1e9
"""Limit of any number in a rule, and of the factor on a gradient: nothing computed from them leaves fp32."""


class Sgd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="rule", tag="sgd"):
    """torch.optim.SGD: one state, the momentum buffer, if there is momentum."""

    rate: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    is_nesterov: bool = False
    is_ascent: bool = False
    """Follow the gradient up (torch: maximize)."""
    is_first: bool = False
    """The momentum buffer starts as a copy of the gradient, whatever is in it."""


class Adam(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="rule", tag="adam"):
    """torch.optim.Adam, or AdamW with decoupled decay: two states, the running means of gradient and square."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    step: int
    """Number of this update, from 1."""
    weight_decay: float = 0.0
    is_decoupled: bool = False
    is_ascent: bool = False


Rule = Sgd | Adam


def states(rule: Rule) -> int:
    """Matrices of the weight's shape that the rule keeps from step to step."""
    match rule:
        case Sgd(momentum=momentum):
            return 1 if momentum else 0
        case Adam():
            return 2


def check(rule: Rule, scale: float) -> None:
    """Check the numbers of a rule and of the factor on gradients. Raises ProtocolError: devices refuse others."""
    _check_numbers(scale=scale, rate=rule.rate, weight_decay=rule.weight_decay)
    match rule:
        case Sgd():
            _check_numbers(momentum=rule.momentum, dampening=rule.dampening)
        case Adam():
            _check_numbers(eps=rule.eps)
            if not (0 <= rule.beta1 < 1 and 0 <= rule.beta2 < 1 and rule.eps >= 0 and rule.step >= 1):  # nor is NaN
                raise ProtocolError(
                    f"expected betas from 0 to below 1, an eps from 0 and a step from 1 up, got {rule.beta1}, "
                    f"{rule.beta2}, {rule.eps} and {rule.step}"
                )


def _check_numbers(**numbers: float) -> None:
    for name, number in numbers.items():
        if not math.isfinite(number) or abs(number) > MOST:
            raise ProtocolError(f"expected a {name} from {-MOST:g} to {MOST:g}, got {number}")
