"""Laws of the thread pool: results come back to the loop, and a failure concerns no other job."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cleave.server.pool import Pool


async def test_jobs_run_off_the_loop_and_their_results_come_back_to_it() -> None:
    pool, loop = Pool(asyncio.get_running_loop()), threading.get_ident()
    done: asyncio.Future[tuple[object, Exception | None, int]] = asyncio.get_running_loop().create_future()
    pool.submit(
        "results", threading.get_ident, lambda result, fault: done.set_result((result, fault, threading.get_ident()))
    )
    worker, fault, handled_in = await done
    assert worker != loop
    assert (fault, handled_in) == (None, loop)
    pool.close()


@pytest.mark.parametrize("threads", [1, 3])
async def test_a_result_that_cannot_be_handled_delays_no_other(threads: int, caplog: pytest.LogCaptureFixture) -> None:
    pool, found = Pool(asyncio.get_running_loop(), threads), set[object]()
    everything = asyncio.Event()

    def keep(result: object, fault: Exception | None) -> None:
        if result == 3:
            raise ZeroDivisionError
        found.add(result if fault is None else type(fault))
        if len(found) == 100:
            everything.set()

    for number in range(100):
        pool.submit("results", lambda number=number: number, keep)
    pool.submit("results", lambda: 1 // 0, keep)
    await asyncio.wait_for(everything.wait(), 60)
    assert found == {*range(100), ZeroDivisionError} - {3}
    assert "could not be handled" in caplog.text
    pool.close()
