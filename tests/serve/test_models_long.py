"""`sdxl serve` with several models: killing one does not affect the others, and while models are
loaded and unloaded 50 times, no request or memory is lost.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import httpx
import pytest

from sdxl.images import read_parameters
from tests.serve.servers import GENERATE
from tests.serve.services import Service, service
from tests.serve.test_edits import picture_in, pixels
from tests.test_deployment import write_foreign_model
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

ASKED = {"prompt": "a red circle on a blue background", "seed": 7, "steps": 4, "deadline_s": 60}
WHILE_AWAY = 12
"""pictures of the running model while the other's replica restarts"""
OTHERS = "ServeReplica:default:ImageReplica-other"
ROUNDS, WARM_ROUNDS = 50, 5
"""Processes grow a little at first, by late imports and pools of memory."""
GONE = "model_not_found"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two models of the start with different weights, and a third one that may be loaded."""
    folder = tmp_path_factory.mktemp("models")
    write_foreign_model(folder / "other", factor=1.2)
    write_foreign_model(folder / "more" / "third", factor=1.2)
    models = ("--model", "mini", "--model", str(folder / "other"), "--aliases", "gpt-image-1=other")
    flags = (*models, "--models-dir", str(folder / "more"), "--llm", "none")
    with service(folder, *flags) as found:
        yield found


def ask(found: Service, **more: Any) -> httpx.Response:
    return httpx.post(found.url + GENERATE, json=ASKED | more, timeout=120)


def picture(found: Service, **more: Any) -> bytes:
    """Return the pixels of a picture that has the metadata of its model."""
    answer = ask(found, **more)
    assert read_parameters(picture_in(answer))["model"] == answer.json()["model"]
    return pixels(picture_in(answer)).tobytes()


def test_killing_one_models_replica_leaves_the_other_as_it_was(running: Service) -> None:
    first, answers = picture(running), list[httpx.Response]()
    assert first != picture(running, model="gpt-image-1"), "their weights differ"
    (victim,) = running.named(OTHERS)
    asking = threading.Thread(target=lambda: answers.append(ask(running, model="other")))
    asking.start()
    victim.kill()
    for _ in range(WHILE_AWAY):
        assert picture(running) == first
        listed = httpx.get(f"{running.url}/v1/models", timeout=5).json()["data"]
        assert listed[0]["id"] == "sdxl-mini"
        assert httpx.get(f"{running.url}/readyz", timeout=5).status_code == 200
    asking.join()
    ready = f"{running.url}/readyz"
    wait_until(lambda: httpx.get(ready).json()["models"]["other"] == "ready", 120, 0.5)
    assert picture(running, model="other")
    assert [each.pid for each in running.named(OTHERS)] != [victim.pid]
    assert answers[0].status_code == 200, "its own request waited for the new replica"


class Client(threading.Thread):
    """Requests pictures of one model, one after another, and counts its answers."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(daemon=True)
        self.url, self.model, self.answers = url, model, Counter[str]()
        self.is_over = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=120) as http:
            while not self.is_over.is_set():
                answer = http.post(GENERATE, json={**ASKED, "model": self.model})
                is_made = answer.status_code == 200
                code = "" if is_made else answer.json()["error"]["code"]
                self.answers["made" if is_made else code] += 1
                if not is_made:
                    self.is_over.wait(0.05)


def made_by(clients: Sequence[Client]) -> int:
    return sum(client.answers["made"] for client in clients)


def held_bytes(found: Service) -> int:
    """Return the memory of all processes, with shared pages counted once."""
    return sum(each.memory_full_info().pss for each in found.processes())


def test_models_come_and_go_under_load(running: Service) -> None:
    clients = [Client(running.url, name) for name in ("mini", "mini", "third", "third")]
    for client in clients:
        client.start()
    held = list[int]()
    with httpx.Client(base_url=running.url, timeout=300) as http:
        for number in range(WARM_ROUNDS + ROUNDS):
            made = made_by(clients[2:])
            loaded = http.post("/v1/models", json={"model": "third"})
            assert loaded.status_code == 200, loaded.text
            wait_until(lambda: made_by(clients[2:]) > made + 2)  # noqa: B023
            unloaded = http.delete("/v1/models/third")
            assert unloaded.status_code == 200, unloaded.text
            wait_until(lambda: not running.named("ImageReplica-third"))
            held.append(held_bytes(running))
            print(number, held[-1] >> 20, [dict(each.answers) for each in clients], flush=True)
    for client in clients:
        client.is_over.set()
    for client in clients:
        client.join()
    assert all(set(client.answers) == {"made"} for client in clients[:2])
    assert all(set(client.answers) <= {"made", GONE} for client in clients[2:])
    # Ray's idle workers come and go between two rounds.
    before, after = median(held[WARM_ROUNDS : WARM_ROUNDS + 10]), median(held[-10:])
    grown = after / before - 1
    assert grown < 0.05, f"{before / 2**20:.0f} MiB before, {after / 2**20:.0f} after: +{grown:.1%}"
