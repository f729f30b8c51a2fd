"""The log of leased stages: what was put in comes out as it was on the wire, within its budgets."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cleave.core.model.batch import Batch, Matrix
from cleave.core.model.shard import Shard
from cleave.core.model.update_rule import Sgd
from cleave.protocol.numbers import NumpyCodec
from cleave.train.offload.boundary_log import BoundaryLog, LogFullError, LoggedPass
from cleave.train.offload.spool import Spool, SpoolFullError

SHARD, OTHER = Shard(first=0, count=2), Shard(first=2, count=2)
ROWS, COLS = 6, 40
RULES = {0: (Sgd(rate=0.1), 1.0)}


def matrix(seed: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal((ROWS, COLS)).astype(np.float32)


def batch() -> Batch[Any]:
    return Batch(x=matrix(0), sequences=1, sequence=ROWS, operands=(None,))


def add(log: BoundaryLog, seed: int) -> LoggedPass:
    log.add_pass(batch(), 1.0, [(SHARD, matrix(seed), matrix(seed + 1))], {3: (matrix(seed + 2), "fp32")})
    return log.open_passes[-1]


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
    first = add(log, 1)
    log.add_update(RULES)
    assert not log.open_passes
    assert [step.passes for step in log.steps(0)] == [[first]]
    assert log.steps(0)[0].rules == RULES
    last = add(log, 5)
    log.forget(SHARD, log.position)
    assert log.position == 1
    assert not log.steps(1)
    assert log.open_passes == [last]
    np.testing.assert_array_equal(log.border(last, SHARD)[0], matrix(5))
    log.add_update(RULES)
    log.forget(SHARD, log.position)
    assert log.bytes == 0


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_each_stage_is_forgotten_by_itself(memory_bytes: int) -> None:
    log = BoundaryLog(NumpyCodec(), "fp32", memory_bytes=memory_bytes)
    for seed in range(4):
        log.add_pass(batch(), 1.0, [(SHARD, matrix(seed), None), (OTHER, matrix(seed + 10), None)], {})
        log.add_update(RULES)
    log.forget(SHARD, 3)
    assert [list(one.borders) for step in log.steps(0) for one in step.passes] == [[OTHER]] * 3 + [[SHARD, OTHER]]
    log.forget(OTHER, 2)
    (third, last) = (step.passes[0] for step in log.steps(2))
    np.testing.assert_array_equal(log.border(third, OTHER)[0], matrix(12))
    np.testing.assert_array_equal(log.border(last, SHARD)[0], matrix(3))
    log.forget(OTHER, 4)
    log.forget(SHARD, 4)
    assert log.bytes == 0
    assert log.position == 4


def test_passes_that_were_given_up_leave_nothing() -> None:
    log = BoundaryLog(NumpyCodec(), "fp32")
    add(log, 1)
    log.forget_open()
    assert not log.open_passes
    assert log.bytes == 0


def test_a_file_goes_with_the_last_of_its_matrices() -> None:
    size = 4 * ROWS * COLS
    spool = Spool(memory_bytes=0, disk_bytes=4 * size, file_bytes=2 * size)
    encoded = [NumpyCodec().encode(matrix(seed), "fp32") for seed in range(5)]
    stored = [spool.store(one, ROWS, COLS, "fp32") for one in encoded[:4]]
    with pytest.raises(SpoolFullError):
        spool.store(encoded[4], ROWS, COLS, "fp32")
    spool.free(stored[0])
    assert spool.bytes == 4 * size
    spool.free(stored[1])
    assert spool.bytes == 2 * size
    again = spool.store(encoded[4], ROWS, COLS, "fp32")
    for one, expected in zip((*stored[2:], again), encoded[2:], strict=True):
        np.testing.assert_array_equal(spool.load(one), expected)
    for one in (*stored[2:], again):
        spool.free(one)
    assert spool.bytes == 0


def test_a_log_without_room_says_so() -> None:
    log = BoundaryLog(NumpyCodec(), "fp32", memory_bytes=0, disk_bytes=4 * ROWS * COLS)
    with pytest.raises(LogFullError):
        add(log, 1)
    assert not log.open_passes
    assert log.bytes == 0, "what had been stored of the pass is freed"
    log.close()


def test_a_full_disk_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Path("/dev/full").open("r+b", buffering=0))  # noqa: SIM115
    log = BoundaryLog(NumpyCodec(), "fp32", memory_bytes=0)
    with pytest.raises(LogFullError, match="space"):
        add(log, 1)
    log.close()


class LimitedFile(io.RawIOBase):
    """A file on a disk with little room."""

    def __init__(self, room_bytes: int) -> None:
        self._data, self._at, self._room_bytes = bytearray(), 0, room_bytes

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._data[self._at : self._at + len(buffer)]
        memoryview(buffer)[: len(found)] = found
        self._at += len(found)
        return len(found)

    def write(self, buffer: Any) -> int:
        count = min(len(buffer), self._room_bytes - self._at)
        if not count:
            raise OSError(errno.ENOSPC, "no space left on device")
        self._data[self._at : self._at + count] = bytes(buffer[:count])
        self._at += count
        return count


def test_what_was_written_before_the_disk_was_full_is_read_while_it_is() -> None:
    def temporary(buffering: int = -1) -> Any:
        file = LimitedFile(4 * ROWS * COLS + 100)
        return file if buffering == 0 else io.BufferedRandom(file)  # type: ignore[arg-type]

    encoded = [NumpyCodec().encode(matrix(seed), "fp32") for seed in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", temporary)
        spool = Spool(memory_bytes=0, disk_bytes=1 << 20)
        first = spool.store(encoded[0], ROWS, COLS, "fp32")
        with pytest.raises(SpoolFullError):
            spool.store(encoded[1], ROWS, COLS, "fp32")
        np.testing.assert_array_equal(spool.load(first), encoded[0])
        spool.free(first)
    assert spool.bytes == 0
