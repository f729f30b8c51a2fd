"""The reference pages that are written from the program itself leave nothing out."""

from __future__ import annotations

from typing import get_args

import msgspec

from cleave import events
from docs import hooks


def test_every_command_and_option_is_described() -> None:
    page = hooks.on_page_markdown("<!-- commands -->")
    for heading in ("train", "join", "plan", "fleet sample", "token add"):
        assert f"## cleave {heading}\n" in page
    for option in ("--model", "--listen", "--trust", "--memory", "--fleet", "--role"):
        assert f"| `{option}`" in page
    assert "%(" not in page, "defaults are filled in"


def test_every_event_is_described_with_all_its_fields() -> None:
    page = hooks.on_page_markdown("<!-- events -->")
    for kind in get_args(events.AnyEvent):
        own = page.partition(f"### {kind.__struct_config__.tag}\n")[2].partition("###")[0]
        for field in msgspec.structs.fields(kind):
            assert f"| `{field.name}` |" in own or field.name == "time_s", (kind, field.name)


def test_fields_of_records_are_listed_with_their_docstrings() -> None:
    page = hooks.on_page_markdown("<!-- fields cleave.Profiles -->\n<!-- settings -->")
    assert "| `latency_s` | `Floats` | Round trip" in page
    assert "| `wire` | `fp32`" in page
