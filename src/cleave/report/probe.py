"""The result of `cleave probe`: every kind of task, measured and by the fit, and the profile that follows."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cleave.report.plain import plain_console
from cleave.report.quantities import seconds, si


class Measured(Protocol):
    """One kind of task; `emulate.fit.Sample` implements it."""

    @property
    def label(self) -> str: ...
    @property
    def rows(self) -> float: ...
    @property
    def flops(self) -> float: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class Fitted(Protocol):
    """A profile; `emulate.fit.Fit` implements it."""

    @property
    def task_s(self) -> float: ...
    @property
    def flops_per_s(self) -> float: ...
    @property
    def byte_s(self) -> float: ...
    @property
    def thin_rows(self) -> float: ...
    @property
    def predicted_s(self) -> tuple[float, ...]: ...
    @property
    def median_error(self) -> float: ...
    @property
    def worst_error(self) -> float: ...


@contextmanager
def measuring(*, quiet: bool) -> Generator[Callable[[str], None]]:
    """Yield a function that shows what is measured next."""
    with plain_console(stderr=True, quiet=quiet).status("starting a device ...") as status:
        yield lambda label: status.update(f"measuring: {label}")


def show(samples: Sequence[Measured], found: Fitted, kernel: str, out: str | None, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(_as_json(samples, found, kernel)) + "\n")
        return
    console = plain_console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("task")
    for title in ("measured", "by the fit", "error", "FLOP/s"):
        table.add_column(title, justify="right")
    for sample, predicted_s in zip(samples, found.predicted_s, strict=True):
        error = predicted_s / sample.seconds - 1
        speed = si(sample.flops / sample.seconds, "FLOP/s") if sample.flops else ""
        table.add_row(sample.label, seconds(sample.seconds), seconds(predicted_s), f"{error:+.0%}", speed)
    console.print(table)
    console.print(
        f"{kernel}: {seconds(found.task_s)} a task, {si(found.flops_per_s, 'FLOP/s')}, "
        f"{found.byte_s * 1e9:.2g} s per GB received or sent; the error of the fit is {found.median_error:.0%} at the "
        f"median and {found.worst_error:.0%} at worst",
        soft_wrap=True,
    )
    console.print(
        f"by these tasks alone, {found.thin_rows:.0f} rows take as long as reading their weights", soft_wrap=True
    )
    if out is not None:
        console.print(f"wrote {out}; its link is not measured, so set it there or with --down, --up and --latency")


def _as_json(samples: Sequence[Measured], found: Fitted, kernel: str) -> dict[str, object]:
    return {
        "kernel": kernel,
        "task_s": found.task_s,
        "flops_per_s": found.flops_per_s,
        "byte_s": found.byte_s,
        "thin_rows": found.thin_rows,
        "median_error": found.median_error,
        "worst_error": found.worst_error,
        "tasks": [
            {
                "task": sample.label,
                "rows": sample.rows if math.isfinite(sample.rows) else None,
                "flops": sample.flops,
                "bytes": sample.size_bytes,
                "measured_s": sample.seconds,
                "fitted_s": predicted_s,
            }
            for sample, predicted_s in zip(samples, found.predicted_s, strict=True)
        ],
    }
