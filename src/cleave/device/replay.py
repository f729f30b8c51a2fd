"""A device without a connection: does what it is told in order, at once, and gives every result whole.

For whoever wants to know what an honest device returns: the same store, tasks and rounding as in `worker.py`. Neither
waits nor returns in parts; who asks, and why, is not its business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import numpy as np

from cleave.core.schedule.rectangles import Rectangle
from cleave.device.programs.kernels import Kernel, NumpyKernel
from cleave.device.programs.resident import make_task
from cleave.device.store import Store
from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Matrix, NumpyCodec

Inbox = Iterable[tuple[messages.Store | messages.Run | messages.Drop, Buffer]]


def replay(inbox: Inbox, kernel: Kernel | None = None) -> Iterator[Matrix]:
    """The result of each `Run`, as its reader sees it; all that a task needs comes before it."""
    kernel = kernel or NumpyKernel()
    store = Store(kernel, sys.maxsize)
    for message, payload in inbox:
        match message:
            case messages.Store():
                store.write(message, payload)
            case messages.Drop(operands=operands):
                store.drop(operands)
            case messages.Run():
                yield _result(message, store, kernel)


def _result(message: messages.Run, store: Store, kernel: Kernel) -> Matrix:
    task, codec = make_task(message.program, store, kernel), NumpyCodec()
    parts: list[tuple[Rectangle, Matrix]] = []
    while (chunk := task.next_chunk()) is not None:
        result = chunk.run()
        if chunk.part is not None:
            values = np.empty((chunk.part.rows, chunk.part.cols), dtype=np.float32)
            codec.decode_into(kernel.encode(result, message.format).data, message.format, values)
            parts.append((chunk.part, values))
    if not task.finished:
        raise ProtocolError(f"expected all that task {message.task} needs before it, but it has to wait; send it first")
    if len(parts) == 1:
        return parts[0][1]
    shape = max(part.bottom for part, _ in parts), max(part.right for part, _ in parts)
    whole = np.empty(shape, dtype=np.float32)
    for part, values in parts:
        whole[part.top : part.bottom, part.left : part.right] = values
    return whole
