"""Many devices and many machines, made up on one: every replica has a device of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serve.probe_runs import told_by
from tests.serve.services import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def probe(nodes: int, gpus: int) -> dict[str, Any]:
    return told_by("tests.serve.cluster_probe", str(nodes), str(gpus), str(free_port()))


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
