"""GET /: the web page, from files of this package."""

import hashlib
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from jaxllm.server.api.errors import ApiError

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # The page loads nothing and sends nothing anywhere but here, and nobody may frame it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again each time, and answered by 304 unless it has changed
}

router = APIRouter(include_in_schema=False)


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def _read_files() -> dict[str, _File]:
    """The page's files by name."""
    found = {}
    for path in files("jaxllm.server").joinpath("static").iterdir():
        suffix = path.name[path.name.rfind(".") :]
        if suffix in _MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[path.name] = _File(content, _MEDIA_TYPES[suffix], etag)
    return found


_FILES = _read_files()


@router.get("/")
async def page(request: Request) -> Response:
    return _answer(request, "index.html")


@router.get("/static/{name}")
async def static(request: Request, name: str) -> Response:
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    if (file := _FILES.get(name)) is None:
        raise ApiError(404, f"the page has no file {name!r}")
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
