"""Laws of a fleet as a whole: products are right whichever devices compute, join, leave, lie or lack memory.

Server and devices are real, over channels in memory, in one event loop in a thread: no ports, and no clock except for
deadlines. Where a device must be in the middle of a product, its kernel waits at a gate.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest

from cleave import events
from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Matrix
from cleave.core.model.gemms import Linear, Role
from cleave.core.plan.gemm.layer import LinearPlan
from cleave.device.kernels import Array, Kernel, NumpyKernel
from cleave.device.worker import Contribution, Offer, Worker
from cleave.errors import ConnectionLost, FleetGoneError
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.programs import Layout
from cleave.server.cluster import Cluster
from cleave.server.operands import Tensor
from cleave.transport.memory import MemoryChannel, memory_pair

PATIENCE_S = 120.0
"""Deadline for work that takes milliseconds, or forever if something is broken."""
ROOMY = 64_000_000
TOLERANCE: dict[WireFormat, float] = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.5e-2, "q8": 3e-2}
"""Tolerance relative to the largest element of a product of normally distributed numbers."""

_Result = TypeVar("_Result")


class Gate(NumpyKernel):
    """A kernel that does `after` products and waits before the next; `reached` is set while it waits."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self._left = after
        self.reached, self.opened = threading.Event(), threading.Event()

    def multiply(self, layout: Layout, pairs: list[tuple[Array, Array]]) -> Array:
        self._left -= 1
        if self._left < 0:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)
        return super().multiply(layout, pairs)

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE_S)


class Watch(NumpyKernel):
    """A kernel that records the peak use of the store."""

    worker: Worker
    most_bytes = 0

    def write(self, strip: Array, data: Buffer, format: WireFormat) -> None:
        self.most_bytes = max(self.most_bytes, stored_bytes(self.worker))
        super().write(strip, data, format)


def stored_bytes(worker: Worker) -> int:
    return worker._store.used_bytes  # pyright: ignore[reportPrivateUsage]


@dataclass
class Device:
    worker: Worker
    channel: MemoryChannel


class World:
    """A cluster with its loop, and devices that come and go."""

    def __init__(self, wire: WireFormat, gone_s: float) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.events: list[events.Event] = []
        self.listeners: list[events.Listener] = [self.events.append]
        self._stays: set[asyncio.Task[None]] = set()
        self.cluster = Cluster(self.loop, wire=wire, alone_wait_s=gone_s, listener=self._hear)

    def _hear(self, event: events.AnyEvent) -> None:
        for listener in self.listeners:
            listener(event)

    def plan(self, linear: Linear) -> LinearPlan | None:
        return self.cluster.choose_layer(linear).plan

    def do(self, what: Coroutine[object, object, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(PATIENCE_S)

    def connect(self) -> MemoryChannel:
        """The device's end of a new connection."""

        async def dial() -> MemoryChannel:
            ours, theirs = memory_pair()
            self._stays.add(self.loop.create_task(self.cluster.serve(ours)))
            return theirs

        return self.do(dial())

    def join(self, *, memory_bytes: int = ROOMY, flops_per_s: float = 1e10, kernel: Kernel | None = None) -> Device:
        channel = self.connect()
        offer = Offer(name="device", token="", flops_per_s=flops_per_s, memory_bytes=memory_bytes)

        async def make() -> Worker:
            return Worker(channel, kernel or NumpyKernel(), offer, Contribution())

        worker = self.do(make())
        if isinstance(kernel, Watch):
            kernel.worker = worker

        async def live() -> None:
            try:
                await worker.join()
                await worker.run()
            except ConnectionLost:
                pass
            finally:
                await channel.close("the device is gone")

        before = self.cluster.devices
        asyncio.run_coroutine_threadsafe(live(), self.loop)
        self.cluster.wait_for_devices(before + 1, PATIENCE_S)
        return Device(worker, channel)

    def vanish(self, *devices: Device) -> None:
        """Cut the connection of devices, and return when the server has noticed."""
        before = self.cluster.devices

        async def cut() -> None:
            for device in devices:
                await device.channel.close("the cable was cut")

        self.do(cut())
        with self.cluster.fleet_changed:
            assert self.cluster.fleet_changed.wait_for(
                lambda: self.cluster.devices == before - len(devices), PATIENCE_S
            )
        self.do(asyncio.sleep(0))  # and has handled it, within one turn of its loop

    def tensor(self, matrix: Matrix) -> Tensor:
        made = self.cluster.tensor(*matrix.shape)
        made.bind(matrix)
        return made

    def close(self) -> None:
        async def end() -> None:
            await self.cluster.close("the test is over", rejoin=False)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others, timeout=1)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.do(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


@contextmanager
def world(devices: int = 0, wire: WireFormat = "fp32", gone_s: float = PATIENCE_S) -> Generator[World]:
    made = World(wire, gone_s)
    try:
        for _ in range(devices):
            made.join()
        yield made
    finally:
        made.close()


@dataclass
class Layer:
    """Grouped layers with their numbers and the expected results of their three products."""

    x: Matrix
    weights: list[Matrix]
    gradients: list[Matrix]

    @property
    def linear(self) -> Linear:
        tokens, width = self.x.shape
        return Linear(tokens=tokens, in_width=width, out_width=sum(len(weight) for weight in self.weights))

    def operands(self, role: Role) -> tuple[list[Matrix], list[Matrix]]:
        match role:
            case "forward":
                return [self.x], self.weights
            case "grad_input":
                return self.gradients, self.weights
            case "grad_weight":
                return self.gradients, [self.x]

    def expected(self, role: Role) -> list[Matrix]:
        match role:
            case "forward":
                return [self.x @ weight.T for weight in self.weights]
            case "grad_input":
                terms = [dy @ weight for dy, weight in zip(self.gradients, self.weights, strict=True)]
                return [np.sum(terms, axis=0, dtype=np.float32)]
            case "grad_weight":
                return [dy.T @ self.x for dy in self.gradients]


ROLES: tuple[Role, ...] = ("forward", "grad_input", "grad_weight")


def layer(tokens: int, width: int, outs: tuple[int, ...], *, whole: bool = True, seed: int = 0) -> Layer:
    """A layer of integers, whose sums are exact in any order, or of normally distributed numbers."""
    rng = np.random.default_rng(seed)

    def draw(rows: int, cols: int) -> Matrix:
        if whole:
            return rng.integers(-3, 4, (rows, cols)).astype(np.float32)
        return rng.standard_normal((rows, cols), dtype=np.float32)

    return Layer(draw(tokens, width), [draw(out, width) for out in outs], [draw(tokens, out) for out in outs])


def submitted(there: World, role: Role, of: Layer) -> Future[list[Matrix]]:
    a, b = of.operands(role)
    staged = [tuple(there.tensor(matrix) for matrix in side) for side in (a, b)]
    return there.cluster.submit(role, staged[0], staged[1], there.plan(of.linear))


def check(outputs: Future[list[Matrix]], expected: list[Matrix], tolerance: float = 0.0) -> None:
    found = outputs.result(PATIENCE_S)
    for output, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(output, wanted, rtol=0, atol=tolerance * float(np.abs(wanted).max()))


# ------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("count", [1, 3, 5, 7])
@pytest.mark.parametrize("outs", [(96,), (64, 16, 100)])
def test_products_of_every_role_are_exact(count: int, outs: tuple[int, ...]) -> None:
    made = layer(700, 120, outs)
    with world(count) as there:
        for role in ROLES:
            check(submitted(there, role, made), made.expected(role))


@pytest.mark.parametrize("wire", ["bf16", "fp16", "q8"])
@pytest.mark.parametrize("count", [1, 3])
def test_narrow_wire_formats_add_only_rounding(count: int, wire: WireFormat) -> None:
    made = layer(300, 96, (64, 32), whole=False)
    with world(count, wire=wire) as there:
        for role in ROLES:
            check(submitted(there, role, made), made.expected(role), TOLERANCE[wire])


def test_concurrent_products_do_not_mix() -> None:
    layers = [layer(200, 48, (40, 24), seed=seed) for seed in range(6)]
    with world(3) as there:
        flying = [(made, role, submitted(there, role, made)) for made in layers for role in ROLES]
        for made, role, outputs in flying:
            check(outputs, made.expected(role))
        assert there.cluster.totals().products == len(flying)


def test_every_device_takes_part_in_a_large_product() -> None:
    made = layer(6000, 256, (256,))
    with world(3) as there:
        check(submitted(there, "forward", made), made.expected("forward"))
        assert all(member.tasks > 0 for member in there.cluster.here())


# ------------------------------------------------------------------------------------------------ joining, leaving


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("after", [0, 1])
def test_the_work_of_a_device_that_vanishes_mid_product_is_reassigned(role: Role, after: int) -> None:
    """Before it has returned anything, or after some of its rectangles have arrived."""
    made = layer(9000, 256, (256, 256))
    with world(2) as there:
        gate = Gate(after)
        lost = there.join(kernel=gate, flops_per_s=2e11)
        outputs = submitted(there, role, made)
        gate.wait()
        there.vanish(lost)
        gate.opened.set()
        check(outputs, made.expected(role))
        left = [event for event in there.events if isinstance(event, events.DeviceLeft)]
        assert [event.device for event in left] == [lost.worker.name]
        assert left[0].lost_tasks > 0


@pytest.mark.parametrize("role", ROLES)
def test_a_small_device_finishes_a_large_ones_block_as_a_sum(role: Role) -> None:
    """One whole block becomes a sum of several over the inner dimension, which must start from zero."""
    tokens, width, out = {"forward": (60, 3000, 50), "grad_input": (60, 50, 3000), "grad_weight": (3000, 60, 50)}[role]
    made = layer(tokens, width, (out,))
    expected = made.expected(role)
    with world() as there:
        gate = Gate()
        lost = there.join(kernel=gate)
        spoiled = [np.full(expected[0].shape, np.nan, dtype=np.float32) for _ in range(64)]
        del spoiled  # memory the output is likely to reuse
        outputs = submitted(there, role, made)
        gate.wait()
        there.join(memory_bytes=200_000)
        there.vanish(lost)
        gate.opened.set()
        check(outputs, expected)
        (small,) = there.cluster.here()
        assert small.tasks > 4


def test_work_waits_while_no_device_is_connected_and_resumes_with_the_next() -> None:
    made = layer(500, 64, (64, 32))
    with world() as there:
        gates = [Gate(), Gate()]
        lost = [there.join(kernel=gate) for gate in gates]
        flying = {role: submitted(there, role, made) for role in ROLES}
        gates[0].wait()
        there.vanish(*lost)
        for gate in gates:
            gate.opened.set()
        assert not any(outputs.done() for outputs in flying.values())
        assert any(isinstance(event, events.Paused) for event in there.events)
        there.join()
        for role, outputs in flying.items():
            check(outputs, made.expected(role))


def test_work_submitted_before_any_device_joins_waits_for_the_first() -> None:
    made = layer(100, 32, (16, 48))
    with world() as there:
        flying = {role: submitted(there, role, made) for role in ROLES}
        there.join()
        for role, outputs in flying.items():
            check(outputs, made.expected(role))


def test_work_fails_when_no_device_joins_in_time() -> None:
    made = layer(100, 32, (16,))
    with world(gone_s=0.05) as there:
        outputs = submitted(there, "forward", made)
        with pytest.raises(FleetGoneError, match="cleave join"):
            outputs.result(PATIENCE_S)


def test_work_fails_when_all_devices_left_and_none_joins_in_time() -> None:
    made = layer(100, 32, (16,))
    with world(gone_s=0.05) as there:
        gate = Gate()
        lost = there.join(kernel=gate)
        outputs = submitted(there, "forward", made)
        gate.wait()
        there.vanish(lost)
        gate.opened.set()
        with pytest.raises(FleetGoneError, match="cleave join"):
            outputs.result(PATIENCE_S)


def test_closing_a_cluster_fails_waiting_work() -> None:
    made = layer(100, 32, (16,))
    with world() as there:
        outputs = submitted(there, "forward", made)
        there.do(there.cluster.close("stopped", rejoin=False))
        with pytest.raises(FleetGoneError, match="stopped"):
            outputs.result(PATIENCE_S)


def test_a_device_that_joins_mid_step_takes_part_in_the_next_step() -> None:
    made = layer(6000, 256, (256,))
    with world() as there:
        gate = Gate()
        there.join(kernel=gate)
        outputs = submitted(there, "forward", made)
        gate.wait()
        there.join()
        gate.opened.set()
        check(outputs, made.expected("forward"))
        there.cluster.step_ended()
        check(submitted(there, "forward", made), made.expected("forward"))
        assert [member.tasks > 0 for member in there.cluster.here()] == [True, True]


def test_a_product_submitted_just_as_a_device_joins_is_computed() -> None:
    """It is planned without devices, and starts once one has joined."""
    made = layer(100, 32, (16,))
    with world() as there:
        flying: list[Future[list[Matrix]]] = []

        def submit_at_once(event: events.Event) -> None:
            if isinstance(event, events.DeviceJoined):
                flying.append(submitted(there, "forward", made))

        there.listeners.append(submit_at_once)
        there.join()
        (outputs,) = flying
        np.testing.assert_array_equal(outputs.result(PATIENCE_S)[0], made.expected("forward")[0])


def test_the_work_of_a_device_that_leaves_during_planning_is_reassigned() -> None:
    made = layer(6000, 256, (256,))
    with world(2) as there:
        lost = there.join()

        class Slow(Linear):
            """A key whose lookup among the cluster's plans makes a device leave."""

            def __hash__(self) -> int:
                if there.cluster.devices == 3:
                    there.vanish(lost)
                return hash((self.tokens, self.in_width, self.out_width, self.roles))

        linear = Slow(tokens=6000, in_width=256, out_width=256)
        outputs = there.cluster.submit(
            "forward", (there.tensor(made.x),), (there.tensor(made.weights[0]),), there.plan(linear)
        )
        np.testing.assert_array_equal(outputs.result(PATIENCE_S)[0], made.expected("forward")[0])


# ------------------------------------------------------------------------------------------------ traffic


def test_a_weight_is_sent_once() -> None:
    weight, layers = layer(1, 256, (256,)).weights[0], [layer(64, 256, (256,), seed=seed) for seed in (1, 2, 3)]
    with world(1) as there:
        staged = there.tensor(weight)
        sent: list[int] = []
        for made in layers:
            before = there.cluster.here()[0].down_bytes
            outputs = there.cluster.submit("forward", (there.tensor(made.x),), (staged,), there.plan(made.linear))
            check(outputs, [made.x @ weight.T])
            sent.append(there.cluster.here()[0].down_bytes - before)
        assert sent == [weight.nbytes + layers[0].x.nbytes, layers[1].x.nbytes, layers[2].x.nbytes]


def test_rows_sent_for_the_forward_product_are_reused_backward() -> None:
    made = layer(64, 256, (256,))
    with world(1) as there:
        x, weight, dy = (there.tensor(matrix) for matrix in (made.x, made.weights[0], made.gradients[0]))
        check(there.cluster.submit("forward", (x,), (weight,), there.plan(made.linear)), made.expected("forward"))
        check(
            there.cluster.submit("grad_input", (dy,), (weight,), there.plan(made.linear)),
            made.expected("grad_input"),
        )
        check(
            there.cluster.submit("grad_weight", (dy,), (x,), there.plan(made.linear)),
            made.expected("grad_weight"),
        )
        once = made.x.nbytes + made.weights[0].nbytes + made.gradients[0].nbytes
        assert there.cluster.here()[0].down_bytes == once


def test_a_device_forgets_tensors_the_server_releases() -> None:
    weight = layer(1, 128, (96,)).weights[0]
    with world() as there:
        device = there.join()
        staged = there.tensor(weight)
        for seed in range(4):
            made = layer(50, 128, (96,), seed=seed)
            x = there.tensor(made.x)
            check(there.cluster.submit("forward", (x,), (staged,), there.plan(made.linear)), [made.x @ weight.T])
            assert stored_bytes(device.worker) == weight.nbytes + made.x.nbytes, "the previous x is forgotten"
            del x
            gc.collect()


@pytest.mark.parametrize("role", ROLES)
def test_devices_with_far_less_memory_than_the_operands_give_exact_products(role: Role) -> None:
    made = layer(600, 300, (200, 100))
    a, b = made.operands(role)
    memory_bytes = sum(matrix.nbytes for matrix in (*a, *b)) // 6
    with world() as there:
        watches = [Watch(), Watch()]
        for watch in watches:
            there.join(memory_bytes=memory_bytes, kernel=watch)
        check(submitted(there, role, made), made.expected(role))
        assert not any(isinstance(event, events.DeviceLeft) for event in there.events), "a cap was exceeded"
        assert all(0 < watch.most_bytes <= memory_bytes for watch in watches)


# ------------------------------------------------------------------------------------------------ faulty devices


class Broken(NumpyKernel):
    """A kernel that never has enough memory."""

    def multiply(self, layout: Layout, pairs: list[tuple[Array, Array]]) -> Array:
        raise MemoryError


def test_a_device_that_fails_every_task_does_not_stop_the_others() -> None:
    """It claims to be by far the fastest, so every plan starts with it."""
    made = layer(300, 64, (64,))
    with world() as there:
        there.join(flops_per_s=1e6)
        there.join(kernel=Broken(), flops_per_s=1e12)
        outputs = submitted(there, "forward", made)
        np.testing.assert_array_equal(outputs.result(PATIENCE_S)[0], made.expected("forward")[0])


class Rogue:
    """A device that sends what a test tells it to."""

    def __init__(self, there: World, flops_per_s: float = 1e12) -> None:
        self._there = there
        self.channel = there.connect()
        before = there.cluster.devices
        there.do(self._join(flops_per_s))
        there.cluster.wait_for_devices(before + 1, PATIENCE_S)

    async def _join(self, flops_per_s: float) -> None:
        hello = messages.Hello(
            version=messages.VERSION, name="rogue", flops_per_s=flops_per_s, memory_bytes=ROOMY, kernel="none"
        )
        await self.channel.send(hello)
        assert isinstance((await self.channel.receive()).message, messages.Welcome)
        while True:
            probe = (await self.channel.receive()).message
            assert isinstance(probe, messages.Probe)
            await self.channel.send(messages.Probed(down_s=1e-6, payload=probe.answer), bytes(probe.answer))
            if probe.payload >= 4 << 20:
                return

    def task(self) -> messages.RunTask:
        """Wait for the first task."""

        async def take() -> messages.RunTask:
            while True:
                message = (await self.channel.receive()).message
                if isinstance(message, messages.RunTask):
                    return message

        return self._there.do(take())

    def answer(self, run: messages.RunTask, payload: bytes, **changed: float) -> None:
        rows, cols = run.program.rows, run.program.cols
        usual = {"first_row": 0, "rows": rows, "first_col": 0, "cols": cols, "flops": 1e6, "compute_s": 1e-3}
        usual |= {"down_bytes": 0, "down_s": 0.0}
        result = messages.Result(task=run.task, format="fp32", payload=len(payload), **{**usual, **changed})
        self._there.do(self.channel.send(result, payload))


@pytest.mark.parametrize("length", [0, 4, -4])
def test_a_result_of_the_wrong_length_removes_the_device_and_spares_the_product(length: int) -> None:
    made = layer(300, 64, (64,))
    with world() as there:
        rogue = Rogue(there)
        outputs = submitted(there, "forward", made)
        run = rogue.task()
        there.join()
        rogue.answer(run, bytes(4 * run.program.rows * run.program.cols + length if length else 0))
        np.testing.assert_array_equal(outputs.result(PATIENCE_S)[0], made.expected("forward")[0])


@pytest.mark.parametrize(
    "lie",
    [
        {"flops": float("inf")},
        {"flops": 1e308, "compute_s": 1e-300},
        {"compute_s": float("inf")},
        {"down_bytes": 1, "down_s": float("inf")},
    ],
)
def test_a_device_that_lies_about_its_speed_harms_nobody_else(lie: dict[str, float]) -> None:
    made = layer(300, 64, (64,))
    with world() as there:
        rogue = Rogue(there)
        outputs = submitted(there, "forward", made)
        run = rogue.task()
        part = made.expected("forward")[0][: run.program.rows]
        rogue.answer(run, part.tobytes(), **lie)
        check(outputs, made.expected("forward"))
        there.join()
        assert there.cluster.devices == 2
        there.do(rogue.channel.close("gone"))
        check(submitted(there, "forward", made), made.expected("forward"))


@pytest.mark.parametrize(
    "said",
    [
        messages.Probed(down_s=0.0),
        messages.Welcome(version=messages.VERSION, name="x"),
        messages.Hello(version=messages.VERSION, name="x", flops_per_s=1.0, memory_bytes=1, kernel=""),
    ],
)
def test_a_device_that_breaks_the_protocol_is_removed_and_its_work_reassigned(said: messages.AnyMessage) -> None:
    made = layer(300, 64, (64,))
    with world() as there:
        rogue = Rogue(there)
        outputs = submitted(there, "forward", made)
        rogue.task()
        there.join()
        there.do(rogue.channel.send(said))
        check(outputs, made.expected("forward"))
        assert there.cluster.devices == 1


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"version": 99}, "protocol version"),
        ({"flops_per_s": 0.0}, "positive"),
        ({"flops_per_s": float("nan")}, "positive"),
        ({"memory_bytes": -1}, "positive"),
    ],
)
def test_a_refused_device_is_told_why(hello: dict[str, object], reason: str) -> None:
    usual = {"version": messages.VERSION, "name": "x", "flops_per_s": 1e9, "memory_bytes": ROOMY, "kernel": "numpy"}
    with world() as there:
        channel = there.connect()
        there.do(channel.send(messages.Hello(**{**usual, **hello})))
        refused = there.do(channel.receive()).message
        assert isinstance(refused, messages.Refused)
        assert reason in refused.reason
        assert there.cluster.devices == 0


def test_devices_with_the_same_name_get_distinct_names() -> None:
    with world(3) as there:
        assert len({member.name for member in there.cluster.here()}) == 3
