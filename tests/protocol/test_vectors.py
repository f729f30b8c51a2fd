"""The golden frames of tests/vectors: our bytes match them, our device answers them, and the document prints them.

They pin the protocol for devices in other languages: a failure here means that those would break.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support import samples

from cleave.core.cost.wire import encoded_bytes
from cleave.core.model.batch import Matrix
from cleave.core.model.decoder import Activation, Attention, Head, Mlp, Norm, Part, Weight
from cleave.core.model.update_rule import Adam, Rule, Sgd
from cleave.core.schedule.rectangles import Rectangle, total, within, without
from cleave.device.kernels import NumpyKernel
from cleave.device.worker import Contribution, Offer, Worker
from cleave.protocol import messages
from cleave.protocol.frames import Assembler
from cleave.protocol.messages import AnyMessage, Bye, Drop, FromDevice, FromServer, Hello, Result, RunTask, Store
from cleave.protocol.numbers import NumpyCodec
from cleave.protocol.programs import Backward, Copy, GemmProgram, Program, Update, operands
from cleave.transport.memory import MemoryChannel, memory_pair

VECTORS = Path(__file__).parents[1] / "vectors"
DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
SOON_S = 120.0
MEASURED = ("down_bytes", "compute_s", "down_s")
"""Fields that differ from run to run."""
CLOSE = 1e-5
"""Tolerance of fp32 sums, relative to the largest entry of a result, or to 1 if all are smaller."""

Case = dict[str, Any]

codec = NumpyCodec()


def cases(folder: str) -> list[Case]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((VECTORS / folder).glob("*.json"))]


MESSAGES, NUMBERS, TASKS, RESIDENT, SESSIONS = map(cases, ("messages", "numbers", "tasks", "resident", "session"))
FRAMES = [*MESSAGES, *(frame for case in [*TASKS, *RESIDENT, *SESSIONS] for frame in case["frames"])]


def named(case: Case) -> str:
    return case["name"]


def message_of(frame: Case) -> AnyMessage:
    return msgspec.convert(frame["message"], AnyMessage)


def matrix_of(rows: list[list[float | str]]) -> Matrix:
    return np.array([[float(x) for x in row] for row in rows], dtype=np.float32)


def fp32(hexadecimal: str, shape: tuple[int, int]) -> Matrix:
    return np.frombuffer(bytes.fromhex(hexadecimal), dtype="<f4").reshape(shape)


# ------------------------------------------------------------------------------------------------ messages, numbers


def test_the_vectors_have_at_least_one_case_of_everything() -> None:
    assert {type(message_of(frame)) for frame in MESSAGES} == set(samples.KINDS)
    assert {case["format"] for case in NUMBERS} == set(samples.FORMATS)
    programs = [run.program for frame in FRAMES if isinstance(run := message_of(frame), RunTask)]
    assert {type(program) for program in programs} == set(get_args(Program))
    rules = [program.rule for program in programs if isinstance(program, Update)]
    assert {type(rule) for rule in rules} == set(get_args(Rule))
    assert {rule.is_decoupled for rule in rules if isinstance(rule, Adam)} == {False, True}
    assert {program.layout for program in programs if isinstance(program, GemmProgram)} == set(samples.LAYOUTS)
    parts = [part for program in programs for part in getattr(program, "parts", ())]
    assert {type(part) for part in parts} == set(get_args(Part))
    assert {part.activation for part in parts if isinstance(part, Mlp)} == set(get_args(Activation))


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame["message"]["type"])
def test_frames_encode_to_and_decode_from_exactly_these_bytes(frame: Case) -> None:
    message, header, payload = message_of(frame), *map(bytes.fromhex, (frame["header_hex"], frame["payload_hex"]))
    assert messages.encode(message) == header
    assert messages.decode(header) == message
    assert isinstance(message, FromDevice if frame["from"] == "device" else FromServer)
    assembler = Assembler()
    whole = assembler.feed(header) if not payload else (assembler.feed(header), assembler.feed(payload))[1]
    assert whole == (message, payload)


@pytest.mark.parametrize("case", NUMBERS, ids=named)
def test_numbers_encode_to_and_decode_from_exactly_these_bytes(case: Case) -> None:
    matrix, shape = matrix_of(case["values"]), (case["rows"], case["cols"])
    np.testing.assert_array_equal(matrix, fp32(case["values_fp32_hex"], shape))
    encoded = codec.encode(matrix, case["format"])
    assert bytes(encoded).hex() == case["hex"]
    assert len(encoded) == encoded_bytes(case["format"], *shape)
    back = np.empty(shape, dtype=np.float32)
    codec.decode_into(encoded.data, case["format"], back)
    assert back.tobytes().hex() == case["decoded_fp32_hex"]


# ------------------------------------------------------------------------------------------------ tasks


def run_of(case: Case) -> RunTask:
    return next(run for frame in case["frames"] if isinstance(run := message_of(frame), RunTask))


def rectangle(result: Result) -> Rectangle:
    bottom, right = result.first_row + result.rows, result.first_col + result.cols
    return Rectangle(result.first_row, bottom, result.first_col, right)


class Assembled:
    """A block assembled from arriving rectangles, each of which must still be missing."""

    def __init__(self, run: RunTask) -> None:
        rows, cols = run.program.rows, run.program.cols
        self.block = np.full((rows, cols), math.nan, dtype=np.float32)
        self.missing = [Rectangle(0, rows, 0, cols)]

    def add(self, result: Result, payload: bytes) -> None:
        part = rectangle(result)
        assert total(within(self.missing, part)) == part.area > 0, f"{part} is not missing"
        self.missing = without(self.missing, part)
        codec.decode_into(payload, result.format, self.block[part.top : part.bottom, part.left : part.right])


def product(layout: str, a: Matrix, b: Matrix) -> Matrix:
    return {"nt": lambda: a @ b.T, "nn": lambda: a @ b, "tn": lambda: a.T @ b}[layout]()


@pytest.mark.parametrize("case", TASKS, ids=named)
def test_the_operands_multiply_to_the_block_and_arrive_in_strips_without_gaps(case: Case) -> None:
    program = run_of(case).program
    operands = {int(number): matrix_of(rows) for number, rows in case["operands"].items()}
    terms: list[NDArray[np.float32]] = [product(program.layout, operands[a], operands[b]) for a, b in program.terms]
    np.testing.assert_array_equal(sum(terms), matrix_of(case["block"]))
    arrived = {number: np.empty((0, matrix.shape[1]), dtype=np.float32) for number, matrix in operands.items()}
    for frame in case["frames"]:
        if isinstance(message := message_of(frame), Store):
            assert message.first_row == len(arrived[message.operand])
            assert (message.rows, message.cols) == operands[message.operand].shape
            strip = np.empty((message.strip_rows, message.cols), dtype=np.float32)
            codec.decode_into(bytes.fromhex(frame["payload_hex"]), message.format, strip)
            arrived[message.operand] = np.vstack([arrived[message.operand], strip])
    for number, matrix in operands.items():
        np.testing.assert_array_equal(arrived[number], matrix)


@pytest.mark.parametrize("case", TASKS, ids=named)
def test_the_rectangles_of_a_task_tile_its_block_exactly_once(case: Case) -> None:
    run, seen = run_of(case), Assembled(run_of(case))
    for frame in case["frames"]:
        if isinstance(message := message_of(frame), Result):
            assert (message.task, message.format) == (run.task, run.format)
            seen.add(message, bytes.fromhex(frame["payload_hex"]))
    assert seen.missing == []
    compare(seen.block, case)


def compare(block: Matrix, case: Case) -> None:
    expected = matrix_of(case["block"])
    if run_of(case).format == "q8":
        steps = np.abs(expected).max(axis=1, keepdims=True) / 126
        assert (np.abs(block - expected) <= steps * 0.5001).all()
    else:
        np.testing.assert_array_equal(block, expected)


# ------------------------------------------------------------------------------------------------ our device


async def play(end: MemoryChannel, frame: Case) -> None:
    """Send exactly the bytes of a frame."""
    for part in (frame["header_hex"], frame["payload_hex"]):
        if part:
            await end._send(bytes.fromhex(part))


def worker_for(hello: Hello, end: MemoryChannel) -> Worker:
    kernel = NumpyKernel()
    kernel.name = hello.kernel
    offer = Offer(name=hello.name, token=hello.token, flops_per_s=hello.flops_per_s, memory_bytes=hello.memory_bytes)
    return Worker(end, kernel, offer, Contribution())


@pytest.mark.parametrize("case", TASKS, ids=named)
async def test_our_device_answers_a_task_with_the_whole_block(case: Case) -> None:
    server, device = memory_pair()
    hello = Hello(version=messages.VERSION, name="d", flops_per_s=1.0, memory_bytes=1 << 20, kernel="numpy")
    seen = Assembled(run_of(case))
    async with asyncio.timeout(SOON_S):
        running = asyncio.ensure_future(worker_for(hello, device).run())
        for frame in case["frames"]:
            if frame["from"] == "server":
                await play(server, frame)
        while seen.missing:
            received = await server.receive()
            assert isinstance(received.message, Result)
            seen.add(received.message, bytes(received.payload))
        await server.send(Bye(reason="done", rejoin=False))
        assert await running == Bye(reason="done", rejoin=False)
    compare(seen.block, case)


@pytest.mark.parametrize("case", RESIDENT, ids=named)
def test_a_conversation_sends_the_operands_it_uses_and_drops_those_it_makes(case: Case) -> None:
    sent: set[int] = set()
    made: set[int] = set()
    named: set[int] = set()
    for frame in case["frames"]:
        match message_of(frame):
            case Store(operand=operand):
                sent.add(operand)
                assert matrix_of(case["operands"][str(operand)]).tobytes().hex() == frame["payload_hex"]
            case RunTask(program=program):
                named |= set(operands(program))
                made |= {number for _, number in made_by(program)}
                made |= {program.state for part in getattr(program, "parts", ()) if isinstance(part, Attention)}
            case Drop(operands=dropped):
                made -= set(dropped)
            case Result(task=task):
                assert matrix_of(case["results"][str(task)]).tobytes().hex() == frame["payload_hex"]
            case other:
                pytest.fail(f"{other} has no place here")
    assert sent == named == {int(number) for number in case["operands"]}
    assert not made


def made_by(program: Program) -> tuple[tuple[int, int], ...]:
    """(operand, accumulator) of each that the program makes."""
    match program:
        case Backward(accumulators=made) | Copy(copies=made):
            return made
        case _:
            return ()


@pytest.mark.parametrize("case", RESIDENT, ids=named)
async def test_our_device_takes_sequences_forward_and_back(case: Case) -> None:
    server, device = memory_pair()
    hello = Hello(version=messages.VERSION, name="d", flops_per_s=1.0, memory_bytes=1 << 20, kernel="numpy")
    async with asyncio.timeout(SOON_S):
        running = asyncio.ensure_future(worker_for(hello, device).run())
        for frame in case["frames"]:
            if frame["from"] == "server":
                await play(server, frame)
                continue
            received, expected = await server.receive(), message_of(frame)
            assert isinstance(received.message, Result)
            assert isinstance(expected, Result)
            assert (received.message.task, rectangle(received.message)) == (expected.task, rectangle(expected))
            compare_closely(fp32(received.payload.hex(), (expected.rows, expected.cols)), case, expected.task)
        await server.send(Bye(reason="done", rejoin=False))
        assert await running == Bye(reason="done", rejoin=False)


def compare_closely(found: Matrix, case: Case, task: int) -> None:
    expected = matrix_of(case["results"][str(task)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * max(float(np.abs(expected).max()), 1.0))


@pytest.mark.parametrize("case", SESSIONS, ids=named)
async def test_our_device_follows_the_session(case: Case) -> None:
    server, device = memory_pair()
    hello = message_of(case["frames"][0])
    assert isinstance(hello, Hello)
    worker = worker_for(hello, device)

    async def live() -> Bye:
        await worker.join()
        return await worker.run()

    async with asyncio.timeout(SOON_S):
        living = asyncio.ensure_future(live())
        for frame in case["frames"]:
            if frame["from"] == "server":
                await play(server, frame)
                continue
            received = await server.receive()
            assert timeless(received.message) == timeless(message_of(frame))
            assert received.payload == bytes.fromhex(frame["payload_hex"])
        assert await living == message_of(case["frames"][-1])


def timeless(message: AnyMessage) -> AnyMessage:
    measured = {name: 0 for name in MEASURED if hasattr(message, name)}
    return msgspec.structs.replace(message, **measured)


# ------------------------------------------------------------------------------------------------ the document


def test_the_document_prints_the_session_byte_for_byte() -> None:
    printed = re.search(r"```frames\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert printed is not None
    entries = re.findall(r"^(device|server) +(\w+)\n((?: +.*\n)+)", printed[1], re.MULTILINE)
    assert len(entries) == len(SESSIONS[0]["frames"])
    for (side, kind, body), frame in zip(entries, SESSIONS[0]["frames"], strict=True):
        header, _, payload = body.partition("payload")
        assert (side, kind) == (frame["from"], frame["message"]["type"])
        assert "".join(header.replace("header", "").split()) == frame["header_hex"]
        assert "".join(payload.split()) == frame["payload_hex"]


def test_the_document_names_every_message_and_every_field() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for kind in samples.KINDS:
        heading = re.search(rf"^#+ `{kind.type_name()}`.*?(?=^#)", text, re.MULTILINE | re.DOTALL)
        assert heading is not None, kind
        for field in msgspec.structs.fields(kind):
            assert field.name == "payload" or f"`{field.name}`" in heading[0], (kind, field.name)


@pytest.mark.parametrize("kind", [*get_args(Program), Attention, Mlp, Head, Weight, Norm, Sgd, Adam], ids=str)
def test_the_document_names_every_field_of_programs_and_parts(kind: type[msgspec.Struct]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    name = kind.__struct_config__.tag or kind.__name__.lower()
    heading = re.search(rf"^#+ [^\n]*`{name}`.*?(?=^#)", text, re.MULTILINE | re.DOTALL)
    assert heading is not None
    for field in msgspec.structs.fields(kind):
        assert f"`{field.name}`" in heading[0], field.name
