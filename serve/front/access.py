"""Access control as ASGI middleware, and the client that a request comes from.

With API keys, every request needs one, except for a few open routes. Without keys, web pages of
other sites are refused. Clients share the queue, so a client must not choose its name: the name is
its key or its address.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Sequence
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import Problem
from serve.front.error_envelope import LIVE, READY
from serve.front.keys import ApiKey, Keyring
from serve.settings import ServeSettings, is_loopback

HEALTH_PATHS = ("/healthz", "/readyz", LIVE, READY)
OPEN_PATHS = (*HEALTH_PATHS, "/")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OPEN_PREFIXES = ("/v1/results/", "/web/")
"""Names of results cannot be guessed; the web page's files contain no secrets."""
ANY, LOCAL = "*", "localhost"
IPV6_PREFIX = 64
"""Bits of an IPv6 address that identify a client; the client may choose the others."""


class Access:
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


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


def key_in(authorizations: Sequence[str], keyring: Keyring) -> ApiKey:
    """Return the request's key, or raise Problem."""
    if len(authorizations) > 1:
        message = f"Authorization must be a single header, got {len(authorizations)}."
        raise Problem(400, message, "Authorization", "invalid_value")
    key = keyring.find(secret_in(*authorizations)) if authorizations else None
    if key is None:
        raise Problem(401, "A valid API key is needed.", None, "invalid_api_key")
    return key


def secret_in(authorization: str) -> str:
    kind, _, secret = authorization.partition(" ")
    if kind.lower() == "basic":
        # Some programs can only send a name and a password: the password is the key.
        return password_in(secret)
    return secret.strip() if kind.lower() == "bearer" else ""


def password_in(coded: str) -> str:
    try:
        return b64decode(coded, validate=True).decode("utf-8").partition(":")[2]
    except ValueError:
        return ""


def check_operator(request: Request) -> None:
    """Raise Problem 403 unless the key is an operator's. Without keys every client may operate."""
    key: ApiKey | None = getattr(request.state, "key", None)
    if key is not None and not key.is_operator:
        message = "This needs an operator's key; `sdxl key NAME --operator` makes one."
        raise Problem(403, message, None, "operator_needed")


def client_of(request: Request, header: str) -> tuple[str, float]:
    """Return the client's name and the weight of its share. A proxy must overwrite `header`."""
    key: ApiKey | None = getattr(request.state, "key", None)
    if key is not None:
        return f"key {key.digest}", key.weight
    peer = request.client.host if request.client else ""
    stated = request.headers.getlist(header)[-1:] if header else []
    return f"address {network_of(stated[0] if stated else peer)}", 1.0


def origin_of(request: Request, public_url: str) -> str:
    """Return the start of this service's URLs: the setting, or the URL of the client's request."""
    return (public_url or str(request.base_url)).rstrip("/")


def network_of(address: str) -> str:
    try:
        parsed = ip_address(address.strip())
    except ValueError:
        return address.strip()[:64]
    if parsed.version == 4:
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped or ip_network((parsed, IPV6_PREFIX), strict=False))


class Hosts:
    """The names under which the service answers. A web page may resolve its own host name to this
    machine (DNS rebinding) and then read every answer. That is impossible with a numeric address,
    so `Host` may be any address. A page whose `Origin` is another address belongs to another
    site."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(name.strip().lower() for name in names if name.strip())

    @classmethod
    def of(cls, settings: ServeSettings) -> Hosts:
        """Make from settings. With keys any name passes, since a page without a key is refused."""
        if settings.keys:
            return cls([ANY])
        return cls([*settings.hosts.split(","), name_in(settings.public_url), settings.host])

    def check(self, host: str | None, origin: str | None) -> None:
        """Raise Problem unless host and origin are allowed. A request without `Host` is not from a
        browser; `Origin` is the page that sends the request."""
        if ANY in self.names:
            return
        name, page = host and name_in(f"//{host}"), page_of(origin)
        if name is not None and not (self._is_ours(name) or is_address(name)):
            raise refused("Host", name)
        if page is not None and page != name and not self._is_ours(page):
            raise refused("Origin", page)

    def _is_ours(self, name: str) -> bool:
        # Browsers and systems resolve localhost only to loopback (RFC 6761, 6.3).
        is_local = name == LOCAL or name.endswith(f".{LOCAL}")
        return is_local or name in self.names or is_loopback(name)


def refused(field: str, name: str) -> Problem:
    message = f"{field}: {name[:100]!r} is not a name of this service; see --hosts."
    return Problem(403, message, None, "host_not_allowed")


def page_of(origin: str | None) -> str | None:
    """Return the page's host name, or `null` for a page that hides its origin."""
    return origin and (name_in(origin) or origin)


def name_in(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return url


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
