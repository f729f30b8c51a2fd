"""The committed diagrams are what their descriptions draw, and need nothing from other hosts."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from docs.diagrams.draw import ASSETS, drawings

NAMES = sorted(drawings())


@pytest.mark.parametrize("name", NAMES)
def test_committed_diagrams_are_what_the_script_draws(name: str) -> None:
    committed = (ASSETS / name).read_text(encoding="utf-8")
    assert committed == drawings()[name], "run python -m docs.diagrams.draw"


@pytest.mark.parametrize("name", NAMES)
def test_diagrams_are_well_formed_and_refer_to_no_other_file(name: str) -> None:
    drawing = drawings()[name]
    root = ET.fromstring(drawing)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert drawing.count("http") == 1, "the namespace alone"
    assert "<script" not in drawing


@pytest.mark.parametrize("name", NAMES)
def test_texts_lie_inside_the_card(name: str) -> None:
    root = ET.fromstring(drawings()[name])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 < float(text.attrib["x"]) < width, text.text
        assert 0 < float(text.attrib["y"]) < height, text.text
