"""A queue makes `sdxl serve` start a second embedded language model, on a Ray of its own."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.llm.texts import CHAT
from tests.serve.services import service

CLIENTS, CHOICES, WITHIN_S = 4, 8, 240.0
"""An answer takes a twentieth of a second, so a few clients with one choice make no queue."""


def writing(url: str) -> set[str]:
    """Return the names of the replicas that report running generations."""
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return set(re.findall(r'^sdxl_llm_running{.*replica="(\w+)"', page, re.M))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_queue_brings_a_second_replica_and_loses_no_answer(tmp_path: Path) -> None:
    options = tmp_path / "options.toml"
    options.write_text("max_batch_size = 1\n")
    flags = ("--llm-options", str(options), "--llm-max-replicas", "2", "--replicas", "1")
    with service(tmp_path, *flags) as found, ThreadPoolExecutor(CLIENTS) as clients:
        until, grown = time.monotonic() + WITHIN_S, False

        def ask(_: int) -> set[int]:
            chat = [{"role": "user", "content": "circle"}]
            body = {"messages": chat, "n": CHOICES, "deadline_s": 100}
            statuses = set()
            while not grown and time.monotonic() < until:
                statuses.add(httpx.post(found.url + CHAT, json=body, timeout=120).status_code)
            return statuses

        assert len(writing(found.url)) == 1
        answered = clients.map(ask, range(CLIENTS))
        while not grown and time.monotonic() < until:
            time.sleep(1)
            grown = len(writing(found.url)) == 2
        assert grown, f"one replica after {WITHIN_S} s of a queue"
        assert set().union(*answered) == {200}
