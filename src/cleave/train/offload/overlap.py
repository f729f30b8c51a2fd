# pyright: standard
"""Weights updated one by one, as soon as their gradients are there, while the fleet still computes others.

New numbers go out to devices at once, so that neither update nor sending waits for the end of backward. The optimizer
is the user's own: it steps for one parameter at a time, which changes nothing for those that treat each parameter by
itself. A gradient that reaches a parameter by another way, such as a penalty on it, must be there before. Whatever
needs all gradients together (clipping by their norm, accumulation over several backwards, optimizers with a line
search) needs the usual way.
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
    """Why an optimizer can only step as a whole."""
    if type(optimizer) not in _ONE_BY_ONE:
        return f"{type(optimizer).__name__} may look at several parameters at once"
    return None


class Overlap:
    """Steps an optimizer for single parameters of its own."""

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
        """One step for one parameter; its gradient is used up. A later `step()` finds nothing left to do for it."""
        whole = self._optimizer.param_groups
        group = whole[self._groups[id(parameter)]]
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        try:
            self._optimizer.param_groups = [{**group, "params": [parameter]}]
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = whole
            parameter.grad = None
