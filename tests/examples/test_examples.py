"""Every example runs as examples/README.md says, and shows what it promises."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, Page, read_page
from tests.docs.runner import Runner, prepared
from tests.support.commands import PATIENCE_S, Process, environment, free_port, wait_until

PAGE = read_page(ROOT / "examples" / "README.md")
LOSS = re.compile(r"loss'?:? '?([\d.]+)")


def losses(printed: str) -> list[float]:
    return [float(number) for number in LOSS.findall(printed)]


def loss_falls(printed: str, clone: Path) -> None:
    found = losses(printed)
    assert len(found) > 3
    assert found[-1] < found[0] - 0.5


def own_loop(printed: str, clone: Path) -> None:
    loss_falls(printed, clone)
    assert float(printed.split()[-1]) < 1e-4  # between the fleet and this machine alone


def adapter(printed: str, clone: Path) -> None:
    loss_falls(printed, clone)
    assert json.loads((clone / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"


def trained(printed: str, clone: Path) -> None:
    loss_falls(printed, clone)
    assert (clone / "trained" / "model.safetensors").is_file()


def run_from_file(printed: str, clone: Path) -> None:
    assert (clone / "my-run" / "model" / "model.safetensors").is_file()
    events = [json.loads(line) for line in (clone / "my-run" / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step_done"]
    assert len(steps) == 40
    assert steps[-1]["loss"] < steps[0]["loss"] - 1


def planned(printed: str, clone: Path) -> None:
    times = [float(number.replace(",", "")) for number in re.findall(r"([\d,]+) s a step", printed)]
    assert len(times) == 3
    assert times[1] < times[0] < times[2], "q8 sends less than bf16, and a narrow link of the server costs time"
    assert all(math.isfinite(time) for time in times)


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "own_loop.py": own_loop,
    "lora_peft.py": adapter,
    "trainer.py": trained,
    "run.toml": run_from_file,
    "plan_a_fleet.py": planned,
}
FAST = {"own_loop.py", "plan_a_fleet.py"}
"""The others start the same processes for as long, and `make test` has to stay short."""


def page_of(example: str) -> Page:
    """The one block of examples/README.md that runs an example, as a page of its own."""
    (block,) = (block for block in PAGE.blocks if example in block.code)
    return Page(name=PAGE.name, blocks=(block,))


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CHECKS]
)
def test_an_example_runs_as_printed_and_shows_what_it_promises(example: str, tmp_path: Path) -> None:
    with prepared(page_of(example), tmp_path, _no_model) as runner:
        (printed,) = runner.run()
        CHECKS[example](printed, runner.clone)


def test_every_example_is_listed_and_tested() -> None:
    names = {path.name for path in (ROOT / "examples").iterdir() if path.name not in ("README.md", "__pycache__")}
    assert names == {*CHECKS, "two_machines_tls"}
    text = (ROOT / PAGE.name).read_text()
    assert all(f"({name})" in text for name in names)


def test_what_the_examples_need_is_installed(tmp_path: Path) -> None:
    (install,) = (block for block in PAGE.blocks if "pip install" in block.code)
    Runner(Page(name=PAGE.name, blocks=(install,)), tmp_path).run()


@pytest.mark.slow
def test_two_machines_join_over_tls_as_their_page_says(tmp_path: Path) -> None:
    with prepared(read_page(ROOT / "examples" / "two_machines_tls" / "README.md"), tmp_path, _no_model) as runner:
        server, device = runner.run()
    assert losses(server)[-1] < losses(server)[0]
    assert "joined" in device


# -------------------------------------------------------------------------------------------- two machines, one wire


@pytest.fixture
def two_machines() -> Iterator[tuple[list[str], list[str]]]:
    """Make two network namespaces with one link between them; yield how to run a command in each."""
    ip = shutil.which("ip") or pytest.skip("there is no ip command here: install iproute2")
    names = [f"cleave-{end}-{free_port()}" for end in ("server", "device")]
    with ExitStack() as stack:
        for name in names:
            made = subprocess.run([ip, "netns", "add", name], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"network namespaces need root: {made.stderr.strip()}")
            stack.callback(subprocess.run, [ip, "netns", "delete", name], check=False)
        ends = [f"cl{name.rpartition('-')[2]}{letter}" for name, letter in zip(names, "ab", strict=True)]
        link = [
            ip,
            "link",
            "add",
            ends[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            names[1],
        ]
        subprocess.run(link, check=True)
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            for words in (
                ["address", "add", f"10.77.0.{number}/24", "dev", end],
                ["link", "set", end, "up"],
                ["link", "set", "lo", "up"],
                ["route", "add", "default", "via", f"10.77.0.{3 - number}"],
            ):
                subprocess.run([ip, "-n", name, *words], check=True)
        yield [ip, "netns", "exec", names[0]], [ip, "netns", "exec", names[1]]


@pytest.mark.slow
def test_a_device_of_another_machine_joins_with_the_printed_command(
    tmp_path: Path, two_machines: tuple[list[str], list[str]]
) -> None:
    on_server, on_device = two_machines
    script = ROOT / "examples" / "two_machines_tls" / "serve.py"
    started: list[Process] = []

    def start(name: str, *words: str) -> Process:
        with (tmp_path / name).open("wb") as output:
            process = subprocess.Popen(words, env=environment(tmp_path), cwd=tmp_path, stdout=output, stderr=output)
        started.append(process)
        return process

    try:
        server = start("server", *on_server, sys.executable, str(script))
        wait_until(lambda: "cleave join" in (tmp_path / "server").read_text(), server)
        command = re.search(r"cleave join '(10\.77\.0\.1:7077#\S+)'", (tmp_path / "server").read_text())
        assert command, (tmp_path / "server").read_text()
        device = start("device", *on_device, sys.executable, "-m", "cleave", "join", command[1], "--threads", "1")
        assert server.wait(PATIENCE_S) == 0, (tmp_path / "server").read_text()
        assert device.wait(PATIENCE_S) == 0, (tmp_path / "device").read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()
    found = losses((tmp_path / "server").read_text())
    assert len(found) == 5
    assert found[-1] < found[0]


def _no_model() -> Path:
    raise AssertionError("no example needs a saved model")
