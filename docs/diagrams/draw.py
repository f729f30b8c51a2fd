"""Draw the diagrams of the docs and the README: `python -m docs.diagrams.draw` rewrites them in docs/assets/.

Pure Python, no dependencies. `tests/docs/test_diagrams.py` checks that the committed files are what this makes.
"""

from __future__ import annotations

from pathlib import Path

from docs.diagrams import overview, sequence
from docs.diagrams.sequence import End, Lane, Message, Note, Section, Sequence

ASSETS = Path(__file__).parents[1] / "assets"

PRODUCT = Sequence(
    name="product",
    title="One linear layer, forward and backward, as matrix products on two devices",
    lanes=(
        Lane("loop", "Your loop", "PyTorch", "three"),
        Lane("server", "Server", "engine", "server"),
        Lane("laptop", "Laptop", "device", "one"),
        Lane("desktop", "Desktop", "device", "two"),
    ),
    steps=(
        Section("Forward"),
        Message("loop", "server", "layer(x): Y\u00a0=\u00a0X\u00a0Wᵀ"),
        Note("server", "plan: a block of Y per device, sized by speed, links and memory"),
        Message("server", "laptop", "task; the rows of X and W it lacks"),
        Message("server", "desktop", "task; rows for a larger block"),
        Note("laptop desktop", "multiply what has arrived; keep the operands"),
        Message("laptop", "server", "rectangles of Y"),
        Message("desktop", "server", "rectangles of Y"),
        Note("server", "check each: C\u00a0r\u00a0=\u00a0A\u00a0(B\u00a0r) for a secret random r"),
        Message("server", "loop", "Y"),
        Section("Backward"),
        Message("loop", "server", "dY"),
        Message("server", "laptop", "rows of dY; X and W are there"),
        Message("server", "desktop", "rows of dY; X and W are there"),
        Message("laptop", "server", "dX first, then dW"),
        Message("desktop", "server", "dX first, then dW"),
        Message("server", "loop", "dX at once, dW before backward() returns"),
        Section("If a device leaves"),
        End("desktop", "gone"),
        Message("server", "laptop", "only what it had not returned"),
        Message("laptop", "server", "the missing rectangles"),
    ),
)

RESIDENT_PASS = Sequence(
    name="resident-pass",
    title="One batch through layers that stay on two devices, forward and backward",
    lanes=(
        Lane("loop", "Your loop", "PyTorch", "three"),
        Lane("server", "Server", "engine", "server"),
        Lane("first", "Device 1", "layers 0–11", "one"),
        Lane("second", "Device 2", "12–23, head", "two"),
    ),
    steps=(
        Section("Weights: once, and again when they change"),
        Message("server", "first", "layers 0–11"),
        Message("server", "second", "layers 12–23, vocabulary"),
        Section("Forward: chunks of tokens, one after another"),
        Message("loop", "server", "embeddings, labels"),
        Message("server", "first", "chunk 0: x"),
        Message("first", "server", "y; K and V stay on the device"),
        Message("server", "second", "chunk 0: y"),
        Message("server", "first", "meanwhile chunk 1: x"),
        Message("second", "server", "chunk 0: loss per row, no logits"),
        Section("Backward: chunks in reverse"),
        Message("server", "second", "last chunk: y, d loss"),
        Message("second", "server", "dy"),
        Message("server", "first", "last chunk: x, dy"),
        Message("first", "server", "dx"),
        Note("first second", "gradients of weights add up here"),
        Section("End of the pass"),
        Message("first", "server", "sum of gradients, read once"),
        Message("second", "server", "sum of gradients, read once"),
        Note("server", "audit: recompute a sample before results are used"),
        Message("server", "loop", "loss and gradients"),
        Note("loop", "optimizer.step()"),
    ),
)


def drawings() -> dict[str, str]:
    """Return the SVG of every diagram by file name."""
    return {
        "product.svg": sequence.draw(PRODUCT),
        "resident-pass.svg": sequence.draw(RESIDENT_PASS),
        "overview.svg": overview.draw(),
        "overview-narrow.svg": overview.draw_narrow(),
    }


def main() -> None:
    for name, content in drawings().items():
        (ASSETS / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
