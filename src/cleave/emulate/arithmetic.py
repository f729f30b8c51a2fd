"""What answers for all emulated devices of a process: true results from a few threads that all share, or nothing but
zeros of the right shape, which take neither time nor memory and test a server alone.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cleave.core.cost.wire import WireFormat, encoded_bytes
from cleave.device.kernels import Array, NumpyKernel
from cleave.device.processor import Encoded, run_timed
from cleave.device.programs.gemm import Chunk
from cleave.errors import ProtocolError
from cleave.protocol.frames import Buffer
from cleave.protocol.messages import SCALE_TEST_VERSION, VERSION

_FIRST_BYTES = 8 << 20
"""Zeros kept at first: as long as most results."""


class EmulatedKernel(NumpyKernel):
    """numpy, under a name that tells people at the server what they see."""

    name = "emulated"


class HollowKernel(NumpyKernel):
    """Matrices that have a shape but no numbers: a zero that is repeated without taking memory."""

    name = "none"

    def allocate(self, rows: int, cols: int) -> Array:
        return np.broadcast_to(np.float32(0), (rows, cols))

    def zeros(self, rows: int, cols: int) -> Array:
        return self.allocate(rows, cols)

    def write(self, strip: Array, data: Buffer, format: WireFormat) -> None:
        """Check the length of received rows, and forget them."""
        if len(data) != encoded_bytes(format, *strip.shape):
            raise ProtocolError(f"expected {encoded_bytes(format, *strip.shape)} bytes, got {len(data)}")


class Zeros:
    """Results of the right shape without arithmetic, all from one buffer."""

    version = SCALE_TEST_VERSION

    def __init__(self) -> None:
        self.kernel = HollowKernel()
        self._zeros = np.zeros(_FIRST_BYTES, dtype=np.uint8)

    async def answer(self, chunk: Chunk, format: WireFormat) -> Encoded | None:
        chunk.skip()
        if chunk.part is None:
            return None
        size = encoded_bytes(format, chunk.part.rows, chunk.part.cols)
        if size > len(self._zeros):
            self._zeros = np.zeros(size, dtype=np.uint8)
        return self._zeros[:size]

    def close(self) -> None:
        """Nothing runs anywhere else."""


class SharedThreads:
    """True results, computed in the order in which devices ask."""

    version = VERSION

    def __init__(self, threads: int) -> None:
        self.kernel = EmulatedKernel()
        self._threads = ThreadPoolExecutor(threads, "compute")

    async def answer(self, chunk: Chunk, format: WireFormat) -> Encoded | None:
        loop = asyncio.get_running_loop()
        encoded, _ = await loop.run_in_executor(self._threads, run_timed, chunk, self.kernel, format)
        return encoded

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
