"""The pictures of an edit are freed as soon as it is answered or refused: by the last reference,
not by Python's garbage collector, which runs after many requests.
"""

from __future__ import annotations

import gc
import http.client
import time
import tracemalloc
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from PIL import Image

from tests.sdxl.test_source import plain, saved
from tests.serve.servers import listening
from tests.serve.test_edits import EDIT, png

MIB = 1 << 20
MOST, LARGE = 4 * MIB, 3 * MIB
REQUESTS, SOON_S = 3, 5.0
KEPT = MIB // 2
"""bytes that a request may leave in logs, metrics and caches; it sends or unpacks six times that"""
FORM = {"content-type": "multipart/form-data; boundary=a"}
Body = bytes | list[bytes]

pytestmark = pytest.mark.slow


def form(*images: bytes, mask: bytes | None = None) -> bytes:
    texts = {"prompt": b"a ring", "steps": b"2", "seed": b"1"}
    fields = [(f'name="{name}"', text) for name, text in texts.items()]
    fields += [('name="image[]"; filename="a"', image) for image in images]
    fields += [] if mask is None else [('name="mask"; filename="a"', mask)]
    parts = [
        b"--a\r\ncontent-disposition: form-data; " + head.encode() + b"\r\n\r\n" + data + b"\r\n"
        for head, data in fields
    ]
    return b"".join(parts) + b"--a--\r\n"


NOISE = saved(Image.effect_noise((2048, 1536), 90))
SENT: dict[str, tuple[int, Body]] = {
    "a picture": (200, form(NOISE)),
    "a picture and its mask": (200, form(NOISE, mask=saved(Image.new("L", (2048, 1536), 255)))),
    "no picture": (400, form(bytes(LARGE))),
    "two pictures": (400, form(bytes(LARGE // 2), bytes(LARGE // 2))),
    "a mask of another size": (400, form(NOISE, mask=png())),
    "a bomb": (400, form(saved(Image.new("L", (6000, 6000))))),
    "cut off": (400, form(saved(plain(2000, 2000), "PNG", compress_level=0)[:LARGE])),
    "no form": (400, bytes(LARGE)),
    "too large": (413, bytes(2 * MOST)),
    "too large as it comes": (413, [bytes(MIB)] * 8),
}


def send(url: str, body: Body) -> int:
    """Send the body with a client that keeps no reference."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=50)
    try:
        is_whole = isinstance(body, bytes)
        connection.request("POST", EDIT, body, FORM, encode_chunked=not is_whole)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(max_edit_bytes=MOST) as (found, _):
        yield found


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("case", SENT)
def test_no_request_body_is_kept_in_memory(url: str, case: str, uncollected: None) -> None:
    status, body = SENT[case]
    assert send(url, body) == status
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(REQUESTS):
        assert send(url, body) == status
    until = time.monotonic() + SOON_S
    # The answer may arrive before the service's thread has dropped the request.
    while (each := (tracemalloc.get_traced_memory()[0] - before) / REQUESTS) > KEPT:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    assert each <= KEPT, f"{each / MIB:.1f} MiB are kept of each, allowed {KEPT / MIB}"
