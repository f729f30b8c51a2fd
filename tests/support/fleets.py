"""Fleets, gemms and servers to test on: builders by seed, and hypothesis strategies over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from hypothesis import strategies as st

from cleave.core.cost.rates import Server
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.core.model.gemms import Gemm

Kind = Literal["usual", "wild", "narrow", "twins", "mixed", "cramped"]
WIRES: tuple[WireFormat, ...] = get_args(WireFormat)


def of(flops: Floats, down: Floats, up: Floats, latency: Floats, memory: Floats, prefix: str = "d") -> Profiles:
    return Profiles(
        names=tuple(f"{prefix}{i}" for i in range(len(flops))),
        flops_per_s=flops,
        down_bytes_per_s=down,
        up_bytes_per_s=up,
        latency_s=latency,
        memory_bytes=memory,
    )


def one(
    flops: float = 1e12, down: float = 1e7, up: float = 3e6, latency: float = 0.02, memory: float = 2e9
) -> Profiles:
    return of(*(np.array([float(x)]) for x in (flops, down, up, latency, memory)))


def usual(count: int, seed: int) -> Profiles:
    """60% phones, 30% laptops, 10% budget phones at a tenth of a phone's rates."""
    rng = np.random.default_rng(seed)
    kind = rng.permutation(np.repeat([0, 1, 2], _shares(count, (0.6, 0.3, 0.1))))
    laptop, slow = kind == 1, np.where(kind == 2, 0.1, 1.0)

    def draw(phone: tuple[float, float], other: tuple[float, float]) -> Floats:
        return np.where(laptop, rng.uniform(*other, count), rng.uniform(*phone, count))

    return of(
        draw((0.4e12, 1.6e12), (1.5e12, 9e12)) * slow,
        draw((50, 200), (100, 500)) * 1e6 / 8 * slow,
        draw((10, 50), (20, 100)) * 1e6 / 8 * slow,
        rng.uniform(0.01, 0.06, count),
        draw((0.5e9, 2e9), (2e9, 16e9)) * np.where(kind == 2, 0.5, 1.0),
    )


def wild(count: int, seed: int, spread: float = 1.5) -> Profiles:
    """Everything log-normal and independent: devices that no shop sells."""
    rng = np.random.default_rng(seed)

    def draw(middle: float) -> Floats:
        return middle * np.exp(rng.normal(0.0, spread, count))

    return of(draw(1e12), draw(1e7), draw(3e6), draw(0.02), draw(2e9))


def narrow(count: int, seed: int) -> Profiles:
    """Devices within 2% of one another."""
    rng = np.random.default_rng(seed)

    def draw(middle: float) -> Floats:
        return middle * rng.uniform(0.99, 1.01, count)

    return of(draw(1e12), draw(1e7), draw(3e6), draw(0.02), draw(2e9))


def twins(count: int, seed: int) -> Profiles:
    """All the same, down to the last bit."""
    return wild(1, seed).take(np.zeros(1, dtype=np.int64)) if count == 1 else _repeated(wild(1, seed), count)


def mixed(count: int, seed: int) -> Profiles:
    """A few giants among many dwarfs, some without latency, some bound by one rate alone."""
    rng = np.random.default_rng(seed)
    fleet = wild(count, seed)
    giant = np.where(rng.random(count) < 0.1, 1e3, 1.0)
    return of(
        fleet.flops_per_s * giant * rng.choice([1.0, 1e-3], count, p=[0.9, 0.1]),
        fleet.down_bytes_per_s * giant,
        fleet.up_bytes_per_s * giant * rng.choice([1.0, 1e-2], count, p=[0.9, 0.1]),
        fleet.latency_s * rng.choice([0.0, 1.0, 100.0], count, p=[0.2, 0.75, 0.05]),
        fleet.memory_bytes,
    )


def cramped(count: int, seed: int) -> Profiles:
    """Memory from a few kilobytes up, so that memory binds before time does."""
    fleet = wild(count, seed)
    memory = 10 ** np.random.default_rng(seed + 1).uniform(3.7, 8.0, count)
    return of(fleet.flops_per_s, fleet.down_bytes_per_s, fleet.up_bytes_per_s, fleet.latency_s, memory)


BUILDERS: dict[Kind, Callable[[int, int], Profiles]] = {
    "usual": usual,
    "wild": wild,
    "narrow": narrow,
    "twins": twins,
    "mixed": mixed,
    "cramped": cramped,
}


def build(kind: Kind, count: int, seed: int) -> Profiles:
    return BUILDERS[kind](count, seed)


def fleets(most: int = 64, least: int = 1, kinds: tuple[Kind, ...] = tuple(BUILDERS)) -> st.SearchStrategy[Profiles]:
    return st.builds(build, st.sampled_from(kinds), st.integers(least, most), st.integers(0, 2**31))


_sizes = st.one_of(st.sampled_from([1, 2, 3, 5, 7, 127, 1024, 4099]), st.integers(1, 300), st.integers(1, 20_000))


def gemms(sizes: st.SearchStrategy[int] = _sizes) -> st.SearchStrategy[Gemm]:
    """Any shape: 1, primes, tall, flat, fewer elements than devices, an inner dimension of 1."""
    return st.builds(Gemm, m=sizes, n=sizes, k=sizes)


_log_rates = st.floats(5.0, 11.0).map(lambda x: 10.0**x)
servers = st.builds(
    Server,
    down_bytes_per_s=st.one_of(st.just(np.inf), _log_rates),
    up_bytes_per_s=st.one_of(st.just(np.inf), _log_rates),
    flops_per_s=st.one_of(st.just(0.0), st.floats(8.0, 14.0).map(lambda x: 10.0**x)),
)


def _shares(count: int, mix: tuple[float, ...]) -> list[int]:
    counts = [int(share * count) for share in mix]
    counts[0] += count - sum(counts)
    return counts


def _repeated(fleet: Profiles, count: int) -> Profiles:
    same = np.ones(count)
    return of(
        fleet.flops_per_s * same,
        fleet.down_bytes_per_s * same,
        fleet.up_bytes_per_s * same,
        fleet.latency_s * same,
        fleet.memory_bytes * same,
    )
