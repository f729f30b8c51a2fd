# pyright: standard
"""The process of a cell: a server on loopback and its training loop, or plain torch (`python -m cleave.bench.worker`).

A job comes as the first line of standard input, messages go to standard output, and when standard input ends, so does
this process: whoever started it is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import psutil

from cleave import events
from cleave.bench.messages import AnyMessage, Failed, Finished, Job, Joined, Listening
from cleave.bench.records import Rates, Step
from cleave.errors import CleaveError

if TYPE_CHECKING:
    from cleave.api.fleet import Fleet
    from cleave.core.plan.resident.stages import ResidentPlan

_MOST_NAMED = 16
"""Devices up to which a plan in words names them."""


def main() -> None:
    """Run the job given on standard input."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no message
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    say = _Messages(output)
    try:
        import torch

        torch.set_num_threads(job.threads)
        if job.has_devices:
            _over_fleet(job, say)
        else:
            _plainly(job, say)
    except CleaveError as fault:
        say(Failed(reason=str(fault)))
    output.flush()
    os._exit(0)  # no thread of a library should keep a finished measurement waiting


class _Messages:
    def __init__(self, output: BinaryIO) -> None:
        self._output = output

    def __call__(self, message: AnyMessage) -> None:
        self._output.write(msgspec.json.encode(message) + b"\n")
        self._output.flush()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _plainly(job: Job, say: _Messages) -> None:
    from cleave.bench.training import build, train

    before_s = time.process_time()
    for step in train(build(job.cell), job.cell):
        now_s = time.process_time()
        say(
            Step(
                number=step.number,
                seconds=step.seconds,
                batch_s=step.batch_s,
                predicted_s=None,
                loss=step.loss,
                down_bytes=0,
                up_bytes=0,
                grain=None,
                plan="plain torch",
                devices=0,
                server_cpu_s=now_s - before_s,
            )
        )
        before_s = now_s
    say(Finished(peak_rss_bytes=_peak_rss_bytes()))


def _over_fleet(job: Job, say: _Messages) -> None:
    from cleave.api.fleet import Fleet
    from cleave.api.training import distribute
    from cleave.bench.training import build, train

    cell, heard = job.cell, _Heard()
    model = build(cell)
    serving = Fleet.serve(
        "127.0.0.1:0",
        token=job.token,
        wire=cell.wire,
        trust="own",
        listener=heard,
        scale_test=cell.fleet.compute == "none",
    )
    with serving as fleet:
        if job.device_cores is not None:
            fleet.cluster.planning.share_cores(job.device_cores / cell.fleet.threads)
        say(Listening(url=fleet.url))
        started_s = time.monotonic()
        fleet.wait(cell.device_count, job.join_s)
        say(Joined(seconds=time.monotonic() - started_s))
        training = train(distribute(model, fleet, grain=cell.grain), cell)
        status, cpu_s = fleet.status(), time.process_time()
        for step in training:
            now, now_s = fleet.status(), time.process_time()
            latest = now.steps[-1] if now.steps and now.steps[-1:] != status.steps[-1:] else None
            say(
                Step(
                    number=step.number,
                    seconds=step.seconds,
                    batch_s=step.batch_s,
                    predicted_s=latest.predicted_s if latest is not None else None,
                    modeled_s=latest.modeled_s if latest is not None else None,
                    loss=step.loss,
                    down_bytes=now.down_bytes - status.down_bytes,
                    up_bytes=now.up_bytes - status.up_bytes,
                    grain=now.grain,
                    plan=_plan_in_words(fleet),
                    devices=len(now.devices),
                    server_cpu_s=now_s - cpu_s,
                    rates=tuple(
                        Rates(
                            device=each.device,
                            flops_per_s=each.flops_per_s,
                            down_bytes_per_s=each.down_bytes_per_s,
                            up_bytes_per_s=each.up_bytes_per_s,
                            down_bytes=each.down_bytes,
                            up_bytes=each.up_bytes,
                        )
                        for each in now.devices
                    ),
                )
            )
            status, cpu_s = now, time.process_time()
        say(Finished(peak_rss_bytes=_peak_rss_bytes(), events=dict(heard.counted), choices=tuple(heard.choices[:100])))


class _Heard:
    """Count events, and keep the reasons for each grain."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.choices: list[str] = []

    def __call__(self, event: events.AnyEvent) -> None:
        self.counted[str(event.__struct_config__.tag)] += 1
        if isinstance(event, events.GrainChosen):
            self.choices.append(f"{event.grain}: {event.reason}")


def _plan_in_words(fleet: Fleet) -> str:
    status, plan = fleet.status(), fleet.cluster.planning.latest
    if status.grain != "resident" or plan is None:
        return status.grain_reason
    return describe_plan(plan)


def describe_plan(plan: ResidentPlan) -> str:
    """Describe a resident plan in one line: stages, their devices, chunks, and what limits it."""
    stages = [
        f"sublayers {stage.first}-{stage.first + stage.count - 1}: {_named(stage.devices)}" for stage in plan.stages
    ]
    return f"{'; '.join(stages)}; chunks of {plan.chunk} tokens, limited by {plan.limit}"


def _named(devices: tuple[str, ...]) -> str:
    distinct = tuple(dict.fromkeys(devices))
    return ", ".join(distinct) if len(distinct) <= _MOST_NAMED else f"{len(distinct)} devices"


def _peak_rss_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return int(psutil.Process().memory_info().rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
