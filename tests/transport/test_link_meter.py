"""The sustained rate of a link, told from arrivals at its end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.transport.link_meter import BURST_BYTES, LinkMeter

PACKET = 1448


def carry(meter: LinkMeter, size: int, begin_s: float, rate: float, *, burst: int = 0, read: int = PACKET) -> float:
    """Let a frame of `size` bytes arrive in reads of `read` bytes, the first `burst` of it at once; return the end."""
    arrived, now_s = 0, begin_s
    while arrived < size:
        piece = min(burst if arrived < burst else read, size - arrived)
        if arrived >= burst:
            now_s += piece / rate
        meter.arrived(piece, now_s, is_continued=arrived > 0)
        arrived += piece
    return now_s


@given(st.floats(1e5, 1e8), st.integers(0, BURST_BYTES), st.sampled_from([PACKET, 10 * PACKET, BURST_BYTES // 2]))
def test_a_burst_at_the_start_of_a_frame_does_not_count(rate: float, burst: int, read: int) -> None:
    meter = LinkMeter()
    carry(meter, 1 << 20, 5.0, rate, burst=burst, read=read)
    size_bytes, seconds = meter.take()
    assert size_bytes > 0.8 * (1 << 20)
    assert size_bytes / seconds == pytest.approx(rate, rel=1e-6)


@given(st.floats(1e5, 1e8), st.floats(0.05, 10.0))
def test_time_in_which_nothing_was_sent_does_not_count(rate: float, pause_s: float) -> None:
    meter, now_s = LinkMeter(), 0.0
    for _ in range(5):
        now_s = carry(meter, 256 << 10, now_s + pause_s, rate)
    size_bytes, seconds = meter.take()
    assert size_bytes / seconds == pytest.approx(rate, rel=1e-6)


def test_short_frames_far_apart_say_nothing() -> None:
    meter, now_s = LinkMeter(), 0.0
    for _ in range(100):
        now_s = carry(meter, BURST_BYTES, now_s + 0.1, 1e6, burst=BURST_BYTES)
    assert meter.take() == (0, 0.0)


def test_short_frames_back_to_back_tell_the_rate() -> None:
    meter, now_s = LinkMeter(), 0.0
    for _ in range(100):
        now_s = carry(meter, 16 << 10, now_s + 1e-4, 2.5e6)
    size_bytes, seconds = meter.take()
    assert size_bytes / seconds == pytest.approx(2.5e6, rel=0.03)


def test_frames_that_were_sent_one_at_a_time_do_not_make_a_link_look_slow() -> None:
    meter, now_s = LinkMeter(), 0.0
    for _ in range(50):
        now_s = carry(meter, 128 << 10, now_s + 4e-3, 25e6)
    size_bytes, seconds = meter.take()
    assert size_bytes / seconds == pytest.approx(25e6, rel=1e-6)


def test_what_was_taken_counts_once() -> None:
    meter = LinkMeter()
    carry(meter, 1 << 20, 0.0, 1e6)
    assert meter.take().size_bytes > 0
    assert meter.take() == (0, 0.0)
