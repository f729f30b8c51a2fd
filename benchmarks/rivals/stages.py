# pyright: standard
"""One stage of the model for torch.distributed.pipelining: a run of layers, the embedding or the head at the ends."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.rivals.shape import SEQUENCE, Work
from benchmarks.rivals.work import build
from torch import nn


def layer_runs(layers: int, stages: int) -> list[range]:
    """Cut layers into runs as even as can be; what is left over goes to the middle, away from embedding and head."""
    sizes = [layers // stages] * stages
    middle_first = sorted(range(stages), key=lambda stage: abs(stage - (stages - 1) / 2))
    for stage in middle_first[: layers % stages]:
        sizes[stage] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


class Stage(nn.Module):
    """Layers of one device. Activations and their gradients travel in `wire`; arithmetic is fp32."""

    def __init__(self, work: Work, stage: int, stages: int, wire: torch.dtype) -> None:
        super().__init__()
        whole: Any = build(work)
        model = whole.get_base_model() if work.lora else whole
        run = layer_runs(work.layers, stages)[stage]
        self.embedding = model.model.embed_tokens if stage == 0 else None
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[number] for number in run)
        self.norm = model.model.norm if stage == stages - 1 else None
        self.head = model.lm_head if stage == stages - 1 else None
        self.wire = wire
        self.is_first = stage == 0
        self.hidden = work.hidden

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(given) if self.embedding is not None else given.float()
        positions = torch.arange(SEQUENCE).unsqueeze(0)
        rotation = self.rotary(hidden, positions)
        for layer in self.layers:
            out = layer(hidden, position_ids=positions, position_embeddings=rotation)
            hidden = out[0] if isinstance(out, tuple) else out
        if self.norm is None or self.head is None:
            return hidden.to(self.wire)
        return self.head(self.norm(hidden))

    def examples(self, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An input and an output of a micro-batch, without values."""
        tokens = torch.empty(sequences, SEQUENCE, dtype=torch.long, device="meta")
        between = torch.empty(sequences, SEQUENCE, self.hidden, dtype=self.wire, device="meta", requires_grad=True)
        logits = torch.empty(sequences, SEQUENCE, 256, device="meta", requires_grad=True)
        return tokens if self.is_first else between, logits if self.head is not None else between
