"""The grain of a step: the blocks of single gemms, or layers that stay on devices."""

from __future__ import annotations

from typing import Literal, get_args

Grain = Literal["auto", "gemm", "resident"]
"""As a user asks for it; auto: whichever is predicted to be faster."""
GRAINS: tuple[Grain, ...] = get_args(Grain)
