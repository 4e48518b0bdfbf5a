"""The chat page's static files, read once and served from memory."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

PAGE_DIR = Path(__file__).parent / "page"


def page_routes() -> list[BaseRoute]:
    """`/` for index.html and `/page/<name>` for every other file of the directory."""
    files = [path for path in sorted(PAGE_DIR.iterdir()) if path.is_file()]
    return [_route("/" if path.name == "index.html" else f"/page/{path.name}", path) for path in files]


def _route(url: str, path: Path) -> Route:
    content, kind = path.read_bytes(), mimetypes.guess_type(path.name)[0] or "application/octet-stream"

    async def file(request: Request) -> Response:
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    return Route(url, file, methods=["GET"])
