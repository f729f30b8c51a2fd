"""Laws of the volunteer's terms: what they forbid, what is unknown forbids too, and mistakes are one sentence."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.config import load_settings
from cleave.device.terms import Conditions, Heat, Sign, Terms, is_in_use, memory_share, objection
from cleave.errors import InputError

MOUSE = Sign(probe="the mouse", idle_s=30.0, sees_all=True)
DISPLAY = Sign(probe="the display", idle_s=900.0, sees_all=True)
TERMINAL = Sign(probe="the terminal", idle_s=900.0, sees_all=False)
FINE = Conditions(
    hour=12.0, on_batteries=False, signs=(DISPLAY,), heat=Heat(sensor="cpu", celsius=40.0), moved_bytes=10_000_000
)
STRICT = Terms(
    run_on_batteries=False,
    run_if_user_active=False,
    start_hour=9.0,
    end_hour=17.5,
    daily_xfer_limit_mb=50.0,
    max_temperature=80.0,
)


def test_what_is_allowed_meets_no_objection() -> None:
    assert objection(STRICT, FINE) is None
    assert objection(Terms(), Conditions(hour=3.0)) is None, "by default everything is allowed, and nothing matters"


@pytest.mark.parametrize(
    ("term", "now", "facts"),
    [
        ("run_on_batteries", replace(FINE, on_batteries=True), "batteries"),
        ("run_on_batteries", replace(FINE, on_batteries=None), "can tell"),
        ("run_if_user_active", replace(FINE, signs=(DISPLAY, MOUSE)), "the mouse had input 30 seconds ago"),
        ("run_if_user_active", replace(FINE, signs=(TERMINAL,)), "no probe sees all"),
        ("run_if_user_active", replace(FINE, signs=()), "no probe"),
        ("start_hour", replace(FINE, hour=8.99), "09:00 to 17:30"),
        ("start_hour", replace(FINE, hour=17.5), "17:30"),
        ("daily_xfer_limit_mb", replace(FINE, moved_bytes=50_000_000), "50"),
        ("daily_xfer_limit_mb", replace(FINE, moved_bytes=None), "can tell"),
        ("max_temperature", replace(FINE, heat=Heat(sensor="coretemp", celsius=81.0)), "coretemp has 81"),
        ("max_temperature", replace(FINE, heat=None), "no sensor"),
    ],
)
def test_each_term_forbids_what_violates_it_and_what_nobody_can_tell(term: str, now: Conditions, facts: str) -> None:
    found = objection(STRICT, now)
    assert found is not None
    assert found.term == term
    assert facts in found.text


def test_input_that_one_probe_sees_counts_even_if_it_does_not_see_all() -> None:
    just_now = replace(TERMINAL, idle_s=1.0)
    assert is_in_use(STRICT, replace(FINE, signs=(DISPLAY, just_now))) is True
    assert is_in_use(STRICT, replace(FINE, signs=(just_now,))) is True
    assert is_in_use(STRICT, replace(FINE, signs=(DISPLAY, TERMINAL))) is False


@given(start=st.floats(0, 24), end=st.floats(0, 24), hour=st.floats(0, 24, exclude_max=True))
def test_each_moment_belongs_to_the_hours_or_to_the_opposite_ones(start: float, end: float, hour: float) -> None:
    def allows(begin: float, stop: float) -> bool:
        return objection(Terms(start_hour=begin, end_hour=stop), Conditions(hour=hour)) is None

    assert allows(start, end) != allows(end, start) or start == end
    assert allows(start, start)


def test_hours_go_across_midnight() -> None:
    night = Terms(start_hour=22.0, end_hour=6.0)
    allowed = [hour for hour in range(24) if objection(night, Conditions(hour=hour)) is None]
    assert allowed == [0, 1, 2, 3, 4, 5, 22, 23]


def test_a_machine_that_got_too_hot_has_to_cool_first() -> None:
    warm = replace(FINE, heat=Heat(sensor="cpu", celsius=78.0))
    assert objection(STRICT, warm) is None
    assert objection(STRICT, warm, is_computing=False) is not None
    assert objection(STRICT, FINE, is_computing=False) is None


def test_memory_is_what_the_user_leaves_and_the_less_if_nobody_can_tell() -> None:
    terms = Terms(ram_max_used_busy_frac=0.2, ram_max_used_idle_frac=0.7)
    assert memory_share(terms, FINE) == 0.7
    assert memory_share(terms, replace(FINE, signs=(MOUSE,))) == 0.2
    assert memory_share(terms, replace(FINE, signs=())) == 0.2


def test_terms_are_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "terms.toml"
    file.write_text("run_on_batteries = false\nidle-time-to-run = 5\nstart_hour = 22.5\nram_max_used_busy_frac = 0.2\n")
    terms = load_settings(Terms, file, {"idle_time_to_run": 7, "cpu_usage_limit": None})
    assert terms == Terms(run_on_batteries=False, idle_time_to_run=7.0, start_hour=22.5, ram_max_used_busy_frac=0.2)
    assert terms.limits.keys() == {"run_on_batteries", "idle_time_to_run", "start_hour", "ram_max_used_busy_frac"}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("run_on_battery = false", "run_on_batteries"),
        ('run_on_batteries = "no"', "true or false"),
        ("start_hour = 25", "24"),
        ("cpu_usage_limit = 0", "100"),
        ("ram_max_used_busy_frac = 50", "1"),
        ("max_bytes_sec_down = -1", "0"),
        ("max_temperature = nan", "a number"),
        ("max_temperature = 200", "150"),
        ("[network]\nmax_bytes_sec_up = 1", "sections"),
        ("start_hour", "TOML"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_setting(tmp_path: Path, text: str, facts: str) -> None:
    file = tmp_path / "terms.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=facts) as fault:
        load_settings(Terms, file, {})
    assert "\n" not in str(fault.value)


def test_the_example_of_the_guide_is_valid_and_names_every_term(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "lend-a-device.md").read_text(encoding="utf-8")
    file = tmp_path / "terms.toml"
    file.write_text(guide.partition("```toml\n")[2].partition("```")[0])
    assert load_settings(Terms, file, {}).limits.keys() == {field.name for field in fields(Terms)}
