# pyright: standard
"""What a rank does in a step, for every rival made of torch alone: one class per arrangement, `step(tokens) -> loss`.

`tokens` is the global batch; a rank takes its part of it. The loss is that of the rank's part, None where it has none.
All use fp32 arithmetic, one thread, and AdamW where the weights are. Ranks that an arrangement leaves out stay idle.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from benchmarks.rivals.shape import SEQUENCES, Work
from benchmarks.rivals.stages import Stage
from benchmarks.rivals.variants import Variant
from benchmarks.rivals.work import adamw, batch, build, loss_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

_WIRES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CPU: Final = torch.device("cpu")


class Idle:
    """A rank that the arrangement leaves out."""

    def step(self, _: torch.Tensor) -> float | None:
        return None


class Alone:
    """One device, no network."""

    def __init__(self, work: Work) -> None:
        self.model: Any = build(work)
        self.optimizer = adamw(self.model)

    def step(self, tokens: torch.Tensor) -> float | None:
        loss = loss_of(self.model(input_ids=tokens).logits, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class DataParallel:
    """torch DistributedDataParallel over gloo; gradients in fp32, or fp16 by torch's hook (the bf16 one wants NCCL)."""

    def __init__(self, work: Work, wire: str) -> None:
        self.model: Any = nn.parallel.DistributedDataParallel(build(work), gradient_as_bucket_view=True)
        if wire == "fp16":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        self.optimizer = adamw(self.model)

    def step(self, tokens: torch.Tensor) -> float | None:
        own = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = loss_of(self.model(input_ids=own).logits, own)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Sharded(DataParallel):
    """torch fully_shard (FSDP 2) over gloo: every layer a unit, and the rest one more."""

    def __init__(self, work: Work, wire: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model: Any = build(work)
        inner = model.get_base_model() if work.lora else model
        # Parameters may travel in bf16 only if they are computed with in bf16, so fp32 arithmetic means fp32 here;
        # gradients are reduced in the format of the wire.
        policy = MixedPrecisionPolicy(reduce_dtype=_WIRES[wire])
        for layer in inner.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model = model
        self.optimizer = adamw(model)


class Pipeline:
    """torch.distributed.pipelining; with several pipelines, the same stages average their gradients (as DT-FM does)."""

    def __init__(self, work: Work, variant: Variant, pipeline: int, stage: int, groups: list[Any], mates: Any) -> None:
        stages = len(variant.pipelines[0])
        self.module = Stage(work, stage, stages, _WIRES[variant.wire])
        given, made = self.module.examples(SEQUENCES // len(variant.pipelines) // variant.micro_batches)
        place = PipelineStage(
            self.module, stage, stages, _CPU, input_args=(given,), output_args=(made,), group=groups[pipeline]
        )
        schedule = ScheduleGPipe if variant.kind == "gpipe" else Schedule1F1B
        self.schedule = schedule(place, variant.micro_batches, loss_of)
        self.optimizer = adamw(self.module)
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.pipeline, self.pipelines = pipeline, len(variant.pipelines)
        self.mates = mates
        self.wire = _WIRES[variant.wire]

    def step(self, tokens: torch.Tensor) -> float | None:
        own = tokens.chunk(self.pipelines)[self.pipeline]
        losses: list[torch.Tensor] = []
        given = (own,) if self.is_first else ()
        if self.is_last:
            self.schedule.step(*given, target=own, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*given, return_outputs=False)
        if self.pipelines > 1:
            self._average()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else None

    def _average(self) -> None:
        gradients = [weight.grad for weight in self.module.parameters() if weight.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(self.wire)
        dist.all_reduce(flat, group=self.mates)
        flat = flat.float() / self.pipelines
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def arrange(work: Work, variant: Variant) -> Any:
    """Build this rank's part of an arrangement; all ranks must call it, in the same order."""
    rank = dist.get_rank()
    match variant.kind:
        case "alone":
            return Alone(work) if rank == variant.pipelines[0][0] else Idle()
        case "ddp":
            return DataParallel(work, variant.wire)
        case "fsdp":
            return Sharded(work, variant.wire)
        case "gpipe" | "1f1b":
            return _pipelined(work, variant, rank)


def _pipelined(work: Work, variant: Variant, rank: int) -> Any:
    groups = [dist.new_group(list(ranks)) for ranks in variant.pipelines]
    mates = [dist.new_group(list(ranks)) for ranks in zip(*variant.pipelines, strict=True)]
    for pipeline, ranks in enumerate(variant.pipelines):
        if rank in ranks:
            stage = ranks.index(rank)
            return Pipeline(work, variant, pipeline, stage, groups, mates[stage])
    return Idle()


def plain_losses(work: Work, steps: int) -> list[float]:
    """Losses of plain torch in one process: what every rival must show."""
    one = Alone(work)
    return [loss for number in range(steps) if (loss := one.step(batch(number))) is not None]
