"""Check arguments of the Python API, so that a wrong type gets a sentence and not a traceback from deep inside."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from types import UnionType

from cleave.core.cost.wire import WIRE_NAMES, WireFormat, format_of
from cleave.core.verify.trust import LEVELS, Level, level_of
from cleave.errors import InputError


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InputError(f"expected {name} to be one of {', '.join(allowed)}, got {value!r}")


def checked_trust(value: object, default: Level) -> Level:
    """Return a level of trust, given by whatever name it has or had; the default for None."""
    level = default if value is None else level_of(value)
    if level is None:
        raise InputError(f"expected trust to be one of {', '.join(LEVELS)}, got {value!r}")
    return level


def checked_wire(value: object) -> WireFormat:
    """Return a wire format, given by whatever name it has or had."""
    format = format_of(value)
    if format is None:
        raise InputError(f"expected wire to be one of {', '.join(WIRE_NAMES)}, got {value!r}")
    return format


def check_count(name: str, value: object) -> None:
    if type(value) is bool or not isinstance(value, Integral) or int(value) < 1:
        raise InputError(f"expected {name} to be a whole number of at least 1, got {value!r}")


def check_seconds(name: str, value: object) -> None:
    """Accept any positive number of seconds, infinity included."""
    if type(value) is bool or not isinstance(value, Real) or not float(value) > 0:
        raise InputError(f"expected {name} to be a number of seconds above 0, got {value!r}")


def check_text(name: str, value: object, example: str) -> None:
    if not isinstance(value, str):
        raise InputError(f"expected {name} to be a string such as {example!r}, got a {type(value).__name__}")


def check_type(value: object, kind: type | UnionType, expected: str) -> None:
    if not isinstance(value, kind):
        raise InputError(f"expected {expected}, got {value!r}")
