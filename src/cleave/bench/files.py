"""The three files of a scenario's results: raw numbers, table, plot. All are rewritten after every cell."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cleave.bench.records import Results, read_results, write_results
from cleave.bench.table import markdown
from cleave.disk import write_whole
from cleave.errors import InputError
from cleave.extras import install_command


class Files:
    """Where results are written."""

    def __init__(self, directory: Path, name: str) -> None:
        self.raw = directory / f"{name}.json"
        self.table = directory / f"{name}.md"
        self.plot = directory / f"{name}.png"

    @property
    def missing_plot(self) -> str | None:
        """Why there is no plot, and what to do; None if there can be one."""
        if find_spec("matplotlib") is not None:
            return None
        return f"no plot without matplotlib; run {install_command('plot')}, then the same command with --redraw"

    def prepare(self) -> None:
        """Create the directory. Raises InputError if nothing can be written, before anything is run."""
        try:
            self.raw.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.raw.with_suffix(".try"), b"")
            self.raw.with_suffix(".try").unlink()
        except OSError as fault:
            raise self._unwritable(fault) from None

    def read(self) -> Results | None:
        return read_results(self.raw)

    def write(self, results: Results) -> None:
        """Write all three; an earlier plot stays if there cannot be one."""
        try:
            write_results(self.raw, results)
            write_whole(self.table, markdown(results).encode())
        except OSError as fault:
            raise self._unwritable(fault) from None
        if self.missing_plot is None:
            from cleave.bench.plot import draw

            draw(results, self.plot)

    def _unwritable(self, fault: OSError) -> InputError:
        return InputError(f"cannot write results to {self.raw.parent}: {fault.strerror}; choose another --out")
