"""`cleave emulate` as people use it: bad input ends with one sentence, and the summary is for machines too."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cleave import Fleet
from cleave.cli.main import main

FLEET = """device,flops_per_s,down_bytes_per_s,up_bytes_per_s,latency_s,memory_bytes
a,1e9,1e7,1e7,0.001,1e8
b,1e9,1e7,1e7,0.001,1e8
"""


@pytest.fixture
def fleet_file(tmp_path: Path) -> str:
    path = tmp_path / "fleet.csv"
    path.write_text(FLEET)
    return str(path)


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        (["127.0.0.1:1", "--fleet", "{missing}"], "missing.csv"),
        (["127.0.0.1:1", "--fleet", "{broken}"], "broken.csv, line 2"),
        (["127.0.0.1:1", "--fleet", "{fleet}", "--calibrate", "{missing}"], "missing.csv"),
        (["127.0.0.1:1", "--fleet", "{fleet}", "--churn", "{missing}"], "missing.csv"),
        (["127.0.0.1:1", "--fleet", "{fleet}", "--churn", "{broken}"], "device,leave_s,join_s"),
        (["127.0.0.1:1", "--fleet", "{fleet}", "--churn", "-3"], "-3"),
        (["--fleet", "{fleet}"], "address of a server"),
        (["nonsense", "--fleet", "{fleet}"], "nonsense"),
        (["127.0.0.1:1", "--fleet", "{fleet}", "--wait", "0.1"], "cannot reach ws://127.0.0.1:1"),
    ],
)
def test_bad_input_ends_with_one_sentence(
    given: list[str], fact: str, fleet_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.csv").write_text(FLEET.replace("1e9", "fast", 1))
    names = {"missing": tmp_path / "missing.csv", "broken": tmp_path / "broken.csv", "fleet": fleet_file}
    assert main(["emulate", *(word.format(**names) for word in given)]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("cleave emulate: ")
    assert fact in said[0]


@pytest.mark.parametrize("ending", ["goodbye", "interrupt"])
def test_an_emulation_ends_cleanly_and_sums_up_as_json(ending: str, fleet_file: str) -> None:
    with Fleet.serve("127.0.0.1:0") as fleet:
        command = [
            sys.executable,
            "-m",
            "cleave",
            "emulate",
            fleet.url,
            "--fleet",
            fleet_file,
            "--count",
            "5",
            "--json",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        fleet.wait(5)
        assert {device.device for device in fleet.devices} == {"a-1", "a-2", "a-3", "b-1", "b-2"}
        if ending == "interrupt":
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    if ending == "goodbye":
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    summary = json.loads(out)
    assert (summary["devices"], summary["joins"], summary["losses"]) == (5, 5, 0)
    assert "emulated 5 devices" in err
    assert "Traceback" not in err
