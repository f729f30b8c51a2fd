"""The tables of `cleave bench` on the benchmarks page are those of the raw numbers kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import page
from tests.bench.recorded import results

from cleave.bench.records import read_results, write_results
from cleave.bench.scenario import read_scenario

SCENARIOS = page.RESULTS.parent / "scenarios"
NAMES = page.names(page.PAGE.read_text(encoding="utf-8"))


def test_the_page_shows_the_tables_of_the_numbers_kept() -> None:
    committed = page.PAGE.read_text(encoding="utf-8")
    assert NAMES
    assert page.written(committed) == committed, "run python benchmarks/page.py"


@pytest.mark.parametrize("name", NAMES)
def test_numbers_on_the_page_are_those_of_the_scenario_as_it_is(name: str) -> None:
    kept = read_results(page.kept(name))
    assert kept is not None
    scenario, cells = read_scenario(SCENARIOS / f"{name}.toml")
    assert [each.cell for each in kept.cells] == list(cells), f"run cleave bench and benchmarks/page.py for {name}"
    assert kept.scenario.title == scenario.title


def test_a_table_replaces_what_was_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    text = "above\n<!-- bench: two -->\nold\n<!-- end of bench: two -->\nbelow\n"
    assert page.written(text) == text
    write_results(page.kept("two"), results(tmp_path))
    new = page.written(text)
    assert "old" not in new
    assert "| two | tiny | full |" in new
    assert new.startswith("above\n<!-- bench: two -->\n")
    assert new.endswith("<!-- end of bench: two -->\nbelow\n")
    assert page.written(new) == new


def test_results_without_a_place_on_the_page_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main([str(tmp_path / "nowhere.json")]) == 2
    assert "nowhere" in capsys.readouterr().err
