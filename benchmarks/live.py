"""The live path compared with other systems and its floor, in one run: one product, a step's gemms, the demo's step.

Systems take turns, so that a slow minute of the machine affects all of them; figures are medians and ratios of medians.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import psutil

from cleave.api.fleet import Fleet
from cleave.api.training import distribute
from cleave.protocol.programs import Layout

from live_systems import SYSTEMS, WORKERS, Cleave, Matrix, System, cut  # isort: skip

Say = Callable[[str], None]


def run(scenario: dict[str, Any], say: Say) -> None:
    rounds: int = scenario["rounds"]
    drivers = [_Driver(name, scenario) for name in SYSTEMS]
    try:
        _product(scenario["product"], drivers, rounds, say)
        _step_gemms(scenario["step"], drivers, rounds, say)
    finally:
        for driver in drivers:
            driver.close()
    _server_cpu(say)
    _demo_step(scenario["step"], rounds, say)


# ------------------------------------------------------------------------------------------------ taking turns


class _Driver:
    """A system in its own process, so that its threads do not wait for another system's interpreter."""

    def __init__(self, name: str, scenario: dict[str, Any]) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_drive, args=(name, scenario, end))
        self._process.start()
        assert self._pipe.recv() == "ready"

    def seconds(self, play: str) -> float:
        self._pipe.send(play)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send("stop")
        self._process.join()


def _drive(name: str, scenario: dict[str, Any], pipe: Connection) -> None:
    rng = np.random.default_rng(0)
    m, n, k = scenario["product"]
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n)))
    expected = a @ b
    step: dict[str, int] = scenario["step"]
    tokens = step["tokens"]
    data = [
        tuple(rng.standard_normal(shape, dtype=np.float32) for shape in ((tokens, k), (n, k), (tokens, n)))
        for k, n in _layers(step)
    ]
    system = SYSTEMS[name]()
    pipe.send("ready")
    while (play := pipe.recv()) != "stop":
        started = time.perf_counter()
        if play == "product":
            c = system.finish(system.start("nn", system.halves(a), system.whole(b)))
            taken = time.perf_counter() - started
            assert np.allclose(c, expected, rtol=1e-3, atol=1e-2)
            del c
        else:
            (_apart if play == "apart" else _together)(system, data)
            taken = time.perf_counter() - started
        gc.collect()
        pipe.send(taken)
    system.close()


# ------------------------------------------------------------------------------------------------ one product


def _product(sizes: list[int], drivers: list[_Driver], rounds: int, say: Say) -> None:
    m, n, k = sizes
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n)))
    times: dict[str, list[float]] = {driver.name: [] for driver in drivers}
    times |= {"numpy, one thread": [], "floor: compute on both cores": [], "floor: bytes over loopback": []}
    with _Floor(a, b) as floor:
        for _ in range(rounds + 1):
            for driver in drivers:
                times[driver.name].append(driver.seconds("product"))
            times["numpy, one thread"].append(_timed(lambda: a @ b))
            times["floor: compute on both cores"].append(floor.compute_s())
            times["floor: bytes over loopback"].append(floor.bytes_s())
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}  # the first is a warm-up
    floor_s = medians["floor: compute on both cores"] + medians["floor: bytes over loopback"]
    say(f"## One product of {m} x {n} x {k}, fp32, two workers of one thread\n")
    say("| system | median s | best s | cleave / it |\n|---|---|---|---|")
    ours = medians["cleave"]
    for name, median in medians.items():
        say(f"| {name} | {median:.3f} | {min(times[name][1:]):.3f} | {ours / median:.2f} |")
    say(f"| floor: both together | {floor_s:.3f} | | {ours / floor_s:.2f} |\n")


class _Floor:
    """The least time of a product by two processes: their compute, and their bytes over bare sockets."""

    def __init__(self, a: Matrix, b: Matrix) -> None:
        self._a, self._b = cut(a), b
        context = multiprocessing.get_context("spawn")
        self._barrier: Barrier = context.Barrier(WORKERS + 1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port: int = self._listener.getsockname()[1]
        shapes = [(len(part), a.shape[1], b.shape[1]) for part in self._a]
        self._processes = [
            context.Process(target=_floor_worker, args=(port, shape, self._barrier), daemon=True) for shape in shapes
        ]
        for process in self._processes:
            process.start()
        self._sockets = [self._listener.accept()[0] for _ in shapes]

    def __enter__(self) -> _Floor:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._sockets:
            connection.sendall(b"q")
            connection.close()
        self._listener.close()
        for process in self._processes:
            process.join()

    def compute_s(self) -> float:
        self._tell(b"c")
        return _timed(self._barrier.wait)

    def bytes_s(self) -> float:
        self._tell(b"b")

        def serve(connection: socket.socket, part: Matrix) -> None:
            connection.sendall(part.reshape(-1).view(np.uint8).data)
            connection.sendall(self._b.reshape(-1).view(np.uint8).data)
            _receive(connection, memoryview(bytearray(len(part) * self._b.shape[1] * 4)))

        threads = [
            threading.Thread(target=serve, args=(connection, part))
            for connection, part in zip(self._sockets, self._a, strict=True)
        ]

        def both() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return _timed(both)

    def _tell(self, order: bytes) -> None:
        for connection in self._sockets:
            connection.sendall(order)
        self._barrier.wait()  # both have received it


def _floor_worker(port: int, shape: tuple[int, int, int], barrier: Barrier) -> None:
    rows, inner, cols = shape
    a, b = np.ones((rows, inner), dtype=np.float32), np.ones((inner, cols), dtype=np.float32)
    c = a @ b
    connection = socket.create_connection(("127.0.0.1", port))
    while True:
        order = connection.recv(1)
        if order in (b"q", b""):
            return
        barrier.wait()
        if order == b"c":
            np.matmul(a, b, out=c)
            barrier.wait()
        else:
            _receive(connection, a.reshape(-1).view(np.uint8).data)
            _receive(connection, b.reshape(-1).view(np.uint8).data)
            connection.sendall(c.reshape(-1).view(np.uint8).data)


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        into = into[connection.recv_into(into) :]


# ------------------------------------------------------------------------------------------------ gemms of a step


def _step_gemms(step: dict[str, int], drivers: list[_Driver], rounds: int, say: Say) -> None:
    count = 3 * len(_layers(step))
    say(f"## The {count} gemms of one training step of the demo model, fp32, two workers of one thread\n")
    for title, play in (("each product by itself", "apart"), ("operands are reused", "together")):
        times: dict[str, list[float]] = {driver.name: [] for driver in drivers}
        for _ in range(rounds + 1):
            for driver in drivers:
                times[driver.name].append(driver.seconds(play))
        medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
        say(f"| {title} | median s | best s | cleave / it |\n|---|---|---|---|")
        for name, median in medians.items():
            say(f"| {name} | {median:.3f} | {min(times[name][1:]):.3f} | {medians['cleave'] / median:.2f} |")
        say("")


def _layers(step: dict[str, int]) -> list[tuple[int, int]]:
    """(in, out) widths of every linear layer, ungrouped."""
    hidden, ffn = step["hidden"], step["ffn"]
    block = [(hidden, hidden)] * 4 + [(hidden, ffn)] * 2 + [(ffn, hidden)]
    return block * step["layers"] + [(hidden, step["vocab"])]


def _apart(system: System, data: list[Any]) -> None:
    """Send each product's operands and wait for its result."""
    products: list[tuple[Layout, Matrix, Matrix]] = [("nt", x, w) for x, w, _ in data]
    for x, w, dy in reversed(data):
        products.append(("nn", dy, w))
        products.append(("tn", dy, x))
    for layout, a, b in products:
        right = system.halves(b) if layout == "tn" else system.whole(b)
        system.finish(system.start(layout, system.halves(a), right))


def _together(system: System, data: list[Any]) -> None:
    """Send X, W and dY once, as a step allows; wait for weight gradients at the end."""
    kept: list[tuple[Any, Any]] = []
    for x, w, _ in data:
        handles = system.halves(x), system.whole(w)
        kept.append(handles)
        system.finish(system.start("nt", *handles))
    gradients: list[Any] = []
    for (x, w), (_, _, dy) in zip(reversed(kept), reversed(data), strict=True):
        grad = system.halves(dy)
        awaited = system.start("nn", grad, w)
        gradients.append(system.start("tn", grad, x))
        system.finish(awaited)
    for gradient in gradients:
        system.finish(gradient)


# ------------------------------------------------------------------------------------------------ server CPU


def _server_cpu(say: Say) -> None:
    """CPU seconds of the server's event loop per gigabyte, from products with large operands or large results."""
    system = Cleave()
    try:
        cluster = system.cluster
        loop = cluster.loop

        async def cpu() -> float:
            return time.thread_time()

        def loop_cpu_s() -> float:
            return asyncio.run_coroutine_threadsafe(cpu(), loop).result()

        def measure(play: Callable[[], object], count: int) -> tuple[float, float, float]:
            play()
            before, started = cluster.totals(), loop_cpu_s()
            for _ in range(count):
                play()
            spent, after = loop_cpu_s() - started, cluster.totals()
            return spent, (after.down_bytes - before.down_bytes) / 1e9, (after.up_bytes - before.up_bytes) / 1e9

        long = np.ones((8192, 2048), dtype=np.float32)
        thin = np.ones((8, 2048), dtype=np.float32)
        down_s, down, _ = measure(lambda: system.finish(system.start("nt", system.halves(long), system.whole(thin))), 8)
        a, b = system.halves(np.ones((8192, 32), dtype=np.float32)), system.whole(np.ones((2048, 32), dtype=np.float32))
        up_s, _, up = measure(lambda: system.finish(system.start("nt", a, b)), 8)
        say("## Server CPU per gigabyte\n")
        say("| direction | CPU s per GB of the server's event loop |\n|---|---|")
        say(f"| down, sent | {down_s / down:.2f} |")
        say(f"| up, received and put in place | {up_s / up:.2f} |\n")
    finally:
        system.close()


# ------------------------------------------------------------------------------------------------ the demo's step


def _demo_step(step: dict[str, int], rounds: int, say: Say) -> None:
    import torch

    from cleave.train.models import build_model

    torch.set_num_threads(WORKERS)
    plain, _ = build_model("demo", "fp32", 1)
    ours = copy.deepcopy(plain)
    text = torch.randint(0, step["vocab"], (step["tokens"] // 256, 256))

    def go(model: Any, optimizer: Any) -> float:
        started = time.perf_counter()
        model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    with Fleet.local(WORKERS, threads=1, offload="always") as fleet:
        distribute(ours, fleet, grain="gemm")
        pairs = [(model, torch.optim.AdamW(model.parameters(), 1e-4)) for model in (plain, ours)]
        for pair in pairs:
            go(*pair)
            go(*pair)
        processes = [psutil.Process(process.pid) for process in fleet._processes]  # pyright: ignore[reportPrivateUsage]

        def device_cpu_s() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        times: list[list[float]] = [[], []]
        figures = {"waiting": 0.0, "server": 0.0, "device": 0.0, "compute": 0.0, "down": 0.0, "up": 0.0}
        for _ in range(rounds):
            times[0].append(go(*pairs[0]))
            before, cpu_s, device_s = fleet.cluster.totals(), time.process_time(), device_cpu_s()
            compute_s = sum(member.compute_s for member in fleet.cluster.members())
            times[1].append(go(*pairs[1]))
            after = fleet.cluster.totals()
            figures["waiting"] += after.waiting_s - before.waiting_s
            figures["server"] += time.process_time() - cpu_s
            figures["device"] += device_cpu_s() - device_s
            figures["compute"] += sum(member.compute_s for member in fleet.cluster.members()) - compute_s
            figures["down"] += after.down_bytes - before.down_bytes
            figures["up"] += after.up_bytes - before.up_bytes
        torch_s, fleet_s = (statistics.median(taken) for taken in times)
        mean = {name: value / rounds for name, value in figures.items()}
    say(f"## A step of the demo model, {step['tokens']} tokens, fp32, on the same {WORKERS} cores\n")
    say("| | s | |\n|---|---|---|")
    say(f"| plain torch, {WORKERS} threads | {torch_s:.3f} | |")
    say(f"| cleave, {WORKERS} devices of one thread | {fleet_s:.3f} | {fleet_s / torch_s:.2f} x plain torch |")
    say(f"| of which waiting for devices | {mean['waiting']:.3f} | {mean['waiting'] / fleet_s:.0%} |")
    say(f"| CPU of the server: torch, event loop | {mean['server']:.3f} | |")
    say(f"| CPU of the devices | {mean['device']:.3f} | |")
    say(f"| of which compute | {mean['compute']:.3f} | |")
    say(f"| bytes down, up | | {mean['down'] / 1e6:.0f} MB, {mean['up'] / 1e6:.0f} MB |\n")


def _timed(play: Callable[[], object]) -> float:
    started = time.perf_counter()
    play()
    return time.perf_counter() - started
