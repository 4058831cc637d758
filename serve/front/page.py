"""Files for a browser: the web page at `/`, the API's documentation at `/docs`, and the guide at
`/docs/guide` if `make site` has built it.

The headers allow no other origin.
"""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

SERVE = Path(__file__).parents[1]
GUIDE = SERVE / "guide"
INLINE = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def hash_of_inline_script() -> str:
    """Return the hash of the page's script that must run before the first paint."""
    (script,) = INLINE.findall((SERVE / "web" / "index.html").read_bytes())
    return base64.b64encode(hashlib.sha256(script).digest()).decode("ascii")


POLICY = {
    "default-src": "'none'",
    "script-src": f"'self' 'sha256-{hash_of_inline_script()}'",
    "style-src": "'self'",
    # Pictures arrive in JSON, and the browser stores the gallery.
    "img-src": "'self' blob: data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
OF_GUIDE = dict.fromkeys(("script-src", "style-src"), "'self' 'unsafe-inline'")
"""The guide's generator writes scripts and styles into its pages."""


def policy_text(policy: dict[str, str]) -> str:
    return "; ".join(f"{name} {sources}" for name, sources in policy.items())


HEADERS = {
    "content-security-policy": policy_text(POLICY),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # Browsers always check for a new version; an unchanged file is a 304.
    "cache-control": "no-cache",
}


class Files(StaticFiles):
    """A folder of files, served with our headers."""

    headers: Mapping[str, str] = HEADERS

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        answer = super().file_response(*arguments, **options)
        answer.headers.update(self.headers)
        return answer


class Guide(Files):
    headers = HEADERS | {"content-security-policy": policy_text(POLICY | OF_GUIDE)}


def add_pages(app: FastAPI) -> None:
    # A machine's table may list scripts as text/plain, which would not run with `nosniff`.
    mimetypes.add_type("text/javascript", ".js")
    if GUIDE.is_dir():
        app.mount("/docs/guide", Guide(directory=GUIDE, html=True))
    for path, below, folder in (("/", "/web", "web"), ("/docs", "/docs", "swagger_ui")):
        files = Files(directory=SERVE / folder)
        app.router.add_route(path, index_of(files), include_in_schema=False)
        app.mount(below, files)


def index_of(files: Files) -> Any:
    async def show(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    return show
