"""What a browser is shown: the web page at `/` and the API's documentation at `/docs`, as files.

Everything comes from this origin, and the headers hold the browser to it. It knows nothing of what
the page then asks for.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

HERE = Path(__file__).parent
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    # Pictures arrive inside JSON, and the gallery keeps them in the browser.
    "img-src": "'self' blob: data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{what} {whence}" for what, whence in POLICY.items()),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # A new version shows at once; what is unchanged is a 304.
    "cache-control": "no-cache",
}


class Files(StaticFiles):
    """A folder of files with our headers."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        answer = super().file_response(*arguments, **options)
        answer.headers.update(HEADERS)
        return answer


def add_pages(app: FastAPI) -> None:
    # A machine's own table may call scripts text/plain, which `nosniff` then forbids to run.
    mimetypes.add_type("text/javascript", ".js")
    for path, below, folder in (("/", "/web", "web"), ("/docs", "/docs", "swagger_ui")):
        files = Files(directory=HERE / folder)
        app.router.add_route(path, front_of(files), include_in_schema=False)
        app.mount(below, files)


def front_of(files: Files) -> Any:
    async def show(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    return show
