"""Results without numbers, for runs of the engine in virtual time."""

from __future__ import annotations

from collections.abc import Iterable

from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import Task, TaskId


class NoNumbers:
    """Accept everything and compute nothing."""

    outputs: list[object]
    is_plausible = True

    def __init__(self) -> None:
        self.outputs = []

    def check(self, task: Task, part: Rectangle, payload: object, *, is_strict: bool) -> object:
        return None

    def begin(self, *, takes_anything: bool) -> None:
        pass

    def leave_alone(self, tasks: Iterable[TaskId]) -> None:
        pass

    def share(self, task: TaskId) -> None:
        pass

    def clear(self, piece: object) -> None:
        pass

    def keep(self, item: object) -> None:
        pass

    def audit(self, case: object) -> str:
        return ""

    def expect_gradients(self) -> None:
        pass

    def gradient(self, parameter: int) -> None:
        return None
