"""The volunteer's view of `cleave join`: the machine's offer, its connection, its contribution so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from cleave.report.plain import plain_console
from cleave.report.quantities import si

_REFRESH_S = 1.0


class Contributed(Protocol):
    """Totals of a device; `device.worker.Contribution` implements it."""

    tasks: int
    flops: float
    compute_s: float
    down_bytes: int
    up_bytes: int


@contextmanager
def shown(
    contribution: Contributed,
    flops_per_s: float,
    memory_bytes: int,
    kernel: str,
    paused: Callable[[], str],
    *,
    quiet: bool,
) -> Generator[Callable[[str], None]]:
    """Yield a function that prints a line; on a terminal, keep a live status of the contribution below it.

    `paused` tells why the device does not compute now, if it does not. Lines quote the server, so they are printed as
    they are, without markup.
    """
    console = plain_console(stderr=True, quiet=quiet)
    console.print(f"this machine: {si(flops_per_s, 'FLOP/s')} ({kernel}), {si(memory_bytes, 'B')} for operands")
    stop = threading.Event()
    with console.status("joining ...") as status:

        def refresh() -> None:
            while not stop.wait(_REFRESH_S):
                why = paused()
                status.update(f"paused: {why}" if why else f"computing: {_totals(contribution)}")

        refresher = threading.Thread(target=refresh, daemon=True)
        if console.is_terminal and not quiet:
            refresher.start()
        try:
            yield lambda text: console.print(text, soft_wrap=True)
        finally:
            stop.set()
    console.print(f"contributed {_totals(contribution)}")


def _totals(contribution: Contributed) -> str:
    return (
        f"{contribution.tasks} tasks, {si(contribution.flops, 'FLOP')} in {contribution.compute_s:.1f} s, "
        f"{si(contribution.down_bytes, 'B')} down, {si(contribution.up_bytes, 'B')} up"
    )
