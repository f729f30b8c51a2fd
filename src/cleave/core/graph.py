"""The gemms of a training step. (skeleton: being written)"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One matrix product C[m,n] = A[m,k] B[k,n]."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k
