"""Golden conversations about resident parts, for `make_vectors.py`: a sequence in chunks, forward and back, gradients.

Expected results are computed by plain torch in float64, whole sequences at once (`tests/support/plain_parts.py`), and
rounded to fp32: nothing in the files was computed by a device. All numbers sent have few digits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tests.support.device_bench import Bench
from tests.support.frames import Frame, Json, described, result, stored, values
from tests.support.plain_parts import Maker, Plain, rotary_table
from torch.nn import functional as F

from cleave.core.model.batch import Matrix
from cleave.core.model.decoder import Attention, Head, Part
from cleave.protocol.messages import Drop, RunTask
from cleave.protocol.programs import Backward, Collect, Forward, Hold, Program, operands

HIDDEN, HEAD_DIM, ROWS = 8, 4, 6
CHUNKS = ((0, 4), (4, 6))
"""Row ranges of a sequence, of unequal length."""
PLAIN = {"bias": False, "adapter": False, "is_transposed": False}
_FINE = 64


def conversations() -> dict[str, Json]:
    made = (llama_block, gpt2_block, attention_slice, tail, head_slice)
    return {name: {"name": name, **make()} for make in made for name in (make.__name__.replace("_", "-"),)}


def llama_block() -> Json:
    """All weights sent ahead; then a silently rebuilt second state, whose gradients are added to those of the first."""
    talk = Talk(seed=1)
    attention = talk.maker.attention(4, 2, HEAD_DIM, "rms", is_rotary=True, **PLAIN)
    mlp = talk.maker.mlp(6, "rms", "silu", gated=True, **PLAIN)
    rotary = rotary_table(10, HEAD_DIM)[[9, 0, 1, 3, 4, 5, 8, 2]]  # with gaps: otherwise the first row would not matter
    way = Way(talk=talk, parts=(attention, mlp), x=talk.draw(), dy=talk.draw(), rotary=rotary)
    talk.run(Hold(operands=tuple(talk.maker.trained)), np.zeros((1, 1)))
    totals = way.go(talk.maker.trained)
    way.state = talk.bench.number()
    way.rebuild()
    way.back(totals, wants_dx=False)
    way.collect(totals, times=2)
    return talk.told()


def gpt2_block() -> Json:
    """The first key is padding, so the first row sees no key."""
    talk = Talk(seed=2)
    how = {"bias": True, "adapter": False, "is_transposed": True}
    attention = talk.maker.attention(2, 2, HEAD_DIM, "layer", **how)
    mlp = talk.maker.mlp(10, "layer", "gelu_tanh", gated=False, **how)
    mask = np.array([[0, 1, 1, 1, 1, 1]], dtype=np.float32)
    way = Way(talk=talk, parts=(attention, mlp), x=talk.draw(), dy=talk.draw(), mask=mask)
    way.collect(way.go(talk.maker.trained))
    return talk.told()


def attention_slice() -> Json:
    """One key head of two, with its query heads; frozen weights with trained adapters."""
    talk = Talk(seed=3)
    maker = talk.maker
    whole = maker.attention(4, 2, HEAD_DIM, "rms", window=3, bias=True, adapter=True, is_transposed=False)
    queries, keys = slice(0, 2 * HEAD_DIM), slice(0, HEAD_DIM)
    part = Attention(
        norm=whole.norm,
        q=maker.cut(whole.q, queries),
        k=maker.cut(whole.k, keys),
        v=maker.cut(whole.v, keys),
        o=maker.cut(whole.o, width=queries),
        head_dim=HEAD_DIM,
        scale=whole.scale,
        window=whole.window,
    )
    way = Way(talk=talk, parts=(part,), x=talk.draw(), dy=talk.draw(), is_slice=True)
    adapters = [number for weight in (part.q, part.k, part.v, part.o) for number in weight.adapter or ()]
    way.collect(way.go(adapters))
    return talk.told()


def tail() -> Json:
    """The end of a model: parts and the head in one program, without attention and so without a state."""
    talk = Talk(seed=4)
    how = {"bias": True, "adapter": False, "is_transposed": False}
    parts = tuple(talk.maker.mlp(5, "layer", activation, gated=False, **how) for activation in ("relu", "gelu"))
    head = talk.maker.head(7, "layer", **PLAIN)
    targets = np.array([[3], [0], [-100], [6], [2], [2]], dtype=np.float32)
    way = Way(talk=talk, parts=parts, head=head, x=talk.draw(), dy=talk.draw(), targets=targets)
    way.dy = np.concatenate([way.reference().y[:, :1], _scales(targets)], axis=1)
    way.collect(way.go(talk.maker.trained))
    return talk.told()


def head_slice() -> Json:
    """Words 5 to 11 of 12; some targets are outside the slice."""
    talk = Talk(seed=5)
    whole = talk.maker.head(12, "rms", **PLAIN)
    targets = np.array([[5], [11], [4], [-1], [8], [0]], dtype=np.float32)
    way = Way(talk=talk, parts=(), head=whole, x=talk.draw(), dy=talk.draw(), targets=targets, is_slice=True)
    way.dy = np.concatenate([way.reference().y[:, :1], _scales(targets)], axis=1)
    way.head = head = Head(norm=whole.norm, weight=talk.maker.cut(whole.weight, slice(5, 12)), first=5)
    assert head.norm is not None
    way.collect(way.go([head.norm.weight, head.weight.weight]))
    return talk.told()


def _scales(targets: Matrix) -> Matrix:
    """Gradient of the loss per row, for the mean over rows that have a target."""
    return (np.float32(0.25) * (targets >= 0)).astype(np.float32)


# ------------------------------------------------------------------------------------------------ conversations


class Short(Maker):
    """Random parts whose numbers have few digits."""

    def put(self, matrix: Matrix) -> int:
        return super().put(np.round(matrix * _FINE) / _FINE)


class Talk:
    """The frames of a conversation, and the results in it."""

    def __init__(self, seed: int) -> None:
        self.bench = Bench()
        self.maker = Short(self.bench, HIDDEN, seed)
        self._frames: list[Frame] = []
        self._results: dict[int, Matrix] = {}
        self._sent: list[int] = []
        self._tasks = itertools.count(101)

    def draw(self) -> Matrix:
        return np.round(self.maker.normal(ROWS, HIDDEN) * 8) / 8

    def run(self, program: Program, expected: Any) -> None:
        """Add a task, the operands it needs that were not sent yet, and its result."""
        task = next(self._tasks)
        self._frames.append((RunTask(task=task, priority=1, program=program, format="fp32"), b""))
        for operand in dict.fromkeys(operands(program)):
            if operand not in self._sent:
                matrix = self.bench.operands[operand]
                self._sent.append(operand)
                self._frames.append(stored(operand, matrix, "fp32", 0, len(matrix)))
        self._results[task] = np.asarray(expected, dtype=np.float32)
        self._frames.append(result(task, (0, 0), self._results[task], "fp32"))

    def drop(self, *made: int) -> None:
        self._frames.append((Drop(operands=made), b""))

    def told(self) -> Json:
        return {
            "operands": {str(operand): values(self.bench.operands[operand]) for operand in self._sent},
            "frames": [described(frame) for frame in self._frames],
            "results": {str(task): values(matrix) for task, matrix in self._results.items()},
        }


class Right(NamedTuple):
    y: Matrix
    dx: Matrix
    gradients: dict[int, Matrix]


@dataclass(kw_only=True)
class Way:
    """A sequence going through parts, and through the head if there is one."""

    talk: Talk
    parts: tuple[Part, ...]
    x: Matrix
    dy: Matrix
    head: Head | None = None
    is_slice: bool = False
    mask: Matrix | None = None
    rotary: Matrix | None = None
    """Table whose second row is the first position of the sequence."""
    targets: Matrix | None = None

    def __post_init__(self) -> None:
        self.state = self.talk.bench.number()
        self._put: dict[tuple[str, int], int] = {}

    def go(self, trained: list[int]) -> dict[int, int]:
        """Run forward and backward; return the accumulator of each operand's gradient."""
        right = self.reference()
        for first, last in CHUNKS:
            self.talk.run(Forward(**self._unit(first, last)), right.y[first:last])
        totals = {operand: self.talk.bench.number() for operand in trained}
        self.back(totals, wants_dx=True)
        return totals

    def rebuild(self) -> None:
        for first, last in CHUNKS:
            self.talk.run(Forward(**self._unit(first, last), is_silent=True), [[0]])

    def back(self, totals: dict[int, int], *, wants_dx: bool) -> None:
        right, pairs = self.reference(), tuple(totals.items())
        for first, last in reversed(CHUNKS):
            dy = self._operand("dy", self.dy[first:last], first)
            unit = Backward(**self._unit(first, last), dy=dy, accumulators=pairs, wants_dx=wants_dx)
            self.talk.run(unit, right.dx[first:last] if wants_dx else [[0]])
        self.talk.drop(self.state)

    def collect(self, totals: dict[int, int], times: int = 1) -> None:
        gradients = self.reference().gradients
        for operand, accumulator in totals.items():
            rows, cols = gradients[operand].shape
            self.talk.run(Collect(accumulator=accumulator, rows=rows, cols=cols), times * gradients[operand])
        self.talk.drop(*totals.values())

    def reference(self) -> Right:
        plain, x = Plain(self.talk.bench), torch.from_numpy(self.x).double().requires_grad_()
        y, dy = x, torch.from_numpy(self.dy).double()
        for part in self.parts:
            passed = plain.part(part, y, self.mask, None if self.rotary is None else self.rotary[1 : 1 + ROWS])
            y = passed if self.is_slice else y + passed
        if self.head is None:
            y.backward(dy)
        else:
            assert self.targets is not None
            logits = plain.logits(self.head, y)
            words = torch.from_numpy(self.targets[:, 0]).long() - self.head.first
            nearest = words.clamp(0, logits.shape[1] - 1)
            right = F.one_hot(nearest, logits.shape[1]) * (words == nearest)[:, None]
            y = torch.stack([logits.logsumexp(1), (logits * right).sum(1)], 1)
            logits.backward(((torch.exp(logits - dy[:, :1]) - right) * dy[:, 1:2]).detach())
        assert x.grad is not None
        gradients = {number: plain.gradient(number) for number in self.talk.maker.trained}
        return Right(y.detach().float().numpy(), x.grad.float().numpy(), gradients)

    def _unit(self, first: int, last: int) -> dict[str, Any]:
        unit: dict[str, Any] = {
            "parts": self.parts,
            "head": self.head,
            "x": self._operand("x", self.x[first:last], first),
            "state": self.state,
            "first_row": first,
            "sequence": ROWS,
            "is_slice": self.is_slice,
        }
        if self.mask is not None:
            unit["mask"] = self._operand("mask", self.mask)
        if self.rotary is not None:
            unit |= {"rotary": self._operand("rotary", self.rotary), "rotary_row": 1 + first}
        if self.targets is not None:
            unit["targets"] = self._operand("targets", self.targets[first:last], first)
        return unit

    def _operand(self, name: str, matrix: Matrix, first: int = 0) -> int:
        """Operand number of a matrix, stored once per name and first row."""
        if (name, first) not in self._put:
            self._put[name, first] = self.talk.bench.put(matrix)
        return self._put[name, first]
