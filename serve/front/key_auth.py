"""Who may ask, as ASGI middleware: with keys, nobody without one but for a few routes; without, no
page of another site.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import Problem
from serve.front.hosts import Hosts
from serve.front.keys import ApiKey, Keyring
from serve.front.probes import LIVE, READY

HEALTH_PATHS = ("/healthz", "/readyz", LIVE, READY)
"""for whoever watches, by whatever name"""
OPEN_PATHS = ("/",)
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OPEN_PREFIXES = ("/v1/results/", "/web/")
"""The names of results cannot be guessed; the web page's files say nothing, and ask for a key."""


class KeyAuth:
    """Without a keyring everybody may pass who asks under a name of ours."""

    def __init__(self, app: ASGIApp, keyring: Keyring | None, hosts: Hosts) -> None:
        self.app, self.keyring, self.hosts = app, keyring, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in HEALTH_PATHS:
            headers = Headers(scope=scope)
            origin = None if scope["method"] in SAFE_METHODS else headers.get("origin")
            self.hosts.check(headers.get("host"), origin)
            if self.keyring is not None and not is_open(scope["path"]):
                key = key_in(headers.getlist("authorization"), self.keyring)
                scope.setdefault("state", {}).update(key=key, key_name=key.name)
        await self.app(scope, receive, send)


def key_in(given: Sequence[str], keyring: Keyring) -> ApiKey:
    """Raises Problem."""
    if len(given) > 1:
        message = f"Authorization: needed one header, got {len(given)}."
        raise Problem(400, message, "Authorization", "invalid_value")
    key = keyring.find(secret_in(*given)) if given else None
    if key is None:
        raise Problem(401, "A valid API key is needed.", None, "invalid_api_key")
    return key


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


def secret_in(header: str) -> str:
    kind, _, secret = header.partition(" ")
    if kind.lower() == "basic":
        # Older programs know only a name and a password: the password is the key.
        return password_of(secret)
    return secret.strip() if kind.lower() == "bearer" else ""


def password_of(coded: str) -> str:
    try:
        return b64decode(coded, validate=True).decode("utf-8").partition(":")[2]
    except ValueError:
        return ""
