"""A real cluster and real workers in one virtual event loop, over channels in memory; some workers are faulty."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cleave import events
from cleave.core.model.batch import Matrix
from cleave.core.model.gemms import Linear, Role
from cleave.core.plan.choose import Arrange
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.device.kernels import NumpyKernel
from cleave.device.worker import Contribution, Offer, Worker
from cleave.errors import CleaveError
from cleave.server.admission.tokens import Keys
from cleave.server.cluster import Cluster, StandIn
from cleave.server.operands import Tensor
from cleave.transport.base import Channel
from cleave.transport.faulty import FaultyChannel, Script
from cleave.transport.memory import MemoryChannel, memory_pair

ROLES: tuple[Role, ...] = ("forward", "grad_input", "grad_weight")
ROOMY = 64_000_000
SEEN = 1e-2
"""How wrong an element may be and go unnoticed, in standard deviations of its product (expected: about 1e-3)."""


@dataclass(eq=False)
class Device:
    channel: FaultyChannel
    worker: Worker
    task: asyncio.Task[None] = field(init=False)
    ended: str = ""

    @property
    def name(self) -> str:
        return self.worker.name


class World:
    """A cluster and its devices; make it inside the loop. `close` raises what escaped from a connection or a worker."""

    def __init__(
        self,
        *,
        gone_s: float = 60.0,
        seed: int = 0,
        keys: Keys | None = None,
        stand_in: StandIn | None = None,
        arrange: Arrange = plan_columns,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: list[events.AnyEvent] = []
        self.cluster = Cluster(
            self.loop, alone_wait_s=gone_s, listener=self._hear, keys=keys, stand_in=stand_in, arrange=arrange
        )
        self._rng = np.random.default_rng(seed)
        self._news = asyncio.Event()
        self._stays: list[asyncio.Task[None]] = []
        self._devices: list[Device] = []

    def _hear(self, event: events.AnyEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition that changes with events holds."""
        while not condition():
            self._news.clear()
            await self._news.wait()

    def connect(self) -> MemoryChannel:
        """The device's end of a new connection."""
        ours, theirs = memory_pair()
        serving = self.cluster.serve(self.reached(ours))
        self._stays.append(self.loop.create_task(serving, name=f"connection {len(self._stays)}"))
        return theirs

    def reached(self, channel: Channel) -> Channel:
        """The server's end of a new connection, as the cluster sees it."""
        return channel

    def dial(
        self,
        name: str,
        script: Script = (),
        *,
        flops_per_s: float = 1e10,
        memory_bytes: int = ROOMY,
        token: str = "",
        wrap: Callable[[Channel], FaultyChannel] | None = None,
    ) -> Device:
        """A device that has begun to join, and may never succeed."""
        inner = self.connect()
        channel = wrap(inner) if wrap else FaultyChannel(inner, script, self._rng)
        offer = Offer(name=name, token=token, flops_per_s=flops_per_s, memory_bytes=memory_bytes)
        device = Device(channel, Worker(channel, NumpyKernel(), offer, Contribution()))
        device.task = self.loop.create_task(_live(device), name=name)
        self._devices.append(device)
        return device

    async def join(self, name: str, script: Script = (), *, flops_per_s: float = 1e10, token: str = "") -> Device:
        """A device that has joined."""
        before = len(self.joined())
        device = self.dial(name, script, flops_per_s=flops_per_s, token=token)
        await self.until(lambda: len(self.joined()) > before)
        return device

    def joined(self) -> list[str]:
        return [event.device for event in self.events if isinstance(event, events.DeviceJoined)]

    def departures(self) -> dict[str, str]:
        """Reasons for leaving, by device name."""
        return {event.device: event.reason for event in self.events if isinstance(event, events.DeviceLeft)}

    def here(self) -> set[str]:
        return {member.name for member in self.cluster.here()}

    async def product(self, role: Role, layer: Layer) -> None:
        """Compute one product on the fleet and check it."""
        a, b = layer.operands(role)
        staged = [tuple(self.tensor(matrix) for matrix in side) for side in (a, b)]
        outputs = await asyncio.wrap_future(
            self.cluster.submit(role, staged[0], staged[1], self.cluster.choose_layer(layer.linear).plan)
        )
        for output, expected in zip(outputs, layer.expected(role), strict=True):
            np.testing.assert_allclose(output, expected, rtol=0, atol=SEEN * float(expected.std()), err_msg=role)

    async def products(self, *layers: Layer) -> None:
        """Compute all three products of each layer at once, as in a step."""
        async with asyncio.TaskGroup() as group:
            for layer in layers:
                for role in ROLES:
                    group.create_task(self.product(role, layer), name=f"product {role}")
        self.cluster.step_ended()

    def tensor(self, matrix: Matrix) -> Tensor:
        made = self.cluster.tensor(*matrix.shape)
        made.bind(matrix)
        return made

    async def close(self) -> None:
        await self.cluster.close("the test is over", rejoin=False)
        for device in self._devices:
            device.task.cancel()
        await asyncio.gather(*(device.task for device in self._devices), return_exceptions=True)
        for device in self._devices:
            await device.channel.close("the test is over")
        outcomes = await asyncio.gather(*self._stays, return_exceptions=True)
        assert not [outcome for outcome in outcomes if outcome is not None], "no exception escapes from a connection"


async def _live(device: Device) -> None:
    """Join and work like `cleave join`, but only once."""
    try:
        await device.worker.join()
        await device.worker.run()
    except CleaveError as fault:
        device.ended = str(fault)
    finally:
        await device.channel.close("the device is gone")


@dataclass
class Layer:
    """A layer with its numbers and the expected results of its three products; integers, whose sums are exact."""

    x: Matrix
    weight: Matrix
    gradient: Matrix

    @property
    def linear(self) -> Linear:
        return Linear(tokens=len(self.x), in_width=self.x.shape[1], out_width=len(self.weight))

    def operands(self, role: Role) -> tuple[list[Matrix], list[Matrix]]:
        match role:
            case "forward":
                return [self.x], [self.weight]
            case "grad_input":
                return [self.gradient], [self.weight]
            case "grad_weight":
                return [self.gradient], [self.x]

    def expected(self, role: Role) -> list[Matrix]:
        match role:
            case "forward":
                return [self.x @ self.weight.T]
            case "grad_input":
                return [self.gradient @ self.weight]
            case "grad_weight":
                return [self.gradient.T @ self.x]


def layer(seed: int, *, tokens: int = 600, width: int = 96, out: int = 128) -> Layer:
    rng = np.random.default_rng(seed)

    def draw(rows: int, cols: int) -> Matrix:
        return rng.integers(-3, 4, (rows, cols)).astype(np.float32)

    return Layer(draw(tokens, width), draw(out, width), draw(tokens, out))
