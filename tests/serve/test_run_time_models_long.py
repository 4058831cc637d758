"""`sdxl serve` under load while models are loaded and unloaded 50 times: no request or memory is
lost.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

import httpx
import pytest

from tests.serve.servers import GENERATE
from tests.serve.services import Service, service
from tests.test_deployment import write_foreign_model
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

ROUNDS, WARM_ROUNDS = 50, 5
"""Processes grow a little at first, by late imports and pools of memory."""
ASKED = {"prompt": "a red circle", "steps": 4, "deadline_s": 60}
GONE = "model_not_found"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("run-time-models")
    write_foreign_model(folder / "models" / "other", factor=1.2)
    with service(folder, "--models-dir", str(folder / "models"), "--llm", "none") as found:
        yield found


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


def more_than(count: int, clients: Sequence[Client]) -> bool:
    return made_by(clients) > count


def held_bytes(found: Service) -> int:
    """Return the memory of all processes, with shared pages counted once."""
    return sum(each.memory_full_info().pss for each in found.processes())


def test_models_come_and_go_under_load(running: Service) -> None:
    clients = [Client(running.url, name) for name in ("mini", "mini", "other", "other")]
    for client in clients:
        client.start()
    held = list[int]()
    with httpx.Client(base_url=running.url, timeout=300) as http:
        for number in range(WARM_ROUNDS + ROUNDS):
            made = made_by(clients[2:])
            loaded = http.post("/v1/models", json={"model": "other"})
            assert loaded.status_code == 200, loaded.text
            wait_until(partial(more_than, made + 2, clients[2:]))
            unloaded = http.delete("/v1/models/other")
            assert unloaded.status_code == 200, unloaded.text
            wait_until(lambda: not running.named("ImageReplica-other"))
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
