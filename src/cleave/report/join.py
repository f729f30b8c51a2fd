"""What a volunteer sees: what this machine offers, whether it is joined, and what it has contributed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console

from cleave.report.quantities import si

_REFRESH_S = 1.0


class Contributed(Protocol):
    tasks: int
    flops: float
    compute_s: float
    down_bytes: int
    up_bytes: int


@contextmanager
def shown(
    contribution: Contributed, flops_per_s: float, memory_bytes: int, kernel: str, *, quiet: bool
) -> Generator[Callable[[str], None]]:
    """Gives a way to say a sentence; on a terminal a line below it counts what was done."""
    console = Console(stderr=True, quiet=quiet, highlight=False)
    console.print(f"this machine: {si(flops_per_s, 'FLOP/s')} ({kernel}), {si(memory_bytes, 'B')} for operands")
    stop = threading.Event()
    with console.status("joining ...") as status:

        def count() -> None:
            while not stop.wait(_REFRESH_S):
                status.update(f"computing: {_done(contribution)}")

        counter = threading.Thread(target=count, daemon=True)
        if console.is_terminal and not quiet:
            counter.start()
        try:
            yield lambda text: console.print(text)
        finally:
            stop.set()
    console.print(f"contributed {_done(contribution)}")


def _done(done: Contributed) -> str:
    return (
        f"{done.tasks} tasks, {si(done.flops, 'FLOP')} in {done.compute_s:.1f} s, "
        f"{si(done.down_bytes, 'B')} down, {si(done.up_bytes, 'B')} up"
    )
