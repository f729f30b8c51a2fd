"""The pages that browsers get, as routes: read once, and sent again only if they changed.

They are the same for everybody and say nothing about the run, so they need no token; what they ask for does.
"""

from __future__ import annotations

import hashlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cleave.web import HEADERS, File, files


def page_routes() -> list[Route]:
    return [_route(path, file) for path, file in files().items()]


def _route(path: str, file: File) -> Route:
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(file.content).hexdigest()[:32]}"'}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.content_type)

    return Route(path, answer)
