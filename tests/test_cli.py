"""The command line as a person or a script uses it: good input, bad input, stable formats."""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cleave.cli.main import _parser, main

HEADER = "device,flops_per_s,down_bytes_per_s,up_bytes_per_s,latency_s,memory_bytes"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    path = tmp_path / "fleet.csv"
    assert main(["fleet", "sample", "--mix", "phone=6,laptop=3,desktop=1", "--seed", "5", "--out", str(path)]) == 0
    return str(path)


@pytest.fixture
def few(tmp_path: Path) -> str:
    """A fleet small enough to plan quickly."""
    path = tmp_path / "few.csv"
    assert main(["fleet", "sample", "--mix", "phone=2,laptop=1", "--seed", "5", "--out", str(path)]) == 0
    return str(path)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A model of two layers, small enough to plan quickly."""
    return write(tmp_path, json.dumps(CONFIG), "config.json")


def write(tmp_path: Path, text: str, name: str = "given.csv") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_a_gemm_plan_as_json_has_the_documented_fields_and_covers_the_output(
    fleet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["plan", "--gemm", "700,500,300", "--fleet", fleet, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["gemm"] == {"m": 700, "n": 500, "k": 300}
    assert plan["makespan_s"] >= plan["bound_s"] > 0
    assert {"device", "rows", "cols", "inner"} == set(plan["blocks"][0])
    volume = sum(
        (b["rows"][1] - b["rows"][0]) * (b["cols"][1] - b["cols"][0]) * (b["inner"][1] - b["inner"][0])
        for b in plan["blocks"]
    )
    assert volume == 700 * 500 * 300
    named = {row["device"] for row in csv.DictReader(Path(fleet).read_text().splitlines())}
    assert {b["device"] for b in plan["blocks"]} | {x["device"] for x in plan["left_out"]} == named


def test_a_plan_by_gemms_as_json_adds_up(few: str, small: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    whole = ["--model", small, "--tokens", "64", "--grain", "gemm"]
    assert main(["plan", *whole, "--fleet", few, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["grain"] == "gemm"
    assert plan["step_s"] == pytest.approx(sum(s["count"] * s["makespan_s"] for s in plan["segments"]))
    assert {s["role"] for s in plan["segments"]} == {"forward", "grad_input", "grad_weight"}
    assert all(s["blocks"] for s in plan["segments"])


@pytest.mark.parametrize("grain", ["auto", "resident"])
def test_a_plan_by_columns_as_json_takes_every_token_through_every_parameter_once(
    fleet: str, grain: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    whole = ["--model", "opt-125m", "--tokens", "8192", "--grain", grain]
    assert main(["plan", *whole, "--fleet", fleet, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["grain"] == "resident"
    assert plan["arrangement"] == "columns"
    assert plan["step_s"] >= plan["bound_s"] > 0
    assert plan["step_s"] == pytest.approx(plan["activation_s"] + plan["synchronisation_s"] + plan["fill_s"])
    assert all(plan["step_s"] <= way["step_s"] for way in plan["rivals"] if way["fits"] and way["runs"])
    faster = {way["name"]: way for way in plan["rivals"] if way["fits"] and way["step_s"] < plan["step_s"]}
    assert {rival["name"] for rival in plan["faster"]} == set(faster)
    for segment in plan["segments"]:
        taken = sum(unit["tokens"][1] - unit["tokens"][0] for unit in segment["units"])
        assert taken == 8192 * segment["slices"]
    assert sum(segment["count"] for segment in plan["segments"]) == 2 * 12 + 1
    named = {row["device"] for row in csv.DictReader(Path(fleet).read_text().splitlines())}
    units = [unit["device"] for segment in plan["segments"] for unit in segment["units"]]
    assert len(units) == len(set(units))
    assert set(units) | {x["device"] for x in plan["left_out"]} == named


def test_the_server_takes_a_block_under_its_own_name(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["plan", "--gemm", "2048,2048,2048", "--fleet", fleet, "--server-tflops", "1", "--json"]) == 0
    assert "server" in {b["device"] for b in json.loads(capsys.readouterr().out)["blocks"]}


def test_a_server_cap_never_makes_a_plan_faster(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    times: list[float] = []
    for cap in ([], ["--server-down", "0.2", "--server-up", "0.1"]):
        assert main(["plan", "--gemm", "4096,4096,4096", "--fleet", fleet, "--json", *cap]) == 0
        times.append(json.loads(capsys.readouterr().out)["makespan_s"])
    assert times[1] > times[0]


def test_the_tables_show_time_bound_limit_and_the_gpu(few: str, small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gemm", "700,500,300", "--fleet", few]) == 0
    assert main(["plan", "--model", small, "--tokens", "64", "--grain", "gemm", "--fleet", few]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("times the lower bound", "limited by", "bytes per device", "A100", "47%", "grad_weight", "attention"):
        assert words in text


def test_a_plan_by_columns_is_drawn_and_compared_with_every_rival(
    fleet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "opt-125m", "--tokens", "8192", "--fleet", fleet]) == 0
    lines = capsys.readouterr().out.splitlines()
    plane = [line for line in lines if line and set(line.lower()) <= set("pld")]
    assert len(plane) == 16
    assert len({len(line) for line in plane}) == 1, "no gaps"
    text = " ".join(" ".join(lines).split())
    for words in ("tokens down, parameters across", "limited by", "A100"):
        assert words in text
    assert re.search(r"one device [^:]*save[^:]*: (\w+ [\d.]+ \w+; )*phone [\d.]+ \w*s\b", text)
    for way in ("columns", "GPipe x data parallel", "layer groups", "grouped gemms", "one by one", "FSDP", "alone"):
        assert way in text


def test_a_plan_says_which_rival_is_faster_by_how_much_and_why(few: str, capsys: pytest.CaptureFixture[str]) -> None:
    request = ["plan", "--model", "opt-125m", "--tokens", "8192", "--fleet", few]
    capsys.readouterr()
    assert main([*request, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["segments"]
    rival = plan["faster"][0]
    assert rival["name"] == plan["rivals"][0]["name"]
    assert rival["factor"] == pytest.approx(plan["step_s"] / plan["rivals"][0]["step_s"])
    assert main(request) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{rival['name']} is {rival['factor']:.2f} times as fast: {rival['spares']}" in text


def test_a_plan_with_adapters_is_faster_and_says_so(few: str, capsys: pytest.CaptureFixture[str]) -> None:
    request = ["plan", "--model", "opt-125m", "--tokens", "8192", "--grain", "resident", "--fleet", few]
    capsys.readouterr()
    plans: list[dict[str, Any]] = []
    for more in ([], ["--lora", "8"]):
        assert main([*request, *more, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert [plan["lora"] for plan in plans] == [None, 8]
    assert plans[1]["step_s"] < plans[0]["step_s"]
    assert main([*request, "--lora", "100000"]) == 2
    assert "768" in capsys.readouterr().err


def test_a_plan_says_which_columns_are_leased_and_none_are_if_forbidden(
    few: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ["plan", "--model", "opt-125m", "--tokens", "8192", "--grain", "resident", "--fleet", few]
    capsys.readouterr()
    plans: list[dict[str, Any]] = []
    for more in ([], ["--lease", "never"]):
        assert main([*request, *more, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    leased, synchronized = plans
    assert any(stage["leased"] for stage in leased["segments"])
    assert all(stage["leased"] == (stage["snapshot_every"] is not None) for stage in leased["segments"])
    assert leased["log_bytes"] > 0
    assert not any(stage["leased"] for stage in synchronized["segments"])
    assert synchronized["log_bytes"] == 0
    assert leased["step_s"] < synchronized["step_s"]
    assert main(request) == 0
    text = " ".join(capsys.readouterr().out.split())
    every = next(stage["snapshot_every"] for stage in leased["segments"] if stage["leased"])
    assert f"leased, a snapshot every {every} steps" in text
    assert main([*request, "--lease", "never"]) == 0
    assert "leased" not in capsys.readouterr().out


def test_a_plan_for_less_energy_says_what_it_costs_and_lists_its_sources(
    fleet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ["plan", "--gemm", "700,500,300", "--fleet", fleet, "--json", "--objective"]
    plans: dict[str, Any] = {}
    for objective in ("time", "energy", "carbon"):
        capsys.readouterr()
        assert main([*request, objective]) == 0
        plans[objective] = json.loads(capsys.readouterr().out)
    for name, plan in plans.items():
        footprint = plan["footprint"]
        parts = [footprint[part]["energy_j"] for part in ("devices", "network", "server")]
        assert footprint["energy_j"] == pytest.approx(sum(parts))
        assert plan["objective"]["name"] == name
        assert plan["objective"]["fastest_s"] == plans["time"]["makespan_s"]
        assert plan["objective"]["seconds"] == plan["makespan_s"]
        assert len({block["device"] for block in plan["blocks"]} | {one["device"] for one in plan["left_out"]}) == 10
        assert all(one["source"] for one in (*footprint["assumptions"], *footprint["evidence"]))
        assert {one["column"] for one in footprint["assumptions"]} == {"", "idle_watts"}
        for cloud in footprint["cloud"]:
            assert cloud["energy_ratio"] == pytest.approx(footprint["energy_j"] / cloud["energy_j"])
    assert plans["energy"]["footprint"]["energy_j"] < plans["time"]["footprint"]["energy_j"]
    assert plans["carbon"]["footprint"]["kgco2e"] < plans["time"]["footprint"]["kgco2e"]


def test_a_plan_tells_its_energy_and_what_it_assumed(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    request = ["plan", "--gemm", "700,500,300", "--fleet", fleet, "--objective", "energy", "--server-watts", "500"]
    assert main(request) == 0
    told = " ".join(capsys.readouterr().out.split())
    for fact in ("objective energy", "of 10;", "above idle", "idle_watts", "Patterson", "up to 12x", "H100"):
        assert fact in told, fact


def test_a_config_json_or_its_folder_is_accepted_as_a_model(
    few: str, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    steps: list[float] = []
    for model in (small, str(Path(small).parent)):
        assert main(["plan", "--model", model, "--tokens", "64", "--grain", "gemm", "--fleet", few, "--json"]) == 0
        steps.append(json.loads(capsys.readouterr().out)["step_s"])
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    "what",
    [
        "--gemm 700,500,300 --split 3d --fleet FLEET",
        "--model SMALL --tokens 64 --grain gemm --fleet FEW",
        "--model opt-125m --tokens 8192 --fleet FLEET",
        "--model opt-125m --tokens 8192 --fleet FEW",
    ],
    ids=["gemm", "gemms", "columns", "rival"],
)
def test_a_plot_is_written_as_an_image(fleet: str, few: str, small: str, tmp_path: Path, what: str) -> None:
    picture, files = tmp_path / "plan.png", {"FLEET": fleet, "FEW": few, "SMALL": small}
    assert main(["plan", *(files.get(word, word) for word in what.split()), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_the_same_seed_draws_the_same_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    drawn: list[str] = []
    for seed in ("3", "3", "4"):
        assert main(["fleet", "sample", "--mix", "phone=5,sbc=2", "--country", "gb", "--seed", seed]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_fleet_is_described_in_words_and_as_json(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["fleet", "show", fleet]) == 0
    assert "10 devices (6 phone, 3 laptop, 1 desktop)" in " ".join(capsys.readouterr().out.split())
    assert main(["fleet", "show", fleet, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 10


GOOD = f"{HEADER}\na,1e12,1e7,1e6,0.01,1e9\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        (HEADER + "\n", "no device"),
        (GOOD.replace("1e7", "nan"), "down_bytes_per_s of device 'a'"),
        (GOOD.replace("1e7", "-1"), "above 0"),
        (GOOD.replace("1e12", "0"), "flops_per_s of device 'a'"),
        (GOOD + "a,1e12,1e7,1e6,0.01,1e9\n", "comes twice"),
        (GOOD.replace(",memory_bytes", "").replace(",1e9", ""), "lacks memory_bytes"),
        (GOOD.replace("1e9", "100"), "smallest block needs"),
        (f"{HEADER},country\na,1e12,1e7,1e6,0.01,1e9,atlantis\n", "'atlantis'"),
        (f"{HEADER},watts,idle_watts\na,1e12,1e7,1e6,0.01,1e9,10,12\n", "idle_watts of device 'a'"),
    ],
)
def test_a_bad_fleet_gives_one_sentence_and_exit_code_2(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gemm", "100,100,100", "--fleet", write(tmp_path, text)]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert ";" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--model", "llama-2-7c", "--tokens", "64"], ["llama-2-7c", "llama-2-7b"]),
        (["--model", "opt-125m"], ["--tokens"]),
        (["--model", "opt-125m", "--tokens", "100", "--sequence", "7"], ["100", "7", "whole number of sequences"]),
        (["--model", "opt-125m", "--tokens", "4096", "--sequence", "4096"], ["opt-125m", "2048", "--sequence", "4096"]),
        (["--model", "no/such/config.json", "--tokens", "64"], ["no/such/config.json"]),
        (["--gemm", "5,5,5", "--tokens", "64"], ["--tokens", "--model", "gemm"]),
        (["--gemm", "5,5,5", "--grain", "resident"], ["resident", "--grain gemm", "--model"]),
        (["--gemm", "5,5,5", "--plot", "plan.gif"], ["plan.gif", ".png"]),
        (["--gemm", "5,5,5", "--plot", "no/such/plan.png"], ["--plot no/such/plan.png", " no/such;"]),
    ],
)
def test_a_bad_request_gives_one_sentence_and_exit_code_2(
    arguments: list[str], facts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments, "--fleet", write(tmp_path, GOOD)]) == 2
    told = capsys.readouterr().err
    assert [fact for fact in facts if fact not in told] == []
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "config",
    ["[1, 2]", "{broken", json.dumps({**CONFIG, "hidden_size": "wide"}), json.dumps({**CONFIG, "model_type": "mamba"})],
)
def test_a_malformed_config_gives_one_sentence_and_exit_code_2(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, config, "config.json")
    assert main(["plan", "--model", path, "--tokens", "64", "--fleet", write(tmp_path, GOOD)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("cleave plan: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--gemm", "5,5", "--fleet", "x.csv"],
        ["plan", "--gemm", "5,0,5", "--fleet", "x.csv"],
        ["plan", "--gemm", "5,5,5", "--fleet", "x.csv", "--server-down", "0"],
        ["plan", "--gemm", "5,5,5", "--fleet", "x.csv", "--wire", "fp8"],
        ["plan", "--gemm", "5,5,5"],
        ["fleet", "sample", "--mix", "phone=1", "--seed", "-1"],
        ["nonsense"],
    ],
)
def test_bad_flags_give_one_sentence_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("mix", ["tablet=3", "phone=x", "phone=-1", "phone=0", "", "phone"])
def test_a_bad_mix_gives_one_sentence_and_exit_code_2(mix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "sample", "--mix", mix]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["train", "--devices", "-1"], ["--devices", "whole number", " 0,", "-1"]),
        (["train", "--dropout", "1"], ["--dropout", " 0 ", "below 1", "'1'"]),
        (["train", "--save-minutes", "-2"], ["--save-minutes", " 0,", "-2"]),
    ],
)
def test_a_flag_out_of_range_names_the_range(
    arguments: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert [fact for fact in facts if fact not in told] == []


@pytest.mark.parametrize(
    ("arguments", "verb", "near"),
    [(["train", "--modle", "x"], "cleave train", "--model"), (["token", "add", "--rle"], "cleave token add", "--role")],
)
def test_an_unknown_option_is_named_with_its_verb_and_the_nearest_one(
    arguments: list[str], verb: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{verb}: ")
    assert near in told


@pytest.mark.parametrize(
    ("arguments", "verb", "near"),
    [
        (["tarin"], "cleave", "train"),
        (["jion", "127.0.0.1:7077"], "cleave", "join"),
        (["runs", "lst"], "cleave runs", "list"),
        (["train", "--wire", "bf61"], "cleave train", "bf16"),
    ],
)
def test_a_mistyped_verb_or_choice_is_answered_with_the_nearest_one(
    arguments: list[str], verb: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{verb}: ")
    assert f"did you mean {near}?" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "verb", "facts"),
    [(["runs"], "cleave runs", ["ACTION", "show"]), (["completion"], "cleave completion", ["SHELL", "zsh"])],
)
def test_a_missing_action_is_answered_with_those_there_are(
    arguments: list[str], verb: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{verb}: ")
    assert all(fact in told for fact in facts)


def test_a_word_that_is_like_no_verb_is_answered_with_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["nonsense"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "did you mean" not in told
    assert "'train'" in told
    assert "'completion'" in told


def test_a_country_without_link_data_is_answered_with_those_that_have_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "sample", "--mix", "phone=1", "--country", "de"]) == 2
    told = capsys.readouterr().err
    assert "--country world" in told
    assert "nl" in told


def test_an_out_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        assert main(["train", "--out", str(out)]) == 2
        told = capsys.readouterr().err
        assert str(tmp_path / "file") in told
        assert "--out" in told
        assert told.count("\n") == 1


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


@pytest.mark.parametrize("parser", list(parsers(_parser())), ids=lambda parser: parser.prog)
def test_help_tells_the_default_of_every_option_and_fits_the_terminal(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action
        takes_value = action.option_strings and action.nargs != 0
        if (
            takes_value
            and not action.required
            and not any(action in group._group_actions for group in _exclusive(parser))
        ):
            told = ("default:", "required with", "draw the", "to write")
            assert any(words in action.help for words in told), f"{parser.prog} {action.option_strings}"
    examples = (parser.epilog or "").count("\n  cleave ")
    if parser.prog.count(" ") == 1 and parser.prog != "cleave completion":
        assert examples, f"{parser.prog} has no example"
    assert all(len(line) <= 80 for line in parser.format_help().splitlines() if not line.startswith("  cleave "))


def _exclusive(parser: argparse.ArgumentParser) -> list[argparse._MutuallyExclusiveGroup]:
    return [group for group in parser._mutually_exclusive_groups if group.required]


def test_help_imports_no_heavy_modules() -> None:
    code = (
        "import sys\n"
        "from cleave.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'rich', 'matplotlib', 'torch'} & set(sys.modules)), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.strip() == "[]"
