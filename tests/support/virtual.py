"""An event loop with a virtual clock: when nothing is ready, time jumps to the next timer.

Deadlines of minutes pass in milliseconds and never depend on the speed of the machine. A run that would wait forever
fails at once, and says which tasks wait where. Work for other threads runs inline and takes a fixed time, so that the
same seed gives the same run. `time.perf_counter` reads the same clock, a little later each time, so that measured rates
are virtual too.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar
from unittest import mock

_COMPUTE_S = 1e-3
"""Duration of a call meant for another thread."""
_TICK_S = 1e-6
"""Time between two readings of the clock."""

Result = TypeVar("Result")


class Stuck(AssertionError):
    """Nothing can happen anymore, or too much time has passed."""


class _Jump(selectors.DefaultSelector):
    """Advances the clock of its loop instead of waiting for a file."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout != 0:
            self.loop.jump(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, limit_s: float) -> None:
        selector = _Jump()
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = _TICK_S  # otherwise a timer far ahead is never quite due
        self._now_s, self.limit_s = 0.0, limit_s
        self.faults: list[str] = []
        """Uncaught exceptions of callbacks and of tasks that were never awaited."""
        self.set_exception_handler(lambda _, context: self.faults.append(_told(context)))

    def time(self) -> float:
        return self._now_s

    def perf_counter(self) -> float:
        self._now_s += _TICK_S
        return self._now_s

    def jump(self, by_s: float | None) -> None:
        if by_s is None:
            raise Stuck(f"nothing is left to happen, but these wait: {self._waiting()}")
        if self._now_s > self.limit_s:
            raise Stuck(f"not done after {self._now_s:.0f} virtual seconds; these wait: {self._waiting()}")
        self._now_s += by_s

    def run_in_executor(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        done: asyncio.Future[Result] = self.create_future()
        try:
            result = func(*args)
        except Exception as fault:
            self.call_later(_COMPUTE_S, _unless_cancelled, done, done.set_exception, fault)
        else:
            self.call_later(_COMPUTE_S, _unless_cancelled, done, done.set_result, result)
        return done

    def _waiting(self) -> str:
        tasks = asyncio.all_tasks(self)
        named = [task for task in tasks if not task.get_name().startswith("Task-")]
        return "; ".join(sorted(_where(task) for task in named or tasks))


def run(main: Coroutine[object, object, Result], *, limit_s: float) -> Result:
    """Run to the end in virtual time; raise Stuck if that takes more than `limit_s` or never happens."""
    loop = VirtualLoop(limit_s)
    try:
        with mock.patch.object(time, "perf_counter", loop.perf_counter):
            try:
                return loop.run_until_complete(loop.create_task(main, name="main"))
            finally:
                _cancel_all(loop)
    finally:
        loop.close()
        assert not loop.faults, loop.faults


def _cancel_all(loop: VirtualLoop) -> None:
    loop.limit_s += 60.0  # for tasks that wait a little before giving up
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


def _unless_cancelled(done: asyncio.Future[Any], settle: Callable[[Any], None], value: object) -> None:
    if not done.cancelled():
        settle(value)


def _where(task: asyncio.Task[Any]) -> str:
    """A task's name and coroutine, and the innermost line at which it waits."""
    frames = task.get_stack()
    place = f"{frames[-1].f_code.co_filename.rpartition('/')[2]}:{frames[-1].f_lineno}" if frames else "nowhere"
    return f"{task.get_name()} {getattr(task.get_coro(), '__qualname__', '')} at {place}"


def _told(context: Mapping[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r} in {context.get('task') or context.get('handle')}"
