"""Threads for everything that computes, so that the event loop only moves bytes.

Short jobs (decoding, checking, storing) go to a few threads in batches, so that many small results cost one crossing
into the loop; audits and plans, which are long, run one at a time on a thread each. The number crunching is numpy's,
which releases the GIL; plans, which do not, are made in another process for large fleets (`planning.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

_MOST_THREADS = 4
_BATCH = 32
"""Jobs a thread takes at a time."""

LaneName = Literal["results", "audits", "plans"]
_Work = Callable[[], object]
Done = Callable[[object, Exception | None], None]
"""Called in the loop with a job's result or exception."""

log = logging.getLogger(__name__)


class _Lane:
    """A first-in, first-out queue of jobs with its own threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int, name: str) -> None:
        self._loop, self._threads, self._idle = loop, threads, threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._waiting: deque[tuple[_Work, Done]] = deque()
        self._is_closed = False

    def submit(self, work: _Work, done: Done) -> None:
        """Queue a job; those of one turn of the loop start together."""
        if not self._waiting and self._idle:
            self._loop.call_soon(self._start)
        self._waiting.append((work, done))

    def close(self) -> None:
        self._is_closed = True
        self._waiting.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._idle and self._waiting and not self._is_closed:
            count = min(_BATCH, -(-len(self._waiting) // self._threads))
            batch = [self._waiting.popleft() for _ in range(count)]
            self._idle -= 1
            running = self._loop.run_in_executor(self._executor, _run, [work for work, _ in batch])
            running.add_done_callback(partial(self._ended, [done for _, done in batch]))

    def _ended(self, batch: list[Done], running: asyncio.Future[list[tuple[object, Exception | None]]]) -> None:
        self._idle += 1
        if self._is_closed or running.cancelled():
            return
        for done, (result, fault) in zip(batch, running.result(), strict=True):
            try:
                done(result, fault)
            except Exception:  # a bug of ours, which must not stop the jobs behind it
                log.exception("a job's result could not be handled")
        self._start()


class Pool:
    """Lives with its loop; `close` discards jobs that have not started."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int | None = None) -> None:
        count = threads or max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._lanes: dict[LaneName, _Lane] = {
            "results": _Lane(loop, count, "cleave-results"),
            "audits": _Lane(loop, 1, "cleave-audit"),
            "plans": _Lane(loop, 1, "cleave-plan"),
        }

    def submit(self, lane: LaneName, work: _Work, done: Done) -> None:
        self._lanes[lane].submit(work, done)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()


def _run(batch: list[_Work]) -> list[tuple[object, Exception | None]]:
    outcomes: list[tuple[object, Exception | None]] = []
    for work in batch:
        try:
            outcomes.append((work(), None))
        except Exception as fault:
            outcomes.append((None, fault))
    return outcomes
