"""What answers for all emulated devices of a process: true results from a few threads that all of them share."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from cleave.core.cost.wire import WireFormat
from cleave.device.kernels import NumpyKernel
from cleave.device.processor import Encoded, run_timed
from cleave.device.programs.gemm import Chunk


class EmulatedKernel(NumpyKernel):
    """numpy, under a name that tells people at the server what they see."""

    name = "emulated"


class SharedThreads:
    """True results, computed in the order in which devices ask."""

    def __init__(self, threads: int) -> None:
        self.kernel = EmulatedKernel()
        self._threads = ThreadPoolExecutor(threads, "compute")

    async def answer(self, chunk: Chunk, format: WireFormat) -> Encoded | None:
        loop = asyncio.get_running_loop()
        encoded, _ = await loop.run_in_executor(self._threads, run_timed, chunk, self.kernel, format)
        return encoded

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
