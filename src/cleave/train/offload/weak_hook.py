"""Hooks that keep nobody alive: a method of an object, as long as that lives, and of nothing once pickled or copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WeakHook:
    def __init__(self, of: Callable[[], Any], method: Callable[..., None]) -> None:
        """`of` returns the object, or None when it is gone, as a weak reference does."""
        self._of, self._method = of, method

    def __call__(self, *args: Any) -> None:
        found = self._of()
        if found is not None:
            self._method(found, *args)

    def __reduce__(self) -> Any:
        return WeakHook, (_nobody, _nothing)


def _nobody() -> None:
    return None


def _nothing(*_: object) -> None:
    pass
