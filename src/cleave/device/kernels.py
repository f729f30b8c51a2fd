"""Array backends of a device: numpy everywhere, torch on a GPU or on request.

Programs are written once for both, with operators, methods and functions of `ops` whose names numpy and torch share; a
kernel adds the few operations that differ. Arrays are opaque to everything else.
"""

from __future__ import annotations

import mmap
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.wire import WireFormat
from cleave.errors import InputError
from cleave.extras import install_command
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import NumpyCodec
from cleave.protocol.programs import Layout
from cleave.transport.allocation import give_back_freed_memory

KernelChoice = Literal["auto", "numpy", "torch"]
Array = Any
"""A kernel's own matrix type; every one can be sliced by rows and columns."""
_MMAP_BYTES = 4 << 20
_BAND_ELEMENTS = 1 << 17
"""Elements of a product computed at once before adding it to a matrix: they should stay in cache."""
_MIN_BAND_ROWS = 64
_ERF_CLIP = 4.0  # beyond this erf is ±1 in fp32
_ERF_NUMERATOR = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
    -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_ERF_DENOMINATOR = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02,
)  # fmt: skip


class Kernel(Protocol):
    name: str
    ops: Any
    """The numpy or torch module, for functions that both have: exp, matmul, clip, ..."""
    tile_elements: int
    """Preferred elements of a temporary, such as a tile of attention scores."""

    def allocate(self, rows: int, cols: int) -> Array: ...

    def zeros(self, rows: int, cols: int) -> Array: ...

    def write(self, strip: Array, data: Buffer, format: WireFormat) -> None:
        """Decode received rows into a slice of an operand."""
        ...

    def multiply(self, layout: Layout, pairs: list[tuple[Array, Array]]) -> Array:
        """Return the sum of op(a) op(b) over pairs; `layout` says which operand is transposed."""
        ...

    def encode(self, result: Array, format: WireFormat) -> NDArray[np.uint8]: ...

    def add_product(self, total: Array, a: Array, b: Array) -> None:
        """Compute total += a b."""
        ...

    def positions(self, first: int, last: int) -> Array:
        """Return first, first + 1, ..., last - 1 as fp32."""
        ...

    def integers(self, array: Array) -> Array:
        """Convert to the integer type used for indexing."""
        ...

    def erf(self, array: Array) -> Array: ...

    def total(self, array: Array) -> float:
        """Add all entries, in double precision where the processor has it."""
        ...

    # Entry by entry and in place, for optimizers. `scratch` has the shape of `total` and is overwritten.

    def add_scaled(self, total: Array, a: Array, factor: float, scratch: Array) -> None:
        """Compute total += factor a."""
        ...

    def add_scaled_product(self, total: Array, a: Array, b: Array, factor: float, scratch: Array) -> None:
        """Compute total += factor a b."""
        ...

    def add_scaled_quotient(self, total: Array, a: Array, b: Array, factor: float, scratch: Array) -> None:
        """Compute total += factor a / b."""
        ...

    def interpolate(self, total: Array, end: Array, weight: float, scratch: Array) -> None:
        """Move total towards `end`: 0 leaves it, 1 gives `end`."""
        ...

    def give_back_memory(self) -> None:
        """Return freed memory to the system instead of keeping it for what comes next."""
        ...


class NumpyKernel:
    name = "numpy"
    ops: Any = np
    tile_elements = 1 << 18

    def __init__(self) -> None:
        self._codec = NumpyCodec()

    def allocate(self, rows: int, cols: int) -> Array:
        """Map large arrays directly, so that freed memory returns to the system; a fragmented heap would only grow."""
        size = rows * cols * np.dtype(np.float32).itemsize
        if size < _MMAP_BYTES:
            return np.empty((rows, cols), dtype=np.float32)
        try:
            pages = _map_pages(size)
        except OSError as fault:
            raise MemoryError(f"no room for {rows} x {cols}: {fault.strerror}") from None
        return np.frombuffer(pages, dtype=np.float32).reshape(rows, cols)

    def zeros(self, rows: int, cols: int) -> Array:
        """Large arrays are fresh pages: zero already, and untouched until used."""
        if rows * cols * np.dtype(np.float32).itemsize < _MMAP_BYTES:
            return np.zeros((rows, cols), dtype=np.float32)
        return self.allocate(rows, cols)

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

    def add_product(self, total: Array, a: Array, b: Array) -> None:
        height = max(_MIN_BAND_ROWS, _BAND_ELEMENTS // total.shape[1])
        for top in range(0, total.shape[0], height):
            total[top : top + height] += self.ops.matmul(a[top : top + height], b)

    def positions(self, first: int, last: int) -> Array:
        return np.arange(first, last, dtype=np.float32)

    def integers(self, array: Array) -> Array:
        return array.astype(np.int64)

    def erf(self, array: Array) -> Array:
        """Approximate erf, which numpy lacks, as x P(x^2) / Q(x^2); error below 4e-7."""
        x = np.clip(array, -_ERF_CLIP, _ERF_CLIP)
        square = x * x
        x *= _polynomial(_ERF_NUMERATOR, square)
        x /= _polynomial(_ERF_DENOMINATOR, square)
        return x

    def total(self, array: Array) -> float:
        return float(array.sum(dtype=np.float64))

    def add_scaled(self, total: Array, a: Array, factor: float, scratch: Array) -> None:
        total += np.multiply(a, factor, out=scratch)

    def add_scaled_product(self, total: Array, a: Array, b: Array, factor: float, scratch: Array) -> None:
        np.multiply(a, factor, out=scratch)
        total += np.multiply(scratch, b, out=scratch)

    def add_scaled_quotient(self, total: Array, a: Array, b: Array, factor: float, scratch: Array) -> None:
        np.multiply(a, factor, out=scratch)
        total += np.divide(scratch, b, out=scratch)

    def interpolate(self, total: Array, end: Array, weight: float, scratch: Array) -> None:
        """Start from the nearer end, as torch does: 1 gives `end` to the last bit."""
        np.subtract(end, total, out=scratch)
        if weight < 0.5:
            total += np.multiply(scratch, weight, out=scratch)
        else:
            np.subtract(end, np.multiply(scratch, 1 - weight, out=scratch), out=total)

    def give_back_memory(self) -> None:
        give_back_freed_memory()


class TorchKernel:
    def __init__(self, device: str, threads: int | None = None) -> None:
        import torch

        self._torch = self.ops = torch
        self.tile_elements = 1 << 18 if device == "cpu" else 1 << 22
        self._device = device
        self._codec = NumpyCodec()
        self.name = f"torch-{device}"
        if threads is not None:
            torch.set_num_threads(threads)

    def allocate(self, rows: int, cols: int) -> Array:
        return self._torch.empty((rows, cols), dtype=self._torch.float32, device=self._device)

    def zeros(self, rows: int, cols: int) -> Array:
        return self._torch.zeros((rows, cols), dtype=self._torch.float32, device=self._device)

    def write(self, strip: Array, data: Buffer, format: WireFormat) -> None:
        matrix = np.empty(tuple(strip.shape), dtype=np.float32)
        self._codec.decode_into(data, format, matrix)
        strip.copy_(self._torch.from_numpy(matrix))

    def multiply(self, layout: Layout, pairs: list[tuple[Array, Array]]) -> Array:
        total = None
        with self._torch.no_grad():  # not inference_mode: a sum over strips updates its result later
            for a, b in pairs:
                left, right = _oriented(layout, a, b)
                total = left @ right if total is None else total.addmm_(left, right)
        return total

    def encode(self, result: Array, format: WireFormat) -> NDArray[np.uint8]:
        return self._codec.encode(result.cpu().numpy(), format)

    def add_product(self, total: Array, a: Array, b: Array) -> None:
        total.addmm_(a, b)

    def positions(self, first: int, last: int) -> Array:
        return self._torch.arange(first, last, dtype=self._torch.float32, device=self._device)

    def integers(self, array: Array) -> Array:
        return array.long()

    def erf(self, array: Array) -> Array:
        return self._torch.erf(array)

    def total(self, array: Array) -> float:
        return float(array.sum(dtype=self._torch.float32 if self._device == "mps" else self._torch.float64))

    def add_scaled(self, total: Array, a: Array, factor: float, scratch: Array) -> None:
        total.add_(a, alpha=factor)

    def add_scaled_product(self, total: Array, a: Array, b: Array, factor: float, scratch: Array) -> None:
        total.addcmul_(a, b, value=factor)

    def add_scaled_quotient(self, total: Array, a: Array, b: Array, factor: float, scratch: Array) -> None:
        total.addcdiv_(a, b, value=factor)

    def interpolate(self, total: Array, end: Array, weight: float, scratch: Array) -> None:
        total.lerp_(end, weight)

    def give_back_memory(self) -> None:
        if self._device != "cpu":
            getattr(self._torch, self._device).empty_cache()
        give_back_freed_memory()


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """Evaluate by Horner's rule, highest power first."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += np.float32(coefficient)
    return total


def _map_pages(size: int) -> mmap.mmap:
    """Map private, huge pages where available, as every page costs a fault."""
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
    """Choose a backend. `auto` is torch if it finds a GPU, else numpy: as fast on a CPU, with far less memory."""
    if choice == "numpy" or (choice == "auto" and not _may_have_gpu()):
        return NumpyKernel()
    if find_spec("torch") is None:
        if choice == "torch":
            advice = f"run {install_command('train', 'torch')}, or choose --kernel numpy"
            raise InputError(f"--kernel torch needs torch, which is not installed; {advice}")
        return NumpyKernel()
    import torch

    if torch.cuda.is_available():
        return TorchKernel("cuda", threads)
    if torch.backends.mps.is_available():
        return TorchKernel("mps", threads)
    return TorchKernel("cpu", threads) if choice == "torch" else NumpyKernel()


def unused_gpu(kernel: Kernel) -> str | None:
    """Say that this machine has a GPU which the kernel leaves idle, and how to use it; None otherwise."""
    if not _may_have_gpu() or kernel.name in ("torch-cuda", "torch-mps"):
        return None
    if find_spec("torch") is None:
        advice = f"computing on its GPU needs torch: {install_command('train', 'torch')}"
    else:
        advice = "torch does not see it: install a torch build for this GPU, and check its driver"
    return f"this machine has a GPU but computes on its processor; {advice}, then join again"


_NVIDIA = Path("/dev/nvidia0")
_WSL = Path("/dev/dxg")


def _may_have_gpu() -> bool:
    """Guess without importing torch, which takes seconds and hundreds of megabytes."""
    return _NVIDIA.exists() or _WSL.exists() or (platform.system() == "Darwin" and platform.machine() == "arm64")
