"""What axe says of a page: roles, names, contrast, order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

_AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"


def complaints(page: Page) -> list[str]:
    """Violations of WCAG 2 A and AA, one line for each."""
    if not _AXE.exists():
        assert not os.environ.get("CI"), "CI must have axe: see `make check-pages`"
        pytest.skip("axe-core is not installed: make check-pages")
    page.evaluate(f"() => {{ {_AXE.read_text()} ; }}")
    found = page.evaluate("axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })")
    return [f"{one['id']}: {node['html']}" for one in found["violations"] for node in one["nodes"]]
