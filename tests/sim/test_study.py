"""A study: cells kept by their content, figures as records, and claims judged on outcomes alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from cleave.api.outcomes import Kept
from cleave.api.planning import load_fleet
from cleave.api.study import Plan, make_study, plan_study, write_study
from cleave.cli.main import main
from cleave.core.fleet.profiles import Profiles
from cleave.sim.cell import Cell, Ground, evaluate, fleet_of, setting_of
from cleave.sim.setting import Outcome
from cleave.sim.study.claims import claims
from cleave.sim.study.figure import Found, Point, cells, expected_under_churn
from cleave.sim.study.names import FIGURES

FLEET = Path(__file__).parents[2] / "benchmarks" / "fleets" / "home4.csv"
QUICK = (20, 40)
"""Sizes of fleets that are judged by law, in a fraction of a second."""
CENTER = Cell(model="opt-125m", tokens=1024, sequence=256, devices=64)
SMALL = ["simulate", "--model", "opt-125m", "--tokens", "1024", "--fleet", str(FLEET)]


@pytest.fixture(scope="module")
def population() -> Profiles:
    return replace(load_fleet(FLEET), latency_s=np.array([0.001, 0.002, 0.003, 0.004]))


@pytest.fixture(scope="module")
def ground(plan: Plan) -> Ground:
    return plan.ground


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_study(
        fleet=FLEET, devices=QUICK, model="opt-125m", tokens=1024, systems=["gpipe", "a100"], only=["devices"]
    )


def never(*_: object) -> None:
    """Progress that nobody watches."""


# ------------------------------------------------------------------------------------------------ fleets


@pytest.mark.parametrize("devices", [1, 3, 4, 5, 11])
def test_a_larger_fleet_has_every_device_of_a_smaller_one(population: Profiles, devices: int) -> None:
    small, large = fleet_of(population, devices, 7), fleet_of(population, 13, 7)
    assert large.names[:devices] == small.names
    np.testing.assert_array_equal(large.up_bytes_per_s[:devices], small.up_bytes_per_s)
    times = [int((large.latency_s == one).sum()) for one in population.latency_s]
    assert max(times) - min(times) <= 1


def test_a_cell_changes_in_its_setting_only_what_it_names(ground: Ground) -> None:
    usual = setting_of(CENTER, ground)
    steep = setting_of(replace(CENTER, down_per_up=8, memory_bytes=1e9, server_bytes_per_s=1e8), ground)
    np.testing.assert_allclose(steep.profiles.down_bytes_per_s / steep.profiles.up_bytes_per_s, 8)
    np.testing.assert_array_equal(steep.profiles.down_bytes_per_s, usual.profiles.down_bytes_per_s)
    assert set(steep.profiles.memory_bytes.tolist()) == {1e9}
    assert (steep.server.down_bytes_per_s, steep.server.up_bytes_per_s) == (1e8, 1e8)
    assert not usual.server.is_capped


def test_a_bill_is_the_sum_of_its_parts_for_the_planned_batch(ground: Ground) -> None:
    cell = replace(CENTER, devices=20)
    billed, plain = evaluate(replace(cell, is_billed=True), ground), evaluate(cell, ground)
    of = {name: float(value) for name, value in billed.detail.items()}
    assert of["energy_j"] == pytest.approx(of["devices_j"] + of["network_j"] + of["server_j"])
    assert min(of.values()) > 0
    assert of["a100_j"] > of["h100_j"]
    assert billed.batch_s == plain.detail["planned_s"]


# ------------------------------------------------------------------------------------------------ kept outcomes


def test_a_study_is_computed_once_and_kept_to_the_last_digit(plan: Plan, tmp_path: Path) -> None:
    first = make_study(plan, never, tmp_path)
    again = make_study(plan, never, tmp_path)
    assert first.computed == first.cells == len(cells(plan.figures))
    assert again.computed == 0
    assert again.charts == first.charts
    assert again.claims == first.claims


def test_an_interrupted_study_loses_only_the_cell_that_ran(plan: Plan, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_study(plan, interrupt, tmp_path)
    rest = make_study(plan, never, tmp_path)
    assert rest.computed == rest.cells - 5


def _torn(text: str) -> str:
    return text[: len(text) // 2]


def _altered(text: str) -> str:
    entry = json.loads(text)
    entry["outcome"]["batch_s"] /= 2
    return json.dumps(entry)


def _of_other_types(text: str) -> str:
    entry = json.loads(text)
    entry["outcome"] = {"system": 1}
    return json.dumps(entry)


@pytest.mark.parametrize("spoil", [_torn, _altered, _of_other_types, lambda _: "", lambda _: "[]"])
def test_a_spoiled_entry_is_computed_again_and_replaced(
    spoil: Callable[[str], str], ground: Ground, tmp_path: Path
) -> None:
    cell = replace(CENTER, system="a100")
    kept = Kept(tmp_path, ground)
    ((_, right),) = kept.outcomes([cell])
    good = kept.path(cell).read_text()
    kept.path(cell).write_text(spoil(good))
    ((_, found),) = kept.outcomes([cell])
    assert asdict(found) == asdict(right)
    assert kept.computed == 2
    assert kept.path(cell).read_text() == good


def test_the_entry_of_another_cell_is_not_taken(ground: Ground, tmp_path: Path) -> None:
    cell, other = replace(CENTER, system="a100"), replace(CENTER, system="h100")
    kept = Kept(tmp_path, ground)
    list(kept.outcomes([other]))
    kept.path(cell).write_bytes(kept.path(other).read_bytes())
    ((_, found),) = kept.outcomes([cell])
    assert asdict(found) == asdict(evaluate(cell, ground))


def test_an_outcome_is_kept_under_everything_it_depends_on(ground: Ground, tmp_path: Path) -> None:
    population = ground.population
    faster = replace(population, up_bytes_per_s=population.up_bytes_per_s * 1.000001)
    wider = replace(ground.shapes["opt-125m"], ffn=4096)
    grounds = [
        ground,
        replace(ground, population=faster),
        replace(ground, shapes={**ground.shapes, "opt-125m": wider}),
    ]
    changed = [CENTER, replace(CENTER, wire="q8"), replace(CENTER, seed=2), replace(CENTER, memory_bytes=1e9)]
    paths = {Kept(tmp_path, one).path(cell) for one in grounds for cell in changed}
    assert len(paths) == len(grounds) * len(changed)


# ------------------------------------------------------------------------------------------------ figures and claims


def test_figures_have_the_names_that_the_command_line_lists(population: Profiles) -> None:
    assert tuple(figure.name for figure in plan_study(fleet=population).figures) == FIGURES


def _point(rate: float) -> Point:
    return Point(x=1, label="", cells=(replace(CENTER, churn_per_hour=rate),))


def test_expected_time_under_churn_is_that_of_the_recoveries() -> None:
    outcome = Outcome(system="x", fits=True, batch_s=100.0, devices_used=36, recovery_s=10.0)
    found = [Found(CENTER, outcome)]
    assert expected_under_churn(_point(0), found).y == 100.0
    hit = expected_under_churn(_point(2), found).y  # 36 x 2 / 3600 = 0.02 departures per second, 10 s each
    assert hit == pytest.approx(125.0)
    assert hit == pytest.approx(100.0 + 0.02 * hit * 10.0)
    never_ends = expected_under_churn(_point(10), found)
    assert never_ends.y is None
    assert never_ends.short == "never ends"


def _outcomes(**of: Outcome) -> dict[Cell, Outcome]:
    return {replace(CENTER, system=system): outcome for system, outcome in of.items()}


def _ran(system: str, batch_s: float, recovery_s: float, devices: int) -> Outcome:
    return Outcome(
        system=system,
        fits=True,
        batch_s=batch_s,
        recovery_s=recovery_s,
        devices_used=devices,
        down_bytes=1.0,
        up_bytes=1.0,
    )


def test_claims_are_the_factors_between_outcomes() -> None:
    ours, rival, cloud = _ran("cleave", 10, 1, 60), _ran("dtfm", 40, 99, 20), _ran("a100", 9, 5, 1)
    speed, devices, parity, recovery, _ = claims(_outcomes(cleave=ours, dtfm=rival, a100=cloud), CENTER)
    (found,) = speed.comparisons
    assert found.against == "dtfm"
    assert found.findings[0].factor == pytest.approx(4.0)
    assert found.findings[0].holds
    assert devices.comparisons[0].findings[0].factor == pytest.approx(3.0)
    assert parity.comparisons[0].findings[0].factor == pytest.approx(0.9)
    assert recovery.comparisons[0].findings[0].factor == pytest.approx(99.0)
    assert not recovery.comparisons[0].findings[0].holds


def test_the_published_form_is_judged_beside_cleave() -> None:
    outcomes = _outcomes(
        cleave=_ran("cleave", 10, 5, 1), **{"cleave-2d": _ran("cleave-2d", 80, 1, 1)}, dtfm=_ran("dtfm", 40, 100, 1)
    )
    speed, _, _, recovery, _ = claims(outcomes, CENTER)
    assert {one.system: one.findings[0].factor for one in speed.comparisons} == {"cleave": 4.0, "cleave-2d": 0.5}
    assert {one.system: one.findings[0].holds for one in recovery.comparisons} == {"cleave": False, "cleave-2d": True}


def test_the_fastest_rival_counts_in_each_setting() -> None:
    outcomes = _outcomes(cleave=_ran("cleave", 10, 1, 1), dtfm=_ran("dtfm", 90, 1, 1), gpipe=_ran("gpipe", 20, 1, 1))
    whole = claims(outcomes, CENTER)[0].comparisons[0]
    assert whole.findings[0].factor == pytest.approx(2.0)
    assert not whole.held


def test_a_rival_that_does_not_fit_is_no_victory_and_cleave_that_does_not_is_a_defeat() -> None:
    nothing = Outcome(system="", fits=False, reason="too small")
    (speed, *_) = claims(_outcomes(cleave=_ran("cleave", 10, 1, 1), dtfm=nothing), CENTER)
    assert speed.comparisons[0].findings == ()
    assert "1 setting" in speed.comparisons[0].not_compared
    (speed, *_) = claims(_outcomes(cleave=nothing, dtfm=_ran("dtfm", 40, 99, 20)), CENTER)
    assert not speed.comparisons[0].held
    assert len(speed.comparisons[0].failed) == 1


def test_traffic_falls_where_the_larger_fleet_moves_less_per_device() -> None:
    outcomes = {
        replace(CENTER, devices=devices): replace(_ran("cleave", 1, 1, 1), down_bytes=down)
        for devices, down in ((4, 7.0), (8, 3.0), (16, 5.0))
    }
    found = claims(outcomes, CENTER)[-1].comparisons[0]
    assert [one.factor for one in found.findings] == pytest.approx([2.0, 4 / 6])
    assert [one.holds for one in found.findings] == [True, False]


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_writes_all_parts_of_a_report(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLEAVE_HOME", str(tmp_path / "home"))
    out = tmp_path / "study"
    words = [
        *SMALL,
        "--report",
        str(out),
        "--devices",
        "20,40",
        "--figures",
        "devices",
        "--systems",
        "gpipe,a100",
        "--json",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cells"] == len(cells(plan.figures))
    assert {Path(path).name for path in found["written"]} == {"index.html", "claims.md", "devices.png", "devices.csv"}
    assert all(Path(path).stat().st_size for path in found["written"])
    assert set(found["figures"]["devices"]["panels"][0]["series"]) == {"cleave", "gpipe", "a100"}
    assert len((out / "devices.csv").read_text().splitlines()) == 1 + found["cells"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([*SMALL, "--report", "{file}"], "is a file"),
        ([*SMALL, "--report", "{file}/study"], "file/study"),
        ([*SMALL, "--report", "{out}", "--figures", "prices"], "prices"),
        ([*SMALL, "--report", "{out}", "--systems", "cleve"], "cleave"),
        ([*SMALL, "--report", "{out}", "--churn", "0.1"], "--churn"),
        ([*SMALL, "--report", "{out}", "--server-down", "1"], "--server-down"),
        ([*SMALL, "--report", "{out}", "--sequence", "1000"], "1000"),
        ([*SMALL, "--report", "{out}", "--seed", "-1"], "-1"),
        ([*SMALL, "--report", "{out}", "--devices", "4,many"], "many"),
        ([*SMALL, "--report", "{out}", "--devices", "0"], "--devices"),
        ([*SMALL, "--figures", "devices"], "--report"),
        (["simulate", "--report", "{out}", "--model", "opt-1b"], "opt-1b"),
        (["simulate", "--model", "opt-125m", "--tokens", "1024"], "--fleet"),
    ],
)
def test_bad_input_ends_with_one_sentence_before_anything_is_computed(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    paths = {"file": str(tmp_path / "file"), "out": str(tmp_path / "out")}
    assert main([word.format(**paths) for word in words]) == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_report_can_be_written_without_any_rival(tmp_path: Path) -> None:
    alone = plan_study(fleet=FLEET, devices=QUICK, model="opt-125m", tokens=1024, systems=[], only=["recovery"])
    written = write_study(make_study(alone, never, tmp_path / "kept"), tmp_path, date="2026-01-01", command="cleave")
    assert "Recovery" in written[0].read_text()
