# pyright: standard
"""Update each weight as soon as its gradient arrives, while the fleet still computes others.

New values go out to devices at once, so neither updating nor sending waits for the end of backward. The optimizer is
the user's own, stepped for one parameter at a time, which is equivalent if it treats parameters independently. A
gradient from elsewhere, such as a penalty on the weight, must be in `.grad` before. Anything that needs all gradients
at once (clipping by global norm, accumulation over several passes, line search) must step as usual.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import optim

from cleave.train.offload.linear import Weights

_ONE_BY_ONE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Adafactor,
)


def why_not(optimizer: optim.Optimizer) -> str | None:
    """Return why an optimizer can only step as a whole; None if it can step per parameter."""
    if type(optimizer) not in _ONE_BY_ONE:
        return f"{type(optimizer).__name__} may look at several parameters at once"
    return None


class Overlap:
    """Step an optimizer for one of its parameters at a time."""

    def __init__(self, optimizer: optim.Optimizer, weights: Weights, parameters: Iterable[torch.Tensor]) -> None:
        self._optimizer = optimizer
        mine = {id(parameter): parameter for parameter in parameters}
        self._groups = {
            id(parameter): index
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in mine
        }
        weights.count_single_steps(optimizer)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._groups

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Step one parameter and clear its gradient, so that a later `step()` skips it."""
        whole = self._optimizer.param_groups
        group = whole[self._groups[id(parameter)]]
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        try:
            self._optimizer.param_groups = [{**group, "params": [parameter]}]
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = whole
            parameter.grad = None
