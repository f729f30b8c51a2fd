"""The log of leased stages: what was put in comes out as it was on the wire, within its budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cleave.core.model.batch import Batch, Matrix
from cleave.core.model.shard import Shard
from cleave.core.model.update_rule import Sgd
from cleave.protocol.numbers import NumpyCodec
from cleave.train.offload.boundary_log import BoundaryLog, LogFullError, LoggedPass

SHARD = Shard(first=0, count=2)
ROWS, COLS = 6, 40
RULES = {0: (Sgd(rate=0.1), 1.0)}


def matrix(seed: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal((ROWS, COLS)).astype(np.float32)


def batch() -> Batch[Any]:
    return Batch(x=matrix(0), sequences=1, sequence=ROWS, operands=(None,))


def add(log: BoundaryLog, seed: int) -> LoggedPass:
    log.add_pass(batch(), 1.0, [(SHARD, matrix(seed), matrix(seed + 1))], {3: (matrix(seed + 2), "fp32")})
    last = log.records[-1]
    assert isinstance(last, LoggedPass)
    return last


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "q8"])
def test_a_pass_is_read_as_devices_saw_it(wire: Any, memory_bytes: int) -> None:
    log, codec = BoundaryLog(NumpyCodec(), wire, memory_bytes=memory_bytes), NumpyCodec()
    kept = [add(log, seed) for seed in (1, 11)]
    for one, seed in zip(kept, (1, 11), strict=True):
        for found, given in zip(log.border(one, SHARD), (matrix(seed), matrix(seed + 1)), strict=True):
            expected = np.empty_like(given)
            codec.decode_into(codec.encode(given, wire).data, wire, expected)
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(log.parameter(one, 3)[0], matrix(seed + 2))
    log.close()


def test_what_is_logged_does_not_change_with_its_matrix() -> None:
    log, x = BoundaryLog(NumpyCodec(), "fp32"), matrix(1)
    log.add_pass(batch(), 1.0, [(SHARD, x, None)], {})
    x += 1
    one = log.open_passes[0]
    np.testing.assert_array_equal(log.border(one, SHARD)[0], matrix(1))


def test_only_passes_since_the_last_update_remain_after_a_fetch() -> None:
    log = BoundaryLog(NumpyCodec(), "fp32", memory_bytes=0)
    add(log, 1)
    log.add_update(RULES)
    assert not log.open_passes
    assert len(log.finished) == 2
    last = add(log, 5)
    log.forget_finished()
    assert log.records == log.open_passes == [last]
    np.testing.assert_array_equal(log.border(last, SHARD)[0], matrix(5))
    log.add_update(RULES)
    log.forget_finished()
    assert log.bytes == 0


def test_a_log_without_room_says_so() -> None:
    log = BoundaryLog(NumpyCodec(), "fp32", memory_bytes=0, disk_bytes=4 * ROWS * COLS)
    with pytest.raises(LogFullError):
        add(log, 1)
    assert not log.records
    log.close()


def test_a_full_disk_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: Path("/dev/full").open("r+b", buffering=0))  # noqa: SIM115
    log = BoundaryLog(NumpyCodec(), "fp32", memory_bytes=0)
    with pytest.raises(LogFullError, match="space"):
        add(log, 1)
    log.close()
