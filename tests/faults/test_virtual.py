"""Laws of virtual time: it costs no real time, keeps order, and lets nothing wait forever."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from tests.support.virtual import Stuck, run


def test_a_year_passes_instantly() -> None:
    async def year() -> float:
        await asyncio.sleep(365 * 86400)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert run(year(), limit_s=1e9) >= 365 * 86400
    assert time.monotonic() - started < 60


def test_timers_fire_in_order_and_timeouts_in_between() -> None:
    seen: list[str] = []

    async def say(after_s: float, word: str) -> None:
        await asyncio.sleep(after_s)
        seen.append(word)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for after_s, word in ((3.0, "c"), (1.0, "a"), (5.0, "e")):
                group.create_task(say(after_s, word))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.0):
                    await asyncio.Event().wait()
            seen.append("b")
            await asyncio.sleep(2.0)
            seen.append("d")

    run(main(), limit_s=10)
    assert seen == ["a", "b", "c", "d", "e"]


def test_tasks_that_would_wait_forever_are_named() -> None:
    async def lonely() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match=r"nothing is left to happen.*lonely at locks\.py|lonely at test_virtual\.py"):
        run(lonely(), limit_s=10)


def test_endless_activity_is_stopped() -> None:
    async def restless() -> None:
        while True:
            await asyncio.sleep(1.0)

    with pytest.raises(Stuck, match=r"not done after 1.. virtual seconds.*restless"):
        run(restless(), limit_s=100)


def test_work_for_threads_runs_inline_in_virtual_time() -> None:
    async def main() -> tuple[bool, float]:
        here = threading.get_ident()
        return await asyncio.to_thread(threading.get_ident) == here, asyncio.get_running_loop().time()

    is_here, took_s = run(main(), limit_s=10)
    assert is_here
    assert 0 < took_s < 0.1


def test_an_uncaught_exception_fails_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run(main(), limit_s=10)
