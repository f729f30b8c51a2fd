"""Server CPU per GB on loopback: the whole path of operands and results, against a bare uvloop protocol.

    python benchmarks/wire_path.py [--rounds 7] [--megabytes 256] [--wires bf16 fp32]

The server is this process; its clients are other processes, which do not multiply, so that they never limit. Everything
is measured in turns, and CPU is that of the whole process, all threads.

- *Bare*: an `asyncio.BufferedProtocol` on uvloop writes strips of the size Cleave's are, or reads into one buffer again
  and again; nothing looks at the bytes.
- *Product*: operands down (staged, encoded, framed, sent); results up (received, unmasked, decoded, checked, stored).
  The device answers with the right product, computed once. One shape has large operands and a small result, the other
  the reverse.
- *Resident*: weights down in a forward pass; their gradients up in a backward pass with the weights already there.

Parts: *loop* is the event loop's thread without encoding and unmasking, *rest* whatever is left of the process. Checks
of a product read its operands too, so they weigh heavier where results are small.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast, get_args
from unittest import mock

import numpy as np
import torch
import uvloop

from cleave.api.fleet import Fleet
from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Batch
from cleave.core.model.decoder import Decoder, Mlp, Norm, Parameter, View, Weight
from cleave.core.model.gemms import Linear, Role
from cleave.core.plan.choose import PassWork
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.protocol.frames import MESSAGE_BYTES
from cleave.protocol.numbers import Matrix
from cleave.server import service
from cleave.server.cluster import Cluster
from cleave.server.gemm.results import GemmResults
from cleave.server.operands import STRIP_BYTES, Tensor
from cleave.server.resident.results import ResidentResults
from cleave.train.offload.codec import TorchCodec
from cleave.transport import stream
from wire_path_device import BARE_BYTES

Way = Literal["down", "up"]
PARTS = ("loop", "unmask", "encode", "decode", "check", "store")
_GB = 1e9
_HIDDEN, _INNER, _LAYERS, _TOKENS = 1024, 4096, 2, 64
_SHAPES: dict[Way, Linear] = {
    "down": Linear(tokens=4096, in_width=2048, out_width=256, roles=("forward",)),
    "up": Linear(tokens=4096, in_width=256, out_width=2048, roles=("forward",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=256, help="bytes moved per measurement (default: 256)")
    parser.add_argument("--wires", nargs="+", default=["bf16", "fp32"], choices=get_args(WireFormat))
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = options.megabytes << 20
    found: dict[str, list[Spent]] = {}
    with ExitStack() as stack:
        bare = stack.enter_context(BareServer.running())
        paths = [stack.enter_context(Path.running(wire)) for wire in options.wires]
        for round_ in range(options.rounds + 1):
            for name, measure in [*bare.measures(), *(one for path in paths for one in path.measures())]:
                spent = measure(size)
                if round_:  # the first warms up
                    found.setdefault(name, []).append(spent)
    print_table(found)


# ------------------------------------------------------------------------------------------------ what was spent


@dataclass
class Spent:
    way: Way
    cpu_s: float = 0.0
    bytes: int = 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def per_gb(self) -> float:
        return self.cpu_s / self.bytes * _GB


class Clock:
    """CPU seconds of the parts of the path, by wrapping the functions that do them."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, bool], float] = {}
        self._nested = threading.local()
        self._loop_thread = 0
        self._lock = threading.Lock()

    @contextmanager
    def watching(self) -> Generator[None]:
        with ExitStack() as stack:
            for owner, name, part in (
                (TorchCodec, "encode", "encode"),
                (TorchCodec, "decode_into", "decode"),
                (GemmResults, "check", "check"),
                (GemmResults, "keep", "store"),
                (ResidentResults, "keep", "store"),
                (stream, "_unmask", "unmask"),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name), part)))
            yield

    def _timed(self, function: Callable[..., object], part: str) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            outer: float = getattr(self._nested, "s", 0.0)
            self._nested.s = 0.0
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - started
                key = (part, threading.current_thread().name == "cleave-server")
                with self._lock:
                    self.seconds[key] = self.seconds.get(key, 0.0) + took - self._nested.s
                self._nested.s = outer + took

        return timed


def print_table(found: dict[str, list[Spent]]) -> None:
    base = {way: statistics.median(one.per_gb for one in found[f"bare {way}"]) for way in get_args(Way)}
    print("| path | CPU s/GB, median (range) | over bare | " + " | ".join(PARTS) + " | rest |")
    print("|---|---|---|" + "---|" * (len(PARTS) + 1))
    for name, runs in found.items():
        each = sorted(run.per_gb for run in runs)
        median = statistics.median(each)
        parts = [statistics.median(run.parts[part] / run.bytes * _GB for run in runs) for part in PARTS]
        cells = [f"{part:.3f}" for part in (*parts, median - sum(parts))] if any(parts) else [""] * (len(PARTS) + 1)
        ratio = median / base[runs[0].way]
        print(f"| {name} | {median:.3f} ({each[0]:.3f}-{each[-1]:.3f}) | {ratio:.2f} | {' | '.join(cells)} |")


# ------------------------------------------------------------------------------------------------ bare


class _Bare(asyncio.BufferedProtocol):
    """Write or read a number of bytes that the client asks for in eight bytes, positive for down, negative for up."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(STRIP_BYTES))
        self._left = self._to_write = 0
        self._is_paused, self._is_answered = False, True
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=MESSAGE_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._left:
            self._left -= nbytes
        else:
            asked = int.from_bytes(self._buffer[:8], "big", signed=True)
            self._to_write, self._left, self._is_answered = max(asked, 0), max(-asked, 0) - (nbytes - 8), False
        self._go_on()

    def _go_on(self) -> None:
        """Write as much as may be written; say so once everything was read or written."""
        assert self._transport is not None
        while self._to_write and not self._is_paused:
            self._to_write -= STRIP_BYTES
            self._transport.write(self._buffer)
        if not self._left and not self._to_write and not self._is_answered:
            self._is_answered = True
            self._transport.write(b"ok")

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._go_on()


class BareServer:
    def __init__(self, client: subprocess.Popen[str]) -> None:
        self._client = client

    @classmethod
    @contextmanager
    def running(cls) -> Generator[BareServer]:
        loop = uvloop.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        async def listen() -> int:
            bound = service.bind("127.0.0.1:0")
            await loop.create_server(_Bare, sock=bound)
            return int(bound.getsockname()[1])

        port = asyncio.run_coroutine_threadsafe(listen(), loop).result(10)
        with _client("bare", str(port)) as client:
            yield cls(client)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)

    def measures(self) -> list[tuple[str, Callable[[int], Spent]]]:
        return [("bare down", lambda size: self._measure("down", size)), ("bare up", lambda s: self._measure("up", s))]

    def _measure(self, way: Way, size: int) -> Spent:
        size -= size % BARE_BYTES
        used = time.process_time()
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(f"{way} {size}\n")
        self._client.stdin.flush()
        self._client.stdout.readline()
        return Spent(way, time.process_time() - used, size)


@contextmanager
def _client(*words: str) -> Generator[subprocess.Popen[str]]:
    script = __file__.replace("wire_path.py", "wire_path_device.py")
    command = [sys.executable, script, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


# ------------------------------------------------------------------------------------------------ Cleave


class Path:
    """A server with one device that answers without multiplying."""

    def __init__(self, wire: WireFormat, cluster: Cluster) -> None:
        self._wire: WireFormat = wire
        self._cluster = cluster
        rng = np.random.default_rng(0)
        self._operands = {
            way: tuple(
                rng.standard_normal(shape, dtype=np.float32)
                for shape in ((linear.tokens, linear.in_width), (linear.out_width, linear.in_width))
            )
            for way, linear in _SHAPES.items()
        }
        self._plans = {way: cluster.choose_layer(linear).plan for way, linear in _SHAPES.items()}
        self._decoder = small_decoder()
        self._weights = [
            rng.standard_normal((one.rows, one.cols), dtype=np.float32) for one in self._decoder.parameters
        ]
        self._kept = self._tensors()
        self._arranged = {is_trained: self._plan(is_trained=is_trained) for is_trained in (False, True)}

    @classmethod
    @contextmanager
    def running(cls, wire: WireFormat) -> Generator[Path]:
        with Fleet("127.0.0.1:0", wire=wire, offload="always", trust="own") as fleet, _client("join", fleet.url):
            fleet.wait(1)
            yield cls(wire, fleet.cluster)

    def measures(self) -> list[tuple[str, Callable[[int], Spent]]]:
        return [
            (f"product down, {self._wire}", lambda size: self._measure("down", self._product, size)),
            (f"product up, {self._wire}", lambda size: self._measure("up", self._product, size)),
            (f"resident down, {self._wire}", lambda size: self._measure("down", self._weights_down, size)),
            (f"resident up, {self._wire}", lambda size: self._measure("up", self._gradients_up, size)),
        ]

    def _measure(self, way: Way, once: Callable[[Way], None], size: int) -> Spent:
        cluster, spent, clock = self._cluster, Spent(way), Clock()
        if once == self._gradients_up:
            self._pass(self._kept, is_trained=True)  # leaves the weights on the device
        with clock.watching():
            moved, used, loop = self._moved(way), time.process_time(), loop_cpu_s(cluster)
            while (done := self._moved(way) - moved) < size:
                once(way)
            spent.cpu_s, spent.bytes = time.process_time() - used, done
            spent.parts["loop"] = loop_cpu_s(cluster) - loop
        for (part, is_in_loop), seconds in clock.seconds.items():
            spent.parts[part] += seconds
            if is_in_loop:
                spent.parts["loop"] -= seconds
        return spent

    def _moved(self, way: Way) -> int:
        totals = self._cluster.totals()
        return totals.down_bytes if way == "down" else totals.up_bytes

    def _product(self, way: Way) -> None:
        role: Role = "forward"
        a, b = (self._staged(matrix) for matrix in self._operands[way])
        self._cluster.wait(self._cluster.submit(role, (a,), (b,), self._plans[way]))

    def _staged(self, matrix: Matrix) -> Tensor:
        tensor = self._cluster.tensor(*matrix.shape)
        tensor.bind(matrix)
        return tensor

    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._staged(weight) for weight in self._weights)

    def _weights_down(self, way: Way) -> None:
        self._pass(self._tensors(), is_trained=False)

    def _gradients_up(self, way: Way) -> None:
        self._pass(self._kept, is_trained=True)

    def _pass(self, operands: tuple[Tensor, ...], *, is_trained: bool) -> None:
        x = np.zeros((_TOKENS, _HIDDEN), dtype=np.float32)
        batch = Batch(x=x, sequences=1, sequence=_TOKENS, operands=operands, is_trained=is_trained, wants_dx=False)
        running = self._cluster.run(self._decoder, batch, self._arranged[is_trained])
        self._cluster.wait(running.outputs)
        if is_trained:
            self._cluster.wait(running.backward(x))

    def _plan(self, *, is_trained: bool) -> ResidentPlan:
        plan = self._cluster.choose_pass(PassWork(self._decoder, 1, _TOKENS, is_trained), must=True).plan
        assert plan is not None
        return plan


def small_decoder() -> Decoder:
    """Return a decoder of MLPs: mostly weights, hardly any activations."""
    parameters: list[Parameter] = []

    def weight(rows: int, cols: int) -> int:
        parameters.append(Parameter(rows, cols, is_trained=True))
        return len(parameters) - 1

    parts = tuple(
        Mlp(
            norm=Norm(kind="rms", eps=1e-5, weight=weight(1, _HIDDEN)),
            gate=Weight(weight=weight(_INNER, _HIDDEN)),
            up=Weight(weight=weight(_INNER, _HIDDEN)),
            down=Weight(weight=weight(_HIDDEN, _INNER)),
            activation="silu",
        )
        for _ in range(_LAYERS)
    )
    views = tuple(View(number, (0, one.rows), (0, one.cols)) for number, one in enumerate(parameters))
    return Decoder(hidden=_HIDDEN, parts=parts, head=None, parameters=tuple(parameters), views=views)


def loop_cpu_s(cluster: Cluster) -> float:
    async def used() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(used(), cluster.loop).result(60)


if __name__ == "__main__":
    main()
