"""The picture of the whole: a server, its devices, and the two grains of work. Shown in the README and on the site."""

from __future__ import annotations

from itertools import pairwise

from docs.diagrams import style

WIDTH, HEIGHT = 840, 584
_MARGIN = 24
_TITLE = (
    "A server with a PyTorch loop, model and optimizer; devices compute blocks of matrix products, "
    "or keep layers while chunks of tokens flow through them"
)
_PROMISES = ("Devices dial in over one port.", "They may join and leave at any time.")
_COLORS = ("one", "two", "three")
_NAMES = ("laptop", "desktop", "mini PC")
_PANEL_TOP, _PANEL_HEIGHT, _PANEL_WIDTH = 138, 392, 388
_SCREEN_TOP = 400
_FLOW_END = _SCREEN_TOP - 6


def draw() -> str:
    """Draw server and both grains side by side."""
    right = WIDTH - _MARGIN - _PANEL_WIDTH
    links = [
        style.path(f"M{x + _PANEL_WIDTH / 2:g} 108V{_PANEL_TOP}", stroke="server", line=1.75) for x in (_MARGIN, right)
    ]
    body = [*_server(WIDTH - 2 * _MARGIN, chips_at=(404, 48)), *links, *_products(_MARGIN), *_layers(right)]
    body.append(_promise(WIDTH / 2, HEIGHT - 22, " ".join(_PROMISES)))
    return style.document("overview", _TITLE, WIDTH, HEIGHT, body)


def draw_narrow() -> str:
    """Draw the same for phones: the grains below each other."""
    width, down, second = _PANEL_WIDTH + 2 * _MARGIN, 46, _PANEL_HEIGHT + 20
    height = _PANEL_TOP + down + second + _PANEL_HEIGHT + 70
    body = [
        *_server(_PANEL_WIDTH, chips_at=(44, 104), height=136),
        f'<g transform="translate(0 {down})">',
        *_products(_MARGIN),
        f'<g transform="translate(0 {second})">',
        *_layers(_MARGIN),
        "</g></g>",
        *(_promise(width / 2, height - 40 + 22 * i, line) for i, line in enumerate(_PROMISES)),
    ]
    return style.document("overview-narrow", _TITLE, width, height, body)


def _promise(x: float, y: float, content: str) -> str:
    return style.text(x, y, content, size=17, anchor="middle", kind="soft")


def _server(width: float, *, chips_at: tuple[float, float], height: float = 84) -> list[str]:
    x = y = _MARGIN
    left, top = chips_at
    chips: list[str] = []
    for name in ("training loop", "model", "optimizer"):
        wide = style.measure(name, 17) + 22
        chips += [
            style.rectangle(left, top, wide, 36, fill="card", stroke="server", radius=18, line=1.25),
            style.text(left + wide / 2, top + 24, name, size=17, anchor="middle"),
        ]
        left += wide + 10
    return [
        style.rectangle(x, y, width, height, fill="server-fill", stroke="server", radius=12, line=1.75),
        *_rack(x + 24, y + 20),
        style.text(x + 84, y + 39, "Server", size=24, kind="bold"),
        style.text(x + 84, y + 63, "your machine, with PyTorch", size=16, kind="soft"),
        *chips,
    ]


def _rack(x: float, y: float) -> list[str]:
    shelves = [
        style.rectangle(x, y + 16 * i, 40, 12, fill="card", stroke="server", radius=3, line=1.5) for i in range(3)
    ]
    lights = [f'<circle cx="{x + 32:g}" cy="{y + 6 + 16 * i:g}" r="2" fill="var(--one)"/>' for i in range(3)]
    return shelves + lights


# ------------------------------------------------------------------------------------------------ blocks of a product


def _products(x: float) -> list[str]:
    return [
        *_panel(x, "gemm", "blocks of one product", "Any PyTorch model. Every block is checked."),
        *_product(x + 30, 230),
        *(
            part
            for i, center in enumerate(_centers(x))
            for part in (*_exchange(center, _COLORS[i], i == 0), *_screen(center, i, _block(center, i)))
        ),
    ]


def _product(x: float, y: float) -> list[str]:
    """A x B = C, cut into three blocks, with the strips that the first of them needs."""
    top, left = 52, 48  # of C: the first block
    a, b, c = x, x + 118, x + 246
    return [
        style.rectangle(a, y, 62, 92, fill="card", stroke="soft", radius=3, line=1.25),
        style.rectangle(a, y, 62, top, fill="one-fill", stroke="one", radius=3, line=1.75),
        style.text(a + 31, y + 33, "A", size=19, anchor="middle", kind="bold"),
        style.text(a + 90, y + 54, "×", size=22, anchor="middle", kind="soft"),
        style.rectangle(b, y + 15, 76, 62, fill="card", stroke="soft", radius=3, line=1.25),
        style.rectangle(b, y + 15, 32, 62, fill="one-fill", stroke="one", radius=3, line=1.75),
        style.text(b + 54, y + 53, "B", size=19, anchor="middle", kind="bold"),
        style.text(b + 102, y + 54, "=", size=22, anchor="middle", kind="soft"),
        style.rectangle(c, y, left, top, fill="one-fill", stroke="one", radius=3, line=1.75),
        style.text(c + left / 2, y + 33, "C", size=19, anchor="middle", kind="bold"),
        style.rectangle(c, y + top, left, 92 - top, fill="three-fill", stroke="three", radius=3, line=1.75),
        style.rectangle(c + left, y, 76 - left + 24, 92, fill="two-fill", stroke="two", radius=3, line=1.75),
    ]


def _exchange(center: float, color: str, is_labeled: bool) -> list[str]:
    """Operands down, in a thick arrow; the result up, in a thin one: links are faster down than up."""
    top, bottom = 340, _FLOW_END
    arrows = [
        style.path(f"M{center - 9:g} {top}V{bottom - 9}", stroke=color, line=6),
        style.head(center - 9, bottom, "down", color=color, size=14),
        style.path(f"M{center + 13:g} {bottom}V{top + 7}", stroke=color, line=2),
        style.head(center + 13, top, "up", color=color, size=9),
    ]
    labels = [
        style.text(center + 58, top + 22, "strips ↓", size=15, anchor="middle", kind="soft"),
        style.text(center + 58, top + 41, "block ↑", size=15, anchor="middle", kind="soft"),
    ]
    return arrows + labels * is_labeled


def _block(center: float, index: int) -> list[str]:
    width, height = ((34, 36), (42, 58), (32, 28))[index]
    color = _COLORS[index]
    y = _SCREEN_TOP + 39 - height / 2
    return [
        style.rectangle(center - width / 2, y, width, height, fill=f"{color}-fill", stroke=color, radius=3, line=1.75)
    ]


# ------------------------------------------------------------------------------------------------ resident layers


def _layers(x: float) -> list[str]:
    centers, lane = _centers(x), 304
    first, last = centers[0] - 13, centers[-1] + 13
    parts = [
        *_panel(x, "resident", "layers that stay", "Fewest bytes: only chunks of tokens travel."),
        *(_chunk(first, lane - 68 + 15 * i) for i in range(3)),
        style.text(first + 20, lane - 48, "chunks of tokens", size=15, kind="soft"),
        style.path(f"M{first:g} {lane - 18:g}V{_FLOW_END - 8:g}", stroke="server", line=2.25),
        style.head(first, _FLOW_END, "down", color="server", size=10),
        style.path(f"M{first - 10:g} {_FLOW_END:g}V{lane + 12:g}", stroke="server", line=2, dash="4 4"),
        style.head(first - 10, lane + 4, "up", color="server", size=9),
        style.path(f"M{last:g} {_FLOW_END:g}V{lane + 12:g}", stroke="server", line=2.25),
        style.head(last, lane + 4, "up", color="server", size=10),
        style.path(f"M{last + 10:g} {lane + 4:g}V{_FLOW_END - 8:g}", stroke="server", line=2, dash="4 4"),
        style.head(last + 10, _FLOW_END, "down", color="server", size=9),
        style.text(last + 5, lane - 8, "loss", size=17, anchor="middle", kind="bold"),
    ]
    for before, after in pairwise(centers):
        parts += _hop(before + 13, after - 13, lane)
    parts += [
        style.text((centers[0] + centers[1]) / 2, lane - 14, "forward", size=15, anchor="middle", color="server"),
        style.text((centers[1] + centers[2]) / 2, lane + 34, "back", size=15, anchor="middle", color="server"),
    ]
    for i, center in enumerate(centers):
        parts += _screen(center, i, _bars(center, i))
    return parts


def _chunk(x: float, y: float) -> str:
    return style.rectangle(x - 10, y, 20, 11, fill="server-fill", stroke="server", radius=3, line=1.5)


def _hop(start: float, stop: float, lane: float) -> list[str]:
    """From one device to the next by way of the server: forward solid, the way back dashed inside it."""
    bottom, inner, bend = _FLOW_END, 10, 8
    return [
        style.path(
            f"M{start:g} {bottom}V{lane + bend:g}q0 -{bend} {bend} -{bend}"
            f"H{stop - bend:g}q{bend} 0 {bend} {bend}V{bottom - 8}",
            stroke="server",
            line=2.25,
        ),
        style.head(stop, bottom, "down", color="server", size=10),
        _chunk((start + stop) / 2, lane - 5.5),
        style.path(
            f"M{stop - inner:g} {bottom}V{lane + inner + bend:g}q0 -{bend} -{bend} -{bend}"
            f"H{start + inner + bend:g}q-{bend} 0 -{bend} {bend}V{bottom - 8}",
            stroke="server",
            line=2,
            dash="4 4",
        ),
        style.head(start + inner, bottom, "down", color="server", size=9),
    ]


def _bars(center: float, index: int) -> list[str]:
    count, color = (3, 5, 2)[index], _COLORS[index]
    y = _SCREEN_TOP + 39 - 12 * count / 2 + 1
    return [
        style.rectangle(center - 30, y + 12 * i, 60, 9, fill=f"{color}-fill", stroke=color, radius=3, line=1.5)
        for i in range(count)
    ]


# ------------------------------------------------------------------------------------------------ both


def _panel(x: float, name: str, title: str, promise: str) -> list[str]:
    wide = style.measure(name, 17) + 34
    return [
        style.rectangle(x, _PANEL_TOP, _PANEL_WIDTH, _PANEL_HEIGHT, fill="panel", stroke="edge", radius=12),
        style.rectangle(x + 20, _PANEL_TOP + 18, wide, 28, fill="server", radius=14),
        style.text(x + 20 + wide / 2, _PANEL_TOP + 38, name, size=17, anchor="middle", kind="bold", color="card"),
        style.text(x + 32 + wide, _PANEL_TOP + 39, title, size=19, kind="bold"),
        style.text(x + 20, _PANEL_TOP + 70, promise, size=16, kind="soft"),
    ]


def _centers(x: float) -> list[float]:
    return [x + 72 + 122 * i for i in range(3)]


def _screen(center: float, index: int, content: list[str]) -> list[str]:
    """A device: a screen with its work, on a foot of its own kind."""
    y, width, height = _SCREEN_TOP, 88, 78
    bottom = y + height
    foot = (
        [style.rectangle(center - 54, bottom + 3, 108, 8, fill="soft", radius=4)],
        [
            style.rectangle(center - 5, bottom, 10, 10, fill="soft", radius=0),
            style.rectangle(center - 24, bottom + 8, 48, 5, fill="soft", radius=2.5),
        ],
        [style.rectangle(center - 30, bottom + 4, 60, 10, fill="soft", radius=3)],
    )[index]
    return [
        *foot,
        style.rectangle(center - width / 2, y, width, height, fill="card", stroke="soft", radius=7, line=2),
        *content,
        style.text(center, bottom + 37, _NAMES[index], size=17, anchor="middle"),
    ]
