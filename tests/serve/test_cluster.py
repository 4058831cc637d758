"""Many devices and many machines, made up on one: every replica has a device of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.services import ROOT, free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_SERVE_WORKER_PROXY_HTTP_PORT": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


def probe(nodes: int, gpus: int) -> dict[str, Any]:
    return told_by("tests.serve.cluster_probe", str(nodes), str(gpus), str(free_port()))


def told_by(program: str, *arguments: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", program, *arguments]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray's own lines are among them.
    (line,) = (text for text in done.stdout.splitlines() if text.startswith('{"'))
    told: dict[str, Any] = json.loads(line)
    return told


def test_eight_replicas_see_a_gpu_each() -> None:
    told = probe(nodes=1, gpus=8)
    assert sorted(told["devices"]) == [str(i) for i in range(8)] and told["pictures"] == 10


def test_three_nodes_serve_as_one() -> None:
    told = probe(nodes=3, gpus=1)
    assert len(set(told["nodes"])) == 3 and told["pictures"] == 10


def test_an_upgrade_loses_no_request_and_a_queue_brings_replicas(tmp_path: Path) -> None:
    ports = str(free_port()), str(free_port())
    told = told_by("tests.serve.rolling_probe", str(tmp_path), *ports)
    rolled = told["rolled"]
    assert set(rolled["statuses"]) == {"200"} and rolled["statuses"]["200"] > 20, rolled
    assert (rolled["before"], rolled["after"]) == (2, 2), rolled
    assert told["is_kept"], "deploying the same again replaced processes"
    assert told["grown"] == 3
