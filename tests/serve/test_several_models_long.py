"""`sdxl serve` with two models of different weights: killing one does not affect the other."""

from __future__ import annotations

import base64
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from sdxl.images import read_parameters
from tests.serve.servers import GENERATE, error_of
from tests.serve.services import Service, service
from tests.test_deployment import write_foreign_model
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ASKED = {"prompt": "a red circle on a blue background", "seed": 7, "steps": 8, "deadline_s": 60}
WHILE_AWAY = 12
"""pictures of the running model while the other's replica restarts"""
OTHERS = "ServeReplica:default:ImageReplica-other"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("two-models")
    write_foreign_model(folder / "other", factor=1.2)
    flags = ("--model", "mini", "--model", str(folder / "other"), "--llm", "none")
    with service(folder, *flags, "--aliases", "gpt-image-1=other") as found:
        yield found


def made(found: Service, **more: Any) -> dict[str, Any]:
    answer = httpx.post(found.url + GENERATE, json=ASKED | more, timeout=90)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def picture(body: dict[str, Any]) -> bytes:
    return base64.b64decode(body["data"][0]["b64_json"])


def pixels(data: bytes) -> bytes:
    import io

    with Image.open(io.BytesIO(data)) as image:
        return image.tobytes()


def test_each_request_gets_its_models_picture(two: Service) -> None:
    mini, other = made(two), made(two, model="gpt-image-1")
    assert (mini["model"], other["model"]) == ("sdxl-mini", "other")
    for body in (mini, other):
        assert read_parameters(picture(body))["model"] == body["model"]
    assert pixels(picture(mini)) != pixels(picture(other)), "their weights differ"
    assert pixels(picture(made(two, model="mini"))) == pixels(picture(mini))
    unknown = httpx.post(two.url + GENERATE, json=ASKED | {"model": "dall-e-9"})
    assert error_of(unknown)["message"].endswith("here are 'sdxl-mini', 'other'.")
    page = httpx.get(f"{two.url}/metrics").text
    for model in ("sdxl-mini", "other"):
        assert f'model="{model}"' in page


def test_killing_one_models_replica_leaves_the_other_as_it_was(two: Service) -> None:
    first = pixels(picture(made(two)))
    (victim,) = two.named(OTHERS)
    statuses: Counter[int] = Counter()

    def ask_the_victims_model() -> None:
        answer = httpx.post(two.url + GENERATE, json=ASKED | {"model": "other"}, timeout=90)
        statuses[answer.status_code] += 1

    asking = threading.Thread(target=ask_the_victims_model)
    asking.start()
    victim.kill()
    for _ in range(WHILE_AWAY):
        assert pixels(picture(made(two))) == first
        listed = httpx.get(f"{two.url}/v1/models", timeout=5).json()["data"]
        assert listed[0]["id"] == "sdxl-mini"
        assert httpx.get(f"{two.url}/readyz", timeout=5).status_code == 200
    asking.join()
    ready = f"{two.url}/readyz"
    wait_until(lambda: httpx.get(ready).json()["models"]["other"] == "ready", 120, 0.5)
    assert made(two, model="other")["model"] == "other"
    assert [each.pid for each in two.named(OTHERS)] != [victim.pid]
    assert set(statuses) == {200}, "its own request waited for the new replica"
