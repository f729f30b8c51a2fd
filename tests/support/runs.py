"""Training runs in this process, on local torch unless a test supplies devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from cleave.config import TrainConfig
from cleave.core.verify.vouching import Vouching
from cleave.events import AnyEvent, StepDone
from cleave.train.loop import Summary, Traffic, run
from cleave.train.undo import Watching

Wrap = Callable[[torch.nn.Module], torch.nn.Module]
TEXT = "".join(f"the {number} sheep jumped over {number * 7 % 13} gates\n" for number in range(300))


def train(
    config: TrainConfig,
    directory: Path,
    *,
    wrap: Wrap = lambda model: model,
    resume: bool = False,
    events: list[AnyEvent] | None = None,
    act: Callable[[AnyEvent], object] = lambda event: None,
    clock: Callable[[], float] = time.perf_counter,
    watching: Watching = lambda: nullcontext(Vouching()),
) -> Summary:
    """Train as configured; each event goes to `act`, then to the list."""

    def observe(event: AnyEvent) -> None:
        act(event)
        if events is not None:
            events.append(event)

    return run(
        config,
        directory,
        wrap=wrap,
        observe=observe,
        traffic=Traffic,
        watching=watching,
        resume=resume,
        clock=clock,
    )


def before_forward(number: int, act: Callable[[], object]) -> Wrap:
    """Act just before the `number`-th forward pass, counted from 1."""

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        count = 0

        def hook(*_: object) -> None:
            nonlocal count
            count += 1
            if count == number:
                act()

        model.register_forward_pre_hook(hook)
        return model

    return wrap


def at_steps(actions: dict[int, Callable[[], object]]) -> Callable[[AnyEvent], object]:
    """Run the action of a step when that step is done."""
    return lambda event: actions.get(event.step, lambda: None)() if isinstance(event, StepDone) else None
