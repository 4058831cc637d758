"""Names under which the service answers: they keep web pages of other sites out.

Such a page may point its own name at this machine (DNS rebinding) and then read every answer. A
numeric address cannot be pointed anywhere, so it is always accepted as `Host`. A page whose
`Origin` is another address belongs to another site. It knows no routes.
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
        """With keys any name passes: a page without a key gets nothing."""
        if settings.keys:
            return cls([ANY])
        return cls([*settings.hosts.split(","), name_in(settings.public_url), settings.host])

    def check(self, host: str | None, origin: str | None) -> None:
        """Raises Problem. A request without `Host` is no browser's; `Origin` is the asking page."""
        if ANY in self.names:
            return
        name, page = host and name_in(f"//{host}"), page_of(origin)
        if name is not None and not (self._is_ours(name) or is_address(name)):
            raise refused("Host", name)
        if page is not None and page != name and not self._is_ours(page):
            raise refused("Origin", page)

    def _is_ours(self, name: str) -> bool:
        return name in self.names or is_local(name) or is_loopback(name)


def refused(field: str, name: str) -> Problem:
    message = f"{field}: {name[:100]!r} is not a name of this service; see --hosts."
    return Problem(403, message, None, "host_not_allowed")


def page_of(origin: str | None) -> str | None:
    """`null` is a page that hides where it comes from."""
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
