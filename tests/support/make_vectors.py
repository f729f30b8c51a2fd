"""Writes the golden frames in tests/vectors: `python -m tests.support.make_vectors`.

They are for people who write a device or a server in another language (docs/protocol.md), and a guard for this one:
`tests/protocol/test_vectors.py` never runs this script. If running it changes a file, the protocol has changed, and its
version must change too, unless docs/protocol.md allows the change.

    messages/   one of every message: its fields, its header, its payload
    numbers/    matrices in each format: values, the same as fp32 bits, encoded, and what a receiver decodes
    tasks/      what a server sends for a gemm, what a device may answer (any tiling will do), and the whole block
    resident/   sequences through parts of a model and back, leased weights: what a server sends, what a device answers
    session/    a whole connection, as printed in docs/protocol.md

All bytes are in hexadecimal. Measured fields (seconds) of answers are examples.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from tests.support.frames import Frame, Json, codec, described, result, stored, values
from tests.support.leased_weights import leases
from tests.support.resident_parts import conversations

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Matrix
from cleave.core.schedule.rectangles import Rectangle
from cleave.protocol.messages import (
    VERSION,
    Bye,
    CancelTasks,
    Drop,
    Failed,
    Hello,
    Idle,
    Leaving,
    Probe,
    Probed,
    Refused,
    RunTask,
    Store,
    Welcome,
)
from cleave.protocol.programs import GemmProgram, Layout

HERE = Path(__file__).parents[1] / "vectors"
TASK = 21


def main() -> None:
    for name, frame in one_of_each().items():
        write("messages", name, {"name": name, **described(frame)})
    for name, (wire, matrix) in matrices().items():
        write("numbers", name, numbers(name, wire, matrix))
    for name, task in tasks().items():
        write("tasks", name, task)
    for name, conversation in {**conversations(), **leases()}.items():
        write("resident", name, conversation)
    write("session", "small", {"name": "small", "frames": [described(frame) for frame in session()]})


# ------------------------------------------------------------------------------------------------ messages


def one_of_each() -> dict[str, Frame]:
    square = np.array([[1, 2], [3, 4]], dtype=np.float32)
    return {
        "hello": (Hello(version=VERSION, name="küche", token="s3cret", flops_per_s=2.5e10, memory_bytes=2_000_000_000,
                        kernel="numpy"), b""),
        "welcome": (Welcome(version=VERSION, name="küche-2"), b""),
        "refused": (Refused(reason="wrong or missing token"), b""),
        "probe": (Probe(answer=2, payload=8), bytes(range(8))),
        "probe-without-payload": (Probe(answer=0), b""),
        "heartbeat": (Probe(answer=0, done_flops=3e9, verified_flops=1e9), b""),
        "probed": (Probed(down_s=0.125, payload=2), bytes(2)),
        "store": stored(17, square, "bf16", 0, 2),
        "store-a-later-strip": stored(70_000, square, "fp32", 1, 2),
        "run": (RunTask(task=9, priority=1, format="bf16",
                    program=GemmProgram(layout="nn", terms=((17, 18), (300, 70_000)), rows=2, cols=5)), b""),
        "result": result(9, (2, 1), square, "fp32", inner=3),
        "failed": (Failed(task=9, reason="MemoryError()"), b""),
        "cancel": (CancelTasks(tasks=(9, 10)), b""),
        "drop": (Drop(operands=(17, 70_000)), b""),
        "idle": (Idle(reason="the others end sooner without this device"), b""),
        "leaving": (Leaving(reason="stopped by its owner"), b""),
        "bye": (Bye(reason="training is complete", rejoin=False), b""),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ numbers


def matrices() -> dict[str, tuple[WireFormat, Matrix]]:
    plain = np.array([[0.0, -0.0, 1.0], [-1.5, 3.1415927, 65504.0]], dtype=np.float32)
    ties = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0xBF817FFF]], dtype=np.uint32).view(np.float32)
    fine = np.array([[1.0 + 2**-11, 1.0 + 3 * 2**-11, 65520.0, 2.0**-24, 2.0**-25, -6e-8]], dtype=np.float32)
    special = np.array([[math.inf, -math.inf, math.nan, 3.4028235e38, 1e-40]], dtype=np.float32)
    rows = np.array([[127.0, -63.5, 0.5, 1.5], [0.0, 0.0, 0.0, 0.0], [-2.0, 1.0, 0.3, 0.01]], dtype=np.float32)
    blocks = np.linspace(-3.0, 40.0, 2 * 70, dtype=np.float32).reshape(2, 70)
    blocks[1, 32:64] *= np.float32(1e-3)
    halves = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]], dtype=np.float32)  # a scale of 1
    spoiled = np.ones((3, 34), dtype=np.float32)
    spoiled[0, 3], spoiled[1, 33], spoiled[2, 0] = math.nan, -math.inf, 3.4028235e38
    scaled = np.array([[1.0], [127.0], [127.00001], [1e-40], [2.0**-126], [-1e30]], dtype=np.float32)
    return {
        "fp32": ("fp32", plain),
        "fp32-special": ("fp32", special),
        "bf16": ("bf16", plain),
        "bf16-ties": ("bf16", ties),
        "bf16-special": ("bf16", special),
        "fp16": ("fp16", plain),
        "fp16-ties-overflow-denormals": ("fp16", fine),
        "fp16-special": ("fp16", special),
        "q8": ("q8", rows),
        "q8-blocks": ("q8", blocks),
        "q8-ties": ("q8", halves),
        "q8-special": ("q8", spoiled),
        "q8-scales-rounded-up": ("q8", scaled),
    }


def numbers(name: str, wire: WireFormat, matrix: Matrix) -> Json:
    encoded = codec.encode(matrix, wire)
    back = np.empty_like(matrix)
    codec.decode_into(encoded.data, wire, back)
    return {
        "name": name,
        "format": wire,
        "rows": matrix.shape[0],
        "cols": matrix.shape[1],
        "values": values(matrix),
        "values_fp32_hex": matrix.tobytes().hex(),
        "hex": bytes(encoded).hex(),
        "decoded_fp32_hex": back.tobytes().hex(),
    }


# ------------------------------------------------------------------------------------------------ tasks


def tasks() -> dict[str, Json]:
    """Gemm cases with small integers, so that every format and every order of summation gives the same result."""
    rng = np.random.default_rng(1)

    def draw(rows: int, cols: int) -> Matrix:
        return rng.integers(-4, 5, (rows, cols)).astype(np.float32)

    nt, other = {1: draw(4, 3), 2: draw(5, 3)}, {8: draw(2, 4), 9: draw(3, 4)}
    nn = {3: draw(3, 2), 4: draw(2, 4), 5: draw(3, 3), 6: draw(3, 4)}
    tn = {1: draw(6, 2), 7: draw(6, 3)}
    other[8][:, 0] = other[9][:, 0] = 127.0  # a scale of 1: integers are exact in q8 too
    return {
        "gemm-nt": task("gemm-nt", GemmProgram(layout="nt", terms=((1, 2),), rows=4, cols=5), nt, "fp32", strips=2),
        "gemm-nn": task(
            "gemm-nn", GemmProgram(layout="nn", terms=((3, 4), (5, 6)), rows=3, cols=4), nn, "bf16", strips=1
        ),
        "gemm-tn": task("gemm-tn", GemmProgram(layout="tn", terms=((1, 7),), rows=2, cols=3), tn, "fp16", strips=3),
        "gemm-nt-q8": task("gemm-nt-q8", GemmProgram(layout="nt", terms=((8, 9),), rows=2, cols=3), other, "q8", 1),
    }


def task(name: str, program: GemmProgram, operands: dict[int, Matrix], wire: WireFormat, strips: int) -> Json:
    whole = block(program.layout, [(operands[a], operands[b]) for a, b in program.terms])
    inner = sum(operands[a].shape[0 if program.layout == "tn" else 1] for a, _ in program.terms)
    frames = list[Frame]()
    held, done = dict.fromkeys(operands, 0), (0, 0)
    for message, payload in sent(program, operands, wire, strips):
        frames.append((message, payload))
        if isinstance(message, Store):
            held[message.operand] = message.first_row + message.strip_rows
        ready = computable(program, operands, held)
        if ready[0] * ready[1] > done[0] * done[1]:
            for part in (Rectangle(0, done[0], done[1], ready[1]), Rectangle(done[0], ready[0], 0, ready[1])):
                if part.area:
                    numbers = whole[part.top : part.bottom, part.left : part.right]
                    frames.append(result(TASK, (part.top, part.left), numbers, wire, inner))
            done = ready
    assert done == whole.shape
    return {
        "name": name,
        "operands": {str(number): values(matrix) for number, matrix in operands.items()},
        "frames": [described(frame) for frame in frames],
        "block": values(whole),
    }


def sent(program: GemmProgram, operands: dict[int, Matrix], wire: WireFormat, strips: int) -> Iterator[Frame]:
    """The frames of a task: the task, then strips of its operands in turn."""
    yield RunTask(task=TASK, priority=1, program=program, format=wire), b""
    for strip in range(strips):
        for operand, matrix in operands.items():
            height = -(-len(matrix) // strips)
            first, last = strip * height, min((strip + 1) * height, len(matrix))
            if first < last:
                yield stored(operand, matrix, wire, first, last)


def computable(program: GemmProgram, operands: dict[int, Matrix], held: dict[int, int]) -> tuple[int, int]:
    """Rows and columns of the block that can be computed from the rows held: an eager device's answer."""
    is_whole = {operand: held[operand] == len(matrix) for operand, matrix in operands.items()}
    match program.layout:
        case "nt":
            return min(held[a] for a, _ in program.terms), min(held[b] for _, b in program.terms)
        case "nn":
            rows = min(held[a] for a, _ in program.terms)
            return (rows, program.cols) if all(is_whole[b] for _, b in program.terms) else (0, 0)
        case "tn":
            return (program.rows, program.cols) if all(is_whole.values()) else (0, 0)


def block(layout: Layout, pairs: list[tuple[Matrix, Matrix]]) -> Matrix:
    match layout:
        case "nt":
            return sum((a @ b.T for a, b in pairs), start=np.float32(0))
        case "nn":
            return sum((a @ b for a, b in pairs), start=np.float32(0))
        case "tn":
            return sum((a.T @ b for a, b in pairs), start=np.float32(0))


# ------------------------------------------------------------------------------------------------ session


def session() -> Iterator[Frame]:
    a = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)
    b = np.array([[1, 0, -1], [0.5, 0.25, 2]], dtype=np.float32)
    program = GemmProgram(layout="nt", terms=((1, 2),), rows=2, cols=2)
    yield Hello(version=VERSION, name="laptop", token="", flops_per_s=5e10, memory_bytes=1 << 30, kernel="example"), b""
    yield Welcome(version=VERSION, name="laptop"), b""
    yield Probe(answer=0), b""
    yield Probed(down_s=0.0), b""
    yield Probe(answer=2, payload=8), bytes(8)
    yield Probed(down_s=0.0625, payload=2), bytes(2)
    yield RunTask(task=1, priority=1, program=program, format="bf16"), b""
    yield stored(1, a, "bf16", 0, 2)
    yield stored(2, b, "bf16", 0, 2)
    answer, payload = result(1, (0, 0), a @ b.T, "bf16", inner=3)
    yield msgspec.structs.replace(answer, down_bytes=8 + 12 + 12), payload
    yield Drop(operands=(1, 2)), b""
    yield Bye(reason="done", rejoin=False), b""


def write(folder: str, name: str, content: Json) -> None:
    (HERE / folder).mkdir(exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[^][{}]+\]", lambda row: re.sub(r"\s+", " ", row[0]).replace("[ ", "[").replace(" ]", "]"), text)
    (HERE / folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
