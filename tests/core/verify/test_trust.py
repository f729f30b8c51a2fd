"""Laws of trust: erring too often, in whatever pattern, ends in quarantine; a single error is cleared in time."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.verify.trust import (
    LEVELS,
    PROBATION,
    RIGHTS_PER_WRONG,
    SAMPLED_PER_PASS,
    WRONGS_TO_QUARANTINE,
    Trust,
    audited_share,
    level_of,
)

LONG = 200_000
"""Blocks: more than it takes to catch the rarest liar that must be caught."""


def blocks_until_lost(trust: Trust, period: int, first: int) -> int | None:
    """Blocks until quarantine of a device that is wrong once every `period` blocks."""
    for block in range(LONG):
        if block % period == first:
            trust.wrong()
        else:
            trust.right()
        if trust.is_lost:
            return block
    return None


@pytest.mark.parametrize("period", [1, 2, 10, 100, RIGHTS_PER_WRONG])
@pytest.mark.parametrize("last", [False, True])
def test_a_device_that_is_wrong_too_often_ends_in_quarantine(period: int, last: bool) -> None:
    assert blocks_until_lost(Trust(), period, period - 1 if last else 0) is not None


@pytest.mark.parametrize("period", [RIGHTS_PER_WRONG + 1, RIGHTS_PER_WRONG + 2, 10 * RIGHTS_PER_WRONG])
def test_a_device_that_is_rarely_wrong_stays(period: int) -> None:
    assert blocks_until_lost(Trust(), period, 0) is None


def test_quarantine_takes_exactly_the_set_number_of_wrongs_in_a_row() -> None:
    trust = Trust()
    for _ in range(WRONGS_TO_QUARANTINE - 1):
        trust.wrong()
        assert not trust.is_lost
    trust.wrong()
    assert trust.is_lost


def test_an_honest_device_with_one_flipped_bit_is_cleared() -> None:
    trust = Trust()
    assert not trust.is_suspect
    trust.wrong()
    assert trust.is_suspect
    assert not trust.is_lost
    for _ in range(RIGHTS_PER_WRONG - 1):
        trust.right()
        assert trust.is_suspect, "not cleared before enough right results"
    trust.right()
    assert not trust.is_suspect
    assert trust == Trust(), "fully cleared"


def test_right_results_build_up_no_credit() -> None:
    trust = Trust()
    for _ in range(100 * RIGHTS_PER_WRONG):
        trust.right()
    for _ in range(WRONGS_TO_QUARANTINE):
        trust.wrong()
    assert trust.is_lost


runs = st.tuples(st.sampled_from(["right", "wrong"]), st.integers(1, 3) | st.integers(1, 3 * RIGHTS_PER_WRONG))


@settings(max_examples=60)
@given(st.lists(runs, max_size=8))
def test_no_order_of_results_hides_more_wrongs_than_the_rights_offset(story: list[tuple[str, int]]) -> None:
    """In exact fractions: suspicion with a floor at 0 is never below the unfloored sum, nor off by rounding."""
    trust, floored, free = Trust(), Fraction(0), Fraction(0)
    for kind, count in story:
        for _ in range(min(count, 5) if kind == "wrong" else count):
            if kind == "wrong":
                trust.wrong()
                floored, free = floored + 1, free + 1
            else:
                trust.right()
                step = Fraction(1, RIGHTS_PER_WRONG)
                floored, free = max(Fraction(0), floored - step), free - step
            assert abs(trust.suspicion - float(floored)) < 1e-9
            if free > WRONGS_TO_QUARANTINE - 1 + Fraction(1, 10**6):
                assert trust.is_lost


def test_how_much_is_audited_follows_the_level_and_the_record() -> None:
    good, suspect = proven(Trust()), proven(Trust(suspicion=0.5))
    for trust in (good, suspect, Trust()):
        assert audited_share("own", trust, "backward", 4) == 0
        assert audited_share("stranger", trust, "backward", 4) == 1
    assert audited_share("known", good, "backward", 4) == SAMPLED_PER_PASS / 4
    assert audited_share("known", suspect, "backward", 4) == 1
    assert audited_share("known", good, "forward", 4) == 1, "each direction is proven by itself"


def test_a_device_is_proven_by_several_audits_in_a_row() -> None:
    trust = Trust()
    for _ in range(PROBATION):
        assert not trust.is_proven("backward")
        trust.audited_right(["backward"])
    assert trust.is_proven("backward")
    trust.audited_wrong()
    assert not trust.is_proven("backward")


def test_levels_are_known_by_their_former_names() -> None:
    assert [level_of(name) for name in ("none", "sample", "strict")] == list(LEVELS) == [level_of(x) for x in LEVELS]
    assert level_of("blind") is None
    assert level_of(["own"]) is None


def proven(trust: Trust) -> Trust:
    trust.passed.update({"backward": PROBATION})
    return trust
