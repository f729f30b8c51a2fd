"""Nobody who puts something into a sink waits, whatever becomes of it."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from cleave.sink import Sink


@given(st.lists(st.integers()))
def test_everything_is_taken_once_and_in_order(items: list[int]) -> None:
    taken: list[int] = []
    sink = Sink(taken.append, name="test", room=1000)
    for item in items:
        sink.put(item)
    assert sink.drain(60.0)
    assert (taken, sink.waiting, sink.dropped) == (items, 0, 0)


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 20))
def test_a_stuck_sink_keeps_the_newest_that_fit_and_counts_the_rest(sizes: list[int], room: int) -> None:
    started, go_on, taken = threading.Event(), threading.Event(), list[int]()

    def take(size: int) -> None:
        started.set()
        assert go_on.wait(60.0)
        taken.append(size)

    sink = Sink(take, name="test", room=room, size=lambda size: size)
    sink.put(0)
    assert started.wait(60.0)
    for size in sizes:
        sink.put(size)
    assert not sink.drain(0.0)
    go_on.set()
    assert sink.drain(60.0)
    kept = taken[1:]
    assert kept == sizes[len(sizes) - len(kept) :]
    assert sum(kept) <= room or len(kept) == 1
    longer = sizes[len(sizes) - len(kept) - 1 :]
    assert kept == sizes or sum(longer) > room
    assert sink.dropped == len(sizes) - len(kept)
