"""Laws of the faulty channel: each fault does exactly what its name says, when the script says so."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from tests.support.virtual import run

from cleave.core.model.update_rule import Sgd
from cleave.errors import ConnectionLost, InputError, ProtocolError
from cleave.protocol import messages
from cleave.protocol.messages import AnyMessage, Hello, Probe, Probed, Result, RunTask, Store, Welcome
from cleave.protocol.programs import Copy, GemmProgram, Hold, Leased, Program, SquareSum, Update
from cleave.transport.faulty import MANNERS, Fault, FaultyChannel
from cleave.transport.memory import MemoryChannel, memory_pair

HELLO = Hello(version=1, name="eve", flops_per_s=1e9, memory_bytes=1 << 20, kernel="none")
RUN = RunTask(task=1, priority=1, program=GemmProgram(layout="nt", terms=((1, 2),), rows=4, cols=4), format="fp32")
NUMBERS = np.arange(1, 17, dtype=np.float32).reshape(4, 4)


def strip(operand: int) -> Store:
    return Store(operand=operand, rows=4, cols=1, format="fp32", first_row=0, strip_rows=4, payload=16)


def result(task: int = 1) -> Result:
    return Result(
        task=task, first_row=0, rows=4, first_col=0, cols=4, format="fp32", flops=0.0, compute_s=0.0, down_bytes=0,
        down_s=0.0, payload=64,
    )  # fmt: skip


def faulty(fault: Fault) -> tuple[FaultyChannel, MemoryChannel]:
    """The faulty device end and the server end of a channel."""
    server, device = memory_pair()
    return FaultyChannel(device, (fault,), np.random.default_rng(0)), server


async def whole_stay(device: FaultyChannel, server: MemoryChannel) -> list[tuple[AnyMessage, bytes]]:
    """Join, get a task and answer it; return what the server received within a minute."""
    seen: list[tuple[AnyMessage, bytes]] = []

    async def serve() -> None:
        while True:
            received = await server.receive()
            seen.append((received.message, bytes(received.payload)))

    async def stay() -> None:
        await device.send(HELLO)
        for message, payload in (
            (Welcome(version=1, name="eve"), b""),
            (RUN, b""),
            (strip(1), bytes(16)),
            (strip(2), bytes(16)),
        ):
            await server.send(message, payload)
            await device.receive()
        await device.send(result(), NUMBERS.tobytes())

    tasks = [asyncio.ensure_future(serve()), asyncio.ensure_future(stay())]
    await asyncio.wait(tasks, timeout=60.0)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, _EXPECTED) for outcome in outcomes), outcomes
    return seen


_EXPECTED = (asyncio.CancelledError, ConnectionLost, ProtocolError)
HONEST: list[tuple[AnyMessage, bytes]] = [(HELLO, b""), (result(), NUMBERS.tobytes())]


def seen_of(fault: Fault) -> list[tuple[AnyMessage, bytes]]:
    async def main() -> list[tuple[AnyMessage, bytes]]:
        device, server = faulty(fault)
        seen = await whole_stay(device, server)
        assert device.struck == ([fault] if fault.after < 2 else [])
        return seen

    return run(main(), limit_s=1e4)


def test_a_fault_that_is_never_due_changes_nothing() -> None:
    assert seen_of(Fault(kind="vanish", phase="idle", after=99)) == HONEST


@pytest.mark.parametrize(
    ("phase", "sent"), [("joining", 0), ("receiving", 1), ("computing", 1), ("returning", 1), ("idle", 2)]
)
@pytest.mark.parametrize("kind", ["vanish", "half-open", "torn-frame"])
def test_nothing_is_sent_after_a_fault_that_ends_the_connection(kind: str, phase: str, sent: int) -> None:
    fault = Fault(kind=kind, phase=phase)  # pyright: ignore[reportArgumentType]
    assert seen_of(fault) == HONEST[:sent]


def test_a_stall_is_silent_for_its_time_and_a_slow_device_is_late_with_each_message() -> None:
    assert seen_of(Fault(kind="stall", phase="computing", seconds=59.0)) == HONEST
    assert seen_of(Fault(kind="stall", phase="computing", seconds=61.0)) == HONEST[:1]
    assert seen_of(Fault(kind="slow", phase="joining", seconds=9.0)) == HONEST
    assert seen_of(Fault(kind="slow", phase="joining", seconds=13.0)) == HONEST[:1]


@pytest.mark.parametrize("manner", MANNERS["lie"])
def test_a_lie_has_the_shape_of_the_right_result(manner: str) -> None:
    hello, (told, payload) = seen_of(Fault(kind="lie", phase="joining", manner=manner))
    numbers = np.frombuffer(payload, dtype=np.float32).reshape(4, 4)
    assert (hello, told) == (HONEST[0], result())
    assert np.isfinite(numbers).all()
    wrong = np.abs(numbers - NUMBERS) > 0.05
    assert wrong.sum() == 1 if manner == "one" else wrong.sum() > 8


def test_a_corrupt_payload_has_one_bit_flipped() -> None:
    _, (told, payload) = seen_of(Fault(kind="corrupt", phase="returning", manner="payload"))
    assert told == result()
    flipped = np.bitwise_xor(np.frombuffer(payload, np.uint8), np.frombuffer(NUMBERS.tobytes(), np.uint8))
    assert np.unpackbits(flipped).sum() == 1


def test_a_corrupt_header_never_arrives_as_it_was_sent() -> None:
    assert seen_of(Fault(kind="corrupt", phase="returning", manner="header"))[1:] != HONEST[1:]


def test_duplicates_and_replays_repeat_messages() -> None:
    assert seen_of(Fault(kind="duplicate", phase="joining")) == [HONEST[0]] * 2 + [HONEST[1]] * 2
    assert seen_of(Fault(kind="replay", phase="receiving", manner="besides")) == [HONEST[0], HONEST[0], HONEST[1]]
    assert seen_of(Fault(kind="replay", phase="receiving", manner="instead")) == [HONEST[0], HONEST[0]]


@pytest.mark.parametrize(("manner", "kind"), [("probed", Probed), ("result", Result), ("failed", messages.Failed)])
def test_a_flood_is_thousands_of_messages_and_then_the_honest_one(manner: str, kind: type[AnyMessage]) -> None:
    first, *flood, last = seen_of(Fault(kind="flood", phase="computing", manner=manner))
    assert [first, last] == HONEST
    assert len(flood) > 1000
    assert all(isinstance(message, kind) for message, _ in flood)


def test_a_half_open_device_receives_nothing_more() -> None:
    async def main() -> None:
        device, server = faulty(Fault(kind="half-open", phase="joining"))
        await server.send(Probe(answer=0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(device.receive(), 1e3)

    run(main(), limit_s=1e4)


def test_the_same_seed_gives_the_same_fault() -> None:
    fault = Fault(kind="lie", phase="joining", seconds=math.inf)
    assert seen_of(fault) == seen_of(fault)


def test_a_manner_of_another_kind_of_fault_is_refused() -> None:
    with pytest.raises(InputError, match="expected a manner of lie"):
        Fault(kind="lie", phase="idle", manner="closed")


@pytest.mark.parametrize(
    ("program", "elements"),
    [
        (SquareSum(accumulators=(7, 8, 9)), 3),
        (Update(rule=Sgd(rate=0.1), weights=(Leased(1, 7), Leased(2, 8))), 1),
        (Copy(copies=((1, 7), (2, 8))), 1),
        (Hold(operands=(1, 2)), 1),
    ],
)
def test_a_device_is_idle_once_the_whole_result_is_sent(program: Program, elements: int) -> None:
    async def main() -> None:
        device, server = faulty(Fault(kind="deaf", phase="idle"))
        await server.send(RunTask(task=1, priority=1, program=program, format="fp32"))
        await device.receive()
        for col in range(elements):
            assert not device.struck
            part = Result(
                task=1, first_row=0, rows=1, first_col=col, cols=1, format="fp32", flops=0.0, compute_s=0.0,
                down_bytes=0, down_s=0.0, payload=4,
            )  # fmt: skip
            await device.send(part, bytes(4))
        assert device.struck

    run(main(), limit_s=1e4)
