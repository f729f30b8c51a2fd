"""Parsers for argument values. A bad value ends the command with one sentence and exit code 2."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

BAD_INPUT = 2


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
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
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return value


def count_or_zero(text: str) -> int:
    return 0 if text.strip() == "0" else count(text)


def number_or_zero(text: str) -> float:
    return 0.0 if text.strip() == "0" else positive(text)


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
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 up, got {text!r}")
    return value
