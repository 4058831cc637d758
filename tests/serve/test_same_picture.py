"""One seed gives one picture: alone or under load, and on any replica of a real service."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from eval.measuring.psnr import psnr_db
from tests.serve.servers import GENERATE
from tests.serve.services import Service, service
from tests.serve.test_api import picture

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ASKED = {"prompt": "a red circle on a blue background", "seed": 3, "steps": 12, "deadline_s": 120}
OTHERS = [
    {"prompt": f"a {colour} star", "seed": i, "steps": 6 + 3 * i, "deadline_s": 120}
    for i, colour in enumerate(("red", "green", "blue", "white", "black", "purple", "orange"))
]
REQUIRED_DB = 60


def render(found: Service, body: dict[str, object]) -> bytes:
    answer = httpx.post(f"{found.url}{GENERATE}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return picture(answer.json()["data"][0])


def alone_and_in_company(found: Service) -> tuple[bytes, list[bytes]]:
    """Make the picture alone, and ten times among seven others: more than one replica takes."""
    alone = render(found, ASKED)
    bodies = [ASKED, *OTHERS] + [ASKED] * 9
    with ThreadPoolExecutor(len(bodies)) as pool:
        rendered = list(pool.map(lambda body: render(found, body), bodies))
    return alone, [rendered[0], *rendered[len(OTHERS) + 1 :]]


def replicas_that_rendered(found: Service) -> int:
    page = httpx.get(f"{found.url}/metrics").text
    counts = re.findall(r'^sdxl_images_total\{.*replica="([^"]+)".*\} (\S+)$', page, re.MULTILINE)
    return len({name for name, count in counts if float(count) > 2})


def psnr(first: bytes, second: bytes) -> float:
    return psnr_db(*(np.asarray(Image.open(io.BytesIO(x))) for x in (first, second)))


def test_a_picture_is_the_same_alone_under_load_and_on_either_replica(tmp_path: Path) -> None:
    with service(tmp_path, "--replicas", "2") as found:
        alone, others = alone_and_in_company(found)
        assert replicas_that_rendered(found) == 2
    worst = min(psnr(alone, other) for other in others)
    assert worst >= REQUIRED_DB, f"{worst:.1f} dB, needed {REQUIRED_DB}"


def test_deterministic_pictures_are_the_same_bytes(tmp_path: Path) -> None:
    with service(tmp_path, "--replicas", "2", "--deterministic") as found:
        alone, others = alone_and_in_company(found)
        assert replicas_that_rendered(found) == 2
    assert {len(other) for other in others} == {len(alone)}
    assert all(other == alone for other in others), "other bytes for the same request"
