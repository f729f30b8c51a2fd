"""The laws of `tests/train/test_stack.py`, over real devices: processes at the other end of sockets."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from cleave import Fleet
from cleave.server.cluster import Cluster
from cleave.wire.stack import Batch, Pass, Stack

sys.path.append(str(Path(__file__).parents[1] / "train"))

from test_stack import *  # noqa: F403


class Recorded:
    """A cluster, and what was asked of it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.wire, self.tensor, self.plan = cluster.wire, cluster.tensor, cluster.plan
        self.refusal: str | None = None
        self.passes: list[tuple[Stack, Batch]] = []
        self.products = 0

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        self.products += 1
        return self._cluster.submit(*args, **options)

    def may_run(self, *args: Any, **options: Any) -> str | None:
        return self.refusal or self._cluster.may_run(*args, **options)

    def run(self, stack: Stack, batch: Batch) -> Pass:
        self.passes.append((stack, batch))
        return self._cluster.run(stack, batch)

    def wait(self, future: Future[Any]) -> Any:
        return self._cluster.wait(future)


@pytest.fixture
def columns(fleet: Fleet) -> Recorded:
    return Recorded(fleet.cluster)
