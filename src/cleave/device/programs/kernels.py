"""What multiplies: numpy everywhere, torch on a GPU (or on request). Operands are opaque to all but their kernel."""

from __future__ import annotations

import mmap
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost import WireFormat
from cleave.errors import InputError
from cleave.wire.frame import Buffer
from cleave.wire.messages import Layout
from cleave.wire.numbers import NumpyCodec

KernelChoice = Literal["auto", "numpy", "torch"]
Array = Any
"""A kernel's own kind of matrix; all of them can be sliced by rows and columns."""
_LARGE_BYTES = 4 << 20


class Kernel(Protocol):
    name: str

    def allocate(self, rows: int, cols: int) -> Array: ...

    def write(self, strip: Array, data: Buffer, format: WireFormat) -> None:
        """Decode rows that arrived into a slice of an operand."""
        ...

    def multiply(self, layout: Layout, pairs: list[tuple[Array, Array]]) -> Array:
        """The sum of op(a) op(b) over pairs."""
        ...

    def encode(self, result: Array, format: WireFormat) -> NDArray[np.uint8]: ...


class NumpyKernel:
    name = "numpy"

    def __init__(self) -> None:
        self._codec = NumpyCodec()

    def allocate(self, rows: int, cols: int) -> Array:
        """Large ones from the system, to which they return: a heap with holes would grow beyond the memory offered."""
        size = rows * cols * np.dtype(np.float32).itemsize
        if size < _LARGE_BYTES:
            return np.empty((rows, cols), dtype=np.float32)
        try:
            pages = _pages(size)
        except OSError as fault:
            raise MemoryError(f"no room for {rows} x {cols}: {fault.strerror}") from None
        return np.frombuffer(pages, dtype=np.float32).reshape(rows, cols)

    def write(self, strip: Array, data: Buffer, format: WireFormat) -> None:
        self._codec.decode_into(data, format, strip)

    def multiply(self, layout: Layout, pairs: list[tuple[Array, Array]]) -> Array:
        total = None
        for a, b in pairs:
            left, right = _oriented(layout, a, b)
            product = np.matmul(left, right, out=self.allocate(left.shape[0], right.shape[1]))
            total = product if total is None else np.add(total, product, out=total)
        return total

    def encode(self, result: Array, format: WireFormat) -> NDArray[np.uint8]:
        return self._codec.encode(result, format)


class TorchKernel:
    def __init__(self, device: str, threads: int | None = None) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._codec = NumpyCodec()
        self.name = f"torch-{device}"
        if threads is not None:
            torch.set_num_threads(threads)

    def allocate(self, rows: int, cols: int) -> Array:
        return self._torch.empty((rows, cols), dtype=self._torch.float32, device=self._device)

    def write(self, strip: Array, data: Buffer, format: WireFormat) -> None:
        matrix = np.empty(tuple(strip.shape), dtype=np.float32)
        self._codec.decode_into(data, format, matrix)
        strip.copy_(self._torch.from_numpy(matrix))

    def multiply(self, layout: Layout, pairs: list[tuple[Array, Array]]) -> Array:
        total = None
        with self._torch.no_grad():  # not inference_mode: a sum over strips adds to its result later
            for a, b in pairs:
                left, right = _oriented(layout, a, b)
                total = left @ right if total is None else total.addmm_(left, right)
        return total

    def encode(self, result: Array, format: WireFormat) -> NDArray[np.uint8]:
        return self._codec.encode(result.cpu().numpy(), format)


def _pages(size: int) -> mmap.mmap:
    """Private and huge ones where there are such, as each page costs a fault."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _oriented(layout: Layout, a: Array, b: Array) -> tuple[Array, Array]:
    match layout:
        case "nt":
            return a, b.T
        case "nn":
            return a, b
        case "tn":
            return a.T, b


def choose_kernel(choice: KernelChoice, threads: int | None) -> Kernel:
    """`auto`: torch where it finds a GPU, else numpy, which is as fast on a CPU and takes far less memory."""
    if choice == "numpy" or (choice == "auto" and not _may_have_gpu()):
        return NumpyKernel()
    if find_spec("torch") is None:
        if choice == "torch":
            raise InputError("--kernel torch needs torch, which is not installed; pip install torch, or use numpy")
        return NumpyKernel()
    import torch

    if torch.cuda.is_available():
        return TorchKernel("cuda", threads)
    if torch.backends.mps.is_available():
        return TorchKernel("mps", threads)
    return TorchKernel("cpu", threads) if choice == "torch" else NumpyKernel()


def _may_have_gpu() -> bool:
    """Without importing torch, which takes seconds and hundreds of megabytes."""
    return Path("/dev/nvidia0").exists() or (platform.system() == "Darwin" and platform.machine() == "arm64")
