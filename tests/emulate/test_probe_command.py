"""`cleave probe` as people use it: a profile that other commands read, and figures for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cleave.api.planning import load_fleet
from cleave.cli.main import main


def test_a_probe_writes_a_profile_of_this_machine_that_emulation_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "laptop.csv"
    assert main(["probe", "--out", str(out), "--name", "laptop", "--down", "5e6", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    profile = load_fleet(out)
    assert profile.names == ("laptop",)
    assert profile.flops_per_s[0] == figures["flops_per_s"] > 1e7
    assert profile.task_s[0] == figures["task_s"] >= 0
    assert profile.byte_s[0] == figures["byte_s"] >= 0
    assert profile.down_bytes_per_s[0] == 5e6
    kinds = {task["task"].split()[0] for task in figures["tasks"]}
    assert kinds == {"receive", "gemm", "forward", "backward"}
    assert {task["rows"] for task in figures["tasks"]} == {None, 16, 64, 256}
    assert all(task["measured_s"] > 0 for task in figures["tasks"])


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "--out", str(tmp_path / "missing" / "laptop.csv")]) == 2
    assert "laptop.csv" in capsys.readouterr().err
