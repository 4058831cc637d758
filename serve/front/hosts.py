"""Refuses requests from web pages of other sites, by the names under which the service answers.

A web page may resolve its own host name to this machine (DNS rebinding) and then read every answer.
That is impossible with a numeric address, so `Host` may be any address. A page whose `Origin` is
another address belongs to another site. It knows no routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from serve.errors import Problem
from serve.settings import ServeSettings, is_loopback

ANY = "*"
LOCAL = "localhost"


class Hosts:
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
