"""A device without a connection: run recorded messages in order and return each result in one piece.

Computes what an honest device returns, with the store, tasks and rounding of `worker.py`. Audits compare against it,
which it does not know; it never waits and never returns partial results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import numpy as np

from cleave.core.model.batch import Matrix
from cleave.core.schedule.rectangles import Rectangle
from cleave.device.kernels import Kernel, NumpyKernel
from cleave.device.programs.resident import make_task
from cleave.device.store import OperandStore
from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import NumpyCodec

Inbox = Iterable[tuple[messages.Store | messages.RunTask | messages.Drop, Buffer]]


def replay(inbox: Inbox, kernel: Kernel | None = None) -> Iterator[Matrix]:
    """Yield the result of each `Run` as decoded from the wire. Every operand must precede the task that needs it."""
    kernel = kernel or NumpyKernel()
    store = OperandStore(kernel, sys.maxsize)
    for message, payload in inbox:
        match message:
            case messages.Store():
                store.write(message, payload)
            case messages.Drop(operands=operands):
                store.drop(operands)
            case messages.RunTask():
                yield _result(message, store, kernel)


def _result(message: messages.RunTask, store: OperandStore, kernel: Kernel) -> Matrix:
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
