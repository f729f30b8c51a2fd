"""Colors, fonts and small pieces of SVG that all diagrams share.

Every diagram brings its own background, so it can be read on a white and on a black page. As an image (README) it
follows the reader's system; inlined into the site it follows the site's switch.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_CHARACTER = 0.58
"""Mean width of a character, in units of the font size."""

_LIGHT = {
    "card": "#fcfdff",
    "edge": "#d3dae4",
    "ink": "#18212f",
    "soft": "#566276",
    "panel": "#f1f4f9",
    "server": "#2f5fd0",
    "server-fill": "#e5edff",
    "one": "#0b8377",
    "one-fill": "#d3f1ec",
    "two": "#b8610b",
    "two-fill": "#fdead0",
    "three": "#7a45c4",
    "three-fill": "#ece1fb",
    "bad": "#c4314b",
}
_DARK = {
    "card": "#10151d",
    "edge": "#323d4c",
    "ink": "#eaf0f8",
    "soft": "#9dabbe",
    "panel": "#18202b",
    "server": "#86adff",
    "server-fill": "#1c2f57",
    "one": "#3fcdbb",
    "one-fill": "#0f3d3a",
    "two": "#f3a955",
    "two-fill": "#46300f",
    "three": "#bd9bf8",
    "three-fill": "#36245a",
    "bad": "#ff7b8f",
}


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colors.items())


_CSS = f"""
.cleave{{{_variables(_LIGHT)}font-family:{FONT}}}
@media (prefers-color-scheme:dark){{.cleave{{{_variables(_DARK)}}}}}
[data-md-color-scheme=default] .cleave{{{_variables(_LIGHT)}}}
[data-md-color-scheme=slate] .cleave{{{_variables(_DARK)}}}
.cleave text{{fill:var(--ink)}}
.cleave .soft{{fill:var(--soft)}}
.cleave .bold{{font-weight:650}}
.cleave .halo{{paint-order:stroke;stroke:var(--card);stroke-width:5px;stroke-linejoin:round}}
"""


def document(name: str, title: str, width: float, height: float, body: Iterable[str]) -> str:
    """Wrap a drawing in its card; `name` keeps ids apart where several are on one page, `title` is read aloud."""
    lines = [
        f'<svg class="cleave" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-labelledby="{name}-title">',
        f'<title id="{name}-title">{escape(title)}</title>',
        f"<style>{_CSS}</style>",
        rectangle(0.5, 0.5, width - 1, height - 1, fill="card", stroke="edge", radius=12),
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def rectangle(
    x: float, y: float, width: float, height: float, *, fill: str, stroke: str = "", radius: float = 4, line: float = 1
) -> str:
    border = f' stroke="var(--{stroke})" stroke-width="{line:g}"' if stroke else ""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
    return f'<rect {place} fill="var(--{fill})"{border}/>'


def text(
    x: float, y: float, content: str, *, size: float = 13, anchor: str = "start", kind: str = "", color: str = ""
) -> str:
    style = f' style="fill:var(--{color})"' if color else ""
    name = f' class="{kind}"' if kind else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{name}{style}>{escape(content)}</text>'
    )


def path(route: str, *, stroke: str, line: float = 1.5, dash: str = "", fill: str = "none") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    inside = fill if fill == "none" else f"var(--{fill})"
    return (
        f'<path d="{route}" fill="{inside}" stroke="var(--{stroke})" stroke-width="{line:g}" '
        f'stroke-linecap="round" stroke-linejoin="round"{dashes}/>'
    )


def head(x: float, y: float, direction: str, *, color: str, size: float = 6) -> str:
    """Draw the head of an arrow whose tip is at (x, y)."""
    back, side = size, size * 0.62
    points = {
        "right": [(x, y), (x - back, y - side), (x - back, y + side)],
        "left": [(x, y), (x + back, y - side), (x + back, y + side)],
        "down": [(x, y), (x - side, y - back), (x + side, y - back)],
        "up": [(x, y), (x - side, y + back), (x + side, y + back)],
    }[direction]
    corners = " ".join(f"{a:g},{b:g}" for a, b in points)
    return f'<polygon points="{corners}" fill="var(--{color})"/>'


def measure(content: str, size: float) -> float:
    """Estimate the width of a text; the fonts of readers differ."""
    return len(content) * size * _CHARACTER


def wrap(content: str, width: float, size: float) -> list[str]:
    """Break a text into lines; no-break spaces hold."""
    lines = [""]
    for word in content.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and measure(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
