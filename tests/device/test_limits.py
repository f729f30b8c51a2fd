"""Promises to a volunteer, end to end: a real process stays within its memory and threads, or says why it cannot."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from cleave import Fleet
from cleave.core.model.batch import Matrix
from cleave.core.model.gemms import Linear, Role

MEMORY = "400MB"
MEMORY_BYTES = 400e6
DEADLINE_S = 60.0
ROLES: tuple[Role, ...] = ("forward", "grad_input", "grad_weight")

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


def peak_bytes(process: int) -> int:
    """Peak resident memory of a process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found
    return int(found[1]) * 1024


def thread_cpu_s(process: int) -> dict[str, float]:
    """CPU seconds per thread."""
    used: dict[str, float] = {}
    for thread in Path(f"/proc/{process}/task").iterdir():
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
        used[thread.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


@pytest.fixture
def one_device() -> Generator[tuple[Fleet, int]]:
    """A fleet of one process on one thread, and that process."""
    with Fleet.local(1, threads=1, memory=MEMORY) as fleet:
        yield fleet, fleet._processes[0].pid  # pyright: ignore[reportPrivateUsage]


def multiply(fleet: Fleet, tokens: int, width: int, out: int) -> None:
    """Compute all three products of a layer and check part of each."""
    rng = np.random.default_rng(tokens)
    x, weight, dy = (
        rng.standard_normal(shape, dtype=np.float32) for shape in ((tokens, width), (out, width), (tokens, out))
    )
    plan = fleet.cluster.choose_layer(Linear(tokens=tokens, in_width=width, out_width=out)).plan
    tensors = [fleet.cluster.tensor(*matrix.shape) for matrix in (x, weight, dy)]
    for tensor, matrix in zip(tensors, (x, weight, dy), strict=True):
        tensor.bind(matrix)
    staged_x, staged_weight, staged_dy = tensors
    for role, a, b in (
        ("forward", staged_x, staged_weight),
        ("grad_input", staged_dy, staged_weight),
        ("grad_weight", staged_dy, staged_x),
    ):
        (found,) = fleet.cluster.submit(role, (a,), (b,), plan).result(DEADLINE_S)
        expected: Matrix = {
            "forward": lambda: x[-3:] @ weight.T,
            "grad_input": lambda: dy[-3:] @ weight,
            "grad_weight": lambda: dy[:, -3:].T @ x,
        }[role]()
        np.testing.assert_allclose(found[-3:], expected, rtol=1e-3, atol=1e-2)


def test_a_process_never_uses_more_memory_than_it_was_given(one_device: tuple[Fleet, int]) -> None:
    """Layers of several sizes come one after another, each larger than the whole memory."""
    fleet, process = one_device
    for tokens, width, out in ((4000, 2500, 2500), (1060, 5200, 5200)):
        multiply(fleet, tokens, width, out)
        assert peak_bytes(process) < MEMORY_BYTES


def test_one_thread_means_one_computing_thread(one_device: tuple[Fleet, int]) -> None:
    """Next to the thread that sends and receives; BLAS starts none of its own."""
    fleet, process = one_device
    before_s, started = thread_cpu_s(process), time.monotonic()
    for _ in range(3):
        multiply(fleet, 3000, 1500, 1500)
    took_s = time.monotonic() - started
    used_s = [after_s - before_s.get(thread, 0.0) for thread, after_s in thread_cpu_s(process).items()]
    assert sum(used_s) <= took_s * 1.3
    assert sum(used > 0.05 * sum(used_s) for used in used_s) <= 2
    assert sum(used_s) > 0.1, "it did compute"


# ------------------------------------------------------------------------------------------------ bad input


def join(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CLEAVE_")}
    return subprocess.run(
        [sys.executable, "-m", "cleave", "join", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ([], "address of a server"),
        (["ftp://example.org:1"], r"wss://[\d.]+:7077.*'ftp://example\.org:1'"),
        (["ws://example.org"], r"wss://[\d.]+:7077.*'ws://example\.org'"),
        (["ws://:7077"], r"wss://[\d.]+:7077.*'ws://:7077'"),
        (["ws://127.0.0.1:99999"], r"wss://[\d.]+:7077.*'ws://127\.0\.0\.1:99999'"),
        (["127.0.0.1:1", "--memory", "10MB"], r"--memory .*at least \d{2,3} MB.*\b10 MB"),
        (["127.0.0.1:1", "--memory", "much"], "--memory.*500MB.*'much'"),
        (["127.0.0.1:1", "--threads", "0"], r"--threads.*\b1\b.*'0'"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(arguments: list[str], facts: str) -> None:
    ended = join(*arguments)
    assert ended.returncode == 2
    assert re.search(facts, ended.stderr), ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "Traceback" not in ended.stderr


def test_dialing_an_address_where_nobody_listens_gives_up_in_time() -> None:
    with socket.socket() as bound:  # a bound port on which nobody listens
        bound.bind(("127.0.0.1", 0))
        started = time.monotonic()
        ended = join(f"127.0.0.1:{bound.getsockname()[1]}", "--wait", "1", "--quiet")
        assert time.monotonic() - started < 15
    assert ended.returncode == 2
    assert "cannot reach" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
