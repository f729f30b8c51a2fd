"""Cells run for real: a server process, device processes, sockets between them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from tests.bench.recorded import results

from cleave.bench.processes import Process, ending, terminable
from cleave.bench.records import Step
from cleave.bench.runner import plan_cells, run_cell, with_cell
from cleave.bench.scenario import Cell, read_scenario
from cleave.cli.main import main

QUICK = Path(__file__).parents[2] / "benchmarks" / "scenarios" / "quick.toml"
JOIN = """title = "x"
tokens = 128
sequence = 32
steps = 3
warmup = 1
{more}
[fleets.here]
devices = "join"
count = 1
{fleet}
[models.tiny]
name = "{model}"
"""


def write(tmp_path: Path, model: str = "tiny-llama", more: str = "", fleet: str = "") -> str:
    path = tmp_path / "x.toml"
    path.write_text(JOIN.format(model=model, more=more, fleet=fleet))
    return str(path)


def only_cell(scenario: str) -> Cell:
    (cell,) = read_scenario(Path(scenario))[1]
    return cell


def bench_children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if "cleave" in " ".join(each.cmdline())]


def test_a_cell_is_measured_end_to_end_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario, out = write(tmp_path), tmp_path / "out"
    assert main(["bench", scenario, "--out", str(out), "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    (run,) = raw["cells"][0]["runs"]
    assert run["failed"] is None
    assert [step["number"] for step in run["steps"]] == [1, 2, 3]
    assert all(step["seconds"] >= step["batch_s"] > 0 and step["down_bytes"] > 0 for step in run["steps"])
    assert all(step["server_cpu_s"] > 0 for step in run["steps"])
    assert [rate["device"] for rate in run["steps"][0]["rates"]] == ["join-1"]
    plain = raw["references"][0]["losses"]
    assert [step["loss"] for step in run["steps"]] == pytest.approx(plain, abs=5e-2)
    assert run["steps"][0]["loss"] == pytest.approx(plain[0], abs=5e-3)
    assert bench_children() == []

    before = (out / "x.json").read_bytes()
    assert main(["bench", scenario, "--out", str(out)]) == 0
    assert "done before" in capsys.readouterr().err
    assert json.loads(before)["cells"] == json.loads((out / "x.json").read_bytes())["cells"]


def test_emulated_devices_are_measured_at_the_speed_of_their_profiles(tmp_path: Path) -> None:
    (cell,) = read_scenario(QUICK)[1]
    run = run_cell(replace(cell, steps=3), 200.0, lambda step: None)
    assert run.failed is None
    assert {rate.device for rate in run.steps[-1].rates} == {"home4-1", "home4-2"}
    assert run.emulation["joins"] == 2
    flops = run.emulation["flops"]
    assert isinstance(flops, float)
    # by their profiles, two devices need at least this long for what they computed
    assert sum(step.seconds for step in run.steps) > flops / 4e9
    assert bench_children() == []


def test_devices_without_arithmetic_are_measured_but_have_no_loss(tmp_path: Path) -> None:
    (cell,) = read_scenario(QUICK)[1]
    silent = replace(cell, steps=2, fleet=replace(cell.fleet, compute="none"))
    run = run_cell(silent, 200.0, lambda step: None)
    assert run.failed is None
    assert len(run.steps) == 2
    assert all(step.up_bytes > 0 for step in run.steps)


def test_a_cell_that_takes_too_long_is_ended_with_its_reason(tmp_path: Path) -> None:
    cell = replace(only_cell(write(tmp_path)), steps=1_000_000)
    run = run_cell(cell, 2.0, lambda step: None)
    assert run.failed is not None
    assert "not finished within 2 s" in run.failed
    assert "of 1000000 steps" in run.failed
    assert bench_children() == []


def test_a_model_that_does_not_fit_fails_its_cell_with_the_reason(tmp_path: Path) -> None:
    run = run_cell(only_cell(write(tmp_path, model="opt-30b")), 200.0, lambda step: None)
    assert run.failed is not None
    assert "opt-30b" in run.failed
    assert run.steps == ()
    assert bench_children() == []


def test_a_model_that_plain_torch_cannot_train_does_not_stop_the_other_cells(tmp_path: Path) -> None:
    scenario, out = write(tmp_path, model="opt-30b"), tmp_path / "out"
    text = Path(scenario).read_text().replace("steps = 3\nwarmup = 1", "steps = 1\nwarmup = 0")
    Path(scenario).write_text(f'{text}[models.small]\nname = "tiny-llama"\n')
    assert main(["bench", scenario, "--out", str(out)]) == 2
    large, small = json.loads((out / "x.json").read_bytes())["cells"]
    assert "opt-30b" in large["runs"][0]["failed"]
    assert small["runs"][0]["failed"] is None
    assert len(small["runs"][0]["steps"]) == 1


def test_devices_that_cannot_start_fail_a_cell_with_their_last_words(tmp_path: Path) -> None:
    cell = only_cell(write(tmp_path, fleet='memory = "1KB"'))
    run = run_cell(cell, 200.0, lambda step: None)
    assert run.failed is not None
    assert "exit code 2" in run.failed


def test_an_interrupt_ends_every_process_of_a_cell(tmp_path: Path) -> None:
    def interrupt(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cell(only_cell(write(tmp_path)), 200.0, interrupt)
    assert bench_children() == []


def test_a_request_to_end_is_taken_for_an_interrupt() -> None:
    usual = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is usual


def test_finished_cells_stand_and_failed_ones_run_again(tmp_path: Path) -> None:
    recorded = results(tmp_path)
    full, lora = recorded.cells
    cells = (full.cell, lora.cell)
    plan = plan_cells(cells, recorded, "abc", again=False)
    assert (plan.pending, plan.standing) == ((lora.cell,), (full,))
    assert plan_cells(cells, recorded, "abc", again=True).pending == cells
    assert plan_cells(cells, None, "abc", again=False).pending == cells
    assert plan_cells(cells, recorded, "other code", again=False).pending == cells


def test_a_new_result_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    recorded = results(tmp_path)
    first, second = recorded.cells
    newer = replace(first, digest="newer")
    assert with_cell(recorded, newer).cells == (newer, second)
    assert with_cell(replace(recorded, cells=(second,)), newer).cells == (second, newer)


def test_the_end_of_a_process_is_told_with_its_last_words() -> None:
    processes = [Process(["-c", "import sys; print('one'); sys.exit('no room')"], cores=(), threads=1)]
    with ending(processes):
        assert list(processes[0].lines(time.monotonic() + 60)) == [b"one\n"]
        assert processes[0].rest() == []
        processes[0].end()
        assert processes[0].last_words == "exit code 1, no room"


def test_a_silent_process_is_ended_at_its_limit() -> None:
    processes = [Process(["-c", "import sys; sys.stdin.read()"], cores=(), threads=1)]
    with ending(processes), pytest.raises(TimeoutError):
        list(processes[0].lines(time.monotonic()))
    assert not processes[0].is_alive


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot pin processes")
def test_a_process_runs_on_the_cores_it_was_given() -> None:
    cores = os.sched_getaffinity(0)
    command = ["-c", "import os; print(*os.sched_getaffinity(0))"]
    processes = [Process(command, cores=given, threads=1) for given in ((), (min(cores),), (10**6,))]
    with ending(processes):
        seen = [set(map(int, next(each.lines(time.monotonic() + 60)).split())) for each in processes]
    assert seen == [cores, {min(cores)}, cores]
    assert os.sched_getaffinity(0) == cores


def test_the_cells_of_a_scenario_are_listed_and_unknown_ones_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = write(tmp_path)
    assert main(["bench", scenario, "--list"]) == 0
    assert capsys.readouterr().out == "here/tiny/full/bf16/auto\n"
    assert main(["bench", scenario, "--only", "there"]) == 2
    assert "'there'" in capsys.readouterr().err


def test_results_that_cannot_be_written_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", write(tmp_path), "--out", str(tmp_path / "file" / "out")]) == 2
    assert "--out" in capsys.readouterr().err
