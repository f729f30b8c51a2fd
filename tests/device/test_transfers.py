"""Laws of the daily count: it survives restarts, adds up over processes, and begins anew at midnight."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from cleave.device.transfers import Transfers

MB = 1_000_000


def test_what_several_processes_moved_adds_up_and_survives_them(tmp_path: Path) -> None:
    first, second = Transfers(tmp_path / "home"), Transfers(tmp_path / "home")
    assert first.today_bytes() == 0
    first.add(3 * MB)
    assert first.today_bytes() == 3 * MB
    second.add(5)
    assert second.today_bytes() == 3 * MB + 5
    second.flush()
    assert first.today_bytes() == 3 * MB + 5
    assert first.today_bytes() == 3 * MB + 5, "nothing counts twice"
    assert Transfers(tmp_path / "home").today_bytes() == 3 * MB + 5


def test_a_new_day_begins_at_zero_and_removes_the_old_count(tmp_path: Path) -> None:
    today = [date(2026, 3, 31)]
    transfers = Transfers(tmp_path, lambda: today[0])
    transfers.add(7 * MB)
    assert transfers.today_bytes() == 7 * MB
    today[0] = date(2026, 4, 1)
    assert transfers.today_bytes() == 0
    transfers.add(2 * MB)
    assert transfers.today_bytes() == 2 * MB
    assert len(list(tmp_path.iterdir())) == 1


def test_a_count_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    transfers = Transfers(tmp_path)
    transfers.add(2 * MB)
    assert transfers.today_bytes() == 2 * MB
    next(tmp_path.iterdir()).write_text("12\nmany\n")
    assert Transfers(tmp_path).today_bytes() is None
    (tmp_path / "file").touch()
    transfers = Transfers(tmp_path / "file")
    transfers.add(2 * MB)
    assert transfers.today_bytes() is None
