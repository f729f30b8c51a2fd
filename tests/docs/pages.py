"""The fenced blocks of a Markdown page, and the directives that say how to run them.

`sh` and `python` blocks are run, in order. An HTML comment right above a block changes how:

    <!-- run: until "TEXT" -->             stop the block, as Ctrl-C does, once it has printed TEXT
    <!-- run: background until "TEXT" -->  go on once it has printed TEXT, and stop it at the end of the section
    <!-- run: join -->                     put the join command that the server in the background printed in place of
                                           the block's own, keep its options, and go on once a step was computed with
                                           the device's help; at the end of the section, the device must have done
                                           tasks
    <!-- run: continued -->                (python) go on where the block before ended, in the same script
    <!-- not run: REASON -->               do not run the block

A section ends at the next heading of level 2. Any other directive is an error, and so is a block that escapes the
harness: a shell block with another language tag, or a command in a block without one. `tests/docs/runner.py` runs
blocks.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)")
_COMMENT = re.compile(r"<!--\s*(?P<kind>run|not run)\s*:\s*(?P<text>.*?)\s*-->")
_RUN = re.compile(r'(?P<word>join|continued)|(?P<background>background )?until "(?P<until>[^"]+)"')
_LANGUAGES = ("sh", "python")
_ESCAPING_LANGUAGES = {"bash", "shell", "console", "zsh", "py", "python3", "pycon", "powershell"}
_LOOKS_LIKE_A_COMMAND = re.compile(r"^(\$ |(cleave|pip|make|python|docker|sudo|git|systemctl) [a-z.])")


class PageError(Exception):
    """A page that the harness cannot run as it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block to run, or to leave out for a reason."""

    language: Literal["sh", "python"]
    code: str
    line: int
    """Line of the page on which the code starts, counted from 1."""
    section: int = 0
    """Headings of level 2 above the block."""
    until: str = ""
    """Text that ends the wait for the block; empty if the block ends by itself."""
    background: bool = False
    join: bool = False
    continued: bool = False
    not_run: str = ""
    """The reason for not running it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    name: str
    """Its path in the repository."""
    blocks: tuple[Block, ...]

    @property
    def is_slow(self) -> bool:
        """Whether the page starts servers or other commands that only an interrupt ends."""
        return any(block.until and not block.not_run for block in self.blocks)

    def mentions(self, text: str) -> bool:
        return any(text in block.code for block in self.blocks)


def all_pages() -> list[Path]:
    """List every page whose blocks are run. `tests/examples` runs those of examples/README.md, one test for each."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_page(path: Path) -> Page:
    return parse_page(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def parse_page(name: str, text: str) -> Page:
    """Find the blocks of a page. Raises PageError if the harness cannot run it as it is written."""
    lines = text.splitlines()
    blocks: list[Block] = []
    directive: tuple[str, int] | None = None
    number = section = 0
    while number < len(lines):
        line, number = lines[number], number + 1
        section += line.startswith("## ")
        if comment := _COMMENT.search(line):
            _require(directive is None, name, number, "the directive above it has no block")
            directive = (f"{comment['kind']}: {comment['text']}", number)
            continue
        if fence := _FENCE.match(line):
            first = number
            while number < len(lines) and not lines[number].strip().startswith(fence["marks"]):
                number += 1
            _require(number < len(lines), name, first, "this block has no end")
            code = textwrap.dedent("\n".join(lines[first:number])) + "\n"
            number += 1
            language = fence["language"].lower()
            if language in _LANGUAGES:
                blocks.append(replace(_block(language, code, first + 1, directive, name), section=section))
                directive = None
            else:
                _check_that_nothing_escapes(language, code, name, first)
        if line.strip():
            _require(directive is None, name, number, "a directive must stand right above an sh or python block")
    _require(directive is None, name, number, "the last directive has no block")
    _check_order(blocks, name)
    return Page(name=name, blocks=tuple(blocks))


def _block(
    language: Literal["sh", "python"], code: str, line: int, directive: tuple[str, int] | None, page: str
) -> Block:
    if directive is None:
        return Block(language=language, code=code, line=line)
    kind, _, text = directive[0].partition(": ")
    if kind == "not run":
        _require(len(text) > 10, page, directive[1], "give the reason for not running the block")
        return Block(language=language, code=code, line=line, not_run=text)
    parsed = _RUN.fullmatch(text)
    _require(parsed is not None, page, directive[1], f"there is no directive {text!r}; see tests/docs/pages.py")
    assert parsed is not None
    return Block(
        language=language,
        code=code,
        line=line,
        until=parsed["until"] or "",
        background=parsed["background"] is not None,
        join=parsed["word"] == "join",
        continued=parsed["word"] == "continued",
    )


def _check_that_nothing_escapes(language: str, code: str, page: str, line: int) -> None:
    _require(language not in _ESCAPING_LANGUAGES, page, line, "tag shell blocks sh and Python blocks python")
    looks_like_one = language in ("", "text") and _LOOKS_LIKE_A_COMMAND.match(code) is not None
    _require(not looks_like_one, page, line, "this looks like a command; tag it sh")


def _check_order(blocks: list[Block], page: str) -> None:
    serving: int | None = None
    for before, block in zip([None, *blocks], blocks, strict=False):
        if block.continued:
            goes_on = before is not None and before.language == block.language == "python"
            goes_on = goes_on and not (before.not_run or before.until)
            _require(goes_on, page, block.line, "only a python block that is run can be continued, by the next block")
        if block.join:
            serves = serving == block.section
            _require(serves and block.language == "sh", page, block.line, "there is no server to join in this section")
            _require("cleave join " in block.code, page, block.line, "expected a cleave join command")
        serving = block.section if block.background else serving


def _require(condition: bool, page: str, line: int, problem: str) -> None:
    if not condition:
        raise PageError(f"{page}, line {line}: {problem}")
