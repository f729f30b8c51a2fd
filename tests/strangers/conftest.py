"""What several kinds of hostile files share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_DEPTH = 1200  # more than Python's recursion limit


@pytest.fixture
def deep_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A text at the bottom of a thousand directories, removed again, as pytest itself cannot remove them."""
    top = tmp_path / "deep"
    top.mkdir()
    monkeypatch.chdir(top)
    for _ in range(_DEPTH):
        Path("d").mkdir()
        os.chdir("d")
    Path("x.txt").write_text("deep")
    os.chdir(top)
    yield Path()
    for _ in range(_DEPTH):
        os.chdir("d")
    Path("x.txt").unlink(missing_ok=True)
    for _ in range(_DEPTH):
        os.chdir("..")
        Path("d").rmdir()
