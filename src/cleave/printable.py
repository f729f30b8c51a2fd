"""Text from a peer or a stranger's file, made safe to print: one line of bounded length that controls no terminal."""

from __future__ import annotations

from typing import Final

NAME_CHARACTERS: Final = 100
LINE_CHARACTERS: Final = 500


def printable(text: str, at_most: int = LINE_CHARACTERS) -> str:
    """Replace what is not a visible character or a space by `?`, and cut the text at so many characters.

    Escape sequences, line ends, overrides of the writing direction and invisible characters are among what goes.
    """
    cut = text if len(text) <= at_most else f"{text[: at_most - 3]}..."
    return cut if cut.isprintable() else "".join(each if each.isprintable() else "?" for each in cut)
