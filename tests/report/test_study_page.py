"""The page of a study stands alone, and hides nothing that is missing."""

from __future__ import annotations

import re

import pytest

from cleave.report.chart import NO_FIT, Chart, Mark, Panel, Series, series_of
from cleave.report.chart_plot import as_png, as_svg
from cleave.report.claim import Claim, Comparison, Finding, as_markdown, where_text
from cleave.report.study_page import StudyPage, as_html

ABSENT = Mark(y=None, text=NO_FIT, why="a stage needs 9 GB <of> memory")
PANEL = Panel(
    title="tiny & small",
    setting="128 tokens; seed 1",
    x_label="devices",
    y_label="seconds",
    places=(2.0, 4.0, 64.0),
    labels=("2", "4", "64"),
    series=(
        Series(name="cleave", kind="ours", marks=tuple(Mark(y=y, text=f"{y:g} s") for y in (30.0, 7.0, 1.0))),
        Series(name="gpipe", kind="rival", marks=(ABSENT, Mark(y=9.0, text="9 s"), Mark(y=0.01, text="10 ms"))),
        Series(name="a100", kind="cloud", marks=(Mark(y=2.0, text="2 s"),) * 3),
    ),
)
CHART = Chart(name="devices", title="Time", says="Seconds.", panels=(PANEL, PANEL), rows=())
FINDINGS = tuple(
    Finding(model="opt-125m", devices=devices, factor=factor, holds=factor >= 4)
    for devices, factor in ((2, 1.0), (4, 5.0), (8, 9.0), (16, 3.0))
)
CLAIM = Claim(
    name="Speed",
    published="4 times faster",
    rule="Seconds over seconds.",
    comparisons=(
        Comparison(
            system="cleave", against="gpipe", findings=FINDINGS, not_compared="1 setting in which gpipe does not fit"
        ),
    ),
)


def page() -> str:
    kinds = series_of((CHART,))
    study = StudyPage(
        title="A study",
        date="2026-01-02",
        version="1",
        command="cleave simulate --report x",
        setting="128 tokens",
        notes=("Simulated.",),
        systems={"cleave": "3 stages"},
        claims=(CLAIM,),
        charts=(CHART,),
    )
    return as_html(study, lambda panel: as_svg(panel, kinds), kinds)


def test_a_page_requests_nothing() -> None:
    text = page()
    assert not re.search(r"<(script|link|img|iframe|object|embed)\b|@import", text)
    assert not re.search(r"url\((?!#)", text)
    references = re.findall(r"""(?:href|src|srcset)\s*=\s*["']?([^"'\s>]+)""", text)
    assert references
    assert all(reference.startswith("#") for reference in references)


def test_every_panel_has_its_drawing_its_setting_and_its_table() -> None:
    text = page()
    assert text.count("<svg") == text.count("<figcaption>") == len(CHART.panels)
    assert text.count(f"<figcaption>{PANEL.setting}") == len(CHART.panels)
    for mark in (mark for one in PANEL.series for mark in one.marks):
        assert f">{mark.text}</td>" in text


def test_what_is_missing_is_said_with_its_reason_and_drawn() -> None:
    text = page()
    assert text.count(f"at 2: {NO_FIT} (a stage needs 9 GB &lt;of&gt; memory)") == len(CHART.panels)
    svg = as_svg(PANEL, series_of((CHART,)))
    assert svg.count(">gpipe</text>") == 2, "in the legend, and beside its crosses"
    assert svg.count(">cleave</text>") == 1


def test_drawings_take_their_colors_from_the_page() -> None:
    svg = as_svg(PANEL, series_of((CHART,)))
    assert "#fd0" not in svg
    for variable in ("var(--ink)", "var(--grid)", "var(--line-0)", "var(--line-1)", "var(--grey-0)"):
        assert variable in svg
        assert f"{variable[4:-1]}:#" in page()


def test_the_same_panel_is_drawn_the_same() -> None:
    kinds = series_of((CHART,))
    assert as_svg(PANEL, kinds) == as_svg(PANEL, kinds)
    assert as_png(CHART, kinds).startswith(b"\x89PNG")


def test_neighbors_in_devices_are_told_together() -> None:
    assert where_text(FINDINGS, holds=True) == "**opt-125m** 4 to 8 devices (5x to 9x)"
    assert where_text(FINDINGS, holds=False) == "**opt-125m** 2 devices (1x), 16 devices (3x)"
    assert where_text(FINDINGS[:1], holds=True) == "none"


@pytest.mark.parametrize(
    "fact", ["2026-01-02", "`cleave simulate`", "2 of 4", "1 to 9, median 4", "1 setting in which"]
)
def test_markdown_has_the_date_the_command_and_the_counts(fact: str) -> None:
    assert fact in as_markdown((CLAIM,), date="2026-01-02", command="cleave simulate", setting="128 tokens")
