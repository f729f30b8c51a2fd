"""Transfers that share capacity max-min fairly: under the server's links, under shared media, over links of their own.

A flow gets as much as any other flow through the pool that limits it, unless its own link is slower; what it leaves is
divided among the others. Pure: the caller supplies the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

import numpy as np

from cleave.core.fleet.profiles import Floats

Pool = str
Key = TypeVar("Key", bound=Hashable)
_ROUNDING = 1e-12


def fair_rates(caps: Sequence[float], pools: Sequence[tuple[Pool, ...]], capacity: Mapping[Pool, float]) -> Floats:
    """Rate of each flow, given the capacity of its own link and the pools it passes through.

    Progressive filling: all rates rise together; a flow stops at its own capacity, or when one of its pools is full.
    """
    own = np.asarray(caps, dtype=np.float64)
    names = sorted({pool for through in pools for pool in through if capacity[pool] < inf})
    member = np.array([[name in through for through in pools] for name in names], dtype=np.bool_)
    member = member.reshape(len(names), len(own))
    left = np.array([capacity[name] for name in names])
    rates, is_open = own.copy(), np.ones(len(own), dtype=np.bool_)
    while is_open.any():
        count = (member & is_open).sum(axis=1)
        level = np.where(count > 0, left / np.maximum(count, 1), inf)
        lowest = float(level.min(initial=inf))
        stops = is_open & (own <= lowest)
        if not stops.any():
            stops = is_open & member[level <= lowest * (1 + _ROUNDING)].any(axis=0)
            rates[stops] = lowest
        left = np.maximum(left - (member[:, stops] * rates[stops]).sum(axis=1), 0.0)
        is_open &= ~stops
    return rates


@dataclass(slots=True)
class _Flow:
    left_bytes: float
    cap: float
    pools: tuple[Pool, ...]
    rate: float = 0.0


class SharedLinks(Generic[Key]):
    """Transfers under way through pools of finite capacity."""

    def __init__(self, capacity: Mapping[Pool, float]) -> None:
        self._capacity = {name: bytes_per_s for name, bytes_per_s in capacity.items() if bytes_per_s < inf}
        self._flows: dict[Key, _Flow] = {}
        self._now = 0.0

    def limiting(self, pools: Sequence[Pool]) -> tuple[Pool, ...]:
        """Those of the pools that are of finite capacity."""
        return tuple(pool for pool in pools if pool in self._capacity)

    def begin(self, key: Key, size_bytes: float, cap: float, pools: tuple[Pool, ...], now: float) -> None:
        self._advance(now)
        self._flows[key] = _Flow(size_bytes, cap, pools)
        self._divide()

    def end(self, key: Key, now: float) -> float:
        """Take a flow out, whether or not it is complete; return the bytes that it has not moved."""
        self._advance(now)
        flow = self._flows.pop(key, None)
        self._divide()
        return 0.0 if flow is None else flow.left_bytes

    def next_end(self) -> tuple[float, Key] | None:
        """When the first flow will be complete, if no other begins or ends before; and which."""
        if not self._flows:
            return None
        key, flow = min(self._flows.items(), key=lambda item: item[1].left_bytes / item[1].rate)
        return self._now + flow.left_bytes / flow.rate, key

    def __contains__(self, key: object) -> bool:
        return key in self._flows

    def rates(self) -> dict[Key, float]:
        return {key: flow.rate for key, flow in self._flows.items()}

    def _advance(self, now: float) -> None:
        for flow in self._flows.values():
            flow.left_bytes = max(flow.left_bytes - flow.rate * (now - self._now), 0.0)
        self._now = now

    def _divide(self) -> None:
        flows = list(self._flows.values())
        shares = fair_rates([flow.cap for flow in flows], [flow.pools for flow in flows], self._capacity)
        for flow, rate in zip(flows, shares.tolist(), strict=True):
            flow.rate = rate
