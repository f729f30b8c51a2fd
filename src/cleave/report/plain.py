"""Consoles for text that others wrote: names, reasons and files are printed as they are, never read as markup."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False, quiet: bool = False, width: int | None = None) -> Console:
    """A console without markup, emoji codes and highlighting; styles are given as such."""
    return Console(stderr=stderr, quiet=quiet, width=width, markup=False, emoji=False, highlight=False)
