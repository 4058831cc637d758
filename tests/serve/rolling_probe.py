"""Run as a program: the shipped Serve config on a simulated cluster, upgraded under load. It prints
its observations as JSON.

python -m tests.serve.rolling_probe FOLDER PORT DASHBOARD_PORT
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray.cluster_utils import Cluster

from tests.serve.services import ROOT
from tests.waiting import wait_until

CONFIG = ROOT / "serve" / "deploy" / "several_nodes.yaml"
CLIENTS, WAITING = 4, 16
TIMEOUT_S = 800.0
PROMPT = "a red circle on a blue background"


class Load:
    """Clients that send one request after another, each on a new connection."""

    def __init__(self, url: str, steps: int = 8, clients: int = CLIENTS) -> None:
        self.url, self.steps = url, steps
        self.statuses: Counter[str] = Counter()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        body = {"prompt": PROMPT, "n": 2, "steps": self.steps, "deadline_s": 110}
        while not self._is_over.is_set():
            try:
                answer = httpx.post(f"{self.url}/v1/images/generations", json=body, timeout=120)
                self.statuses[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                self.statuses[type(error).__name__] += 1


def config(folder: Path, port: int, name: str, **arguments: Any) -> Path:
    """Write the shipped config, with the embedded model on loopback ports of this machine."""
    found = yaml.safe_load(CONFIG.read_text())
    found["http_options"]["port"] = port
    given = {
        "model": "mini",
        "backend": "onnxruntime",
        "precision": "",
        "device": "cpu",
        "llm": "none",
        "replicas": 2,
        "results_dir": str(folder / "results"),
    }
    args = found["applications"][0]["args"]
    del args["keys"]
    found["applications"][0]["args"] = {**args, **given, **arguments}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(found))
    return file


def deploy(file: Path, dashboard: str) -> None:
    serve = str(Path(sys.executable).with_name("serve"))
    done = subprocess.run(
        [serve, "deploy", str(file), "--address", dashboard], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until(lambda: status(serve, dashboard) == "RUNNING", TIMEOUT_S, 0.5)


def status(serve: str, dashboard: str) -> str:
    done = subprocess.run(
        [serve, "status", "--address", dashboard], capture_output=True, text=True, check=True
    )
    found = yaml.safe_load(done.stdout)["applications"]["sdxl"]
    assert found["status"] != "DEPLOY_FAILED", found
    return str(found["status"])


def processes(url: str) -> tuple[set[str], set[str]]:
    """Return the names of the replicas and of the front ends that answer now."""
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return set(re.findall(r'replica="(\w+)"', page)), set(re.findall(r'ingress="(\w+)"', page))


def roll(folder: Path, url: str, port: int, dashboard: str) -> dict[str, Any]:
    """Replace every replica and every front end while clients send requests."""
    deploy(config(folder, port, "before", queue=64), dashboard)
    before = processes(url)
    with Load(url) as load:
        time.sleep(5)
        deploy(config(folder, port, "after", queue=63), dashboard)
        wait_until(lambda: processes(url)[0].isdisjoint(before[0]), TIMEOUT_S, 0.5)
        wait_until(lambda: processes(url)[1].isdisjoint(before[1]), TIMEOUT_S, 0.5)
        time.sleep(5)
    after = processes(url)
    return {"statuses": load.statuses, "before": len(before[0]), "after": len(after[0])}


def again(folder: Path, url: str, port: int, dashboard: str) -> bool:
    """Return whether deploying the same config once more keeps every process."""
    before = processes(url)
    deploy(config(folder, port, "again", queue=63), dashboard)
    return before == processes(url)


def grow(folder: Path, url: str, port: int, dashboard: str) -> int:
    """Return the number of replicas when more images wait than two replicas take at once."""
    arguments = {"max_replicas": 3, "target_queue_s": 0.2, "queue": 63}
    deploy(config(folder, port, "growing", **arguments), dashboard)
    with Load(url, steps=60, clients=WAITING):
        wait_until(lambda: len(processes(url)[0]) > 2, TIMEOUT_S, 0.5)
        return len(processes(url)[0])


def main(folder: str, port: int, dashboard_port: int) -> None:
    head = {"include_dashboard": True, "dashboard_port": dashboard_port, "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, logging_level="ERROR")  # type: ignore[arg-type]
    place = (Path(folder), f"http://127.0.0.1:{port}", port, f"http://127.0.0.1:{dashboard_port}")
    try:
        report = {"rolled": roll(*place), "is_kept": again(*place), "grown": grow(*place)}
        print(json.dumps(report))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
