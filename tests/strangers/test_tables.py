"""Fleets, settings and configs from strangers give a result or one sentence and exit code 2, whatever they hold."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleave.api.planning import load_fleet, load_shape
from cleave.cli.main import main
from cleave.config import TrainConfig, load_config, to_toml
from cleave.errors import InputError

Make = Callable[[Path], object]
HEADER = "device,flops_per_s,down_bytes_per_s,up_bytes_per_s,latency_s,memory_bytes"
ROW = "1e12,1e7,1e7,0.01,8e9"
FLEET = f"{HEADER}\na,{ROW}\nb,{ROW}\n"
SHAPE: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 256,
}
NESTED = "[" * 100_000


def _text(content: str | bytes) -> Make:
    return lambda file: file.write_bytes(content if isinstance(content, bytes) else content.encode())


def _shape(**fields: object) -> Make:
    return lambda file: file.write_text(json.dumps({**SHAPE, **fields}))


ANY_KIND: dict[str, Make] = {
    "pipe": os.mkfifo,
    "endless": lambda file: file.symlink_to("/dev/zero"),
    "loop": lambda file: file.symlink_to(file),
    "directory": Path.mkdir,
    "huge": lambda file: (file.touch(), os.truncate(file, 1 << 40)),
    "NULs": _text(bytes(1000)),
    "not UTF-8": _text(b"\xff\xfe\x00"),
    "nested": _text(NESTED),
    "nested further": _text("a = " + NESTED),
    "escapes": _text("\x1b]0;title\x07\x1b[2J"),
    "long number": _text("1" * 10_000),
    "one line": _text("," * 1_000_000),
}
FLEETS: dict[str, Make] = {
    **ANY_KIND,
    "empty": _text(""),
    "name with an escape": _text(f"{HEADER}\n\x1b[31m,{ROW}\n"),
    "name with a line end": _text(f'{HEADER}\n"a\rb",{ROW}\n'),
    "long name": _text(f"{HEADER}\n{'x' * 300},{ROW}\n"),
    "right to left": _text(f"{HEADER}\n\u202ea,{ROW}\n"),
    "infinite": _text(f"{HEADER}\na,inf,1e7,1e7,0.01,8e9\n"),
    "not a number": _text(f"{HEADER}\na,nan,1e7,1e7,0.01,8e9\n"),
    "beyond a float": _text(f"{HEADER}\na,1e999,1e7,1e7,0.01,8e9\n"),
    "negative": _text(f"{HEADER}\na,-1,1e7,1e7,0.01,8e9\n"),
    "almost no speed": _text(f"{HEADER}\na,1e-300,1e7,1e7,0.01,8e9\n"),
    "absurd link": _text(f"{HEADER}\na,1e12,1e300,1e7,0.01,8e9\n"),
    "absurd latency": _text(f"{HEADER}\na,1e12,1e7,1e7,1e300,8e9\n"),
    "cell of any length": _text(f"{HEADER}\na,{'9' * 200_000},1e7,1e7,0.01,8e9\n"),
}
SHAPES: dict[str, Make] = {
    **ANY_KIND,
    "list": _text("[]"),
    "nested objects": _text('{"a":' * 100_000),
    "a billion layers": _shape(num_hidden_layers=10**9),
    "two billion layers": _shape(num_hidden_layers=2**31 - 1),
    "absurd width": _shape(hidden_size=10**300),
    "digits without end": _text('{"model_type": "llama", "hidden_size": ' + "9" * 10_000 + "}"),
    "not a number": _shape(hidden_size=float("nan")),
    "family with escapes": _shape(model_type="\x1b[2J\n"),
}
SETTINGS: dict[str, Make] = {
    **ANY_KIND,
    "nested tables": _text("a = " + "{a = " * 3000),
    "nested lists in lines": _text("betas = [\n" + "[\n" * 10_000),
    "long dotted key": _text("a." * 4000 + "a = 1"),
    "longer dotted key": _text("a." * 30_000 + "a = 1"),
    "many dotted keys": _text("\n".join(f"k{line}." + "a." * 2000 + "a = 1" for line in range(8))),
    "absurd steps": _text("steps = 99999999999999999999999"),
    "digits without end": _text("steps = " + "9" * 5000),
    "hexadecimal without end": _text("steps = 0x" + "f" * 8000),
    "infinite rate": _text("learning_rate = inf"),
    "rate is not a number": _text("learning_rate = nan"),
    "rate beyond a float": _text("learning_rate = 1e999"),
    "NUL in a path": _text('data = "a\\u0000b"'),
    "NUL in a name": _text('model = "a\\u0000b"'),
    "escape in a name": _text('model = "\\u001b[2J"'),
    "key with escapes": _text('"\\u001b[2J" = 1'),
    "date": _text("steps = 1979-05-27"),
    "table": _text("[steps]\na = 1"),
    "tables": _text("[[steps]]\n" * 1000),
    "address": _text('listen = "[::1]:٣"'),
}


def _fleet_show(file: Path) -> list[str]:
    return ["fleet", "show", str(file)]


def _plan_fleet(file: Path) -> list[str]:
    return ["plan", "--gemm", "64,64,64", "--fleet", str(file)]


def _plan_model(file: Path) -> list[str]:
    good = file.with_name("good.csv")
    good.write_text(FLEET)
    return ["plan", "--model", str(file), "--tokens", "64", "--fleet", str(good)]


def _train(file: Path) -> list[str]:
    return ["train", str(file), "--out", str(file.with_name("run"))]


CASES = {
    f"{kind}: {name}": (command, suffix, make)
    for kind, command, suffix, table in (
        ("fleet show", _fleet_show, "csv", FLEETS),
        ("plan --fleet", _plan_fleet, "csv", FLEETS),
        ("plan --model", _plan_model, "json", SHAPES),
        ("train", _train, "toml", SETTINGS),
    )
    for name, make in table.items()
}


@pytest.mark.parametrize(("command", "suffix", "make"), CASES.values(), ids=CASES)
def test_a_hostile_file_gives_one_printable_sentence_and_code_2(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    command: Callable[[Path], list[str]],
    suffix: str,
    make: Make,
) -> None:
    file = tmp_path / f"x.{suffix}"
    make(file)
    tracemalloc.start()
    try:
        assert main(command(file)) == 2
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()
    said = capfd.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.removesuffix("\n").isprintable()
    assert said.err.startswith("cleave ")
    assert said.out == ""
    assert not (tmp_path / "run").exists()


def test_a_fleet_may_come_through_a_pipe_of_the_shell(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.write(writer, FLEET.encode())
    os.close(writer)
    try:
        assert main(["fleet", "show", f"/dev/fd/{reader}"]) == 0
    finally:
        os.close(reader)
    assert "2 devices" in capfd.readouterr().out


@pytest.mark.parametrize("number", ["1e-6", "1e21"])
@pytest.mark.parametrize("column", range(5))
def test_the_oddest_profiles_still_give_a_plan_or_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], column: int, number: str
) -> None:
    cells = ROW.split(",")
    cells[column] = number
    (tmp_path / "x.csv").write_text(f"{HEADER}\n[/x],{','.join(cells)}\nb,{ROW}\n")
    assert main(["plan", "--json", "--gemm", "64,64,64", "--fleet", str(tmp_path / "x.csv")]) in (0, 2)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("size", [7, 2**31 - 1])
@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "vocab_size"])
def test_absurd_shapes_give_a_plan_or_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], field: str, size: int
) -> None:
    (tmp_path / "x.csv").write_text(FLEET)
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_attention_heads": 1, field: size}))
    command = ["plan", "--json", "--grain", "gemm", "--model", str(tmp_path), "--tokens", "64"]
    assert main([*command, "--fleet", str(tmp_path / "x.csv")]) in (0, 2)
    assert "Traceback" not in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------- mutations


def _mutated(text: str) -> st.SearchStrategy[bytes]:
    raw = text.encode()
    places = st.integers(0, len(raw))
    inserted = st.sampled_from([b"\0", b"\xff", b"\n", b'"', b"[", b"{", b",", b"=", b".", b"-", b"e999", b"9" * 400])
    return st.builds(
        lambda start, length, new: raw[:start] + new + raw[start + length :], places, st.integers(0, 30), inserted
    )


def _tried(read: Callable[[Path], object], file: Path, content: bytes) -> None:
    file.write_bytes(content)
    try:
        read(file)
    except InputError as fault:
        assert str(fault)  # noqa: PT017


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=_mutated(to_toml(TrainConfig())))
def test_any_mutated_settings_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    _tried(lambda file: load_config(file, {}), tmp_path / "x.toml", content)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=_mutated(FLEET))
def test_any_mutated_fleet_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    _tried(load_fleet, tmp_path / "x.csv", content)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=_mutated(json.dumps(SHAPE)))
def test_any_mutated_config_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    _tried(lambda file: load_shape(str(file)), tmp_path / "x.json", content)
