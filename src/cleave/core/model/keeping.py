"""What a device keeps of a sequence's forward pass for its backward pass: the more, the less it recomputes."""

from __future__ import annotations

from typing import Literal

Keeping = Literal["nothing", "inputs", "all"]
"""Nothing but keys and values; the input of every sublayer too; or also what is inside: queries, contexts, MLPs."""
KEEPINGS: tuple[Keeping, ...] = ("nothing", "inputs", "all")
"""From the least memory to the least compute."""
