# pyright: standard
"""Linear layers with their three gemms on the fleet: the autograd function, and the operands of weights.

    Y_i = X W_i^T + b_i        dX = sum_i dY_i W_i        dW_i = dY_i^T X

One function serves a group of layers that read the same X (q, k, v; gate, up). Weights are operands that stay on
devices until they change; X and dY live as long as the graph needs them. dW is off the critical path: it is computed
while backward goes on and added to `.grad`, with all hooks, just before `backward()` returns. `distribute.py` decides
which modules come here; this module knows products and gradients, not modules.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.autograd import Variable
from torch.utils.weak import WeakTensorKeyDictionary

from cleave.core.cost.streams import Stream, stream_format
from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Matrix
from cleave.core.model.gemms import Linear, Role
from cleave.core.plan.choose import LayerChoice, Local
from cleave.core.plan.gemm.layer import LinearPlan
from cleave.protocol.numbers import Encoded
from cleave.train.offload.leased_tensors import LeasedParameter
from cleave.train.offload.step_hooks import watch_steps

_BACKWARD, _FORWARD, _WEIGHTS = 0, 1, 2  # priorities: what the caller waits for comes first
HALVES: dict[torch.dtype, WireFormat] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_SAMPLES = 32


class FleetTensor(Protocol):
    """A matrix with an identity; devices may hold it longer than this process holds its values."""

    def bind(self, matrix: Matrix | None, encoded: Encoded | None = None) -> None: ...


class Multiplier(Protocol):
    """The interface that training needs from a fleet."""

    wire: WireFormat

    def tensor(self, rows: int, cols: int, format: WireFormat | None = None) -> FleetTensor: ...

    def choose_layer(self, linear: Linear, local: Local = ...) -> LayerChoice: ...

    def submit(
        self,
        role: Role,
        a: tuple[Any, ...],
        b: tuple[Any, ...],
        plan: LinearPlan | None,
        *,
        priority: int = 1,
        format: WireFormat | None = None,
    ) -> Future[list[Matrix]]: ...

    def step_ended(self) -> None: ...

    def wait(self, future: Future[list[Matrix]]) -> list[Matrix]: ...


# ------------------------------------------------------------------------------------------------ weights


def parameter_format(fleet: Multiplier, parameter: torch.Tensor) -> WireFormat:
    """Return the wire format of a parameter."""
    if parameter.dim() > 1:
        return wire_format(fleet, compute_dtype(parameter), "weight")
    return wire_format(fleet, parameter.dtype, "vector")


class Weights:
    """Operands of parameters, replaced whenever values may have changed, so that frozen weights travel once.

    Optimizers may write without bumping `_version` (fused ones do), so every optimizer step counts as a change of all
    trained parameters. Writes through `.data` leave no trace either; a sample of the values catches those.
    """

    def __init__(self, fleet: Multiplier) -> None:
        self._fleet = fleet
        self.steps = 0
        """Optimizer steps and other changes of trained parameters so far."""
        self._whole = 0
        self._own = WeakTensorKeyDictionary()  # parameter -> its individual changes
        self._single: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._known = WeakTensorKeyDictionary()  # weight -> {format: (key, operand)}
        watch_steps(self)

    def changed(self) -> None:
        """All trained parameters may have new values."""
        self._whole += 1
        self._count_step()

    def count_single_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Declare that this optimizer changes only parameters that have a gradient when it steps."""
        self._single.add(optimizer)

    def stepping(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Nothing changes before a step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._single:
            self.changed()
            return
        self._count_step()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._own[parameter] = 1 + (self._own.get(parameter) or 0)

    def _count_step(self) -> None:
        self.steps += 1
        self._fleet.step_ended()

    def touched(self) -> None:
        """Trained parameters have new values, though no optimizer stepped."""
        self._whole += 1

    def operand(self, weight: torch.Tensor, format: WireFormat) -> FleetTensor:
        if isinstance(weight, LeasedParameter):
            weight._cleave_keeper.refresh("a batch is computed without the devices that keep weights")
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            key = self._key(weight)
            formats: dict[WireFormat, tuple[object, FleetTensor]] | None = self._known.get(weight)
            if formats is None:
                formats = self._known[weight] = {}
            found = formats.get(format)
            if found is None or found[0] != key:
                rows, cols = (1, *weight.shape)[-2:]
                operand = self._fleet.tensor(rows, cols, format)
                bind(operand, weight, format)
                formats[format] = found = (key, operand)
            return found[1]

    def close(self) -> None:
        """Release all operands; later requests create new ones."""
        with self._lock:
            self._known.clear()

    def _key(self, weight: torch.Tensor) -> tuple[object, ...]:
        flat = weight.detach().reshape(-1) if not weight.is_contiguous() else weight.detach().view(-1)
        samples = tuple(flat[:: max(1, flat.numel() // _SAMPLES)].tolist())
        steps = (self._whole, self._own.get(weight, 0)) if weight.requires_grad else None
        return steps, version(weight), weight.data_ptr(), samples


def bind(operand: FleetTensor, tensor: torch.Tensor, format: WireFormat) -> None:
    """Give an operand its values, without a copy if the tensor is already in wire format."""
    matrix = tensor.detach().cpu().reshape(-1, tensor.shape[-1]).contiguous()
    if HALVES.get(matrix.dtype) == format:
        operand.bind(None, matrix.view(-1).view(torch.uint8).numpy())
    else:
        operand.bind(matrix.float().numpy())


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype of a product with this tensor, under autocast too."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def version(tensor: torch.Tensor) -> int:
    """Return torch's counter of in-place writes, -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


# ------------------------------------------------------------------------------------------------ one call


@dataclass(frozen=True)
class GroupCall:
    """A group of layers applied to one X."""

    fleet: Multiplier
    weights: Weights
    linear: Linear
    plan: LinearPlan | None
    """The plan chosen before the call; None without devices, to be planned when one joins."""
    format: WireFormat
    """Format of X, the weights and all results."""
    dy_format: WireFormat
    dtype: torch.dtype
    """Dtype of the outputs."""
    members: tuple[torch.Tensor, ...]
    """The weights: [out, in], or [in, out] if `is_transposed`."""
    deferred: tuple[bool, ...]
    """Whether each weight's gradient is added just before backward returns instead of at once."""
    is_transposed: bool

    @property
    def forward_role(self) -> Role:
        return "grad_input" if self.is_transposed else "forward"

    @property
    def input_role(self) -> Role:
        return "forward" if self.is_transposed else "grad_input"


def wire_format(fleet: Multiplier, dtype: torch.dtype, stream: Stream) -> WireFormat:
    """Return the format of a tensor's stream; 16-bit types travel as they are unless 8 bits will do."""
    format = stream_format(stream, fleet.wire)
    return format if format == "q8" else HALVES.get(dtype, format)


def apply(call: GroupCall, x: torch.Tensor, biases: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """Return the outputs of all members."""
    anchor = _anchor() if any(call.deferred) else None
    direct = [w for w, deferred in zip(call.members, call.deferred, strict=True) if not deferred]
    return _Layers.apply(call, anchor, x, len(direct), *direct, *biases)  # type: ignore[no-any-return]


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: GroupCall, anchor: Any, x: torch.Tensor, directs: int, *rest: torch.Tensor | None
    ) -> Any:
        biases = rest[directs:]
        rows = x.numel() // x.shape[-1]
        operand = call.fleet.tensor(rows, x.shape[-1], call.format)
        bind(operand, x, call.format)
        weights = tuple(call.weights.operand(weight, call.format) for weight in call.members)
        future = call.fleet.submit(
            call.forward_role, (operand,), weights, call.plan, priority=_FORWARD, format=call.format
        )
        outputs = call.fleet.wait(future)
        operand.bind(None)  # devices keep their copies; backward binds the saved tensor again
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.call, ctx.operand, ctx.weights = call, operand, weights
        ctx.biased = [bias is not None for bias in biases]
        ys = [_shaped(y, x, call.dtype) for y in outputs]
        for y, bias in zip(ys, biases, strict=True):
            if bias is not None:
                y += bias.detach().to(y.dtype)
        return tuple(ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # type: ignore[override]
        call: GroupCall = ctx.call
        (x,) = ctx.saved_tensors
        there = [i for i, grad in enumerate(grads) if grad is not None]
        dys = [_like_output(grads[i], call) for i in there]
        operands = [call.fleet.tensor(dy.shape[0], dy.shape[1], call.dy_format) for dy in dys]
        for operand, dy in zip(operands, dys, strict=True):
            bind(operand, dy, call.dy_format)

        dx_future = None
        if ctx.needs_input_grad[2] and there:
            weights = tuple(ctx.weights[i] for i in there)
            plan = call.plan if len(there) == len(grads) else _plan_of(call, there)
            dx_future = call.fleet.submit(
                call.input_role, tuple(operands), weights, plan, priority=_BACKWARD, format=call.format
            )
        dw_futures = _start_weights(ctx, x, there, operands)

        dbs = [
            grad.reshape(-1, grad.shape[-1]).sum(0) if biased and grad is not None else None
            for grad, biased in zip(grads, ctx.biased, strict=True)
        ]
        dx = None if dx_future is None else _shaped(call.fleet.wait(dx_future)[0], x, x.dtype)
        dws: list[torch.Tensor | None] = []
        for i, (weight, deferred) in enumerate(zip(call.members, call.deferred, strict=True)):
            if deferred:
                if i in dw_futures:
                    _defer(call.fleet, weight, dw_futures[i])
            else:
                dws.append(_gradient(call.fleet, weight, dw_futures[i]) if i in dw_futures else None)
        return None, None, dx, None, *dws, *dbs


def _start_weights(ctx: Any, x: torch.Tensor, there: list[int], operands: list[Any]) -> dict[int, Any]:
    """Submit dW of the trained members; return (future, position in its outputs) per member."""
    call: GroupCall = ctx.call
    wanted = [(i, dy) for i, dy in zip(there, operands, strict=True) if call.members[i].requires_grad]
    if not wanted:
        return {}
    bind(ctx.operand, x, call.format)
    plan = call.plan if len(wanted) == len(call.members) else _plan_of(call, [i for i, _ in wanted])
    dys = tuple(dy for _, dy in wanted)
    a, b = ((ctx.operand,), dys) if call.is_transposed else (dys, (ctx.operand,))
    future = call.fleet.submit("grad_weight", a, b, plan, priority=_WEIGHTS, format=call.format)
    return {i: (future, position) for position, (i, _) in enumerate(wanted)}


def _plan_of(call: GroupCall, members: list[int]) -> LinearPlan | None:
    """Plan for a subset of the group, which needs a choice of its own."""
    assert not call.is_transposed, "such layers are never grouped"
    out_width = sum(call.members[i].shape[0] for i in members)
    return call.fleet.choose_layer(replace(call.linear, out_width=out_width)).plan


def _shaped(matrix: Matrix, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(matrix).view(*x.shape[:-1], matrix.shape[1]).to(device=x.device, dtype=dtype)


def _like_output(grad: torch.Tensor | None, call: GroupCall) -> torch.Tensor:
    assert grad is not None
    return grad.detach().to(call.dtype).reshape(-1, grad.shape[-1])


# ------------------------------------------------------------------------------------------------ gradients of weights


_state = threading.local()
_KEPT_PASSES = 16


def _anchor() -> torch.Tensor:
    """Return a scalar that makes outputs require gradients although autograd does not see the weights."""
    anchor = getattr(_state, "anchor", None)
    if anchor is None:
        with torch.inference_mode(False):
            anchor = _state.anchor = torch.zeros((), requires_grad=True)
    return anchor


def _gradient(fleet: Multiplier, weight: torch.Tensor, entry: tuple[Future[list[Matrix]], int]) -> torch.Tensor:
    future, position = entry
    return torch.from_numpy(fleet.wait(future)[position]).to(device=weight.device, dtype=weight.dtype)


def _defer(fleet: Multiplier, weight: torch.Tensor, entry: tuple[Future[list[Matrix]], int]) -> None:
    """Add the gradient when this backward pass ends.

    A failed pass never ends, so only the entries of the last few passes are kept.
    """
    passes: dict[int, list[Any]] | None = getattr(_state, "passes", None)
    if passes is None:
        passes = _state.passes = {}
    number = torch._C._current_graph_task_id()
    if number not in passes:
        while len(passes) >= _KEPT_PASSES:
            del passes[next(iter(passes))]
        passes[number] = []
        Variable._execution_engine.queue_callback(lambda: _finish(passes.pop(number)))
    passes[number].append((fleet, weight, entry))


def _finish(deferred: list[tuple[Multiplier, torch.Tensor, tuple[Future[list[Matrix]], int]]]) -> None:
    """Run one backward from the weights themselves, so that hooks and accumulation see ordinary gradients."""
    sums: dict[torch.Tensor, torch.Tensor] = {}
    for fleet, weight, entry in deferred:
        gradient = _gradient(fleet, weight, entry)
        sums[weight] = gradient if weight not in sums else sums[weight] + gradient
    if sums:
        torch.autograd.backward(list(sums), list(sums.values()))


def local_flops_per_s() -> float:
    """Measure this process's own matrix throughput, in about a tenth of a second."""
    import time

    side = 512
    a = torch.from_numpy(np.random.default_rng(0).standard_normal((side, side), dtype=np.float32))
    best_s, stop = float("inf"), time.perf_counter() + 0.1
    while time.perf_counter() < stop:
        started = time.perf_counter()
        torch.mm(a, a)
        best_s = min(best_s, time.perf_counter() - started)
    return 2.0 * side**3 / best_s
