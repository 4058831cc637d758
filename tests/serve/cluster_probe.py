"""Run as a program: the application on a made-up cluster; prints what each replica sees as JSON.

python -m tests.serve.cluster_probe NODES GPUS_A_NODE PORT
"""

from __future__ import annotations

import json
import sys
import urllib.request

import ray
from ray import serve as ray_serve
from ray.cluster_utils import Cluster

from serve.app import application
from serve.settings import ServeSettings


def main(nodes: int, gpus: int, port: int) -> None:
    cluster = Cluster()
    for _ in range(nodes):
        cluster.add_node(num_gpus=gpus, num_cpus=gpus + 1)
    ray.init(address=cluster.address, logging_level="ERROR")  # type: ignore[arg-type]
    ray_serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        ray_serve.run(application(ServeSettings(port=port)))
        handle = ray_serve.get_deployment_handle("ImageReplica", "default")
        cards = handle.broadcast("card").results(timeout_s=60)
        print(
            json.dumps(
                {
                    "devices": [card.engines["devices"] for card in cards],
                    "nodes": [card.engines["node"] for card in cards],
                    "pictures": pictures(port),
                }
            )
        )
    finally:
        ray_serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def pictures(port: int) -> int:
    """How many of ten come when they are asked for at once."""
    body = json.dumps({"prompt": "a ring", "n": 10, "steps": 2, "deadline_s": 100}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/images/generations", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return len(json.load(answer)["data"])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
