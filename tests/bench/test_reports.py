"""Table, plot and raw numbers, made from recorded results."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.bench.recorded import results, step

from cleave.bench.figures import Spread, figures, links_off
from cleave.bench.files import Files
from cleave.bench.records import Measured, read_results, write_results
from cleave.bench.table import markdown
from cleave.cli.main import main
from cleave.errors import InputError


def test_figures_leave_out_the_warm_up_and_keep_the_spread(tmp_path: Path) -> None:
    recorded = results(tmp_path)
    measured = recorded.cells[0]
    found = figures(measured, 2, recorded.reference(measured.cell))
    assert found is not None
    assert found.seconds == Spread(median=2.5, least=2.0, most=3.0)
    assert found.ratio == Spread(median=1.25, least=1.0, most=1.5)
    assert found.ratio.worst == 1.5
    assert (found.down_bytes, found.up_bytes) == (3e6, 1e6)
    assert found.peak_rss_bytes == 500_000_000
    assert found.loss_off == pytest.approx(0.25)


@pytest.mark.parametrize(("least", "most", "worst"), [(0.5, 1.5, 0.5), (0.8, 1.5, 1.5), (1.0, 1.0, 1.0)])
def test_the_worst_ratio_is_the_one_furthest_from_one_either_way(least: float, most: float, worst: float) -> None:
    assert Spread(median=1.0, least=least, most=most).worst == worst


def test_rates_are_judged_where_bytes_moved(tmp_path: Path) -> None:
    down_off, up_off = links_off(results(tmp_path).cells[0])
    assert down_off == pytest.approx(0.1)  # of a: 1.1 of 1 MB/s
    assert up_off == pytest.approx(-0.05)  # b sent nothing, so its rate is a guess


@pytest.mark.parametrize(("learned", "off"), [(0.9e6, -0.1), (1e6, 0.0), (1.9e6, 0.0), (2.2e6, 0.1)])
def test_on_a_shared_medium_a_rate_is_right_between_the_fair_share_and_all_of_it(
    tmp_path: Path, learned: float, off: float
) -> None:
    measured = results(tmp_path).cells[0]
    rates = replace(step(1, 1.0).rates[1], down_bytes_per_s=learned)
    run = replace(measured.runs[0], steps=(step(1, 1.0, rates=(rates,)),))
    assert links_off(replace(measured, runs=(run,)))[0] == pytest.approx(off)


def test_the_table_says_what_was_measured_and_why_a_cell_failed(tmp_path: Path) -> None:
    text = markdown(results(tmp_path))
    assert "# Two cells" in text
    assert "`cleave bench recorded.toml`" in text
    assert "2026-01-01" in text
    rows = [line for line in text.splitlines() if line.startswith("| two")]
    assert rows[0] == "| two | tiny | full | resident | 2.5 | 2-3 | 1.5 | 2 | **1.25** | **1.50** |"
    assert "not finished / within 600 s" in rows[1]
    assert "3.0 | 1.0 | +10% | -5% | 0.25 | 0.5 | 4% | 2% | 500 | 2.5e-01 |" in rows[2]
    assert "in 0 of 2 cells" in text


def test_every_row_of_a_table_has_as_many_cells_as_its_header(tmp_path: Path) -> None:
    recorded = results(tmp_path)
    for with_steps in (recorded, replace(recorded, scenario=replace(recorded.scenario, show_steps=True))):
        for table in markdown(with_steps).split("\n\n"):
            rows = [line for line in table.splitlines() if line.startswith("|")]
            assert len({row.count("|") for row in rows}) <= 1, table


def test_steps_are_listed_side_by_side_on_request(tmp_path: Path) -> None:
    recorded = results(tmp_path)
    text = markdown(replace(recorded, scenario=replace(recorded.scenario, show_steps=True)))
    assert "| 1 | 9 | 9 |" in text
    assert "| 4 | 3 |  |" in text


def test_times_of_a_machine_that_was_too_slow_or_busy_are_named(tmp_path: Path) -> None:
    recorded = results(tmp_path)
    (run,) = recorded.cells[0].runs
    slow = replace(run, emulation={"results": 200, "late_results": 20})
    busy = replace(run, steps=tuple(replace(step, other_cpu_s=2.0) for step in run.steps))
    for changed, fact in ((slow, "too slow to emulate"), (busy, "Other processes")):
        assert fact not in markdown(recorded)
        text = markdown(replace(recorded, cells=(replace(recorded.cells[0], runs=(changed,)), recorded.cells[1])))
        assert f"`{recorded.cells[0].cell.name}`" in next(line for line in text.splitlines() if fact in line)


def test_cells_measured_with_other_code_are_named(tmp_path: Path) -> None:
    recorded = results(tmp_path)
    older = replace(recorded.cells[0], versions={"code": "older"})
    assert "two/tiny/full" not in markdown(recorded)
    assert "two/tiny/full" in markdown(replace(recorded, cells=(older, recorded.cells[1])))


def test_raw_numbers_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    recorded = results(tmp_path)
    write_results(tmp_path / "raw.json", recorded)
    assert read_results(tmp_path / "raw.json") == recorded
    assert read_results(tmp_path / "none.json") is None


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1}', "[1]", "\xff"])
def test_a_file_that_holds_no_results_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "raw.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"raw\.json"):
        read_results(path)
    assert path.read_text() == text


def test_the_plot_shows_cells_and_single_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recorded = results(tmp_path)
    for name, with_steps in (("rows", False), ("steps", True)):
        files = Files(tmp_path, name)
        files.write(replace(recorded, scenario=replace(recorded.scenario, show_steps=with_steps)))
        assert files.plot.read_bytes().startswith(b"\x89PNG")
        assert files.plot.stat().st_size > 10_000


def test_without_matplotlib_the_rest_is_written_and_the_remedy_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files = Files(tmp_path, "unseen")
    files.write(results(tmp_path))
    assert (files.raw.exists(), files.table.exists(), files.plot.exists()) == (True, True, False)
    assert files.missing_plot is not None
    assert "install" in files.missing_plot
    assert "--redraw" in files.missing_plot


def test_results_without_a_single_step_still_make_a_table(tmp_path: Path) -> None:
    recorded = results(tmp_path)
    empty = tuple(
        replace(each, runs=(replace(each.runs[0], steps=(), failed="no device joined"),)) for each in recorded.cells
    )
    files = Files(tmp_path, "empty")
    files.write(replace(recorded, cells=empty))
    assert files.table.read_text().count("no device joined") == 2


def test_redrawing_needs_results_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = results(tmp_path)
    command = ["bench", str(tmp_path / "recorded.toml"), "--out", str(tmp_path / "out"), "--redraw"]
    assert main(command) == 2
    assert "no results" in capsys.readouterr().err
    files = Files(tmp_path / "out", "recorded")
    files.prepare()
    write_results(files.raw, recorded)
    assert main(command) == 2  # a cell failed, and a script should know
    assert "1 of 2 cells failed" in capsys.readouterr().err
    assert files.table.read_text() == markdown(recorded)


def test_steps_without_a_prediction_have_no_ratio() -> None:
    assert step(1, 2.0, predicted_s=None).ratio is None
    assert step(1, 2.0, predicted_s=0.0).ratio is None
    assert step(1, 3.0, batch_s=2.5).ratio == 1.5


def test_raw_numbers_are_plain_json(tmp_path: Path) -> None:
    write_results(tmp_path / "raw.json", results(tmp_path))
    raw = msgspec.json.decode((tmp_path / "raw.json").read_bytes())
    first = raw["cells"][0]["runs"][0]["steps"][0]
    assert {"seconds", "predicted_s", "loss", "down_bytes", "up_bytes", "grain", "plan", "rates"} <= first.keys()
    assert {"command", "date", "versions", "scenario"} <= raw.keys()
    assert isinstance(msgspec.convert(raw["cells"][0], Measured), Measured)
