"""Pages that the server's port serves: `join.html`, a device without installation, and what it needs.

Plain ES modules, no build step and no request to another host. `device/` is the device itself; `make wasm` compiles its
kernel.
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; "
    "style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Sent with every page: nothing is loaded from elsewhere, and nothing may frame a page."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".wasm": "application/wasm",
    ".svg": "image/svg+xml",
}
_PAGES = {"/": "view.html", "/join": "join.html"}


class File(NamedTuple):
    content: bytes
    content_type: str


def files() -> dict[str, File]:
    """All that browsers get, by the path they ask for: the pages, and /web/ followed by the name of a file."""
    found = {f"/web/{name}": file for name, file in _files_of(resources.files(__name__), "")}
    return {**found, **{path: found[f"/web/{name}"] for path, name in _PAGES.items()}}


def _files_of(folder: Traversable, prefix: str) -> list[tuple[str, File]]:
    found = list[tuple[str, File]]()
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.is_dir():
            found += _files_of(entry, f"{prefix}{entry.name}/")
        elif (kind := _TYPES.get(entry.name[entry.name.rfind(".") :])) is not None:
            found.append((prefix + entry.name, File(entry.read_bytes(), kind)))
    return found
