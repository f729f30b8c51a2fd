"""Laws of device names: unique, with the lowest free number, and forgotten with the last device that used them."""

from __future__ import annotations

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.schedule.names import Names

WANTED = ["phone", "phone-2", "phone-3", "phone-2-2", "phone-02", "phone-", "-2", "laptop"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(WANTED) | st.integers(0, 20), max_size=60))
def test_a_new_name_gets_the_lowest_free_number(script: list[str | int]) -> None:
    """A script mixes requested names with indices of taken names to free."""
    names = Names()
    taken: list[str] = []
    for step in script:
        if isinstance(step, str):
            numbered = (f"{step}-{number}" for number in count(2))
            lowest = step if step not in taken else next(name for name in numbered if name not in taken)
            assert names.free(step, taken.__contains__) == lowest
            taken.append(lowest)
        elif taken:
            freed = taken.pop(step % len(taken))
            names.freed(freed, taken.__contains__)
    while taken:
        names.freed(taken.pop(), taken.__contains__)
    assert not names._numbers, "nothing remains of unused names"
