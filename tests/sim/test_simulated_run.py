"""A simulated run's event log tells what the outcome counts, in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cleave.cli.main import main

FLEET = str(Path(__file__).parents[2] / "benchmarks" / "fleets" / "home4.csv")
USUAL = ["simulate", "--model", "opt-125m", "--tokens", "2048", "--fleet", FLEET]


def simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], list[Any]]:
    log = tmp_path / "events.jsonl"
    assert main([*USUAL, "--events", str(log), *words, "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)["systems"]["cleave"]
    return outcome, [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("method", ["engine", "law"])
def test_the_log_has_every_batch_arrival_and_departure_in_order(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome, events = simulated(tmp_path, capsys, "--method", method, "--batches", "4", "--churn", "30")
    kinds = [event["event"] for event in events]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_finished")
    steps = [event for event in events if event["event"] == "step_done"]
    assert sum(step["seconds"] for step in steps) / 4 == pytest.approx(outcome["batch_s"])
    assert all(step["loss"] is None and step["predicted_s"] == outcome["planned_s"] for step in steps)
    assert kinds.count("device_left") == outcome["departures"] > 0
    moments = [event["time_s"] for event in events]
    assert moments == sorted(moments)
    assert steps[-1]["devices"] == kinds.count("device_joined") - kinds.count("device_left")


def test_a_log_is_never_overwritten_and_none_is_left_of_what_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, events = simulated(tmp_path, capsys)
    assert [event["event"] for event in events].count("device_joined") == 4
    assert main([*USUAL, "--events", str(tmp_path / "events.jsonl")]) == 2
    assert "events.jsonl" in capsys.readouterr().err
    assert main([*USUAL, "--events", str(tmp_path / "others.jsonl"), "--systems", "gpipe"]) == 2
    assert not (tmp_path / "others.jsonl").exists()
