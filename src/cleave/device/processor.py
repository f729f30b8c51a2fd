"""What computes a device's chunks: one at a time, each with the seconds it took.

`Processor` is what the worker needs. A real device computes in a thread of its own; an emulated one takes as long as
its profile says (`cleave.emulate`). Knows chunks, neither tasks nor channels.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.wire import WireFormat
from cleave.device.kernels import Kernel
from cleave.device.programs.gemm import Chunk

Encoded = NDArray[np.uint8]


class Processor(Protocol):
    async def run(self, chunk: Chunk, format: WireFormat, *, begins: bool) -> tuple[Encoded | None, float]:
        """Compute a chunk; return its result in `format`, None if it has none to send, and the seconds it took.

        `begins` says that it is the first chunk of its task.
        """
        ...

    def received(self, payload_bytes: int) -> None:
        """Count a payload that arrived and was decoded."""
        ...

    async def close(self) -> None:
        """Wait until nothing computes any more."""
        ...


class ThreadProcessor:
    """Compute in a thread of its own, as fast as it can."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._thread = ThreadPoolExecutor(1, "compute")

    async def run(self, chunk: Chunk, format: WireFormat, *, begins: bool) -> tuple[Encoded | None, float]:
        started = time.perf_counter()
        encoded, _ = await asyncio.get_running_loop().run_in_executor(
            self._thread, run_timed, chunk, self._kernel, format
        )
        return encoded, time.perf_counter() - started  # with the hand-over, which is part of what a task costs

    def received(self, payload_bytes: int) -> None:
        """Nothing to count: decoding took its own time."""

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)  # a product cannot be interrupted; do not block the loop for it


class RestingProcessor:
    """Let another processor compute in a share of the time only: it rests before the next chunk, not after a result."""

    def __init__(self, inner: Processor, share: float) -> None:
        self._inner, self._share = inner, share
        self._rest_until_s = 0.0

    async def run(self, chunk: Chunk, format: WireFormat, *, begins: bool) -> tuple[Encoded | None, float]:
        """Report the seconds with the rest that follows, as this is how fast the device is."""
        now_s = asyncio.get_running_loop().time
        while (rest_s := self._rest_until_s - now_s()) > 0:
            await asyncio.sleep(rest_s)
        encoded, took_s = await self._inner.run(chunk, format, begins=begins)
        self._rest_until_s = now_s() + took_s / self._share - took_s
        return encoded, took_s / self._share

    def received(self, payload_bytes: int) -> None:
        self._inner.received(payload_bytes)

    async def close(self) -> None:
        await self._inner.close()


def run_timed(chunk: Chunk, kernel: Kernel, format: WireFormat) -> tuple[Encoded | None, float]:
    """Compute and encode a chunk in the calling thread; return the result and the seconds it took."""
    started = time.perf_counter()
    result = chunk.run()
    encoded = None if chunk.part is None else kernel.encode(result, format)
    return encoded, time.perf_counter() - started
