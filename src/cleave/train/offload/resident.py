# pyright: standard
"""Run one batch through a decoder stack on the fleet, as a single autograd function.

The input and all trained parameters are inputs of the function, so hooks, clipping, accumulation and tied weights see
ordinary gradients. With targets the result is the loss: the fleet then starts backward by itself and `backward()` only
collects. Also converts masks, rotary tables and labels of a batch. Knows no modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from cleave.core.model.batch import Batch, Gradients, Matrix
from cleave.core.model.decoder import Decoder
from cleave.core.model.shard import Shard
from cleave.core.plan.choose import Local, PassChoice, PassWork
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import LeaseLost
from cleave.train.offload.families import Description
from cleave.train.offload.lease_held import FleetPassLease
from cleave.train.offload.leases import Leases
from cleave.train.offload.linear import Multiplier, Weights, parameter_format
from cleave.train.offload.overlap import Overlap

_Result = TypeVar("_Result")


@runtime_checkable
class Columns(Multiplier, Protocol):
    """A fleet that can also run batches through decoder stacks."""

    def choose_pass(self, work: PassWork, local: Local = ..., *, must: bool = False) -> PassChoice:
        """Choose the devices to hold the layers for such a batch, or give the reason why not; the fleet reports it."""
        ...

    def run(
        self,
        decoder: Decoder,
        batch: Batch[Any],
        plan: ResidentPlan | None,
        lease: Any = None,
        *,
        dy: Matrix | None = None,
        is_exact: bool = ...,
        is_beside: bool = ...,
    ) -> Pass:
        """Start a batch; with `dy`, the gradient of its output is known and no output is wanted.

        `is_exact` brings gradients back unrounded; `is_beside` lets other passes run meanwhile, on other devices.
        """
        ...

    def lease(self, decoder: Decoder, plan: ResidentPlan, lent: Any) -> Any:
        """Prepare to lend parameters and their optimizer states to devices."""
        ...

    def place(self, work: PassWork) -> ResidentPlan | None:
        """Plan work again that was lost; None if no device can do it."""
        ...

    def rehouse(self, work: PassWork, lease: Any, shards: Collection[Shard]) -> ResidentPlan | None:
        """Plan for a lease with other devices for some shards; None if none can keep them."""
        ...

    def intact(self, lease: Any) -> frozenset[int]:
        """Leased parameters that their devices still hold."""
        ...

    def rescue(self) -> AbstractContextManager[None]:
        """Do work that must not wait for devices: while none is connected, this server computes."""
        ...

    def before_closing(self, call: Callable[[], None]) -> None:
        """Have something done before the fleet closes."""
        ...

    def wait(self, future: Future[_Result]) -> _Result: ...


class Pass(Protocol):
    """A batch running through a decoder on the fleet."""

    @property
    def outputs(self) -> Future[Matrix]:
        """tokens x hidden; with a head tokens x 1: the loss per row, 0 without a target."""
        ...

    def backward(self, dy: Matrix | None) -> Future[Gradients]:
        """Return gradients. `dy` is tokens x hidden; None with a head: `scales` are known and backward has started."""
        ...

    def arrivals(self) -> Iterator[tuple[int, Matrix]]:
        """Yield gradients of a piecemeal batch as they complete; maybe not all of them, while `backward` has all."""
        ...

    def publish(self, parameter: int, operand: Any) -> None:
        """Send new values of a parameter to the devices that hold it, for their next pass."""
        ...


class UnfitError(Exception):
    """The reason why a batch cannot run as a stack."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Labels of a batch, one row per token."""

    words: Matrix
    """tokens x 1: target token, negative where there is none."""
    scales: Matrix
    """tokens x 1: weight of each row in the loss."""


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
    plan: ResidentPlan | None,
    work: PassWork,
    overlap: Overlap | None = None,
    leases: Leases | None = None,
) -> torch.Tensor:
    """Return the output of the stack, in the shape and dtype of `x`; with targets, the loss."""
    lease = leases.for_training(description, plan, work) if leases is not None and is_trained else None
    batch = Batch(
        x=_matrix(x),
        sequences=x.shape[0],
        sequence=x.shape[1],
        operands=_operands(fleet, weights, description, lease),
        mask=mask,
        rotary=rotary,
        targets=None if targets is None else targets.words,
        scales=None if targets is None else targets.scales,
        is_trained=is_trained,
        wants_dx=is_trained and x.requires_grad,
        is_piecemeal=overlap is not None and any(one in overlap for one in description.parameters),
    )
    call = _Call(fleet, weights, overlap, description, plan, leases)
    return _Stack.apply(call, batch, lease, x, *description.parameters)  # type: ignore[no-any-return]


def _operands(
    fleet: Columns, weights: Weights, description: Description, lease: FleetPassLease | None = None
) -> tuple[Any, ...]:
    leased = () if lease is None else lease.parameters
    return tuple(
        None if number in leased else weights.operand(one, parameter_format(fleet, one))
        for number, one in enumerate(description.parameters)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """What forward and backward of one batch share."""

    fleet: Columns
    weights: Weights
    overlap: Overlap | None
    description: Description
    plan: ResidentPlan | None
    leases: Leases | None

    def run(self, batch: Batch[Any], lease: FleetPassLease | None) -> Pass:
        return self.fleet.run(self.description.stack, batch, self.plan if lease is None else lease.plan, lease)

    def run_again(self, batch: Batch[Any], lease: FleetPassLease | None = None) -> tuple[Pass, Batch[Any]]:
        """Run a batch with the weights as they are now, or with those of another lease."""
        batch = replace(batch, operands=_operands(self.fleet, self.weights, self.description, lease))
        return self.run(batch, lease), batch

    def begin_again(self, lease: FleetPassLease, fault: LeaseLost) -> FleetPassLease | None:
        """Recover from lost devices; return the lease under which to run again, if any."""
        assert self.leases is not None, "else nothing was leased"
        return self.leases.begin_again(lease, fault)


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        batch: Batch[Any],
        lease: FleetPassLease | None,
        x: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        running = call.run(batch, lease)
        while True:
            try:
                matrix = call.fleet.wait(running.outputs)
                break
            except LeaseLost as fault:
                assert lease is not None, "else no device can take weights along"
                lease = call.begin_again(lease, fault)
                running, batch = call.run_again(batch, lease)
        outputs = torch.from_numpy(matrix)
        if batch.is_trained:
            ctx.save_for_backward(x, *parameters)  # lets torch detect writes to them before backward
            ctx.call, ctx.batch, ctx.running, ctx.lease = call, batch, running, lease
        if batch.scales is not None:
            return torch.sum(outputs * torch.from_numpy(batch.scales), dtype=torch.float64).to(x.device, torch.float32)
        return outputs.view(x.shape).to(x.device, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        call: _Call = ctx.call
        batch: Batch[Any] = ctx.batch
        lease: FleetPassLease | None = ctx.lease
        x, *_ = ctx.saved_tensors
        running: Pass | None = ctx.running
        if running is None:  # a pass has one backward; a retained graph needs another pass
            lease = None
            running, batch = call.run_again(batch)
        ctx.running, ctx.lease = None, None
        ctx.batch = replace(batch, operands=())  # a kept loss must not keep the weights
        is_loss = batch.scales is not None
        dy, scale = (None, grad.item()) if is_loss else (_matrix(grad), 1.0)
        description, overlap = call.description, call.overlap

        def like(tensor: torch.Tensor, matrix: Matrix | None) -> torch.Tensor | None:
            if matrix is None:
                return None
            gradient = torch.from_numpy(matrix).view(tensor.shape)
            return (gradient if scale == 1.0 else gradient * scale).to(tensor.device, tensor.dtype)

        returned = running.backward(dy)
        updated: set[int] = set()
        for number, matrix in running.arrivals() if batch.is_piecemeal else ():
            parameter = description.parameters[number]
            if overlap is not None and parameter in overlap:
                updated.add(number)
                gradient = like(parameter, matrix)
                assert gradient is not None
                overlap.update(parameter, gradient)
                running.publish(number, call.weights.operand(parameter, parameter_format(call.fleet, parameter)))
        while True:
            try:
                gradients: Gradients = call.fleet.wait(returned)
                if lease is not None:
                    assert call.leases is not None
                    call.leases.returned(lease, running, batch, scale)
                break
            except LeaseLost as fault:
                assert lease is not None, "else no device can take weights along"
                lease = call.begin_again(lease, fault)
                running, batch = call.run_again(batch, lease)
                returned = _returned_again(call.fleet, running, dy, is_loss=is_loss)
        own = (
            None if number in updated else like(parameter, gradients.parameters[number])
            for number, parameter in enumerate(description.parameters)
        )
        return None, None, None, like(x, gradients.dx), *own


def _returned_again(fleet: Columns, running: Pass, dy: Matrix | None, *, is_loss: bool) -> Future[Gradients]:
    """Return the gradients of a pass that runs once more, whose output nobody needs."""
    if not is_loss:
        with suppress(LeaseLost):  # its gradients fail the same way
            fleet.wait(running.outputs)
    return running.backward(dy)


def _matrix(tensor: torch.Tensor) -> Matrix:
    return tensor.detach().cpu().reshape(-1, tensor.shape[-1]).float().contiguous().numpy()


# ------------------------------------------------------------------------------------------------ inputs of a batch


def padding(mask: torch.Tensor | None, x: torch.Tensor, window: int | None, attention: str) -> Matrix | None:
    """Extract padding from a layer's mask, which must otherwise be exactly causal within the window; None if none."""
    sequences, sequence = x.shape[:2]
    if mask is None:
        if attention != "sdpa":
            raise UnfitError("there is no mask at all, so attention is not causal")
        return None
    if mask.dim() != 4 or mask.shape[-2:] != (sequence, sequence) or mask.shape[1] != 1:
        raise UnfitError(f"its mask is {tuple(mask.shape)}, but devices support only causal masks with padding")
    is_additive = mask.dtype != torch.bool
    if is_additive and not ((mask == 0) | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        raise UnfitError("its mask adds to scores, but devices support only causal masks with padding")
    visible = (mask == 0 if is_additive else mask)[:, 0].cpu().numpy()  # numpy compares far faster than torch
    is_real = visible.diagonal(axis1=1, axis2=2).copy()
    position = np.arange(sequence)
    causal = position[:, None] >= position
    if window is not None:
        causal &= position > position[:, None] - window
    if not all(np.array_equal(seen, causal & real) for seen, real in zip(visible, is_real, strict=True)):
        raise UnfitError("its mask is not just causal with padding (packed sequences, a prefix, or a custom mask)")
    if is_real.all():
        return None
    if is_additive and not visible.any(-1).all():
        raise UnfitError("eager attention lets fully masked rows attend to everything; use sdpa")
    return np.broadcast_to(is_real, (sequences, sequence)).astype(np.float32)


def rotary_table(tables: tuple[torch.Tensor, torch.Tensor], head_dim: int) -> Matrix:
    """Return cosines next to sines, only once if all sequences have the same positions."""
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
    """Read labels as transformers' `ForCausalLMLoss` does; None where torch itself should raise or return NaN."""
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
