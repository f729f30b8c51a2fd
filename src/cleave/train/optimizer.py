# pyright: standard
"""The optimizer of `cleave train`: AdamW, and its learning rate by step."""

from __future__ import annotations

import math

import torch

from cleave.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of a step, counted from 1: linear warm-up, then cosine decay to the minimum at the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    floor = config.minimum_learning_rate_share
    return config.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def adamw(config: TrainConfig, model: torch.nn.Module) -> torch.optim.AdamW:
    """Optimize every trained parameter; decay matrices only, not norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
