"""Sequence diagrams from a short description: lanes, and what happens in order. Narrow, for phones."""

from __future__ import annotations

from dataclasses import dataclass

from docs.diagrams import style

WIDTH = 460
_PAD = 14
_SIZE = 13.5
_LINE = 17
_HEADER = 46


@dataclass(frozen=True)
class Lane:
    key: str
    name: str
    detail: str
    color: str


@dataclass(frozen=True)
class Section:
    title: str


@dataclass(frozen=True)
class Message:
    """An arrow from lane to lane; a weak one is dashed."""

    sender: str
    receiver: str
    text: str
    is_weak: bool = False


@dataclass(frozen=True)
class Note:
    """Something that happens at one lane, or at several at once."""

    lanes: str
    text: str


@dataclass(frozen=True)
class End:
    """The lane ends here."""

    lane: str
    text: str


Step = Section | Message | Note | End


@dataclass(frozen=True)
class Sequence:
    name: str
    title: str
    lanes: tuple[Lane, ...]
    steps: tuple[Step, ...]


def draw(diagram: Sequence) -> str:
    """Return the diagram as SVG."""
    pitch = (WIDTH - 2 * _PAD) / len(diagram.lanes)
    x = {lane.key: _PAD + pitch * (i + 0.5) for i, lane in enumerate(diagram.lanes)}
    color = {lane.key: lane.color for lane in diagram.lanes}
    body: list[str] = []
    ends: dict[str, float] = {}
    y = float(_PAD + _HEADER + 12)
    for step in diagram.steps:
        match step:
            case Section(title):
                y += 24
                body += _section(title, y)
                y += 9
            case Message(sender, receiver, content, is_weak):
                lines = style.wrap(content, _room(x[sender], x[receiver]), _SIZE)
                y += _LINE * len(lines) + 3
                body += _message(x[sender], x[receiver], y, lines, color[sender], is_weak)
                y += 11
            case Note(lanes, content):
                keys = lanes.split()
                drawn, height = _note([x[key] for key in keys], y + 8, content, color[keys[0]], pitch)
                body += drawn
                y += height + 14
            case End(lane, content):
                y += 20
                ends[lane] = y
                body += _end(x[lane], y, content)
                y += 10
    height = y + _PAD - 2
    lifelines = [
        style.path(
            f"M{x[lane.key]:g} {_PAD + _HEADER}V{ends.get(lane.key, height - 10):g}",
            stroke="edge",
            line=1.5,
            dash="2 5",
        )
        for lane in diagram.lanes
    ]
    headers = [part for lane in diagram.lanes for part in _header(lane, x[lane.key], pitch - 8)]
    return style.document(diagram.name, diagram.title, WIDTH, round(height), [*lifelines, *headers, *body])


def _header(lane: Lane, x: float, width: float) -> list[str]:
    return [
        style.rectangle(
            x - width / 2, _PAD, width, _HEADER, fill=f"{lane.color}-fill", stroke=lane.color, radius=8, line=1.25
        ),
        style.text(x, _PAD + 20, lane.name, size=_SIZE, anchor="middle", kind="bold"),
        style.text(x, _PAD + 37, lane.detail, size=11.5, anchor="middle", kind="soft"),
    ]


def _section(title: str, y: float) -> list[str]:
    return [
        style.path(f"M{_PAD} {y - 4:g}H{WIDTH - _PAD}", stroke="edge"),
        style.text(_PAD, y, title + " ", size=12, kind="bold halo", color="soft"),
    ]


def _room(start: float, stop: float) -> float:
    """Return the width of a label: an arrow's own length and what is free beside it."""
    middle = (start + stop) / 2
    return 2 * min(middle - _PAD, WIDTH - _PAD - middle) if abs(start - stop) < 160 else abs(start - stop) + 60


def _message(start: float, stop: float, y: float, lines: list[str], color: str, is_weak: bool) -> list[str]:
    sign = 1 if stop > start else -1
    start, stop = start + sign * 3, stop - sign * 3
    middle = (start + stop) / 2
    half = max(style.measure(line, _SIZE) for line in lines) / 2
    middle = min(max(middle, _PAD + half), WIDTH - _PAD - half)
    labels = [
        style.text(middle, y - 6 - _LINE * (len(lines) - 1 - i), line, size=_SIZE, anchor="middle", kind="halo")
        for i, line in enumerate(lines)
    ]
    return [
        *labels,
        style.path(f"M{start:g} {y:g}H{stop - sign * 5:g}", stroke=color, line=1.75, dash="5 4" if is_weak else ""),
        style.head(stop, y, "right" if sign > 0 else "left", color=color, size=8),
    ]


def _note(at: list[float], y: float, content: str, color: str, pitch: float) -> tuple[list[str], float]:
    widest = max(at) - min(at) + pitch - 8
    wanted = style.measure(content, _SIZE) + 20
    width = min(max(widest, min(wanted, 2.1 * pitch)), WIDTH - 2 * _PAD)
    lines = style.wrap(content, width - 18, _SIZE)
    height = _LINE * len(lines) + 11
    left = min(max((min(at) + max(at)) / 2 - width / 2, _PAD), WIDTH - _PAD - width)
    labels = [
        style.text(left + width / 2, y + 18 + _LINE * i, line, size=_SIZE, anchor="middle")
        for i, line in enumerate(lines)
    ]
    return [style.rectangle(left, y, width, height, fill=f"{color}-fill", radius=6), *labels], height


def _end(x: float, y: float, content: str) -> list[str]:
    half = style.measure(content, _SIZE) / 2
    middle = min(max(x, _PAD + half), WIDTH - _PAD - half)
    return [
        style.text(middle, y - 11, content, size=_SIZE, anchor="middle", kind="halo", color="bad"),
        style.path(f"M{x - 6:g} {y - 6:g}l12 12m0 -12l-12 12", stroke="bad", line=2.5),
    ]
