# pyright: standard
"""`cleave.distribute`: send a model's linear layers and decoder stacks to a fleet, and undo it.

A layer's class is swapped for a subclass, so names, state_dict, hooks, PEFT, deepcopy and Trainer are unaffected, and
assigning the class back undoes it. Layers called in a row with the same X are learned as a group; from then on the call
of the first computes all of them, and the others find their output waiting. With offload `auto` the cost model compares
the fleet's time with this process's, per layer and size, and keeps small layers local. `decoder.py` runs whole decoder
stacks; when it declines a call, their layers still send gemms.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from cleave.core.model.gemms import Linear, Role
from cleave.core.model.grain import Grain
from cleave.core.plan.choose import LayerChoice, Local
from cleave.errors import ModelError
from cleave.events import GrainChosen, Listener, Note
from cleave.settings import GRAIN, OFFLOAD, Offload
from cleave.train.offload import decoder as stack
from cleave.train.offload.linear import (
    GroupCall,
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

Module = TypeVar("Module", bound=nn.Module)


def distribute(
    model: Module,
    fleet: Multiplier,
    *,
    offload: Offload = OFFLOAD,
    tell: Listener = lambda event: None,
    immediate: bool = False,
    grain: Grain = GRAIN,
    may_lease: bool = True,
) -> Module:
    """Send the gemms of every linear layer of a model to a fleet; return the same model.

    Gradients of weights are complete when `backward()` returns. `immediate` makes them ordinary autograd results, for
    `torch.autograd.grad(loss, weights)`, at the cost of waiting for each. With grain `auto` or `resident`, decoder
    stacks run as a whole where that is faster or, with `resident`, wherever possible; in training the loss of labels is
    then computed there too and no logits are returned. With `may_lease`, trusted devices that hold layers alone keep
    their weights and optimizer states, where that is faster and the optimizer allows it.
    """
    found = [module for module in model.modules() if is_linear(module)]
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no nn.Linear or Conv1D layer, so there is nothing to send to devices; "
            "train it without a fleet"
        )
    shared, heads = stack.shared_parameters(model), _head_modules(model)
    offloading = _Offloading(fleet, offload, tell, immediate)
    for module in found:
        if isinstance(getattr(module, "_cleave", None), _Site):
            _restore(module)
        site = _Site(offloading, module, is_shared=id(module.weight) in shared, is_head=module in heads)
        module._cleave = site  # type: ignore[assignment]
        module.__class__ = _distributed_class(type(module))
    offloading.loading = model.register_load_state_dict_post_hook(_Loaded(offloading))
    stack.uninstall(model)
    if grain == "gemm":
        tell(GrainChosen(grain="gemm", reason="as set"))
    else:
        assert isinstance(fleet, Columns), "only such a fleet runs stacks"
        reason = stack.install(
            model,
            fleet,
            offloading.weights,
            tell,
            must=grain == "resident",
            local=offloading.local,
            may_lease=may_lease and not immediate,
        )
        if reason is not None and grain == "resident":
            undistribute(model)
            raise ModelError(f"{type(model).__name__} cannot stay on devices: {reason}; use grain auto or gemm")
    return model


def undistribute(model: Module) -> Module:
    """Restore every layer of a model; return the same model."""
    stack.uninstall(model)
    for module in model.modules():
        site = getattr(module, "_cleave", None)
        if isinstance(site, _Site):
            if site.offloading is not None:
                site.offloading.close()
            _restore(module)
    return model


def _head_modules(model: nn.Module) -> set[nn.Module]:
    """Return the layers that compute logits, where the model can name them."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else getattr(model, "lm_head", None)
    return set(head.modules()) if isinstance(head, nn.Module) else set()


# ------------------------------------------------------------------------------------------------ swapped classes


class _Distributed(Swapped):
    """Mixin put before a linear layer's own class."""

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


class _Offloading:
    """State shared by all sites of a model."""

    def __init__(self, fleet: Multiplier, offload: Offload, tell: Listener, immediate: bool) -> None:
        self.fleet, self.offload, self.tell, self.immediate = fleet, offload, tell, immediate
        self.weights = Weights(fleet)
        self.local = Local(flops_per_s=local_flops_per_s(), may_compute=offload == "auto")
        self._decided: dict[Linear, bool] = {}
        self._decided_at = 0
        self.said: set[tuple[int, int, int, bool]] = set()
        self.thread_state = threading.local()
        self.loading: Any = None

    def choose(self, linear: Linear) -> LayerChoice | None:
        """Choose where to compute a layer's products; None is this process. Reported once per size."""
        choice = self.fleet.choose_layer(linear, self.local)
        if not self.local.may_compute:
            return choice
        if choice.plan is None:  # no devices: compute locally
            return None
        if self._decided_at != self.weights.steps:  # keep the answer within a step, so that recomputation repeats it
            self._decided_at = self.weights.steps
            self._decided.clear()
        is_remote = self._decided.setdefault(linear, choice.is_remote)
        key = (linear.tokens, linear.in_width, linear.out_width, is_remote)
        if key not in self.said:
            self.said.add(key)
            self.tell(Note(text=choice.reason))
        return choice if is_remote else None

    def close(self) -> None:
        self.weights.close()
        if self.loading is not None:
            self.loading.remove()
            self.loading = None

    def __deepcopy__(self, memo: object) -> _Offloading:
        return self


class _Loaded:
    """Hook for load_state_dict, which changes weights; becomes a no-op when pickled."""

    def __init__(self, offloading: _Offloading | None = None) -> None:
        self._offloading = offloading

    def __call__(self, *_: object) -> None:
        if self._offloading is not None:
            self._offloading.weights.changed()

    def __reduce__(self) -> Any:
        return _Loaded, ()


@dataclass(frozen=True)
class _ReadyOutput:
    """An output computed with its group before its own layer is called."""

    x: weakref.ref[torch.Tensor]
    state: tuple[object, ...]
    y: torch.Tensor


class _Site:
    """One distributed layer and its group."""

    def __init__(
        self, offloading: _Offloading | None, module: nn.Module, *, is_shared: bool, is_head: bool = False
    ) -> None:
        self.offloading, self.is_shared, self.is_head = offloading, is_shared, is_head
        self._module = weakref.ref(module)
        self.leader: _Site | None = None
        self.followers: list[_Site] = []
        self.grouped: list[_Site] = []
        """Followers as of the last optimizer step; fixed in between, so that recomputation repeats the same group."""
        self._grouped_at = 0

    @property
    def is_transposed(self) -> bool:
        return Conv1D is not None and isinstance(self._module(), Conv1D)

    def call(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the layer's output; None if the layer should compute it locally."""
        offloading, module = self.offloading, self._module()
        if offloading is None or module is None or x.numel() == 0:
            return None
        dtype = compute_dtype(x)
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        if dtype not in SENT or x.dim() < 2 or weight.dtype not in SENT or x.device.type == "meta":
            return None
        thread_state = offloading.thread_state
        waiting: dict[_Site, _ReadyOutput] = thread_state.__dict__.setdefault("waiting", {})
        state = (version(x), torch.is_grad_enabled(), dtype)
        found = waiting.pop(self, None)
        if found is not None and found.x() is x and found.state == state:
            return found.y
        self._learn(thread_state, x, state)
        group = self._group(offloading, waiting)
        outputs = self._run(offloading, group, x, dtype)
        if outputs is None:
            return None
        for site, y in zip(group[1:], outputs[1:], strict=True):
            waiting[site] = _ReadyOutput(weakref.ref(x), state, y)
        return outputs[0]

    def _learn(self, thread_state: Any, x: torch.Tensor, state: tuple[object, ...]) -> None:
        """Join the group of the layer that last read this same X, if it may."""
        last: tuple[weakref.ref[torch.Tensor], tuple[object, ...], _Site] | None = getattr(thread_state, "last", None)
        if last is not None and last[0]() is x and last[1] == state and last[2] is not self:
            leader = last[2]
            if self.leader is None and not self.followers and _may_group(leader, self):
                leader.followers.append(self)
                self.leader = leader
            return
        thread_state.last = (weakref.ref(x), state, self)

    def _group(self, offloading: _Offloading, waiting: dict[_Site, _ReadyOutput]) -> list[_Site]:
        for site in [
            site for site in self.grouped if site in waiting
        ]:  # computed last time but never used: leaves the group
            del waiting[site]
            if site in self.followers:
                self.followers.remove(site)
                site.leader = None
        if self._grouped_at != offloading.weights.steps:
            self._grouped_at = offloading.weights.steps
            self.grouped = list(self.followers)
        return [self, *self.grouped]

    def _run(
        self, offloading: _Offloading, group: list[_Site], x: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...] | None:
        modules = [site._module() for site in group]
        weights: list[torch.Tensor] = [module.weight for module in modules]  # type: ignore[union-attr, misc]
        trained = [weight.requires_grad and torch.is_grad_enabled() for weight in weights]
        is_head = any(site.is_head for site in group)
        linear = _sizes(
            self.is_transposed, x, weights, wants_dx=x.requires_grad, wants_dw=any(trained), is_head=is_head
        )
        choice = offloading.choose(linear)
        if choice is None:
            return None
        call = GroupCall(
            fleet=offloading.fleet,
            weights=offloading.weights,
            linear=linear,
            plan=choice.plan,
            format=wire_format(offloading.fleet, dtype, "activation"),
            dy_format=wire_format(
                offloading.fleet,
                dtype,
                "logit gradient" if is_head else "activation gradient",
            ),
            dtype=dtype,
            members=tuple(weights),
            deferred=tuple(
                wants and not site.is_shared and not offloading.immediate
                for site, wants in zip(group, trained, strict=True)
            ),
            is_transposed=self.is_transposed,
        )
        return apply(call, x, [module.bias for module in modules])  # type: ignore[union-attr, misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Site:
        module: Any = memo.get(id(self._module())) or self._module()
        return _Site(self.offloading, module, is_shared=self.is_shared, is_head=self.is_head)

    def __reduce__(self) -> Any:
        return _unpickled_site, ()


def _unpickled_site() -> _Site:
    """Unpickle a site as one that computes locally."""
    return _Site(None, nn.Identity(), is_shared=False)


def _may_group(leader: _Site, site: _Site) -> bool:
    return leader.leader is None and not leader.is_transposed and not site.is_transposed


def _sizes(
    is_transposed: bool,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    *,
    wants_dx: bool,
    wants_dw: bool,
    is_head: bool,
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
        is_head=is_head and not is_transposed,
    )
