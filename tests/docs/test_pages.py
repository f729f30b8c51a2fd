"""Every shell and Python block of the README and the guides runs as printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.pages import Page, PageError, all_pages, parse_page, read_page
from tests.docs.runner import prepared, save_small_model

MOST_EXCUSED = 12
"""Blocks that may stay unrun, of all pages together: what needs another machine, an init system or an engine."""
_SERVER = '<!-- run: background until "x" -->\n```sh\ncleave train\n```\n'
PAGES = [read_page(path) for path in all_pages()]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    made: list[Path] = []

    def make() -> Path:
        if not made:
            made.append(save_small_model(tmp_path_factory.mktemp("small-model") / "model"))
        return made[0]

    return make


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.is_slow else [])
        for page in PAGES
        if any(not block.not_run for block in page.blocks)
    ],
)
def test_every_block_of_a_page_runs_as_printed(page: Page, tmp_path: Path, small_model: Callable[[], Path]) -> None:
    with prepared(page, tmp_path, small_model) as runner:
        runner.run()


def test_few_blocks_stay_unrun_and_each_for_a_reason() -> None:
    excused = [
        f"{page.name}, line {block.line}: {block.not_run}" for page in PAGES for block in page.blocks if block.not_run
    ]
    assert len(excused) <= MOST_EXCUSED, "\n".join(excused)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("```bash\nls\n```\n", "tag shell blocks sh"),
        ("```\n$ ls\n```\n", "tag it sh"),
        ("```text\ncleave train\n```\n", "tag it sh"),
        ("<!-- run: twice -->\n```sh\nls\n```\n", "'twice'"),
        ("<!-- not run: no -->\n```sh\nls\n```\n", "reason"),
        ("<!-- run: join -->\n```sh\ncleave join here:1\n```\n", "no server"),
        (_SERVER + "## Next\n<!-- run: join -->\n```sh\ncleave join here:1\n```\n", "no server"),
        ("<!-- run: continued -->\n```python\nx = 1\n```\n", "continued"),
        ('<!-- run: until "x" -->\nprose\n```sh\nls\n```\n', "right above"),
        ('<!-- run: until "x" -->\n', "no block"),
        ("```sh\nls\n", "no end"),
    ],
)
def test_a_page_that_would_escape_the_harness_is_refused(text: str, fact: str) -> None:
    with pytest.raises(PageError, match=fact):
        parse_page("page.md", text)


def test_directives_change_how_a_block_runs() -> None:
    text = (
        'prose\n\n<!-- run: background until "devices join" -->\n```sh\ncleave train\n```\n\n'
        "- item\n\n    <!-- run: join -->\n    ```sh\n    cleave join here:1 --memory 1GB\n    ```\n"
        "<!-- not run: needs a phone -->\n\n```python\ncall()\n```\n"
    )
    server, device, phone = parse_page("page.md", text).blocks
    assert (server.background, server.until, server.line) == (True, "devices join", 5)
    assert device.join
    assert device.code == "cleave join here:1 --memory 1GB\n"
    assert phone.not_run == "needs a phone"
