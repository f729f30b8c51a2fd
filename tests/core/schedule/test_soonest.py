"""Law of the queue of device times: it agrees with sorting all of them."""

from __future__ import annotations

import math
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.schedule.soonest import Soonest
from cleave.core.schedule.tasks import DeviceId

DEVICES = [DeviceId(name) for name in "abcdefghijkl"]
MOMENTS = [-math.inf, 0.0, 1.0, 1.5, 2.0, 3.0]

device, moment = st.sampled_from(DEVICES), st.sampled_from(MOMENTS)
changes = st.tuples(st.sampled_from(["put", "put_earlier", "discard", "pop"]), device, moment)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(changes, max_size=100), st.integers(0, 13))
def test_devices_come_out_by_time_and_ties_in_insertion_order(
    script: list[tuple[str, DeviceId, float]], limit: int
) -> None:
    soonest = Soonest()
    expected: dict[DeviceId, tuple[float, int]] = {}
    for number, (change, name, at) in enumerate(script):
        known = expected.get(name, (math.inf, 0))[0]
        match change:
            case "put":
                soonest.put(name, at)
                if at != known:
                    expected[name] = (at, number)
            case "put_earlier":
                soonest.put_earlier(name, at)
                if at < known:
                    expected[name] = (at, number)
            case "discard":
                soonest.discard(name)
                expected.pop(name, None)
            case _:
                due = [other for other in _ranked(expected) if expected[other][0] < at]
                assert soonest.pop_before(at) == due
                for other in due:
                    del expected[other]
        assert list(islice(soonest.in_order(), limit)) == _ranked(expected)[:limit]
        assert len(soonest) == len(expected)
        assert all(soonest.moment(name) == expected.get(name, (math.inf,))[0] for name in DEVICES)


def _ranked(moments: dict[DeviceId, tuple[float, int]]) -> list[DeviceId]:
    return sorted(moments, key=lambda name: moments[name])
