"""Cleave, dask.distributed and Ray, each with two single-threaded local workers, behind one small interface.

All of them cut a product in two by rows (of the output, or of the inner dimension for tn) and join the halves in this
process. A handle keeps a matrix, or its halves, with the workers, so that it is sent once and can be reused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cleave.api.fleet import Fleet
from cleave.core.model.gemms import Linear, Role
from cleave.protocol.programs import Layout

Matrix = NDArray[np.float32]
WORKERS = 2
PRIORITIES: dict[Layout, int] = {"nn": 0, "nt": 1, "tn": 2}
"""As in training: weight gradients come last. Ray has no priorities."""
ROLES: dict[Layout, Role] = {"nt": "forward", "nn": "grad_input", "tn": "grad_weight"}


class System(Protocol):
    name: str

    def whole(self, matrix: Matrix) -> Any:
        """Send a matrix to every worker as a whole."""
        ...

    def halves(self, matrix: Matrix) -> Any:
        """Send half of a matrix's rows to each worker."""
        ...

    def start(self, layout: Layout, a: Any, b: Any) -> Any:
        """Start computing op(a) op(b) without waiting."""
        ...

    def finish(self, started: Any) -> Matrix: ...

    def close(self) -> None: ...


def multiply(layout: str, a: Matrix, b: Matrix) -> Matrix:
    return a @ b.T if layout == "nt" else a @ b if layout == "nn" else a.T @ b


def joined(layout: str, parts: list[Matrix]) -> Matrix:
    return np.add(parts[0], parts[1]) if layout == "tn" else np.concatenate(parts)


def cut(matrix: Matrix) -> list[Matrix]:
    half = len(matrix) // 2
    return [matrix[:half], matrix[half:]]


class Cleave:
    name = "cleave"

    def __init__(self) -> None:
        self.fleet = Fleet.local(WORKERS, threads=1, offload="always")
        self.cluster = self.fleet.cluster

    def whole(self, matrix: Matrix) -> Any:
        tensor = self.cluster.tensor(*matrix.shape)
        tensor.bind(matrix)
        return tensor

    halves = whole

    def start(self, layout: Layout, a: Any, b: Any) -> Any:
        match layout:
            case "nt":
                linear = Linear(tokens=a.rows, in_width=a.cols, out_width=b.rows, roles=("forward",))
            case "nn":
                linear = Linear(tokens=a.rows, in_width=b.cols, out_width=b.rows, roles=("grad_input",))
            case "tn":
                linear = Linear(tokens=a.rows, in_width=b.cols, out_width=a.cols, roles=("grad_weight",))
        return (
            self.cluster.submit(
                ROLES[layout], (a,), (b,), self.cluster.choose_layer(linear).plan, priority=PRIORITIES[layout]
            ),
            a,
            b,
        )

    def finish(self, started: Any) -> Matrix:
        return self.cluster.wait(started[0])[0]

    def close(self) -> None:
        self.fleet.close()


class Dask:
    name = "dask"

    def __init__(self) -> None:
        dask: Any = import_module("dask")  # installed only by make bench-live
        distributed: Any = import_module("distributed")
        dask.config.set({"distributed.worker.daemon": True, "distributed.comm.compression": None})
        self._cluster = distributed.LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, processes=True, dashboard_address=None, protocol="tcp://"
        )
        self._client = distributed.Client(self._cluster)
        self._workers: list[str] = list(self._client.scheduler_info()["workers"])

    def whole(self, matrix: Matrix) -> Any:
        future = self._client.scatter(matrix, broadcast=True, direct=True, hash=False)
        return [future] * WORKERS

    def halves(self, matrix: Matrix) -> Any:
        return [
            self._client.scatter(part, workers=[worker], direct=True, hash=False)
            for part, worker in zip(cut(matrix), self._workers, strict=True)
        ]

    def start(self, layout: Layout, a: Any, b: Any) -> Any:
        futures = [
            self._client.submit(
                multiply, layout, left, right, workers=[worker], pure=False, priority=-PRIORITIES[layout]
            )
            for left, right, worker in zip(a, b, self._workers, strict=True)
        ]
        return layout, futures

    def finish(self, started: Any) -> Matrix:
        layout, futures = started
        return joined(layout, self._client.gather(futures, direct=True))

    def close(self) -> None:
        self._client.close()
        self._cluster.close()


class Ray:
    name = "ray"

    def __init__(self) -> None:
        ray: Any = import_module("ray")
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        self._ray = ray
        ray.init(
            num_cpus=WORKERS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=2 << 30,
            _system_config={"metrics_report_interval_ms": 0},
        )
        self._multiply = ray.remote(num_cpus=1)(multiply)

    def whole(self, matrix: Matrix) -> Any:
        return [self._ray.put(matrix)] * WORKERS

    def halves(self, matrix: Matrix) -> Any:
        return [self._ray.put(part) for part in cut(matrix)]

    def start(self, layout: Layout, a: Any, b: Any) -> Any:
        return layout, [self._multiply.remote(layout, left, right) for left, right in zip(a, b, strict=True)]

    def finish(self, started: Any) -> Matrix:
        layout, references = started
        return joined(layout, self._ray.get(references))

    def close(self) -> None:
        self._ray.shutdown()


SYSTEMS: dict[str, Callable[[], System]] = {"cleave": Cleave, "dask": Dask, "ray": Ray}
