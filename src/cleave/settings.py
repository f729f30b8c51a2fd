"""Settings shared by the command line, TOML files and the Python API: the allowed values and defaults."""

from __future__ import annotations

from typing import Final, Literal, get_args

from cleave.core.cost.wire import WireFormat
from cleave.core.model.grain import Grain
from cleave.core.model.lease import LeaseMode
from cleave.core.verify.trust import Level

Offload = Literal["auto", "always"]
"""Keep gemms on the server that are not worth sending, or send every gemm."""
Alone = Literal["wait", "compute"]
"""While no device is connected: wait for one to join, or compute on the server until then."""

OFFLOADS: Final[tuple[Offload, ...]] = get_args(Offload)
ALONES: Final[tuple[Alone, ...]] = get_args(Alone)

WIRE: Final[WireFormat] = "fp32"
GRAIN: Final[Grain] = "auto"
LEASE: Final[LeaseMode] = "auto"
OFFLOAD: Final[Offload] = "always"
"""Use the fleet by default; the server computes gemms that are not worth sending only on request."""
TRUST: Final[Level] = "stranger"
"""Trust in devices that join with a token for which nothing else was said: no result of theirs is used unchecked."""
ALONE: Final[Alone] = "wait"
ALONE_WAIT_S: Final = 3600.0
DEVICE_THREADS: Final = 1
