"""Run as a program: both models on a cluster of simulated GPUs; prints each model's GPUs as JSON.

python -m tests.serve.llm.placement_probe GPUS OPTIONS PORT [SECONDS]

With SECONDS, pictures and chats are requested together for this time, and a replica of each kind is
killed.
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
import ray
from ray import serve as ray_serve

from serve.app import application
from serve.errors import Problem
from serve.settings import ServeSettings

DOUBLE = Path(__file__).parent / "double"
ROOT = Path(__file__).parents[3]
MODEL = ROOT / "serve" / "llm" / "mini" / "weights"


def main(gpus: int, options: str, port: int, seconds: float = 0.0) -> None:
    ray.init(
        address="local",
        num_gpus=gpus,
        num_cpus=gpus + 2,
        include_dashboard=False,
        logging_level=logging.ERROR,
    )
    ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = ServeSettings(
        port=port,
        llm=str(MODEL),
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
        found: dict[str, Any] = {"images": devices("ImageReplica"), "llm": devices("LlmReplica")}
        if seconds:
            found |= asyncio.run(under_load(url, seconds))
        print(json.dumps(found))
    finally:
        ray_serve.shutdown()
        ray.shutdown()


def wait_until_ready(url: str) -> None:
    until = time.monotonic() + 300
    while True:
        try:
            answer = httpx.get(f"{url}/readyz", timeout=30)
            if answer.status_code == 200 and answer.json().get("llm", "ready") == "ready":
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < until, "not ready after 300 s"
        time.sleep(0.5)


def devices(name: str) -> list[str]:
    """Return the devices of all replicas when all run. A model is ready with one replica."""
    handle = ray_serve.get_deployment_handle(name, "default")
    until = time.monotonic() + 300
    while True:
        deployment = ray_serve.status().applications["default"].deployments[name]
        cards = handle.broadcast("card").results(timeout_s=120)
        if deployment.status == "HEALTHY" and not any(isinstance(c, Problem) for c in cards):
            return [getattr(card, "device", "") or card.engines["devices"] for card in cards]
        assert time.monotonic() < until, f"{name}: {deployment}, {cards}"
        time.sleep(0.2)


async def under_load(url: str, seconds: float) -> dict[str, Any]:
    until = time.monotonic() + seconds
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
        await asyncio.sleep(seconds / 4)
        os.kill(process_of(title), signal.SIGKILL)
    await asyncio.gather(*tasks)
    await asyncio.to_thread(wait_until_ready, url)
    again = {
        path: httpx.post(url + path, json=body, timeout=120).status_code for path, body in asked
    }
    return {"statuses": {path: dict(each) for path, each in counts.items()}, "after": again}


def process_of(title: str) -> int:
    import psutil

    children = psutil.Process().children(recursive=True)
    return next(p.pid for p in children if title in " ".join(p.cmdline()))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *map(float, sys.argv[4:]))
