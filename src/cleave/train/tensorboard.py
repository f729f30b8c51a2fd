# pyright: standard
"""Write the events of a run as TensorBoard curves, if TensorBoard is installed.

TensorBoard's own writer hands records to a thread, which dies with a traceback when the disk is full and then fails
the caller. The format is simple, so records go through `AppendedFile` instead, which waits for free space.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cleave.disk import AppendedFile
from cleave.events import AnyEvent, Evaluated, Listener, RolledBack, StepDone


@contextmanager
def with_tensorboard(run_directory: Path, observe: Listener, first_step: int) -> Iterator[Listener]:
    """Yield a listener that also writes TensorBoard records; curves are cut at `first_step`, and at steps undone."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        yield observe
        return
    name = f"events.out.tfevents.{time.time_ns()}.{platform.node()}.{os.getpid()}"  # one file per process
    file = AppendedFile(run_directory / "tensorboard" / name)
    records = RecordWriter(file)

    def write(step: int, **content: object) -> None:
        records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())

    def both(event: AnyEvent) -> None:
        observe(event)
        if isinstance(event, RolledBack):
            write(event.step + 1, session_log=SessionLog(status=SessionLog.START))
        if isinstance(event, StepDone | Evaluated):
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in _curves(event).items()]
            write(event.step, summary=Summary(value=values))

    write(0, file_version="brain.Event:2")
    write(first_step + 1, session_log=SessionLog(status=SessionLog.START))
    try:
        yield both
    finally:
        file.close()


def _curves(event: StepDone | Evaluated) -> dict[str, float]:
    if isinstance(event, Evaluated):
        return {"loss/evaluation": event.loss}
    return {
        "loss/training": event.loss,
        "learning_rate": event.learning_rate,
        "gradient_norm": event.gradient_norm,
        "tokens_per_s": event.tokens / max(event.seconds, 1e-9),
        "fleet/devices": event.devices,
        "fleet/down_bytes": event.down_bytes,
        "fleet/up_bytes": event.up_bytes,
    }
