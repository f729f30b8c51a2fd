"""Scenario files: what they may say, what they become, and how a wrong one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cleave.bench.scenario import read_scenario, select
from cleave.core.fleet.profiles import read_csv
from cleave.errors import InputError

ROOT = Path(__file__).parents[2]
SCENARIOS = [ROOT / "benchmarks" / "scenarios" / f"{name}.toml" for name in ("quick", "wire", "exact", "slow64")]
FLEET = """device,flops_per_s,down_bytes_per_s,up_bytes_per_s,latency_s,memory_bytes
a,1e9,1e6,2e5,0.01,1e9
b,2e9,2e6,4e5,0.01,1e9
"""
GOOD = """title = "x"
modes = ["full", "lora-8"]
[fleets.two]
file = "two.csv"
[models.tiny]
name = "tiny-llama"
"""


def write(tmp_path: Path, text: str, fleet: str = FLEET) -> Path:
    (tmp_path / "two.csv").write_text(fleet)
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return path


def test_cells_are_the_product_of_everything_listed(tmp_path: Path) -> None:
    text = GOOD.replace("[fleets.two]", 'grains = ["gemm", "resident"]\nwires = ["fp32", "bf16"]\n[fleets.two]')
    _, cells = read_scenario(write(tmp_path, text))
    assert len(cells) == len({cell.name for cell in cells}) == 8
    assert "two/tiny/lora-8/bf16/gemm" in {cell.name for cell in cells}
    assert all(cell.device_count == 2 for cell in cells)


def test_int8_is_read_as_q8_and_not_listed_beside_it(tmp_path: Path) -> None:
    def text(wires: str) -> str:
        return GOOD.replace("[fleets.two]", f"wires = {wires}\n[fleets.two]")

    assert {cell.wire for cell in read_scenario(write(tmp_path, text('["int8"]')))[1]} == {"q8"}
    with pytest.raises(InputError, match="wires has an entry twice"):
        read_scenario(write(tmp_path, text('["int8", "q8"]')))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_scenarios_of_the_repository_are_valid(path: Path) -> None:
    scenario, cells = read_scenario(path)
    assert cells
    assert scenario.title


def test_the_wire_scenario_has_the_cells_that_predictions_are_judged_on() -> None:
    scenario, cells = read_scenario(SCENARIOS[1])
    assert {cell.fleet_name for cell in cells} == {"home4", "mixed8", "wifi4"}
    assert {cell.mode for cell in cells} == {"full", "lora-8"}
    assert len(cells) == 12
    assert scenario.target == (0.9, 1.15)
    assert scenario.warmup == 2


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (("[fleets.two]", "steps = 0\n[fleets.two]"), ["steps", ">= 1"]),
        (("[fleets.two]", 'steps = "8"\n[fleets.two]'), ["steps", "int", "str"]),
        (("[fleets.two]", "stepps = 8\n[fleets.two]"), ["stepps"]),
        (('file = "two.csv"', 'file = "two.csv"\nspeed = 3'), ["speed", "fleets"]),
        (('file = "two.csv"', 'file = "gone.csv"'), ["gone.csv", "cannot read"]),
        (('file = "two.csv"', ""), ["two", "file or sample"]),
        (('file = "two.csv"', 'devices = "join"'), ["two", "count"]),
        (('file = "two.csv"', 'devices = "join"\ncount = 1\nclaim = 2'), ["two", "claim"]),
        (('name = "tiny-llama"', ""), ["tiny", "hidden"]),
        (('name = "tiny-llama"', "hidden = 100\nheads = 3"), ["tiny", "100", "3"]),
        (('name = "tiny-llama"', 'name = "demo"\nhidden = 64'), ["tiny", "shape"]),
        (('"lora-8"', '"lora"'), ["'lora'", "lora-8"]),
        (('"lora-8"', '"full"'), ["modes", "twice"]),
        (('["full", "lora-8"]', "[]"), ["modes", "empty"]),
        (("[fleets.two]", "tokens = 100\n[fleets.two]"), ["100", "256"]),
        (("[fleets.two]", "steps = 2\n[fleets.two]"), ["warmup", "2"]),
        (("[fleets.two]", "target = [2.0, 1.0]\n[fleets.two]"), ["target", "2"]),
        (("[fleets.two]", '[fleets."a/b"]\nfile = "two.csv"\n[fleets.two]'), ["a/b"]),
        (('title = "x"', "title = "), ["TOML"]),
        (('title = "x"', 'title = "x"\nbenchmark = "live"'), ["benchmarks/run.py"]),
    ],
)
def test_a_wrong_scenario_is_refused_in_one_sentence(tmp_path: Path, change: tuple[str, str], facts: list[str]) -> None:
    assert change[0] in GOOD
    with pytest.raises(InputError) as raised:
        read_scenario(write(tmp_path, GOOD.replace(*change, 1)))
    told = str(raised.value)
    assert "\n" not in told
    assert all(fact in told for fact in facts), told


def test_a_broken_fleet_file_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"two\.csv, line 3"):
        read_scenario(write(tmp_path, GOOD, FLEET.replace("2e9", "fast")))


def test_a_missing_scenario_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.toml"):
        read_scenario(tmp_path / "gone.toml")


def test_a_fleet_is_repeated_or_cut_to_its_count(tmp_path: Path) -> None:
    for count, last in ((1, "a"), (2, "b"), (5, "a.3")):
        path = write(tmp_path, GOOD.replace('file = "two.csv"', f'file = "two.csv"\ncount = {count}'))
        _, cells = read_scenario(path)
        profiles = read_csv(cells[0].fleet_csv, "fleet")
        assert (len(profiles), profiles.names[-1]) == (count, last)


def test_the_speed_of_all_devices_can_be_set(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace('file = "two.csv"', 'file = "two.csv"\nflops_per_s = 3e9\ncount = 3'))
    profiles = read_csv(read_scenario(path)[1][0].fleet_csv, "fleet")
    assert profiles.flops_per_s.tolist() == [3e9] * 3
    assert profiles.down_bytes_per_s.tolist() == [1e6, 2e6, 1e6]


def test_a_sampled_fleet_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    sampled = GOOD.replace('file = "two.csv"', 'sample = { mix = "laptop=3", seed = 4 }')
    first, second = (read_scenario(write(tmp_path, sampled))[1][0] for _ in range(2))
    other = read_scenario(write(tmp_path, sampled.replace("seed = 4", "seed = 5")))[1][0]
    assert first.digest("c") == second.digest("c") != other.digest("c")


def test_a_cell_is_another_one_if_its_settings_its_fleet_or_the_code_differ(tmp_path: Path) -> None:
    def first(text: str, fleet: str = FLEET) -> str:
        return read_scenario(write(tmp_path, text, fleet))[1][0].digest("code")

    assert first(GOOD) == first(GOOD.replace('title = "x"', 'title = "y"'))
    assert first(GOOD) != first(GOOD.replace("[fleets.two]", "seed = 2\n[fleets.two]"))
    assert first(GOOD) != first(GOOD, FLEET.replace("2e6", "3e6"))
    cell = read_scenario(write(tmp_path, GOOD))[1][0]
    assert cell.digest("code") != cell.digest("other code")


def test_fleets_share_the_reference_of_a_model_and_mode(tmp_path: Path) -> None:
    both = GOOD.replace("[models.tiny]", '[fleets.other]\nfile = "two.csv"\nclaim = 3\n[models.tiny]')
    _, cells = read_scenario(write(tmp_path, both))
    assert len({cell.reference_digest() for cell in cells}) == len({cell.mode for cell in cells}) == 2


def test_cells_are_selected_by_how_their_name_starts(tmp_path: Path) -> None:
    _, cells = read_scenario(write(tmp_path, GOOD))
    assert select(cells, ()) == cells
    assert select(cells, ("two/tiny",)) == select(cells, ("two/",)) == cells
    assert [cell.mode for cell in select(cells, ("two/tiny/lora-8",))] == ["lora-8"]
    with pytest.raises(InputError, match="two/tiny/full"):
        select(cells, ("two/ti",))
