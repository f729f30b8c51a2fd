"""Stays drawn from the fits of the Failure Trace Archive have the fits' means."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from cleave.api.churning import churn_of
from cleave.errors import InputError
from cleave.facts import table
from cleave.sim.availability import FAMILIES, Duration, fit

ROWS = table("availability_distributions")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['trace'][:8].strip()} {row['family']}")
def test_parameters_mean_what_the_table_says(row: dict[str, str]) -> None:
    found = fit(ROWS, f"{row['trace'].partition(' ')[0]}:{row['family']}")
    # the parameters are printed with two digits after the point, the means were computed before that
    assert found.stays.mean_h == pytest.approx(float(row["avail_mean_h"]), rel=0.06)
    assert found.absences.mean_h == pytest.approx(float(row["unavail_mean_h"]), rel=0.06)


@pytest.mark.parametrize(
    "duration",
    [
        Duration("exp", 4.0),
        Duration("weibull", 1.5, 3.0),
        Duration("lognormal", 1.0, 0.5),
        Duration("gamma", 2.0, 3.0),
    ],
)
def test_draws_have_the_mean_of_the_distribution(duration: Duration) -> None:
    rng, count = random.Random(0), 20_000
    draws = [duration.draw_h(rng) for _ in range(count)]
    mean = sum(draws) / count
    error = math.sqrt(sum((one - mean) ** 2 for one in draws) / count / count)
    assert abs(mean - duration.mean_h) < 4 * error


@pytest.mark.parametrize("family", FAMILIES)
def test_devices_are_there_for_the_share_of_the_time_that_the_fit_says(family: str) -> None:
    found = fit(ROWS, f"microsoft99:{family}")
    there_s = away_s = 0.0
    for seed in range(100):
        stays = list(itertools.islice(found.lives(random.Random(seed)), 200))
        there_s += sum(end - begin for begin, end in stays)
        away_s += sum(later[0] - earlier[1] for earlier, later in itertools.pairwise(stays))
    expected = found.stays.mean_h / (found.stays.mean_h + found.absences.mean_h)
    assert there_s / (there_s + away_s) == pytest.approx(expected, rel=0.05)


def test_a_draw_can_be_repeated() -> None:
    draw = churn_of("fta:skype06", ["a", "b"], seed=3)
    first, again = ({name: list(itertools.islice(stays, 5)) for name, stays in draw().items()} for _ in range(2))
    assert first == again
    assert first["a"] != first["b"]


@pytest.mark.parametrize("kind", ["fta:nothing", "fta:skype06:normal", "-1", "no/such/file.csv"])
def test_what_is_no_churn_is_refused(kind: str) -> None:
    with pytest.raises(InputError):
        churn_of(kind, ["a"], seed=0)
