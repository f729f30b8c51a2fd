"""Bind a program to the operands in the store, and reject it with one sentence if they do not fit.

Nothing behind this module checks shapes again: a program that passes reads and writes only within its operands. It
knows neither when a task is due nor how anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cleave.core.model.decoder import Attention, Head, Mlp, Norm, Part, Weight
from cleave.device.kernels import Array, Kernel
from cleave.device.programs.linear import Scope
from cleave.device.programs.shards import DeviceShard
from cleave.device.store import HeldOperand, OperandStore
from cleave.errors import ProtocolError
from cleave.protocol.programs import Backward, Forward, operands, parameters

_MAX_ROWS = 1 << 24  # positions are fp32, exact up to here
_MAX_VOCABULARY = 1 << 31
_MAX_SCALE = 1e9

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A program with all of its operands present."""

    scope: Scope
    shard: DeviceShard
    x: Array
    dy: Array
    hidden: int
    kv_widths: tuple[int, ...]


def check_program(program: Forward | Backward) -> None:
    """Check everything that does not depend on operands. Raises ProtocolError."""
    parts = len(program.parts) + (program.head is not None)
    _require(parts > 0, "expected a program of at least one part, got none")
    _require(not program.is_slice or parts == 1, f"expected a slice of one part alone, got {parts} parts")
    _require(
        0 <= program.first_row < program.sequence <= _MAX_ROWS and program.rotary_row >= 0,
        f"expected rows within a sequence of at most {_MAX_ROWS}, got row {program.first_row} of {program.sequence} "
        f"with rotary row {program.rotary_row}",
    )
    _require(
        (program.head is None) == (program.targets is None),
        "expected targets with a head and only then, got one of them alone",
    )
    attentions = [part for part in program.parts if isinstance(part, Attention)]
    _require(
        program.rotary is not None or not any(part.is_rotary for part in attentions),
        "expected a rotary table for an attention that is rotary, got none",
    )
    for part in attentions:
        is_odd = part.is_rotary and part.head_dim % 2
        if part.head_dim <= 0 or is_odd or (part.window is not None and part.window <= 0):
            raise ProtocolError(
                f"expected a head_dim and a window from 1 up, even if rotary, got {part.head_dim} and {part.window}"
            )
        _check_number("scale", part.scale, -_MAX_SCALE)
    for norm in _norms(program):
        _check_number("eps", norm.eps, 0.0)
    for weight in _weights(program):
        _check_number("scale", weight.scale, -_MAX_SCALE)
    if isinstance(program, Backward):
        named, own = set(parameters(program)), [accumulator for _, accumulator in program.accumulators]
        _require(
            {operand for operand, _ in program.accumulators} <= named and len(set(own)) == len(own),
            "expected an accumulator of its own for some weights of the program, got others",
        )


def bind(program: Forward | Backward, store: OperandStore, kernel: Kernel) -> Bound | None:
    """Bind the program once every operand is complete, None before; creates missing accumulators."""
    held: dict[int, HeldOperand] = {}
    for number in operands(program):  # stops at the first missing one; weights, rarely missing, come last
        operand = store.get(number)
        if operand is None or not operand.is_whole:
            return None
        if operand.is_accumulator:
            raise ProtocolError(f"expected operand {number} to have been sent, but it is an accumulator")
        held[number] = operand
    shapes = {number: (operand.rows, operand.cols) for number, operand in held.items()}
    _check_shapes(program, shapes)
    values = {number: operand.array for number, operand in held.items()}
    rows, hidden = shapes[program.x]
    accumulators = program.accumulators if isinstance(program, Backward) else ()
    return Bound(
        scope=Scope(
            kernel=kernel,
            values=values,
            gradients={operand: store.accumulator(number, *shapes[operand]).array for operand, number in accumulators},
            rows=rows,
            first_row=program.first_row,
            mask=None if program.mask is None else values[program.mask],
            rotary=None if program.rotary is None else values[program.rotary][program.rotary_row :][:rows],
            targets=None if program.targets is None else values[program.targets],
        ),
        shard=DeviceShard(parts=program.parts, head=program.head, is_slice=program.is_slice),
        x=values[program.x],
        dy=values[program.dy] if isinstance(program, Backward) else None,
        hidden=hidden,
        kv_widths=tuple(_widths(shapes, part.k)[1] for part in program.parts if isinstance(part, Attention)),
    )


# ------------------------------------------------------------------------------------------------ parts of a program


def _norms(program: Forward | Backward) -> Iterator[Norm]:
    for part in program.parts:
        yield part.norm
    if program.head is not None and program.head.norm is not None:
        yield program.head.norm


def _weights(program: Forward | Backward) -> Iterator[Weight]:
    for part in program.parts:
        match part:
            case Attention():
                yield from (part.q, part.k, part.v, part.o)
            case Mlp():
                yield from (part.up, part.down)
                if part.gate is not None:
                    yield part.gate
    if program.head is not None:
        yield program.head.weight


# ------------------------------------------------------------------------------------------------ shapes


def _check_shapes(program: Forward | Backward, shapes: dict[int, Shape]) -> None:
    rows, hidden = shapes[program.x]
    _require(
        program.first_row + rows <= program.sequence,
        f"expected rows within a sequence of {program.sequence}, got {rows} from {program.first_row} on",
    )
    if isinstance(program, Backward):
        _check_shape("dy", shapes[program.dy], (rows, hidden if program.head is None else 2))
    if program.mask is not None:
        _check_shape("a mask", shapes[program.mask], (1, program.sequence))
    if program.targets is not None:
        _check_shape("targets", shapes[program.targets], (rows, 1))
    for norm in _norms(program):
        for number in (norm.weight, norm.bias):
            if number is not None:
                _check_shape("a norm", shapes[number], (1, hidden))
    for weight in _weights(program):
        _check_weight(shapes, weight)
    for part in program.parts:
        _check_part(part, shapes, hidden)
        if isinstance(part, Attention) and part.is_rotary:
            assert program.rotary is not None
            positions, width = shapes[program.rotary]
            _require(
                program.rotary_row + rows <= positions and width == 2 * part.head_dim,
                f"expected a rotary table of at least {program.rotary_row + rows} x {2 * part.head_dim}, got "
                f"{positions} x {width}",
            )
    if program.head is not None:
        _check_head(program.head, shapes, hidden)


def _check_part(part: Part, shapes: dict[int, Shape], hidden: int) -> None:
    match part:
        case Attention():
            queries, keys = _widths(shapes, part.q)[1], _widths(shapes, part.k)[1]
            entering = part.q, part.k, part.v
            fits = (
                _widths(shapes, part.v)[1] == keys
                and _widths(shapes, part.o) == (queries, hidden)
                and keys % part.head_dim == 0
                and queries % keys == 0
            )
        case Mlp():
            inner = _widths(shapes, part.up)[1]
            entering = (part.up,) if part.gate is None else (part.gate, part.up)
            fits = _widths(shapes, part.down) == (inner, hidden) and _widths(shapes, entering[0])[1] == inner
    if not fits or not all(_widths(shapes, weight)[0] == hidden for weight in entering):
        raise ProtocolError(
            f"the weights of an {type(part).__name__.lower()} do not fit each other and {hidden} columns of x; the "
            "server is at fault"
        )


def _check_head(head: Head, shapes: dict[int, Shape], hidden: int) -> None:
    width, words = _widths(shapes, head.weight)
    _require(
        width == hidden and 0 <= head.first <= _MAX_VOCABULARY - words,
        f"expected a vocabulary of {hidden} columns within {_MAX_VOCABULARY} words, got {words} x {width} from word "
        f"{head.first} on",
    )


def _check_weight(shapes: dict[int, Shape], weight: Weight) -> None:
    width, out = _widths(shapes, weight)
    if weight.bias is not None:
        _check_shape("a bias", shapes[weight.bias], (1, out))
    if weight.adapter is not None:
        a, b = weight.adapter
        _check_shape("an adapter's A", shapes[a], (shapes[a][0], width))
        _check_shape("an adapter's B", shapes[b], (out, shapes[a][0]))


def _widths(shapes: dict[int, Shape], weight: Weight) -> Shape:
    """Input and output width."""
    rows, cols = shapes[weight.weight]
    return (rows, cols) if weight.is_transposed else (cols, rows)


def _check_shape(label: str, found: Shape, expected: Shape) -> None:
    if found != expected:  # not _require: wording a message takes longer than the check
        raise ProtocolError(
            f"expected {label} of {expected[0]} x {expected[1]}, got {found[0]} x {found[1]}; send another"
        )


def _check_number(label: str, number: float, minimum: float) -> None:
    if not minimum <= number <= _MAX_SCALE:  # nor is NaN
        raise ProtocolError(f"expected a {label} from {minimum:g} to {_MAX_SCALE:g}, got {number}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ProtocolError(message)
