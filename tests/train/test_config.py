"""A run's settings are checked once, on loading, and survive being saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cleave.config import TrainConfig, load_config, to_toml
from cleave.errors import InputError


def _file(directory: Path, text: str) -> Path:
    path = directory / "run.toml"
    path.write_text(text)
    return path


def test_without_a_file_and_overrides_the_config_is_the_demo() -> None:
    config = load_config(None, {})
    assert config == TrainConfig(model="demo", data=None)
    assert config.local_devices == 4


def test_a_run_that_others_can_join_starts_no_local_devices_unless_told_to() -> None:
    assert load_config(None, {"listen": "0.0.0.0:7077"}).local_devices == 0
    assert load_config(None, {"listen": "0.0.0.0:7077", "devices": 2}).local_devices == 2


def test_the_names_of_options_are_names_of_settings(tmp_path: Path) -> None:
    config = load_config(_file(tmp_path, "wait = 5\nalone-wait = 7\n"), {})
    assert (config.wait_s, config.alone_wait_s) == (5.0, 7.0)


def test_a_section_in_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    path = _file(tmp_path, "[train]\nsteps = 7\n")
    with pytest.raises(InputError, match=r"\[train\].*remove"):
        load_config(path, {})


def test_overrides_win_over_the_file_and_none_means_not_given(tmp_path: Path) -> None:
    path = _file(tmp_path, 'steps = 7\nlearning-rate = 1\nmodel = "tiny-opt"\n')
    config = load_config(path, {"steps": 9, "model": None, "eval-every": 3})
    assert (config.steps, config.learning_rate, config.model, config.eval_every) == (9, 1.0, "tiny-opt", 3)


def test_a_saved_config_reads_back_as_itself_without_its_token(tmp_path: Path) -> None:
    config = TrainConfig(
        data=Path('odd "name"\\with\ttab\x7f and é'),
        betas=(0.8, 0.95),
        autocast="bf16",
        checkpointing=True,
        learning_rate=1e-7,
        token="secret",
        out=Path("somewhere"),
    )
    text = to_toml(config)
    assert "secret" not in text
    assert load_config(_file(tmp_path, text), {}) == replace(config, token=None)


def test_every_default_passes_its_own_check(tmp_path: Path) -> None:
    assert load_config(_file(tmp_path, to_toml(TrainConfig())), {}) == TrainConfig()


def test_int8_is_read_as_q8(tmp_path: Path) -> None:
    assert load_config(_file(tmp_path, 'wire = "int8"'), {}) == load_config(None, {"wire": "q8"})
    assert load_config(None, {"wire": "int8"}).wire == "q8"


@pytest.mark.parametrize(("key", "meant"), [("learning_rat", "learning_rate"), ("warm-up-steps", "warmup_steps")])
def test_an_unknown_setting_is_refused_with_the_closest_name(tmp_path: Path, key: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"no setting '{key}'.*did you mean {meant}"):
        load_config(_file(tmp_path, f"{key} = 1\n"), {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps = 0", r"number.* 1\b.* 2,147,483,647\b"),
        ("steps = 2.5", "a whole number"),
        ("steps = true", "a whole number"),
        ('steps = "many"', "a whole number"),
        ("learning_rate = 0", r"number above 0\b"),
        ("learning_rate = inf", "a number"),
        ("learning_rate = nan", "a number"),
        ("clip = -1", r"number.* 0\b"),
        (f"clip = 1{'0' * 400}", "a number"),
        ('wire = "fp8"', "one of fp32, bf16, fp16, q8"),
        ('autocast = "fp16"', "one of bf16"),
        ("betas = [0.9]", "2 numbers"),
        ("betas = [0.9, 1.0]", r"number.* 0\b.* 0\.999999\b"),
        ("betas = 0.9", "2 numbers"),
        ("tensorboard = 1", "true or false"),
        ("data = 3", "a path"),
        ('model = ""', "string"),
        ("[model]\nname = 1", "string"),
        ('listen = "7077"', "HOST:PORT"),
        ('listen = "here:99999"', "HOST:PORT"),
    ],
)
def test_a_value_of_the_wrong_kind_or_size_is_refused_with_what_was_expected(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(InputError, match=f"{text.strip('[').split()[0].rstrip(']')} to be .*{expected}.*, got "):
        load_config(_file(tmp_path, text), {})


def test_a_missing_or_invalid_toml_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*absent\.toml"):
        load_config(tmp_path / "absent.toml", {})
    with pytest.raises(InputError, match=r"expected TOML in .*run\.toml"):
        load_config(_file(tmp_path, "steps: 3"), {})
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"expected TOML in .*run\.toml"):
        load_config(tmp_path / "run.toml", {})
