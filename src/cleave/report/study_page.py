"""A study as one HTML page without any other file or request: claims, charts, and a table under every chart."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from cleave.report.chart import Chart, Kind, Panel, Series
from cleave.report.claim import Claim, Comparison, count_text, range_text, systems_of, where_text
from cleave.report.study_style import STYLE

_BOLD = re.compile(r"\*\*(.+?)\*\*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPage:
    title: str
    date: str
    version: str
    command: str
    setting: str
    """The center of the study, in words."""
    notes: tuple[str, ...]
    """What a reader has to know before any figure."""
    systems: Mapping[str, str]
    """How each system runs in the center of the study, or why it cannot."""
    claims: tuple[Claim, ...]
    charts: tuple[Chart, ...]


def as_html(page: StudyPage, draw: Callable[[Panel], str], kinds: Mapping[str, Kind]) -> str:
    """`draw` makes the SVG of a panel."""
    links = [("claims", "Claims"), *((chart.name, chart.title) for chart in page.charts), ("systems", "Systems")]
    body = [
        f"<header><h1>{_text(page.title)}</h1><p>{_text(page.setting)}.</p>",
        "".join(f"<p>{_text(note)}</p>" for note in page.notes),
        f"<p class=made>Cleave {_text(page.version)}, {_text(page.date)}: <code>{_text(page.command)}</code></p>",
        "<nav>" + " ".join(f"<a href=#{name}>{_text(title)}</a>" for name, title in links) + "</nav></header>",
        _claims(page.claims),
        *(_chart(chart, draw) for chart in page.charts),
        _systems(page.systems, kinds),
    ]
    return (
        '<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width,'
        f'initial-scale=1"><title>{_text(page.title)}</title><style>{STYLE}</style></head><body><main>\n'
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _claims(claims: Sequence[Claim]) -> str:
    systems = systems_of(claims)
    head = "".join(f"<th>{_text(one)}: holds in</th><th>factors</th>" for one in systems)
    rows = [
        f"<tr>{_th(claim.published if number == 0 else '')}<td>{_text(against)}</td>"
        + "".join(_judged(found.get(one)) for one in systems)
        + "</tr>"
        for claim in claims
        for number, (against, found) in enumerate(claim.by_opponent().items())
    ]
    details = [
        f"<details><summary>{_text(claim.name)}: every setting</summary><p>{_text(claim.rule)}</p>"
        + "".join(_findings(found) for found in claim.comparisons)
        + "</details>"
        for claim in claims
    ]
    return (
        "<section id=claims><h2>Published claims, and what is found here</h2><p>What arXiv:2512.22142 publishes, "
        "judged in every setting of this report. A factor above 1 favors Cleave.</p>"
        f"<div class=wide><table class=claims><thead><tr><th>published</th><th>against</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{''.join(details)}</section>"
    )


def _judged(found: Comparison | None) -> str:
    return f"<td class={_verdict(found)}>{count_text(found)}</td><td>{_text(range_text(found))}</td>"


def _verdict(found: Comparison | None) -> str:
    if found is None or not found.findings:
        return "nothing"
    return "partly" if found.held and found.failed else "yes" if found.held else "no"


def _findings(found: Comparison) -> str:
    apart = f"<li>Not compared: {_text(found.not_compared)}" if found.not_compared else ""
    held, failed = (_bold(where_text(found.findings, holds=holds)) for holds in (True, False))
    return (
        f"<h4>{_text(found.system)} against {_text(found.against)}</h4><ul><li>Holds in {count_text(found)}: {held}"
        f"<li>Does not hold in: {failed}{apart}</ul>"
    )


def _chart(chart: Chart, draw: Callable[[Panel], str]) -> str:
    panels = "".join(
        f"<figure>{draw(panel)}<figcaption>{_text(panel.setting)}.</figcaption>"
        f"<details open><summary>Table</summary><div class=wide>{_table(panel)}</div>{_reasons(panel)}</details>"
        "</figure>"
        for panel in chart.panels
    )
    return (
        f"<section id={chart.name}><h2>{_text(chart.title)}</h2><p>{_text(chart.says)}</p>"
        f"<div class=panels>{panels}</div></section>"
    )


def _table(panel: Panel) -> str:
    head = "".join(f"<th>{_text(label)}</th>" for label in panel.labels)
    rows = "".join(
        f"<tr class={one.kind}>{_th(one.name)}"
        + "".join(f"<td{' class=none' if mark.y is None else ''}>{_text(mark.text)}</td>" for mark in one.marks)
        + "</tr>"
        for one in panel.series
    )
    return f"<table><thead><tr><th>{_text(panel.x_label)}</th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _reasons(panel: Panel) -> str:
    """Why values are missing; reasons that differ in numbers alone are told once."""
    said = "".join(f"<li><b>{_text(one.name)}</b> {_text(why)}" for one in panel.series for why in _whys(one, panel))
    return f"<ul class=why>{said}</ul>" if said else ""


def _whys(series: Series, panel: Panel) -> list[str]:
    missing = [(mark, label) for mark, label in zip(series.marks, panel.labels, strict=True) if mark.y is None]
    found: list[str] = []
    for (text, _), same in groupby(missing, key=lambda pair: (pair[0].text, _shape_of(pair[0].why))):
        members = list(same)
        first, at = members[0]
        where = f"at {at}: " if len({mark.why for mark, _ in members}) > 1 else ""
        why = f" ({where}{first.why})" if first.why else ""
        found.append(f"at {', '.join(label for _, label in members)}: {text}{why}")
    return found


def _shape_of(why: str) -> str:
    """A reason without its numbers."""
    return re.sub(r"[\d.,]+", "#", why)


def _systems(systems: Mapping[str, str], kinds: Mapping[str, Kind]) -> str:
    rows = "".join(
        f"<tr class={kinds.get(name, 'rival')}>{_th(name)}<td class=words>{_text(how)}</td></tr>"
        for name, how in systems.items()
    )
    return (
        "<section id=systems><h2>Systems</h2><p>How each runs in the center of the study, or why it cannot.</p>"
        f"<div class=wide><table><tbody>{rows}</tbody></table></div></section>"
    )


def _th(text: str) -> str:
    return f"<th scope=row>{_text(text)}</th>"


def _text(text: str) -> str:
    return html.escape(text, quote=False)


def _bold(text: str) -> str:
    return _BOLD.sub(r"<b>\1</b>", _text(text))
