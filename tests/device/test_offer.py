"""What a machine offers: never more memory than it has, and a GPU that stands idle is mentioned."""

from __future__ import annotations

from pathlib import Path

import pytest

from cleave import memory
from cleave.device import kernels, probe
from cleave.device.kernels import NumpyKernel, TorchKernel, unused_gpu
from cleave.errors import InputError


def test_more_memory_than_the_machine_has_is_refused_with_what_it_has() -> None:
    total = memory.total_bytes()
    with pytest.raises(InputError, match=f"at most {total / 1e9:.3g} GB"):
        probe.usable_memory_bytes(total + 1)
    assert 0 < probe.usable_memory_bytes(total) < total


def test_a_containers_limit_counts_as_the_machines_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 400\nfile 300\nshmem 100\n")):
        (tmp_path / name).write_text(text)
    container = memory._Container(tmp_path / "max", tmp_path / "current", tmp_path / "stat", "file", "shmem")
    monkeypatch.setattr(memory, "_CONTAINERS", (container,))
    assert memory.total_bytes() == 1000
    assert memory.available_bytes() == 500
    (tmp_path / "max").write_text("max\n")
    assert memory.total_bytes() > 1000


def test_a_gpu_without_torch_is_mentioned_with_the_command_that_brings_it_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_NVIDIA", tmp_path / "nvidia0")
    monkeypatch.setattr(kernels.platform, "system", lambda: "Linux")
    assert unused_gpu(NumpyKernel()) is None
    (tmp_path / "nvidia0").touch()
    assert "driver" in (unused_gpu(NumpyKernel()) or "")
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    hint = unused_gpu(NumpyKernel()) or ""
    assert "has a GPU" in hint
    assert "install" in hint
    assert "torch" in hint
    used = TorchKernel("cpu")
    used.name = "torch-cuda"
    assert unused_gpu(used) is None
