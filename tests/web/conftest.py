"""A browser for the tests of pages: Debian's Chromium, driven by Playwright. In CI it must be there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-unsafe-webgpu",
)
GUARD_MS = 120_000


@pytest.fixture(scope="module")  # while Playwright is there, its event loop runs in this thread: no async test could
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        assert not os.environ.get("CI"), "CI must have Chromium: see .ci/packages"
        pytest.skip("chromium is not installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that must not report an error in its console."""
    context = browser.new_context()
    context.set_default_timeout(GUARD_MS)
    opened, errors = context.new_page(), list[str]()
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda fault: errors.append(str(fault)))
    yield opened
    context.close()
    assert not errors
