"""The work that every rival does, in numbers: models, batch, sizes. Pure, so that nobody needs torch to ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SEQUENCES: Final = 8
SEQUENCE: Final = 256
TOKENS: Final = SEQUENCES * SEQUENCE
VOCABULARY: Final = 256
HEAD_WIDTH: Final = 64
LORA_RANK: Final = 8
_SHAPES: Final = {"demo": (256, 768, 4), "demo10": (576, 1728, 8)}
"""Hidden width, width inside the MLP, layers: the model of `cleave train`, and one of ten times its parameters."""
MODELS: Final = tuple(_SHAPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step consists of."""

    model: str
    lora: bool

    @property
    def hidden(self) -> int:
        return _SHAPES[self.model][0]

    @property
    def ffn(self) -> int:
        return _SHAPES[self.model][1]

    @property
    def layers(self) -> int:
        return _SHAPES[self.model][2]

    @property
    def adapters(self) -> int:
        """Weights of the LoRA adapters, for q and v of every layer."""
        return self.layers * 2 * LORA_RANK * 2 * self.hidden

    @property
    def weights(self) -> int:
        """All weights, adapters included."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        whole = 2 * VOCABULARY * self.hidden + self.layers * layer + self.hidden
        return whole + self.adapters if self.lora else whole

    @property
    def trained(self) -> int:
        """Weights that an optimizer updates."""
        return self.adapters if self.lora else self.weights
