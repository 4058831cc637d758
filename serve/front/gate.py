"""Who may ask, as ASGI middleware: with keys, nobody without one but for a few routes."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import Problem
from serve.front.keys import Keyring

OPEN_PATHS = ("/healthz", "/readyz", "/")
OPEN_PREFIXES = ("/v1/results/", "/web/")
"""The names of results cannot be guessed; the web page's files say nothing, and ask for a key."""


class Gate:
    """Without a keyring everybody may pass."""

    def __init__(self, app: ASGIApp, keyring: Keyring | None) -> None:
        self.app, self.keyring = app, keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.keyring is not None and not is_open(scope["path"]):
            key = self.keyring.find(secret_of(scope))
            if key is None:
                raise Problem(401, "A valid API key is needed.", None, "invalid_api_key")
            scope.setdefault("state", {}).update(key=key, key_name=key.name)
        await self.app(scope, receive, send)


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


def secret_of(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    kind, _, secret = given.partition(" ")
    return secret.strip() if kind.lower() == "bearer" else ""
