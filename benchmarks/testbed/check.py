"""Measure a testbed with plain sockets: every link both ways by itself, then every shared medium with all its devices.

A link carries frames, a stream its payload: of the configured rate, 95.6 % is the most that a stream can show.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.testbed import transfer
from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.layout import PAYLOAD_SHARE, SERVER, TestbedError

Way = Literal["down", "up"]
WAYS: Final[tuple[Way, ...]] = ("down", "up")
_PORT: Final = 7070
_FEWEST_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One transfer, or several at once."""

    what: str
    configured_bytes_per_s: float
    measured_bytes_per_s: float
    """Payload."""
    burst_bytes: int
    """Size of the token bucket."""
    let_through_bytes: float | None
    """Most bytes ahead of the configured rate at any time; None for several transfers at once."""

    @property
    def share(self) -> float:
        """Measured rate, headers added, over the configured one: 1 is exact."""
        return self.measured_bytes_per_s / PAYLOAD_SHARE / self.configured_bytes_per_s


def measure(testbed: Testbed, seconds: float = 1.0) -> Iterator[Measured]:
    """Measure every link, each for about `seconds` both ways, then every medium."""
    listener = testbed.start(
        SERVER,
        [sys.executable, "-I", transfer.__file__, "listen", testbed.address(SERVER), str(_PORT)],
        stdout=subprocess.PIPE,
    )
    assert listener.stdout is not None
    if not listener.stdout.readline():
        raise TestbedError("the server's namespace cannot listen on its address; run the check again")
    try:
        for port in testbed.layout.ports:
            shared = testbed.layout.media.get(port.medium)
            for way in WAYS:
                own = port.down if way == "down" else port.up
                bucket = own if shared is None or own.bytes_per_s < shared.bytes_per_s else shared
                (arrivals,) = move_at_once(testbed, [(port.name, way)], bucket.bytes_per_s * seconds)
                yield Measured(
                    what=f"{port.name}, {way}",
                    configured_bytes_per_s=bucket.bytes_per_s,
                    measured_bytes_per_s=transfer.sustained_bytes_per_s(arrivals),
                    burst_bytes=bucket.burst_bytes,
                    let_through_bytes=transfer.let_through_bytes(arrivals, bucket.bytes_per_s),
                )
        for medium, bucket in testbed.layout.media.items():
            names = [port.name for port in testbed.layout.ports if port.medium == medium]
            moves: list[tuple[str, Way]] = [(name, way) for name in names for way in WAYS]
            each = move_at_once(testbed, moves, 2 * bucket.bytes_per_s * seconds / len(moves))
            yield Measured(
                what=f"{len(names)} devices at once, both ways",
                configured_bytes_per_s=bucket.bytes_per_s,
                measured_bytes_per_s=common_bytes_per_s(each),
                burst_bytes=bucket.burst_bytes,
                let_through_bytes=None,
            )
    finally:
        listener.kill()
        listener.wait()


def move_at_once(testbed: Testbed, moves: list[tuple[str, Way]], count: float) -> list[transfer.Arrivals]:
    """Move `count` bytes between the server and each device, all at the same time."""
    size = max(_FEWEST_BYTES, round(count))
    numbers = map(str, (_PORT, size, len(moves)))
    command = [sys.executable, "-I", transfer.__file__]
    given = [testbed.address(SERVER), *numbers]
    movers = [testbed.start(name, [*command, way, *given], stdout=subprocess.PIPE) for name, way in moves]
    said = [mover.communicate()[0] for mover in movers]
    for (name, way), mover in zip(moves, movers, strict=True):
        if mover.returncode != 0:
            raise TestbedError(f"{name} cannot move bytes {way}; look at the error above")
    return [[(seconds, got) for seconds, got in json.loads(each)] for each in said]


def common_bytes_per_s(each: list[transfer.Arrivals]) -> float:
    """The rate of several transfers together, while all of them were under way."""
    begin_s = max(arrivals[0][0] for arrivals in each)
    until_s = min(arrivals[-1][0] for arrivals in each)
    if until_s <= begin_s:
        raise TestbedError("the transfers of a medium's devices did not overlap; measure for more --seconds")
    return sum(_moved(arrivals, begin_s, until_s) for arrivals in each) / (until_s - begin_s)


def _moved(arrivals: transfer.Arrivals, begin_s: float, until_s: float) -> int:
    inside = [got for seconds, got in arrivals if begin_s <= seconds <= until_s]
    return inside[-1] - inside[0] if inside else 0
