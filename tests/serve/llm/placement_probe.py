"""Run as a program: both models on a cluster of eight simulated GPUs. Pictures and chats are
requested together while a replica of each kind is killed. It prints GPUs and outcomes as JSON.

python -m tests.serve.llm.placement_probe OPTIONS PORT
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve as ray_serve

from serve.app import application
from serve.errors import Problem
from serve.llm.names import MINI
from serve.settings import ServeSettings
from tests.waiting import wait_until

DOUBLE = Path(__file__).parent / "double"
GPUS, LOAD_S, START_S = 8, 40.0, 300.0


def main(options: str, port: int) -> None:
    ray.init(
        address="local",
        num_gpus=GPUS,
        num_cpus=GPUS + 2,
        include_dashboard=False,
        logging_level=logging.ERROR,
    )
    ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = ServeSettings(
        port=port,
        llm=str(MINI),
        llm_backend="tensorrt-llm",
        llm_options=options,
        llm_python=sys.executable,
        llm_replicas=2,
        backend="onnxruntime",
        deadline_s=100,
    )
    try:
        ray_serve.run(application(settings))
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url)
        found = {"images": devices("ImageReplica"), "llm": devices("LlmReplica")}
        print(json.dumps({**found, **asyncio.run(under_load(url))}))
    finally:
        ray_serve.shutdown()
        ray.shutdown()


def wait_until_ready(url: str) -> None:
    wait_until(lambda: is_ready(url), START_S, 0.5)


def is_ready(url: str) -> bool:
    try:
        answer = httpx.get(f"{url}/readyz", timeout=30)
    except httpx.HTTPError:
        return False
    return answer.is_success and answer.json().get("llm", "ready") == "ready"


def devices(name: str) -> list[str]:
    """Return the devices of all replicas when all run. A model is ready with one replica."""
    handle = ray_serve.get_deployment_handle(name, "default")

    def cards_of_all() -> list[Any]:
        deployment = ray_serve.status().applications["default"].deployments[name]
        cards = handle.broadcast("card").results(timeout_s=120)
        is_whole = deployment.status == "HEALTHY" and not any(isinstance(c, Problem) for c in cards)
        return cards if is_whole else []

    cards = wait_until(cards_of_all, START_S, 0.2, ray_serve.status)
    return [getattr(card, "device", "") or card.engines["devices"] for card in cards]


async def under_load(url: str) -> dict[str, Any]:
    until = time.monotonic() + LOAD_S
    picture = {"prompt": "a ring", "steps": 4, "deadline_s": 90}
    chat = {"messages": [{"role": "user", "content": "circle"}], "deadline_s": 90}
    asked = [("/v1/images/generations", picture), ("/v1/chat/completions", chat)] * 4
    counts: dict[str, Counter[str]] = {path: Counter() for path, _ in asked}

    async def ask(path: str, body: Any) -> None:
        while time.monotonic() < until:
            try:
                async with httpx.AsyncClient(timeout=120) as http:
                    answer = await http.post(url + path, json=body)
                counts[path][str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                counts[path][type(error).__name__] += 1

    tasks = [asyncio.create_task(ask(path, body)) for path, body in asked]
    for title in ("ImageReplica", "LlmReplica"):
        await asyncio.sleep(LOAD_S / 4)
        os.kill(process_of(title), signal.SIGKILL)
    await asyncio.gather(*tasks)
    await asyncio.to_thread(wait_until_ready, url)
    again = {
        path: httpx.post(url + path, json=body, timeout=120).status_code for path, body in asked
    }
    return {"statuses": counts, "after": again}


def process_of(title: str) -> int:
    children = psutil.Process().children(recursive=True)
    return next(p.pid for p in children if title in " ".join(p.cmdline()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
