"""Laws of vouching: nothing unchecked without a state to go back to, and a token's unchecked work is undone once."""

from __future__ import annotations

from cleave.core.verify.vouching import Doubt, Vouching


def vouching(*, step: int = 1) -> Vouching:
    made = Vouching()
    made.can_go_back = True
    made.begin_step(step)
    return made


def test_work_goes_unchecked_only_once_there_is_a_state_to_go_back_to() -> None:
    record = vouching(step=3)
    assert not record.wants_restore_point
    assert not record.may_go_unchecked("ann")
    assert record.wants_restore_point
    record.keep_restore_point(3)
    assert record.may_go_unchecked("ann")
    assert not record.may_go_unchecked("bob"), "each token has its own"
    assert record.restore_points == {3}


def test_a_loop_that_cannot_go_back_needs_no_restore_point_and_is_told_no_doubt() -> None:
    record = Vouching()
    assert record.may_go_unchecked("ann")
    record.used_unchecked("ann")
    record.convict("ann", "phone")
    assert record.doubt is None
    assert not record.may_go_unchecked("ann")


def test_a_conviction_puts_every_step_in_doubt_since_the_first_unchecked_work() -> None:
    record = vouching(step=3)
    record.may_go_unchecked("ann")
    record.keep_restore_point(3)
    for step in (4, 5, 9):
        record.begin_step(step)
        record.used_unchecked("ann")
    record.convict("ann", "phone")
    assert record.doubt == Doubt(4, "phone")
    record.went_back(3)
    assert record.doubt is None
    assert record.is_convicted("ann")
    assert not record.may_go_unchecked("ann")
    assert not record.wants_restore_point, "it will never go unchecked again"
    assert not record.restore_points
    record.convict("ann", "phone")
    assert record.doubt is None, "all of its work was checked since"


def test_two_convictions_go_back_to_the_earlier_of_both() -> None:
    record = vouching()
    for step, key in ((2, "ann"), (7, "bob")):
        record.may_go_unchecked(key)
        record.keep_restore_point(step)
        record.begin_step(step + 1)
        record.used_unchecked(key)
    record.convict("bob", "laptop")
    record.convict("ann", "phone")
    assert record.doubt == Doubt(3, "phone")


def test_going_back_undoes_the_unchecked_work_of_others_too() -> None:
    record = vouching()
    for step, key in ((2, "ann"), (7, "bob")):
        record.may_go_unchecked(key)
        record.keep_restore_point(step)
        record.begin_step(step + 1)
        record.used_unchecked(key)
    record.convict("ann", "phone")
    record.went_back(2)
    assert not record.may_go_unchecked("bob"), "its restore point is of a step that was undone"
    record.begin_step(3)
    record.convict("bob", "laptop")
    assert record.doubt is None, "nothing unchecked of it is left"


def test_one_who_was_always_checked_puts_nothing_in_doubt() -> None:
    record = vouching(step=5)
    record.convict("eve", "phone")
    assert record.doubt is None


def test_restore_points_are_few_however_many_tokens_there_are() -> None:
    record = vouching()
    for step in range(1, 50):
        record.may_go_unchecked(f"token {step}")
        record.keep_restore_point(step)
        assert record.may_go_unchecked(f"token {step}")
    assert len(record.restore_points) <= 4
    record.begin_step(60)
    record.used_unchecked("token 49")
    record.convict("token 49", "phone")
    assert record.doubt == Doubt(60, "phone")


def test_a_restart_helps_no_liar() -> None:
    record = vouching()
    for step, key in ((2, "ann"), (7, "bob"), (20, "cid")):
        record.may_go_unchecked(key)
        record.keep_restore_point(step)
        record.begin_step(step + 1)
        record.used_unchecked(key)
    record.convict("eve", "phone")
    later = vouching()
    later.recall(record.record, 10)  # the last checkpoint: steps after it are lost
    assert later.is_convicted("eve")
    assert later.restore_points == {2, 7}
    later.convict("cid", "tablet")
    assert later.doubt is None
    later.convict("ann", "laptop")
    assert later.doubt == Doubt(3, "laptop")
