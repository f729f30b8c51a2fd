# pyright: standard
"""One batch through a decoder stack on the fleet, as one autograd function.

The input and all trained parameters are inputs of the function, so hooks, clipping, accumulation and tied weights see
ordinary gradients. With targets the result is the loss: the fleet then goes on into backward by itself, and
`backward()` only collects. Also reads masks, position tables and labels as a batch has them. Knows no modules.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from cleave.core.cost.gemm import WireFormat
from cleave.protocol.decoder import Batch, Gradients, Pass, Stack
from cleave.protocol.numbers import Matrix
from cleave.train.offload.families import Description
from cleave.train.offload.linear import HALVES, Multiplier, Weights, compute_dtype, wire_format
from cleave.train.offload.overlap import Overlap

_Result = TypeVar("_Result")


@runtime_checkable
class Columns(Multiplier, Protocol):
    """A fleet that takes batches through stacks as well."""

    def may_run(
        self, stack: Stack, sequences: int, sequence: int, is_trained: bool, *, must: bool = False
    ) -> str | None:
        """None if it can and, unless it must, is worth it; else why not, which the fleet has told already."""
        ...

    def run(self, stack: Stack, batch: Batch) -> Pass: ...

    def wait(self, future: Future[_Result]) -> _Result: ...


class UnfitError(Exception):
    """A reason why a batch is nothing for a stack."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    words: Matrix
    """tokens x 1: negative where there is none"""
    scales: Matrix
    """tokens x 1: what a row's loss counts in the loss"""


def run(
    fleet: Columns,
    weights: Weights,
    description: Description,
    x: torch.Tensor,
    *,
    mask: Matrix | None,
    rotary: Matrix | None,
    targets: Targets | None,
    is_trained: bool,
    overlap: Overlap | None = None,
) -> torch.Tensor:
    """What leaves the stack, in the shape and dtype of x; with targets the loss."""
    batch = Batch(
        x=_matrix(x),
        sequences=x.shape[0],
        sequence=x.shape[1],
        operands=_operands(fleet, weights, description),
        mask=mask,
        rotary=rotary,
        targets=None if targets is None else targets.words,
        scales=None if targets is None else targets.scales,
        is_trained=is_trained,
        wants_dx=is_trained and x.requires_grad,
        is_piecemeal=overlap is not None and any(one in overlap for one in description.parameters),
    )
    return _Stack.apply(fleet, weights, overlap, description, batch, x, *description.parameters)  # type: ignore[no-any-return]


def _operands(fleet: Columns, weights: Weights, description: Description) -> tuple[Any, ...]:
    return tuple(weights.operand(one, _format(fleet, one)) for one in description.parameters)


def _format(fleet: Columns, parameter: torch.Tensor) -> WireFormat:
    """Vectors are few, and norms sensitive, so those travel as they are."""
    return wire_format(fleet, compute_dtype(parameter)) if parameter.dim() > 1 else HALVES.get(parameter.dtype, "fp32")


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fleet: Columns,
        weights: Weights,
        overlap: Overlap | None,
        description: Description,
        batch: Batch,
        x: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        running = fleet.run(description.stack, batch)
        outputs = torch.from_numpy(fleet.wait(running.outputs))
        if batch.is_trained:
            ctx.save_for_backward(x, *parameters)  # so that torch notices who writes into them before backward
            ctx.fleet, ctx.description, ctx.batch, ctx.running = fleet, description, batch, running
            ctx.weights, ctx.overlap = weights, overlap
        if batch.scales is not None:
            return torch.sum(outputs * torch.from_numpy(batch.scales), dtype=torch.float64).to(x.device, torch.float32)
        return outputs.view(x.shape).to(x.device, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        fleet: Columns = ctx.fleet
        batch: Batch = ctx.batch
        x, *_ = ctx.saved_tensors
        running: Pass | None = ctx.running
        if running is None:  # a pass has one backward: who retains the graph for another starts anew
            batch = replace(batch, operands=_operands(fleet, ctx.weights, ctx.description))
            running = fleet.run(ctx.description.stack, batch)
        ctx.running, ctx.batch = None, replace(batch, operands=())  # who keeps the loss does not keep the weights
        is_loss = batch.scales is not None
        returned = running.backward(None if is_loss else _matrix(grad))
        scale = grad.item() if is_loss else 1.0

        def like(tensor: torch.Tensor, matrix: Matrix | None) -> torch.Tensor | None:
            if matrix is None:
                return None
            gradient = torch.from_numpy(matrix).view(tensor.shape)
            return (gradient if scale == 1.0 else gradient * scale).to(tensor.device, tensor.dtype)

        updated: set[int] = set()
        for number, matrix in running.arrivals() if batch.is_piecemeal else ():
            parameter = ctx.description.parameters[number]
            if parameter in ctx.overlap:
                updated.add(number)
                ctx.overlap.update(parameter, like(parameter, matrix))
                running.publish(number, ctx.weights.operand(parameter, _format(fleet, parameter)))
        gradients: Gradients = fleet.wait(returned)
        own = (
            None if number in updated else like(parameter, gradients.parameters[number])
            for number, parameter in enumerate(ctx.description.parameters)
        )
        return None, None, None, None, None, like(x, gradients.dx), *own


def _matrix(tensor: torch.Tensor) -> Matrix:
    return tensor.detach().cpu().reshape(-1, tensor.shape[-1]).float().contiguous().numpy()


# ------------------------------------------------------------------------------------------------ what a batch says


def padding(mask: torch.Tensor | None, x: torch.Tensor, window: int | None, attention: str) -> Matrix | None:
    """Which keys are padding, read from the mask a layer gets: causal, within the window, and nothing else."""
    sequences, sequence = x.shape[:2]
    if mask is None:
        if attention != "sdpa":
            raise UnfitError("there is no mask at all, so attention is not causal")
        return None
    if mask.dim() != 4 or mask.shape[-2:] != (sequence, sequence) or mask.shape[1] != 1:
        raise UnfitError(f"its mask is {tuple(mask.shape)}, which is more than causal and padding")
    is_additive = mask.dtype != torch.bool
    if is_additive and not ((mask == 0) | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        raise UnfitError("its mask adds to scores, which is more than causal and padding")
    visible = (mask == 0 if is_additive else mask)[:, 0].cpu().numpy()  # numpy compares many times faster than torch
    is_real = visible.diagonal(axis1=1, axis2=2).copy()
    position = np.arange(sequence)
    causal = position[:, None] >= position
    if window is not None:
        causal &= position > position[:, None] - window
    if not all(np.array_equal(seen, causal & real) for seen, real in zip(visible, is_real, strict=True)):
        raise UnfitError("its mask is more than causal and padding (packed sequences, prefixes, or your own)")
    if is_real.all():
        return None
    if is_additive and not visible.any(-1).all():
        raise UnfitError("eager attention lets rows that see no key see all; use sdpa")
    return np.broadcast_to(is_real, (sequences, sequence)).astype(np.float32)


def rotary_table(tables: tuple[torch.Tensor, torch.Tensor], head_dim: int) -> Matrix:
    """Cosines beside sines; once for all sequences if they have the same positions."""
    cosines, sines = tables
    if cosines.dim() != 3 or cosines.shape[-1] != head_dim or cosines.shape != sines.shape:
        raise UnfitError(f"its rotary tables are {tuple(cosines.shape)}, expected sequences x rows x {head_dim}")
    if torch.equal(cosines, cosines[:1].expand_as(cosines)) and torch.equal(sines, sines[:1].expand_as(sines)):
        cosines, sines = cosines[:1], sines[:1]
    return _matrix(torch.cat((cosines, sines), dim=-1))


def targets_of(
    labels: torch.Tensor,
    vocabulary: int,
    *,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: object,
) -> Targets | None:
    """Labels as transformers' `ForCausalLMLoss` reads them; None where torch itself should raise or give NaN."""
    words = shift_labels
    if words is None:
        words = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    words = words.detach().reshape(-1, 1).cpu()
    is_word = words != ignore_index
    count = int(is_word.sum()) if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, torch.Tensor):
        if count.numel() != 1:
            return None
        count = count.item()
    if count == 0 or not (((words >= 0) & (words < vocabulary)) | ~is_word).all():
        return None
    return Targets(
        words=torch.where(is_word, words, -1).float().numpy(),
        scales=np.where(is_word.numpy(), np.float32(1.0 / count), np.float32(0.0)),
    )
