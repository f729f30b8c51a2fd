"""A browser for the tests of pages: Debian's Chromium, driven by Playwright. In CI it must be there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
ELSEWHERE = "server.test"
"""This machine, by a name of which browsers do not know that it is this machine."""
_FLAGS = (
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-unsafe-webgpu",
    f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1",
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
    """A page that must not report an error in its console, nor ask any other machine for anything."""
    context = browser.new_context(ignore_https_errors=True)
    context.set_default_timeout(GUARD_MS)
    opened, errors, hosts = context.new_page(), list[str](), set[str | None]()
    context.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda fault: errors.append(str(fault)))
    yield opened
    context.close()
    assert not errors
    assert hosts <= {"127.0.0.1", ELSEWHERE, None}, "None: pages without an address"


def by_keyboard(page: Page) -> list[str]:
    """Press Tab through the whole page; return the ids or orders of what got the focus, which must be visible."""
    reached = list[str]()
    while True:
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => {
                const focused = document.activeElement, style = getComputedStyle(focused);
                if (focused === document.body) return null;
                return [focused.dataset.order || focused.id || focused.className, style.outlineStyle];
            }"""
        )
        if found is None or found[0] in reached:
            return reached
        name, outline = found
        assert outline != "none", f"nobody sees that {name} has the focus"
        reached.append(name)
