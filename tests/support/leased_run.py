"""A run of `cleave train`'s loop on devices that keep weights, for tests that kill it: a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.leased_training import Told, on_devices
from tests.support.runs import TEXT, train

from cleave.config import TrainConfig
from cleave.events import AnyEvent, StepDone
from cleave.train.loop import Summary
from cleave.train.offload.distribute import distribute

STEPS = 8


def config_in(directory: Path) -> TrainConfig:
    data = directory / "text.txt"
    data.write_text(TEXT)
    return TrainConfig(
        model="tiny-llama",
        data=data,
        steps=STEPS,
        sequence=16,
        batch=2,
        warmup_steps=2,
        eval_every=0,
        eval_batches=1,
        save_every=3,
        tensorboard=False,
        sample=0,
    )


def train_leased(
    directory: Path, told: Told, *, resume: bool, act: Callable[[AnyEvent], object] = lambda event: None
) -> Summary:
    with on_devices(told, every=2) as fleet:
        return train(
            config_in(directory),
            directory / "run",
            wrap=lambda model: distribute(model, fleet.cluster, offload="always", grain="resident", tell=told),
            resume=resume,
            act=act,
        )


def _die(event: AnyEvent) -> None:
    if isinstance(event, StepDone) and event.step == STEPS - 2:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train_leased(Path(sys.argv[1]), Told(), resume=False, act=_die)
