"""Whose request it is: clients share the queue, so each needs a name that it cannot choose.

With keys it is the key; else the address that asks, as the edge states it where there is one.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network

from starlette.requests import Request

from serve.front.keys import ApiKey

IPV6_PREFIX = 64
"""bits of an address that are one client's: it may choose the others as it likes"""


def client_of(request: Request, header: str) -> tuple[str, float]:
    """The client and the weight of its share. `header` is believed: the edge must set it anew."""
    key: ApiKey | None = getattr(request.state, "key", None)
    if key is not None:
        return f"key {key.digest}", key.weight
    peer = request.client.host if request.client else ""
    stated = request.headers.getlist(header)[-1:] if header else []
    return f"address {network_of(stated[0] if stated else peer)}", 1.0


def network_of(address: str) -> str:
    try:
        parsed = ip_address(address.strip())
    except ValueError:
        return address.strip()[:64]
    if parsed.version == 4:
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped or ip_network((parsed, IPV6_PREFIX), strict=False))
