"""Under which names the service may be asked: what keeps another site's page in a browser out.

A page may point a name of its own at this machine (DNS rebinding), and then every answer is its to
read. An address written as one cannot be pointed anywhere, so a request may always be sent to it; a
page that lies at another address than this is another site's. It knows no routes.
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
        """With keys any name passes: a page that has none gets nothing."""
        if settings.keys:
            return cls([ANY])
        return cls([*settings.hosts.split(","), name_in(settings.public_url), settings.host])

    def check(self, host: str | None, origin: str | None) -> None:
        """Raises Problem. What sends no `Host` is no browser; an `Origin` is the page that asks."""
        if ANY in self.names:
            return
        asked, page = host and name_in(f"//{host}"), page_of(origin)
        if asked is not None and not (self._is_ours(asked) or is_address(asked)):
            raise refused("Host", asked)
        if page is not None and page != asked and not self._is_ours(page):
            raise refused("Origin", page)

    def _is_ours(self, name: str) -> bool:
        return name in self.names or is_local(name) or is_loopback(name)


def refused(field: str, name: str) -> Problem:
    message = f"{field}: {name[:100]!r} is not a name of this service; see --hosts."
    return Problem(403, message, None, "host_not_allowed")


def page_of(origin: str | None) -> str | None:
    """`null` is a page that may not say where it comes from."""
    return origin and (name_in(origin) or origin)


def name_in(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return url


def is_local(name: str) -> bool:
    """Browsers and systems resolve these to loopback alone (RFC 6761, 6.3)."""
    return name == LOCAL or name.endswith(f".{LOCAL}")


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
