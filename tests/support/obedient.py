"""A device without a channel or threads: obeys messages at once, as far as it can.

It drives the same store and tasks as the worker from one place, so that all their exceptions surface, and memory can be
checked after every message.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
from tests.support import mutations

from cleave.device.kernels import NumpyKernel
from cleave.device.programs.resident import DeviceTask, make_task
from cleave.device.store import OperandStore
from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import Assembler, Buffer
from cleave.protocol.messages import AnyMessage, FromServer

MEMORY_BYTES = 1 << 18


class Device:
    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._kernel = NumpyKernel()
        self.store, self._memory_bytes = OperandStore(self._kernel, memory_bytes), memory_bytes
        self._tasks: dict[int, tuple[messages.RunTask, DeviceTask]] = {}
        self.results = self.failures = 0

    def obey(self, strings: Iterable[bytes]) -> bool:
        """Take byte strings as they come over a channel; return False if one was refused, ending the connection."""
        assembler = Assembler()
        try:
            for data in strings:
                whole = assembler.feed(data)
                if whole is not None:
                    self._take(*whole)
                    self._work()
                assert 0 <= self.store.used_bytes <= self._memory_bytes
        except ProtocolError:
            return False
        return True

    def _take(self, message: AnyMessage, payload: Buffer) -> None:
        match message:
            case messages.Store():
                self.store.write(message, payload)
            case messages.RunTask():
                self._tasks[message.task] = message, make_task(message.program, self.store, self._kernel)
            case messages.Drop(operands=operands):
                self.store.drop(operands)
            case messages.CancelTasks(tasks=tasks):
                for task in tasks:
                    self._tasks.pop(task, None)
            case _ if not isinstance(message, FromServer):
                raise ProtocolError("a server does not send this")
            case _:
                pass

    def _work(self) -> None:
        for number, (message, task) in list(self._tasks.items()):
            while (chunk := task.next_chunk()) is not None:
                try:
                    with np.errstate(all="ignore"):  # numpy's warnings about non-finite numbers are not crashes
                        result = chunk.run()
                    if chunk.part is not None:
                        self._kernel.encode(result, message.format)
                        self.results += 1
                except (MemoryError, RuntimeError):  # as in the worker: the task fails, the device stays
                    self.failures += 1
                    del self._tasks[number]
                    break
            if task.finished:
                self._tasks.pop(number, None)


def mishap(rng: random.Random) -> list[bytes]:
    """A server's frames in a golden conversation, with one to three of them wrong."""
    conversation = rng.choice(mutations.conversations())
    said = [list(frame) for frame in conversation]
    for at in rng.sample(range(len(said)), rng.randint(1, 3)):
        header, payload = conversation[at]
        match rng.randrange(8):
            case 0:
                said[at] = []
            case 1:
                said[at] = [header, payload, *rng.choice(conversation)]
            case 2:
                said[at] = list(rng.choice(conversation))
            case 3 if payload:
                said[at] = [header, mutations.other_numbers(payload, rng)]
            case _:
                said[at] = [mutations.odd(header, rng), payload]
    return [data for frame in said for data in frame if data]
