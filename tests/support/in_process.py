"""A cluster and its devices in this process: real workers over channels in memory, in an event loop in its own thread.

The test decides which device holds which shard: `anyhow` draws arrangements that no planner would make.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from tests.support.doomed import DoomedChannel, Moment
from tests.support.plans import plan_of, stage_of

from cleave.core.cost.wire import WireFormat
from cleave.core.plan.choose import Arrange
from cleave.core.plan.resident.problem import Problem
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import ResidentPlan, Stage
from cleave.core.verify.trust import Level
from cleave.device.join import stand_in
from cleave.device.kernels import NumpyKernel
from cleave.device.replay import replay
from cleave.device.worker import Contribution, Offer, Worker
from cleave.errors import ConnectionLost
from cleave.events import Listener
from cleave.server.admission.tokens import Keys
from cleave.server.cluster import Cluster
from cleave.transport.base import Channel
from cleave.transport.lying import Lie, LyingChannel
from cleave.transport.memory import memory_pair

ROOMY = 64_000_000
Result = TypeVar("Result")


class InProcess:
    """Context manager of an in-process fleet; distribute models to its `cluster`."""

    def __init__(
        self,
        memory_bytes: Sequence[int],
        *,
        wire: WireFormat = "fp32",
        arrange: Arrange = plan_columns,
        trust: Level = "own",
        lies: Mapping[int, Lie] | None = None,
        dooms: Mapping[int, Moment] | None = None,
        draw: Callable[[], float] | None = None,
        listener: Listener = lambda event: None,
    ):
        """`lies` are told by devices with these numbers; audits replace draws of the random generator by `draw`.

        Devices with `dooms` lose their connection at that moment; of several that share one `Moment`, only the first
        to reach it.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server")
        self._memory_bytes, self._wire, self._arrange = memory_bytes, wire, arrange
        self._trust: Level = trust
        self._lies, self._draw, self._listener = lies or {}, draw, listener
        self._dooms = dooms or {}
        self._met: list[Moment] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self.plans: list[ResidentPlan] = []

    def __enter__(self) -> InProcess:
        self._thread.start()
        self.cluster = self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.prepare_closing()
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> Cluster:
        cluster = Cluster(
            self._loop,
            wire=self._wire,
            arrange=self._remember,
            keys=Keys(trust=self._trust),
            replay=replay,
            listener=self._listener,
            draw=self._draw or np.random.default_rng(1).random,
            stand_in=stand_in,
            stands_in=False,
        )
        for index, memory_bytes in enumerate(self._memory_bytes):
            ours, theirs = memory_pair()
            self._tasks.append(self._loop.create_task(cluster.serve(ours)))
            offer = Offer(name=f"d{index}", token="", flops_per_s=1e10, memory_bytes=memory_bytes)
            channel = LyingChannel(theirs, self._lies[index]) if index in self._lies else theirs
            if index in self._dooms:
                channel = self._doomed(channel, self._dooms[index])
            worker = Worker(channel, NumpyKernel(), offer, Contribution())
            self._tasks.append(self._loop.create_task(_live(worker, channel)))
        while cluster.devices < len(self._memory_bytes):
            await asyncio.sleep(0)  # they join in this loop
        return cluster

    async def _end(self) -> None:
        await self.cluster.close("the test is over", rejoin=False)
        await asyncio.wait(self._tasks)

    def _doomed(self, channel: Channel, moment: Moment) -> DoomedChannel:
        async def meet() -> bool:
            if not any(moment is other for other in self._met):
                self._met.append(moment)
                await channel.close()
            return True

        return DoomedChannel(channel, moment, meet)

    def _remember(self, *args: Any, **options: Any) -> ResidentPlan:
        self.plans.append(self._arrange(*args, **options))
        return self.plans[-1]

    def _do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _live(worker: Worker, channel: Channel) -> None:
    await worker.join()
    with suppress(ConnectionLost):  # such as a quarantine
        await worker.run()
    await channel.close()


def anyhow(seed: int, chunk: int | None = None) -> Arrange:
    """Random runs of sublayers and slices of single ones, on any devices, some in several columns; any chunk size."""
    draw = random.Random(seed)

    def arrange(problem: Problem, **_: object) -> ResidentPlan:
        names, sublayers, first = problem.profiles.names, problem.sums.sublayers, 0
        stages: list[Stage] = []
        while first < len(sublayers):
            most = min(sublayers[first].slices, 4)
            slices = draw.randint(2, most) if most > 1 and draw.random() < 0.5 else 1
            count = 1 if slices > 1 else draw.randint(1, len(sublayers) - first)
            columns = [draw.sample(range(len(names)), draw.randint(1, len(names))) for _ in range(slices)]
            held = [[(names[device], draw.random()) for device in column] for column in columns]
            stages.append(stage_of(first, count, held))
            first += count
        return plan_of(stages, chunk or draw.randint(1, problem.sums.sequence + 3))

    return arrange
