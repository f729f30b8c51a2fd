"""Hooks of mkdocs: write reference pages from the program itself, so that they cannot go stale.

In a page, `<!-- commands -->` becomes a section for every command, `<!-- events -->` one for every event,
`<!-- settings -->` a table of settings and their defaults, `<!-- fields MODULE.CLASS -->` a table of a record's fields.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import get_args

_USAGE_COLUMNS = "78"
_SHORT = re.compile(r"<code>([^<]{1,28})</code>")


def on_page_markdown(markdown: str, **_: object) -> str:
    for marker, write in (("commands", commands), ("events", events), ("settings", settings)):
        if f"<!-- {marker} -->" in markdown:
            markdown = markdown.replace(f"<!-- {marker} -->", write())
    return re.sub(r"<!-- fields (\S+)\.(\w+) -->", lambda match: fields(*match.groups()), markdown)


def on_page_content(html: str, **_: object) -> str:
    """Keep short code, such as an option, on one line; browsers would break it at its hyphens."""
    return _SHORT.sub(r'<code class="short">\1</code>', html)


# ------------------------------------------------------------------------------------------------ commands


def commands() -> str:
    """Describe every command, in the order of `cleave --help`, as Markdown."""
    from cleave.cli import main

    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ |= {"COLUMNS": _USAGE_COLUMNS, "NO_COLOR": "1"}
    try:
        return "\n".join(line for parser in _leaves(main._parser()) for line in _command(parser))
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of commands that do something, as against those that only have subcommands."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield parser
    for action in nested:
        for inner in dict.fromkeys(action.choices.values()):
            yield from _leaves(inner)


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {parser.prog}\n"
    if parser.description:
        yield _escaped(parser.description) + "\n"
    yield f"```text\n{parser.format_usage().removeprefix('usage: ').rstrip()}\n```\n"
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        shown = [one for one in group._group_actions if one.help != argparse.SUPPRESS and one.dest != "help"]
        if not shown:
            continue
        if group.description:
            yield _escaped(group.description) + "\n"
        yield f"| {group.title or 'options'} | |\n|---|---|"
        for action in shown:
            text = formatter._expand_help(action) if action.help else ""
            yield f"| {_name(action, formatter)} | {_escaped(text)} |"
        yield ""
    if parser.epilog:
        yield f"```text\n{textwrap.dedent(parser.epilog).strip()}\n```\n"


def _name(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    if not action.option_strings:
        value = formatter._format_args(action, formatter._get_default_metavar_for_positional(action))
        return f"`{_cell(value.strip('[]'))}`"
    value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    flag = action.option_strings[-1]
    return f"`{flag}`" if action.nargs == 0 else f"`{flag}` `{_cell(value)}`"


def _cell(text: str) -> str:
    """Let the choices of an option break across lines on a narrow screen."""
    choices = text.removeprefix("{").removesuffix("}")
    return choices.replace(",", " · ") if choices != text else text


def _escaped(text: str) -> str:
    for character in "\\*_<>|[]":
        text = text.replace(character, "\\" + character)
    return re.sub(r"(?<![\w-])(--[a-z][a-z-]+)", r"`\1`", " ".join(text.split()))


# ------------------------------------------------------------------------------------------------ records


def events() -> str:
    """Describe every event of a run, with its fields, as Markdown."""
    from cleave import events as module

    sections: list[str] = []
    for kind in get_args(module.AnyEvent):
        sections += [f"### {kind.__struct_config__.tag}", f"`cleave.events.{kind.__name__}`: {inspect.getdoc(kind)}"]
        sections.append(_table(kind))
    return "\n\n".join(sections)


def fields(module: str, name: str) -> str:
    return _table(getattr(import_module(module), name))


def _table(kind: type) -> str:
    """Return a table of the fields of a record: name, type and docstring, as the source has them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    rows = ["| field | type | |", "|---|---|---|"]
    for here, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = inspect.cleandoc(str(after.value.value)).replace("|", "\\|")
            rows.append(f"| `{here.target.id}` | `{ast.unparse(here.annotation)}` | {text} |")
    return "\n".join(rows)


def settings() -> str:
    """Describe the settings that Python and the command line share, as Markdown."""
    from cleave import settings as module
    from cleave.core.cost.wire import WIRE_FORMATS
    from cleave.core.model.grain import GRAINS
    from cleave.core.verify.trust import LEVELS

    rows: tuple[tuple[str, tuple[str, ...], object], ...] = (
        ("wire", WIRE_FORMATS, module.WIRE),
        ("grain", GRAINS, module.GRAIN),
        ("offload", module.OFFLOADS, module.OFFLOAD),
        ("trust", LEVELS, module.TRUST),
        ("alone", module.ALONES, module.ALONE),
        ("alone_wait_s", (), module.ALONE_WAIT_S),
        ("threads", (), module.DEVICE_THREADS),
    )
    lines = [
        f"| `{name}` | {', '.join(f'`{one}`' for one in allowed) or 'a number'} | `{default}` |"
        for name, allowed, default in rows
    ]
    return "\n".join(["| setting | values | default |", "|---|---|---|", *lines])
