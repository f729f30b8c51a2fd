"""What a library says when it fails on a file, in one line; it may quote anything that is in the file."""

from __future__ import annotations

from cleave.printable import printable

_CHARACTERS = 200


def cause_of(fault: BaseException) -> str:
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    return printable(" ".join(str(fault).split()), _CHARACTERS) or type(fault).__name__
