"""A stand-in fleet in this process: runs batches through stacks in plain torch, from their description alone.

It verifies descriptions, masks, tables and scales. Products of single layers are computed here too and counted, so
that a test sees whether a model ran as a stack or by gemms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn import functional

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Batch, Gradients, Matrix
from cleave.core.model.decoder import Attention, Decoder, Head, Mlp, Norm, Weight
from cleave.core.model.gemms import Linear, Role
from cleave.core.plan.choose import LayerChoice, Local, PassChoice, PassWork
from cleave.core.plan.gemm.layer import LinearPlan
from cleave.protocol.numbers import Encoded, NumpyCodec

_Result = TypeVar("_Result")
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@dataclass(eq=False)
class Operand:
    rows: int
    cols: int
    format: WireFormat
    numbers: torch.Tensor | None = None
    """Values after decoding, as devices see them."""

    def bind(self, matrix: Matrix | None, encoded: Encoded | None = None) -> None:
        codec = NumpyCodec()
        if encoded is None and matrix is not None:
            assert matrix.shape == (self.rows, self.cols)
            encoded = codec.encode(matrix, self.format)
        if encoded is not None:
            decoded = np.empty((self.rows, self.cols), np.float32)
            codec.decode_into(memoryview(encoded), self.format, decoded)
            self.numbers = torch.from_numpy(decoded)


@dataclass
class LocalColumns:
    wire: WireFormat = "fp32"
    refusal: str | None = None
    passes: list[tuple[Decoder, Batch]] = field(default_factory=list)
    products: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tensor(self, rows: int, cols: int, format: WireFormat | None = None) -> Operand:
        return Operand(rows, cols, format or self.wire)

    def choose_layer(self, linear: Linear, local: Local | None = None) -> LayerChoice:
        return LayerChoice(plan=None, is_remote=True, reason="")

    def step_ended(self) -> None:
        pass

    def submit(
        self,
        role: Role,
        a: tuple[Any, ...],
        b: tuple[Any, ...],
        plan: LinearPlan | None,
        *,
        priority: int = 1,
        format: WireFormat | None = None,
    ) -> Future[list[Matrix]]:
        with self._lock:
            self.products += 1
        with torch.autocast("cpu", enabled=False):
            match role:
                case "forward":
                    results = [a[0].numbers @ one.numbers.T for one in b]
                case "grad_input":
                    results = [sum(left.numbers @ right.numbers for left, right in zip(a, b, strict=True))]
                case "grad_weight":
                    results = [left.numbers.T @ right.numbers for left in a for right in b]
        return _done([result.numpy() for result in results])

    def choose_pass(self, work: PassWork, local: Local | None = None, *, must: bool = False) -> PassChoice:
        return PassChoice(is_resident=self.refusal is None, plan=None, reason=self.refusal or "")

    def run(self, stack: Decoder, batch: Batch, plan: object, lease: object = None, **_: object) -> LocalPass:
        assert lease is None, "plans without devices lend nothing"
        with self._lock:
            self.passes.append((stack, batch))
        return LocalPass(stack, batch)

    def wait(self, future: Future[_Result]) -> _Result:
        return future.result()

    def lease(self, decoder: Decoder, plan: object, lent: object) -> object:
        raise AssertionError("plans without devices lend nothing")

    def place(self, work: PassWork) -> None:
        raise AssertionError("plans without devices lend nothing")

    def rehouse(self, work: PassWork, lease: object, shards: object) -> None:
        raise AssertionError("plans without devices lend nothing")

    def intact(self, lease: object) -> frozenset[int]:
        raise AssertionError("plans without devices lend nothing")

    def rescue(self) -> AbstractContextManager[None]:
        return nullcontext()

    def before_closing(self, call: Callable[[], None]) -> None:
        pass


class LocalPass:
    def __init__(self, stack: Decoder, batch: Batch) -> None:
        self._stack, self._batch = stack, batch
        self._is_spent = False
        with torch.inference_mode(False), torch.enable_grad():
            self._x = torch.from_numpy(batch.x).double().requires_grad_(batch.wants_dx)
            self._parameters = [
                operand.numbers.double().requires_grad_(one.is_trained and batch.is_trained)
                for one, operand in zip(stack.parameters, batch.operands, strict=True)
            ]
            with torch.autocast("cpu", enabled=False):
                self._y = _through(stack, batch, self._x, self._parameters)
        self.outputs = _done(self._y.detach().float().numpy())

    def backward(self, dy: Matrix | None) -> Future[Gradients]:
        assert self._batch.is_trained
        assert not self._is_spent, "a pass has one backward"
        self._is_spent = True
        given = self._batch.scales if self._stack.head is not None else dy
        assert given is not None
        wanted = [one for one in (self._x, *self._parameters) if one.requires_grad]
        found = iter(torch.autograd.grad(self._y, wanted, torch.from_numpy(given).double()))
        x, *parameters = [
            next(found).float().numpy() if one.requires_grad else None for one in (self._x, *self._parameters)
        ]
        return _done(Gradients(dx=x, parameters=tuple(parameters)))


def _done(result: _Result) -> Future[_Result]:
    future: Future[_Result] = Future()
    future.set_result(result)
    return future


def _through(stack: Decoder, batch: Batch, x: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
    def view(number: int) -> torch.Tensor:
        found = stack.views[number]
        return parameters[found.parameter][slice(*found.rows), slice(*found.cols)]

    for part in stack.parts:
        match part:
            case Attention():
                x = x + _attention(view, part, batch, x)
            case Mlp():
                inner = _norm(view, part.norm, x)
                up, act = _linear(view, part.up, inner), _ACTIVATIONS[part.activation]
                x = x + _linear(
                    view, part.down, act(up) if part.gate is None else act(_linear(view, part.gate, inner)) * up
                )
    return x if stack.head is None else _losses(view, stack.head, batch, x)


def _linear(view: Any, weight: Weight, x: torch.Tensor) -> torch.Tensor:
    matrix = view(weight.weight)
    y = x @ (matrix if weight.is_transposed else matrix.T)
    if weight.bias is not None:
        y = y + view(weight.bias)
    if weight.adapter is not None:
        down, up = weight.adapter
        y = y + weight.scale * (x @ view(down).T) @ view(up).T
    return y


def _norm(view: Any, norm: Norm, x: torch.Tensor) -> torch.Tensor:
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * view(norm.weight)
    return y if norm.bias is None else y + view(norm.bias)


def _attention(view: Any, part: Attention, batch: Batch, x: torch.Tensor) -> torch.Tensor:
    inner = _norm(view, part.norm, x)
    shape = (batch.sequences, batch.sequence, -1, part.head_dim)
    q, k, v = (_linear(view, one, inner).view(shape).transpose(1, 2) for one in (part.q, part.k, part.v))
    if part.is_rotary:
        assert batch.rotary is not None
        table = torch.from_numpy(batch.rotary).double().view(-1, 1, batch.sequence, 2 * part.head_dim)
        cosines, sines = table.chunk(2, -1)
        q, k = (one * cosines + torch.cat((-one.chunk(2, -1)[1], one.chunk(2, -1)[0]), -1) * sines for one in (q, k))
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    position = torch.arange(batch.sequence)
    visible = position[:, None] >= position
    if part.window is not None:
        visible = visible & (position > position[:, None] - part.window)
    visible = visible.expand(batch.sequences, 1, -1, -1)
    if batch.mask is not None:
        visible = visible & (torch.from_numpy(batch.mask) != 0)[:, None, None, :]
    scores = (q @ k.transpose(-1, -2) * part.scale).masked_fill(~visible, -1e30)
    shares = scores.softmax(-1) * visible
    return _linear(view, part.o, (shares @ v).transpose(1, 2).reshape(len(x), -1))


def _losses(view: Any, head: Head, batch: Batch, x: torch.Tensor) -> torch.Tensor:
    assert batch.targets is not None
    logits = _linear(view, head.weight, x if head.norm is None else _norm(view, head.norm, x))
    words = torch.from_numpy(batch.targets).long()[:, 0]
    return functional.cross_entropy(logits, words.clamp(min=-1), ignore_index=-1, reduction="none")[:, None]
