"""The event log of a simulated run, in the words of a real one: `cleave view` shows either."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from pathlib import Path

from cleave.api.simulating import Simulated
from cleave.events import AnyEvent, DeviceJoined, DeviceLeft, EventLog, Note, RunFinished, RunStarted, StepDone
from cleave.sim.cleave import SYSTEM
from cleave.sim.course import Change, Course


def write_log(path: Path, simulated: Simulated, course: Course) -> None:
    """Write what happened in simulated batches to a new file; seconds count from their start."""
    now = 0.0
    log = EventLog(path, lambda: now)
    for now, event in happened(simulated, course):  # noqa: B007 - the log's clock reads it
        log(event)
    log.close()


def happened(simulated: Simulated, course: Course) -> Iterator[tuple[float, AnyEvent]]:
    """Yield the events of simulated batches, with the second of each. There is no loss, as nothing was computed."""
    setting, detail = simulated.setting, simulated.systems[SYSTEM].detail
    names = setting.profiles.names
    changes = course.changes
    if changes is None:
        changes = tuple(Change(0.0, device, True) for device in range(len(names)))
    yield (
        0.0,
        RunStarted(
            model=setting.model.name,
            parameters=int(setting.model.params),
            steps=len(course.batch_s),
            first_step=1,
            tokens_per_step=setting.tokens,
            wire=setting.wire,
            seed=setting.seed,
        ),
    )
    yield 0.0, Note(text=f"simulated, not run: no device computed anything (method: {course.method})")
    present, remaining = 0, list(changes)
    for number, (seconds, end) in enumerate(zip(course.batch_s, course.ends, strict=True), start=1):
        while remaining and remaining[0].at <= end:
            change = remaining.pop(0)
            present += 1 if change.joins else -1
            yield change.at, _joined(simulated, change.device) if change.joins else _left(names[change.device])
        yield (
            end,
            StepDone(
                step=number,
                loss=nan,
                learning_rate=0.0,
                gradient_norm=0.0,
                tokens=setting.tokens,
                seconds=seconds,
                predicted_s=float(detail["planned_s"]),
                waiting_s=seconds,
                devices=present,
                down_bytes=int(detail["server_down_bytes"]),
                up_bytes=int(detail["server_up_bytes"]),
            ),
        )
    yield course.ends[-1], RunFinished(step=len(course.batch_s), loss=None, reason="done")


def _joined(simulated: Simulated, device: int) -> DeviceJoined:
    profiles = simulated.setting.profiles
    return DeviceJoined(
        device=profiles.names[device],
        flops_per_s=float(profiles.flops_per_s[device]),
        down_bytes_per_s=float(profiles.down_bytes_per_s[device]),
        up_bytes_per_s=float(profiles.up_bytes_per_s[device]),
        latency_s=float(profiles.latency_s[device]),
        memory_bytes=float(profiles.memory_bytes[device]),
        kernel="simulated",
    )


def _left(device: str) -> DeviceLeft:
    return DeviceLeft(device=device, reason="churn", lost_tasks=0)
