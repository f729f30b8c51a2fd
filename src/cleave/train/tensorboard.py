# pyright: standard
"""The events of a run as TensorBoard's curves, where TensorBoard is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cleave.events import AnyEvent, Evaluated, Listener, StepDone


@contextmanager
def with_tensorboard(run_directory: Path, observe: Listener, first_step: int) -> Iterator[Listener]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield observe
        return
    with SummaryWriter(str(run_directory / "tensorboard"), purge_step=first_step + 1) as writer:

        def both(event: AnyEvent) -> None:
            observe(event)
            match event:
                case StepDone():
                    writer.add_scalar("loss/training", event.loss, event.step)
                    writer.add_scalar("learning_rate", event.learning_rate, event.step)
                    writer.add_scalar("gradient_norm", event.gradient_norm, event.step)
                    writer.add_scalar("tokens_per_s", event.tokens / event.seconds, event.step)
                    writer.add_scalar("fleet/devices", event.devices, event.step)
                    writer.add_scalar("fleet/down_bytes", event.down_bytes, event.step)
                    writer.add_scalar("fleet/up_bytes", event.up_bytes, event.step)
                case Evaluated():
                    writer.add_scalar("loss/evaluation", event.loss, event.step)
                case _:
                    pass

        yield both
