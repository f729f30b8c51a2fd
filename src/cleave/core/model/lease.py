"""Leases as users ask for them: whether devices may keep what they train, with its optimizer state."""

from __future__ import annotations

from typing import Literal, get_args

LeaseMode = Literal["auto", "never"]
"""auto: wherever it is predicted to be faster and allowed."""
LEASE_MODES: tuple[LeaseMode, ...] = get_args(LeaseMode)
