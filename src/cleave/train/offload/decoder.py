# pyright: standard
"""Run whole decoder stacks on the fleet, loss included, transparently to the model.

The classes of a base model, its layers and its language model are swapped. The first layer runs its input through the
whole stack and the others pass it on; with labels in training the language model requests the loss as well, so neither
hidden states nor logits come back. A call that needs more (a KV cache, hidden states of layers, a mask that is not
causal) is computed layer by layer, with gemms on the fleet; each call decides again. `families.py` knows the models,
`resident.py` the autograd function.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cleave.core.model.decoder import Attention, Decoder
from cleave.core.plan.choose import Local, PassWork
from cleave.events import GrainChosen, Listener, Note
from cleave.train.offload import families
from cleave.train.offload.families import Description, StackLocation
from cleave.train.offload.leases import Leases
from cleave.train.offload.linear import Weights
from cleave.train.offload.overlap import Overlap, why_not
from cleave.train.offload.pieces import SENT
from cleave.train.offload.resident import Columns, Targets, UnfitError, padding, rotary_table, run, targets_of
from cleave.train.offload.swap import Swapped, original, restore, swap

try:
    from transformers.loss.loss_utils import ForCausalLMLoss
except ImportError:
    ForCausalLMLoss = None
try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # before transformers 5, layers get arguments or another forward instead
    _active_collector = None

_NEUTRAL_ARGUMENTS = {
    "hidden_states",
    "attention_mask",
    "position_ids",
    "position_embeddings",
    "cache_position",
    "num_items_in_batch",
    "ignore_index",
    "shift_labels",
    "return_dict",
}
"""Arguments of a layer that do not change what it computes; any other must be None or False."""


def install(
    model: nn.Module,
    fleet: Columns,
    weights: Weights,
    tell: Listener,
    *,
    local: Local,
    must: bool = False,
    may_lease: bool = True,
) -> str | None:
    """Run all decoder stacks of a model on the fleet wherever that pays off or, with `must`, is possible.

    With `may_lease`, devices may keep weights and optimizer states.

    Returns the reason if none can run now; every call checks again.
    """
    reasons: list[str] = []
    places = families.find(model)
    for place in places:
        leases = Leases(fleet, weights, tell, shared=shared_parameters(model), is_allowed=may_lease)
        runner = _Runner(fleet, weights, tell, leases, local=local, must=must)
        runner.hooks = leases.watch_saving(model)
        described = families.describe(place)
        if isinstance(described, str):
            reasons.append(described)
            runner.decline(described)
        _take(place.base, _Base, runner)
        for layer in families.layers(place.base):
            _take(layer, _Layer, runner)
        if place.language_model is not None:
            _take(place.language_model, _LanguageModel, runner)
    if not places:
        unknown = "the model has no decoder of a known family (Llama, Mistral, Qwen2, OPT, GPT-2)"
        tell(GrainChosen(grain="gemm", reason=unknown))
        return unknown
    return reasons[0] if len(reasons) == len(places) else None


def overlap(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Let an optimizer step for each weight of the stacks as soon as its gradient arrives; return why if it cannot."""
    reason = why_not(optimizer)
    if reason is not None:
        return reason
    runners = _runners(model)
    if not runners:
        return "no stack of it may run on devices"
    shared = shared_parameters(model)  # which get gradients elsewhere too
    single = [parameter for parameter in model.parameters() if id(parameter) not in shared]
    for runner in runners:
        runner.overlap_with(optimizer, single)
    return None


def _runners(model: nn.Module) -> list[_Runner]:
    found = {id(one._cleave_stack): one._cleave_stack for one in model.modules() if isinstance(one, _InStack)}
    return list(found.values())


def shared_parameters(model: nn.Module) -> set[int]:
    """Return ids of parameters used by more than one module, such as a head tied to the embedding."""
    owners = Counter(id(one) for module in model.modules() for one in module._parameters.values() if one is not None)
    return {parameter for parameter, count in owners.items() if count > 1}


def know(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Tell the stacks which optimizer will step them, before its first step."""
    for runner in _runners(model):
        runner.leases.know(optimizer)


def gives_loss(model: nn.Module) -> bool:
    """Whether devices can compute the model's loss: the standard one of `labels` or `shift_labels`."""
    return isinstance(model, _LanguageModel) and ForCausalLMLoss is not None and model.loss_function is ForCausalLMLoss


def uninstall(model: nn.Module) -> None:
    for runner in _runners(model):
        runner.leases.finish("the model is no longer distributed")
        for hook in runner.hooks:
            hook.remove()
    for module in model.modules():
        if isinstance(module, _InStack):
            restore(module)  # type: ignore[arg-type]
            del module._cleave_stack


def _take(module: nn.Module, mixin: type[_InStack], runner: _Runner) -> None:
    swap(module, mixin)
    module._cleave_stack = runner  # type: ignore[assignment]


# ------------------------------------------------------------------------------------------------ swapped classes


class _InStack(Swapped):
    _cleave_stack: _Runner

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy as the original class, which computes locally."""
        state = {name: value for name, value in vars(self).items() if name != "_cleave_stack"}
        return _blank, (original(self),), state  # type: ignore[arg-type]


def _blank(kind: Any) -> Any:
    return kind.__new__(kind)


class _Layer(_InStack):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Bypass `__call__`, where transformers does gradient checkpointing, which a stack on devices does not need."""
        output = self._cleave_stack.layer(self, args, kwargs)
        return super().__call__(*args, **kwargs) if output is None else output  # type: ignore[misc]


class _Base(_InStack):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._cleave_stack.base(self, super().forward, args, kwargs)  # type: ignore[misc]


class _LanguageModel(_InStack):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._cleave_stack.language_model(self, super().forward, args, kwargs)  # type: ignore[misc]

    @property
    def loss_function(self) -> Any:
        usual = super().loss_function  # type: ignore[misc]
        return self._cleave_stack.loss_function(usual)

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value


# ------------------------------------------------------------------------------------------------ calls


@dataclass(slots=True, eq=False)
class _Request:
    """A language model's request for the loss, read by its first layer."""

    language_model: nn.Module
    targets: Targets
    loss: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class _BaseCall:
    """A running call of a base model."""

    base: nn.Module
    first: nn.Module | None
    """Its first layer."""
    request: _Request | None
    output: torch.Tensor | None = None
    """The first layer's output, if it ran the stack."""


class _Runner:
    """State shared by the modules of a stack: each thread's call, and the messages already shown."""

    def __init__(
        self, fleet: Columns, weights: Weights, tell: Listener, leases: Leases, *, local: Local, must: bool
    ) -> None:
        self.leases = leases
        self.hooks: list[Any] = []
        self._fleet, self._weights, self._tell, self._local, self._must = fleet, weights, tell, local, must
        self._told: set[GrainChosen | Note] = set()
        self._stacks: dict[bool, Decoder] = {}
        self._thread_state = threading.local()
        self._overlap: Overlap | None = None
        self._has_run = False

    def overlap_with(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        self._overlap = Overlap(optimizer, self._weights, parameters)

    def language_model(self, model: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = _given(model, args, kwargs)
        if given.get("labels") is not None:
            kwargs = _without_cache(given, kwargs)
        self._thread_state.request = request = _request(model, given)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._thread_state.request = None
        if request is None or request.loss is None:
            return output
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})

    def loss_function(self, usual: Any) -> Any:
        request: _Request | None = getattr(self._thread_state, "request", None)
        return usual if request is None or request.loss is None else lambda *_, **__: request.loss

    def base(self, base: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if base.training and torch.is_grad_enabled():
            kwargs = _without_cache(_given(base, args, kwargs), kwargs)
        request = getattr(self._thread_state, "request", None)
        self._thread_state.call = _BaseCall(base, next(iter(families.layers(base)), None), request)
        try:
            return forward(*args, **kwargs)
        finally:
            self._thread_state.call = None

    def layer(self, layer: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Return a layer's output; None if the layer should compute it locally."""
        call: _BaseCall | None = getattr(self._thread_state, "call", None)
        if call is None:  # called from outside its model
            return None
        if layer is not call.first:
            return call.output if call.output is not None and args and args[0] is call.output else None
        given = _given(layer, args, kwargs)
        try:
            call.output = self._run(call, given["hidden_states"], given)
        except UnfitError as unfit:
            self.decline(str(unfit))
        return call.output

    def _run(self, call: _BaseCall, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor | None:
        is_training = call.base.training and torch.is_grad_enabled()
        if given.get("use_cache") or given.get("past_key_values") is not None:
            if is_training:
                raise UnfitError("a KV cache was requested; train with use_cache=False")
            return None  # as in `generate`: not worth a message
        _check_call(x, given)
        request = call.request
        description = self._describe(StackLocation(base=call.base, language_model=request and request.language_model))
        if description.stack.head is None:
            request = None
        if request is not None and len(request.targets.words) != x.shape[0] * x.shape[1]:
            raise UnfitError("the number of labels differs from the number of tokens")
        is_trained = torch.is_grad_enabled() and (
            x.requires_grad or any(one.is_trained for one in description.stack.parameters)
        )
        first = description.stack.parts[0]
        assert isinstance(first, Attention)
        attention: str = call.base.config._attn_implementation  # type: ignore[union-attr, assignment]
        mask = padding(given.get("attention_mask"), x, first.window, attention)
        rotary = rotary_table(given["position_embeddings"], first.head_dim) if first.is_rotary else None
        work = PassWork(
            description.stack,
            x.shape[0],
            x.shape[1],
            is_trained,
            is_trained and x.requires_grad,
            states := self.leases.eligibility.states(description) if is_trained else None,
            frozenset() if states is None else self.leases.eligibility.unleased(description),
        )
        choice = self._fleet.choose_pass(work, self._local, must=self._must)
        if not choice.is_resident:
            return None
        self._has_run = True
        output = run(
            self._fleet,
            self._weights,
            description,
            x,
            mask=mask,
            rotary=rotary,
            targets=None if request is None else request.targets,
            is_trained=is_trained,
            plan=choice.plan,
            work=work,
            overlap=self._overlap,
            leases=self.leases,
        )
        if request is None:
            return output
        request.loss = output
        return x.new_empty(0, *x.shape[1:])  # leaves no sequences for the base and the language model to process

    def _describe(self, place: StackLocation) -> Description:
        """Describe the stack, with its head if there is a language model whose head can be described."""
        described = families.describe(place, with_head=place.language_model is not None)
        if isinstance(described, str) and place.language_model is not None:
            reason, described = described, families.describe(place)
            if isinstance(described, Description):
                self._tell_once(Note(text=f"the loss is computed on the server, not on devices: {reason}"))
        if isinstance(described, str):
            raise UnfitError(described)
        stack = described.stack
        known = self._stacks.get(stack.head is not None)
        if known is None or known != stack:
            self._stacks[stack.head is not None] = known = stack
        return Description(
            stack=known, parameters=described.parameters
        )  # the identical object, which the fleet may have cached

    def decline(self, reason: str) -> None:
        """Report why the layers are computed product by product: from the start, or for one batch among others."""
        if self._has_run:
            self._tell_once(Note(text=f"a batch was computed product by product, not by resident layers: {reason}"))
        else:
            self._tell_once(GrainChosen(grain="gemm", reason=f"layers cannot stay on devices: {reason}"))

    def _tell_once(self, event: GrainChosen | Note) -> None:
        if event not in self._told:
            self._told.add(event)
            self._tell(event)


@functools.cache
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


def _given(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by name."""
    given = _signature(original(module)).bind(module, *args, **kwargs).arguments
    others = given.pop("kwargs", {})
    return {**given, **others}


def _without_cache(given: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Disable the KV cache unless requested: with a gradient or a loss it goes unused."""
    is_asked = given.get("use_cache") is not None or given.get("past_key_values") is not None
    is_positional = "use_cache" in given and "use_cache" not in kwargs
    if is_asked or is_positional or _is_packed(given):
        return kwargs
    return {**kwargs, "use_cache": False}


def _is_packed(given: dict[str, Any]) -> bool:
    """Whether transformers would detect packed sequences, which it does only without a cache."""
    positions = given.get("position_ids")
    return positions is not None and given.get("attention_mask") is None and bool((positions.diff() != 1).any())


def _check_call(x: torch.Tensor, given: dict[str, Any]) -> None:
    if x.dim() != 3 or x.numel() == 0 or x.dtype not in SENT or x.device.type == "meta":
        raise UnfitError(f"its input is {tuple(x.shape)} in {x.dtype} on {x.device.type}, expected sequences of floats")
    if torch.compiler.is_compiling():
        raise UnfitError("torch.compile is active")
    if _active_collector is not None and _active_collector.get():
        raise UnfitError("hidden states or attentions of layers were requested")
    for name, value in given.items():
        if name not in _NEUTRAL_ARGUMENTS and name != "self" and value is not None and value is not False:
            if name == "is_causal" and value is True:
                continue
            raise UnfitError(f"layers get the argument {name}, which devices do not support")


def _request(model: Any, given: dict[str, Any]) -> _Request | None:
    """Return a request for the loss; None if the caller needs logits or another loss."""
    labels, keep = given.get("labels"), given.get("logits_to_keep", 0)
    if (
        labels is None
        or not model.training
        or not torch.is_grad_enabled()
        or model.loss_function is not ForCausalLMLoss
        or not (isinstance(keep, int) and keep == 0)
        or given.get("return_dict", model.config.return_dict) is False
    ):
        return None
    loss = {
        name: value for name, value in given.items() if name in ("num_items_in_batch", "ignore_index", "shift_labels")
    }
    targets = targets_of(labels, model.config.vocab_size, **loss)
    return None if targets is None else _Request(model, targets)
