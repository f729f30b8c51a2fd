"""The clients of `wire_path.py`, each in a process of its own.

bare PORT   read or write bytes as asked on standard input, over a plain socket
join URL    a device that answers every task without multiplying: products with numbers computed once (the
            benchmark's operands never change), passes and gradients with zeros
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

import numpy as np

from cleave.core.cost.wire import WireFormat, encoded_bytes
from cleave.core.schedule.rectangles import Rectangle
from cleave.device.programs.gemm import bands
from cleave.errors import CleaveError
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Encoded, NumpyCodec
from cleave.protocol.programs import Backward, Collect, Forward, GemmProgram, Layout, operands
from cleave.transport.base import Channel
from cleave.transport.websocket import dial

BARE_BYTES = 4 << 20
"""Bytes per system call of the bare client."""


def bare(port: int) -> None:
    buffer = memoryview(bytearray(BARE_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connected:
        for line in sys.stdin:
            way, size = line.split()
            connected.sendall((int(size) if way == "down" else -int(size)).to_bytes(8, "big", signed=True))
            left = int(size) + 2 if way == "down" else int(size)
            while left > 0:
                if way == "down":
                    left -= connected.recv_into(buffer[: min(left, BARE_BYTES)])
                else:
                    connected.sendall(buffer)
                    left -= BARE_BYTES
            if way == "up":
                connected.recv(2)
            print("done", flush=True)


_TIMED_ROWS = 512
"""Rows of the blocks whose products are timed: equal ones are computed once."""


class Device:
    def __init__(self, channel: Channel) -> None:
        self._channel, self._codec = channel, NumpyCodec()
        self._strips: dict[int, list[tuple[messages.Store, Buffer]]] = {}
        self._products: dict[tuple[int, int], Encoded] = {}
        self._waiting: list[messages.RunTask] = []
        self._zeros = np.zeros(8 << 20, dtype=np.uint8)

    async def live(self) -> None:
        await self._channel.send(
            messages.Hello(version=messages.VERSION, name="echo", flops_per_s=1e11, memory_bytes=4 << 30, kernel="none")
        )
        while True:
            received = await self._channel.receive()
            match received.message:
                case messages.Store() as store:
                    self._strips.setdefault(store.operand, []).append((store, received.payload))
                case messages.RunTask() as task:
                    self._waiting.append(task)
                case messages.Drop(operands=gone):
                    for operand in gone:
                        self._strips.pop(operand, None)
                case messages.Probe(answer=size):
                    await self._channel.send(messages.Probed(down_s=received.link_s, payload=size), bytes(size))
                case messages.Bye():
                    return
                case _:
                    pass
            for task in [one for one in self._waiting if self._is_ready(one)]:
                self._waiting.remove(task)
                await self._answer(task)

    def _is_ready(self, task: messages.RunTask) -> bool:
        return all(self._is_whole(operand) for operand in operands(task.program))

    def _is_whole(self, operand: int) -> bool:
        strips = self._strips.get(operand)
        return strips is not None and strips[-1][0].first_row + strips[-1][0].strip_rows == strips[-1][0].rows

    async def _answer(self, task: messages.RunTask) -> None:
        match task.program:
            case GemmProgram() as program:
                key = (program.rows, program.cols)
                if key not in self._products or program.rows < _TIMED_ROWS:  # others are trials, of other numbers
                    block = sum(self._product(program.layout, a, b) for a, b in program.terms)
                    self._products[key] = self._codec.encode(np.asarray(block, dtype=np.float32), task.format)
                await self._send(task, *key, self._products[key])
            case Collect(rows=rows, cols=cols):
                await self._send(task, rows, cols, None)
            case Forward(x=x, is_silent=False) | Backward(x=x, wants_dx=True):
                first = self._strips[x][0][0]
                await self._send(task, first.rows, first.cols, None)
            case _:
                await self._send(task, 1, 1, None)

    def _product(self, layout: Layout, a: int, b: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        left, right = self._matrix(a), self._matrix(b)
        return (left.T if layout == "tn" else left) @ (right.T if layout == "nt" else right)

    def _matrix(self, operand: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        whole = self._strips[operand][0][0]
        matrix = np.empty((whole.rows, whole.cols), dtype=np.float32)
        for strip, payload in self._strips[operand]:
            rows = slice(strip.first_row, strip.first_row + strip.strip_rows)
            self._codec.decode_into(payload, strip.format, matrix[rows])
        return matrix

    async def _send(self, task: messages.RunTask, rows: int, cols: int, whole: Encoded | None) -> None:
        for part in bands(rows, cols):
            size = encoded_bytes(task.format, part.rows, cols)
            start = encoded_bytes(task.format, part.top, cols)
            payload = self._zeros[:size] if whole is None else whole[start : start + size]
            await self._channel.send(_result(task.task, part, task.format, size), payload.data)


def _result(task: int, part: Rectangle, format: WireFormat, size: int) -> messages.Result:
    return messages.Result(
        task=task,
        first_row=part.top,
        rows=part.rows,
        first_col=0,
        cols=part.cols,
        format=format,
        flops=1e6,
        compute_s=1e-5,
        down_bytes=1 << 20,
        down_s=1e-3,
        payload=size,
    )


async def join(url: str) -> None:
    channel = await dial(url + "/ws")
    with contextlib.suppress(CleaveError):
        await Device(channel).live()


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        bare(int(sys.argv[2]))
    else:
        asyncio.run(join(sys.argv[2]))
