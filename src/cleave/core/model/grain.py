"""The grain of a step: the blocks of single gemms, or layers that stay on devices."""

from __future__ import annotations

from typing import Literal, get_args

Grain = Literal["auto", "gemm", "resident"]
"""What the user asks for; auto: whichever is predicted to be faster."""
GRAINS: tuple[Grain, ...] = get_args(Grain)
