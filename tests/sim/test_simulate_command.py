"""`cleave simulate`: JSON that scripts can rely on, and one sentence on bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cleave.cli.main import main

FLEET = str(Path(__file__).parents[2] / "benchmarks" / "fleets" / "home4.csv")
USUAL = ["simulate", "--model", "opt-125m", "--tokens", "2048", "--fleet", FLEET]


def test_json_has_the_setting_and_an_outcome_per_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*USUAL, "--method", "law", "--seed", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setting"]["model"] == "opt-125m"
    assert found["setting"]["devices"] == 4
    assert found["setting"]["seed"] == 3
    ours = found["systems"]["cleave"]
    assert ours["fits"] is True
    assert ours["batch_s"] > 0
    assert ours["method"] == "timeline"


@pytest.mark.parametrize(
    ("added", "named"),
    [
        (["--systems", "cleve"], "cleave"),
        (["--systems", ","], "cleave"),
        (["--churn", "fta:nobody"], "nobody"),
        (["--noise", "3"], "3"),
        (["--seed", "-1"], "-1"),
        (["--sequence", "1000"], "1000"),
        (["--fleet", "no/such/fleet.csv"], "no/such/fleet.csv"),
        (["--model", "opt-1b"], "opt-1b"),
    ],
)
def test_bad_input_ends_with_one_sentence(added: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*USUAL, *added]) == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1
