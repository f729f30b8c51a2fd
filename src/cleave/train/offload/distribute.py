# pyright: standard
"""`cleave.distribute`: a model's linear layers, and its decoder stacks, sent to a fleet; and back.

A layer's class is swapped for a subclass of it, so names, state_dict, hooks, PEFT, deepcopy and Trainer do not
notice, and assigning the class back undoes it. Layers called one after another with the very same X are learned as a
group and from then on computed together when the first is called; the others find their output waiting. With offload
`auto` the cost model compares what the fleet would take with what this process takes, per layer and size, and keeps
small ones here. Decoder stacks as a whole are for `train/stack.py`; their layers still send gemms where it passes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from cleave.core.model.gemms import Role
from cleave.core.plan.gemm.layer import Linear
from cleave.errors import InfeasibleError, ModelError
from cleave.train.offload import decoder as stack
from cleave.train.offload.linear import (
    Call,
    Multiplier,
    Weights,
    apply,
    compute_dtype,
    local_flops_per_s,
    version,
    wire_format,
)
from cleave.train.offload.pieces import SENT, Conv1D, is_linear
from cleave.train.offload.resident import Columns
from cleave.train.offload.swap import Swapped, restore

Offload = Literal["auto", "always"]
Grain = Literal["auto", "gemm", "resident"]
Module = TypeVar("Module", bound=nn.Module)


def distribute(
    model: Module,
    fleet: Multiplier,
    *,
    offload: Offload = "auto",
    say: Callable[[str], None] = lambda text: None,
    immediate: bool = False,
    grain: Grain = "gemm",
) -> Module:
    """Send the gemms of every linear layer of a model to a fleet; the model itself is returned.

    Gradients of weights are complete when `backward()` returns. `immediate` makes them ordinary results of autograd,
    for `torch.autograd.grad(loss, weights)`, at the price of waiting for each. With the grains `auto` and `resident`
    decoder stacks run as a whole where the fleet finds that better, or, if `resident`, can; the loss of labels is then
    computed there too while training, and no logits come back with it.
    """
    found = [module for module in model.modules() if is_linear(module)]
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no nn.Linear or Conv1D layer, so there is nothing to send to devices; "
            "train it without a fleet"
        )
    shared = _shared_parameters(model)
    sending = _Sending(fleet, offload, say, immediate)
    for module in found:
        if isinstance(getattr(module, "_cleave", None), _Site):
            _restore(module)
        module._cleave = _Site(sending, module, is_shared=id(module.weight) in shared)  # type: ignore[assignment]
        module.__class__ = _distributed_class(type(module))
    sending.loading = model.register_load_state_dict_post_hook(_Loaded(sending))
    stack.uninstall(model)
    if grain != "gemm":
        assert isinstance(fleet, Columns), "only such a fleet runs stacks"
        reason = stack.install(model, fleet, sending.weights, say, must=grain == "resident")
        if reason is not None and grain == "resident":
            undistribute(model)
            raise ModelError(f"{type(model).__name__} cannot stay on devices: {reason}; or use the grain auto or gemm")
    return model


def undistribute(model: Module) -> Module:
    """Make every layer what it was."""
    stack.uninstall(model)
    for module in model.modules():
        site = getattr(module, "_cleave", None)
        if isinstance(site, _Site):
            if site.sending is not None:
                site.sending.close()
            _restore(module)
    return model


def _shared_parameters(model: nn.Module) -> set[int]:
    """Parameters that more than one module uses, such as a head tied to the token table."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


# ------------------------------------------------------------------------------------------------ swapped classes


class _Distributed(Swapped):
    """Mixed in before a linear layer's own class."""

    _cleave: _Site

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self._cleave.call(input)
        return super().forward(input) if output is None else output  # type: ignore[misc]


class DistributedLinear(_Distributed, nn.Linear):
    """nn.Linear, with its gemms on a fleet."""


_classes: dict[type, type] = {nn.Linear: DistributedLinear}

if Conv1D is not None:

    class DistributedConv1D(_Distributed, Conv1D):  # type: ignore[misc]
        """transformers' Conv1D, with its gemms on a fleet."""

    _classes[Conv1D] = DistributedConv1D


def _distributed_class(original: type) -> type:
    if original not in _classes:
        _classes[original] = type(f"Distributed{original.__name__}", (_Distributed, original), {})
    return _classes[original]


def _restore(module: nn.Module) -> None:
    restore(module)
    del module._cleave


# ------------------------------------------------------------------------------------------------ sites


class _Sending:
    """What all sites of a model share."""

    def __init__(self, fleet: Multiplier, offload: Offload, say: Callable[[str], None], immediate: bool) -> None:
        self.fleet, self.offload, self.say, self.immediate = fleet, offload, say, immediate
        self.weights = Weights(fleet)
        self.local_flops_per_s = local_flops_per_s() if offload == "auto" else 0.0
        self._decided: dict[Linear, bool] = {}
        self._decided_at = 0
        self.said: set[tuple[int, int, int, bool]] = set()
        self.here = threading.local()
        self.loading: Any = None

    def is_worth_sending(self, linear: Linear) -> bool:
        """Whether the fleet is faster than this process; said once per size."""
        if self.offload == "always":
            return True
        try:
            plan = self.fleet.plan(linear)
        except InfeasibleError:
            plan = None
        if plan is None:  # nobody is there: this process can do it
            return False
        local_s = sum(gemm.flops for gemm in linear.gemms.values()) / self.local_flops_per_s
        if self._decided_at != self.weights.steps:  # within a step the answer stays, or recomputing would differ
            self._decided_at = self.weights.steps
            self._decided.clear()
        worth = self._decided.setdefault(linear, plan.total_s < local_s)
        key = (linear.tokens, linear.in_width, linear.out_width, worth)
        if key not in self.said:
            self.said.add(key)
            where = "go to devices" if worth else "stay on the server"
            self.say(
                f"gemms of {linear.tokens} tokens x {linear.in_width} x {linear.out_width} {where}: "
                f"{plan.total_s * 1e3:.1f} ms on devices, {local_s * 1e3:.1f} ms here"
            )
        return worth

    def close(self) -> None:
        self.weights.close()
        if self.loading is not None:
            self.loading.remove()
            self.loading = None

    def __deepcopy__(self, memo: object) -> _Sending:
        return self


class _Loaded:
    """Told when a model has loaded other weights; survives pickling as something that does nothing."""

    def __init__(self, sending: _Sending | None = None) -> None:
        self._sending = sending

    def __call__(self, *_: object) -> None:
        if self._sending is not None:
            self._sending.weights.changed()

    def __reduce__(self) -> Any:
        return _Loaded, ()


@dataclass(frozen=True)
class _Waiting:
    """An output computed with its group, before its layer was called."""

    x: weakref.ref[torch.Tensor]
    state: tuple[object, ...]
    y: torch.Tensor


class _Site:
    """One layer's place in the scheme: its group, and whether its output is waiting."""

    def __init__(self, sending: _Sending | None, module: nn.Module, *, is_shared: bool) -> None:
        self.sending, self.is_shared = sending, is_shared
        self._module = weakref.ref(module)
        self.leader: _Site | None = None
        self.followers: list[_Site] = []
        self.grouped: list[_Site] = []
        """The followers as of the last optimizer step: in between, recomputing must repeat what was computed."""
        self._grouped_at = 0

    @property
    def is_transposed(self) -> bool:
        return Conv1D is not None and isinstance(self._module(), Conv1D)

    def call(self, x: torch.Tensor) -> torch.Tensor | None:
        """The layer's output, or None if the layer should compute it itself."""
        sending, module = self.sending, self._module()
        if sending is None or module is None or x.numel() == 0:
            return None
        dtype = compute_dtype(x)
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        if dtype not in SENT or x.dim() < 2 or weight.dtype not in SENT or x.device.type == "meta":
            return None
        here = sending.here
        waiting: dict[_Site, _Waiting] = here.__dict__.setdefault("waiting", {})
        state = (version(x), torch.is_grad_enabled(), dtype)
        found = waiting.pop(self, None)
        if found is not None and found.x() is x and found.state == state:
            return found.y
        self._learn(here, x, state)
        group = self._group(sending, waiting)
        outputs = self._run(sending, group, x, dtype)
        if outputs is None:
            return None
        for site, y in zip(group[1:], outputs[1:], strict=True):
            waiting[site] = _Waiting(weakref.ref(x), state, y)
        return outputs[0]

    def _learn(self, here: Any, x: torch.Tensor, state: tuple[object, ...]) -> None:
        """Follow the layer that last read this very X; leave a group that did not hold."""
        last: tuple[weakref.ref[torch.Tensor], tuple[object, ...], _Site] | None = getattr(here, "last", None)
        if last is not None and last[0]() is x and last[1] == state and last[2] is not self:
            leader = last[2]
            if self.leader is None and not self.followers and _may_group(leader, self):
                leader.followers.append(self)
                self.leader = leader
            return
        here.last = (weakref.ref(x), state, self)

    def _group(self, sending: _Sending, waiting: dict[_Site, _Waiting]) -> list[_Site]:
        for site in [site for site in self.grouped if site in waiting]:  # was not asked for last time
            del waiting[site]
            if site in self.followers:
                self.followers.remove(site)
                site.leader = None
        if self._grouped_at != sending.weights.steps:
            self._grouped_at = sending.weights.steps
            self.grouped = list(self.followers)
        return [self, *self.grouped]

    def _run(
        self, sending: _Sending, group: list[_Site], x: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...] | None:
        modules = [site._module() for site in group]
        weights: list[torch.Tensor] = [module.weight for module in modules]  # type: ignore[union-attr, misc]
        trained = [weight.requires_grad and torch.is_grad_enabled() for weight in weights]
        linear = _sizes(self.is_transposed, x, weights, wants_dx=x.requires_grad, wants_dw=any(trained))
        if not sending.is_worth_sending(linear):
            return None
        call = Call(
            fleet=sending.fleet,
            weights=sending.weights,
            linear=linear,
            format=wire_format(sending.fleet, dtype),
            dtype=dtype,
            members=tuple(weights),
            deferred=tuple(
                wants and not site.is_shared and not sending.immediate
                for site, wants in zip(group, trained, strict=True)
            ),
            is_transposed=self.is_transposed,
        )
        return apply(call, x, [module.bias for module in modules])  # type: ignore[union-attr, misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Site:
        module: Any = memo.get(id(self._module())) or self._module()
        return _Site(self.sending, module, is_shared=self.is_shared)

    def __reduce__(self) -> Any:
        return _asleep, ()


def _asleep() -> _Site:
    """What a pickled site becomes: a layer that computes by itself."""
    return _Site(None, nn.Identity(), is_shared=False)


def _may_group(leader: _Site, site: _Site) -> bool:
    return leader.leader is None and not leader.is_transposed and not site.is_transposed


def _sizes(
    is_transposed: bool, x: torch.Tensor, weights: list[torch.Tensor], *, wants_dx: bool, wants_dw: bool
) -> Linear:
    first: Role = "grad_input" if is_transposed else "forward"
    second: Role = "forward" if is_transposed else "grad_input"
    roles: list[Role] = [first]
    if torch.is_grad_enabled() and wants_dx:
        roles.append(second)
    if torch.is_grad_enabled() and wants_dw:
        roles.append("grad_weight")
    return Linear(
        tokens=x.numel() // x.shape[-1],
        in_width=weights[0].shape[1],
        out_width=sum(weight.shape[0] for weight in weights),
        roles=tuple(roles),
    )
