"""The parser of every verb, and parsers for argument values.

A bad value ends the command with one sentence and exit code 2. Help has groups, units, defaults and examples.
"""

from __future__ import annotations

import argparse
import difflib
import math
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cleave.core.verify.trust import level_of

BAD_INPUT = 2
_MOST_COLUMNS = 100


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of examples, and use the width of the terminal up to what is easy to read."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns - 2, _MOST_COLUMNS)
        super().__init__(prog, max_help_position=28, width=width)


class Parser(argparse.ArgumentParser):
    def __init__(self, *, description: str | None = None, examples: Sequence[str] = (), **options: Any) -> None:
        """`examples` are shown at the end of the help, one command per line."""
        epilog = "\n".join(("examples:", *(f"  {example}" for example in examples))) if examples else None
        wrapped = None
        if description is not None:
            wrapped = textwrap.fill(description, min(shutil.get_terminal_size().columns - 2, _MOST_COLUMNS))
        super().__init__(description=wrapped, epilog=epilog, formatter_class=_Help, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reject an unknown argument in the name of the verb it was given to, with the nearest option."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = list(self._option_string_actions)
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            self.error(f"unknown argument {unknown[0]}" + (f"; did you mean {near[0]}?" if near else ""))
        return options, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject an unknown verb, or another value that is not among the choices, with the nearest one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            near = difflib.get_close_matches(str(value), [str(choice) for choice in action.choices or ()], n=1)
            if not near:
                raise
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; did you mean {near[0]}?") from None

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            verbs = [name for action in self._actions if action.metavar == missing for name in action.choices or ()]
            message = f"missing {missing}" + (f", one of {', '.join(verbs)}" if verbs else "")
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


AddVerb = Callable[..., Parser]


def gemm_sizes(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"expected three sizes M,N,K such as 4096,2048,2048, got {text!r}")
    m, n, k = (count(part) for part in parts)
    return m, n, k


def size_bytes(text: str) -> int:
    units = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    stripped = text.strip().lower()
    number = stripped.rstrip("bgikmt ")
    try:
        value = float(number) * units[stripped[len(number) :].strip()]
    except (KeyError, ValueError):
        value = 0.0
    if not (math.isfinite(value) and value >= 1):
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 2GB, got {text!r}")
    return int(value)


def count(text: str) -> int:
    try:
        value = int(text.strip())
    except ValueError:
        value = 0
    if not 1 <= value < 2**40:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def count_or_zero(text: str) -> int:
    try:
        return 0 if text.strip() == "0" else count(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}") from None


def number_or_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def probability(text: str) -> float:
    value = number_or_zero(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"expected a probability of at least 0 and below 1, got {text!r}")
    return value


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return value


def trust(text: str) -> str:
    """Read a level of trust, also by the name it had in earlier releases."""
    return level_of(text) or text
