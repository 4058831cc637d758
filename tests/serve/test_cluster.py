"""Many devices and many machines, made up on one: every replica has a device of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.serve.services import ROOT, free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_SERVE_WORKER_PROXY_HTTP_PORT": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


def probe(nodes: int, gpus: int) -> dict[str, Any]:
    argv = [sys.executable, "-m", "tests.serve.cluster_probe", str(nodes), str(gpus)]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        [*argv, str(free_port())],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray's own lines are among them.
    (line,) = (text for text in done.stdout.splitlines() if text.startswith('{"devices"'))
    told: dict[str, Any] = json.loads(line)
    return told


def test_eight_replicas_see_a_gpu_each() -> None:
    told = probe(nodes=1, gpus=8)
    assert sorted(told["devices"]) == [str(i) for i in range(8)] and told["pictures"] == 10


def test_three_nodes_serve_as_one() -> None:
    told = probe(nodes=3, gpus=1)
    assert len(set(told["nodes"])) == 3 and told["pictures"] == 10
