"""Run as a program: the application on a simulated cluster; prints each replica's view as JSON.

python -m tests.serve.cluster_probe PORT NODES CONFIG

NODES is a JSON list of each node's arguments of `ray start`; CONFIG is a file for `serve deploy`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray import serve as ray_serve
from ray.cluster_utils import Cluster

from serve.app import build
from serve.llm.deployment import NODE
from tests.serve.llm.placement_probe import devices, wait_until_ready
from tests.serve.servers import GENERATE

KEY = "k"


def main(port: int, nodes: list[dict[str, Any]], config: dict[str, Any]) -> None:
    cluster = Cluster()
    for node in nodes:
        cluster.add_node(**{"num_cpus": node.get("num_gpus", 0) + 1, **node})
    ray.init(address=cluster.address, logging_level="ERROR")  # type: ignore[arg-type]
    http = {"host": "127.0.0.1", "port": port}
    ray_serve.start(proxy_location=config["proxy_location"], http_options=http)
    arguments = config["applications"][0]["args"]
    try:
        ray_serve.run(build({**arguments, "port": port}))
        wait_until_ready(f"http://127.0.0.1:{port}")
        has_llm = arguments["llm"] != "none"
        report = {
            "images": devices("ImageReplica"),
            "llm": devices("LlmReplica") if has_llm else [],
            "nodes": {node["NodeID"]: node["Labels"].get(NODE) for node in ray.nodes()},
            "image_nodes": nodes_of("ImageReplica"),
            "pictures": pictures(port),
        }
        print(json.dumps(report))
    finally:
        ray_serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def nodes_of(name: str) -> list[str]:
    cards = ray_serve.get_deployment_handle(name, "default").broadcast("card")
    return [card.engines["node"] for card in cards.results(timeout_s=60)]


def pictures(port: int) -> int:
    """Return how many of ten simultaneous requests get a picture."""
    body = {"prompt": "a ring", "n": 10, "steps": 2, "deadline_s": 100}
    url, headers = f"http://127.0.0.1:{port}{GENERATE}", {"authorization": f"Bearer {KEY}"}
    return len(httpx.post(url, json=body, headers=headers, timeout=120).json()["data"])


if __name__ == "__main__":
    _, port_, nodes_, config_ = sys.argv
    main(int(port_), json.loads(nodes_), yaml.safe_load(Path(config_).read_text()))
