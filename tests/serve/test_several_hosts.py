"""A service and a job on three hosts (netns.py), each a node of Ray, while a host or its network
fails. docs/operations.md has a table of the gaps that these tests print.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serve.loads import Load
from tests.serve.netns import Host, hosts
from tests.serve.services import ROOT
from tests.tools import tool
from tests.waiting import wait_until

START_NODE = str(ROOT / "serve/deploy/start_node.sh")
NODE = ("--num-cpus=1", "--num-gpus=1", "--object-store-memory=100000000")
"""A made-up GPU of each host places a replica there, as real ones do."""
URL = "http://127.0.0.1:8000"
GAP_S = 10.0
RATE = 4.0
BEFORE_S, APART_S = 4.0, 20.0
ROWS = 384
LOSSY = (
    "add table inet loss",
    "add chain inet loss input { type filter hook input priority 0 ; }",
    "add rule inet loss input iifname eth0 numgen random mod 100 < 5 counter drop",
)
"""for nft: every twentieth packet, at random. A kernel may lack netem."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[Host]]:
    """Three nodes of Ray; the first is the head."""
    with hosts(tmp_path, 3) as found:
        join(*found)
        yield found


def join(head: Host, *others: Host, **state: str) -> None:
    (head.folder.parent / "token").write_text("0" * 64)
    start_node(head, "head", **state)
    wait_until(lambda: is_open(head, 6379), 120, 0.2, lambda: head.log)
    for host in others:
        start_node(host, f"{head.address}:6379")


def start_node(host: Host, role: str, **environment: str) -> None:
    host.start(START_NODE, role, *NODE, **token_of(host), **environment)


def token_of(host: Host) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(host.folder.parent / "token")}


def is_open(host: Host, port: int) -> bool:
    with host.inside(), socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def running(cluster: list[Host]) -> list[Host]:
    deploy(*cluster)
    return cluster


def deploy(head: Host, *others: Host) -> None:
    """The service of several_nodes.yaml with the embedded model: a proxy and a replica a host, two
    front ends."""
    count = len(others) + 1
    config = yaml.safe_load((ROOT / "serve/deploy/several_nodes.yaml").read_text())
    folder = head.folder.parent
    config["applications"][0]["args"] |= {
        "model": "mini",
        "backend": "onnxruntime",
        "precision": "",
        "keys": "",
        "replicas": count,
        "results_dir": str(folder / "results"),
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    wait_until(lambda: is_open(head, 8265), 120, 0.2, lambda: head.log)
    head.run("serve", "deploy", str(file), **token_of(head))
    for host in (head, *others):
        wait_until(lambda: len(replicas(host)) == count, 300, 0.5, lambda: head.log)  # noqa: B023


def replicas(host: Host) -> set[str]:
    """The replicas that a front end sees from this host."""
    try:
        with host.inside():
            page = httpx.get(f"{URL}/metrics", timeout=10).text
    except httpx.HTTPError:
        return set()
    return set(re.findall(r'replica="(\w+)"', page))


def load_on(host: Host, seconds: float, *strikes: tuple[float, Callable[[], object]]) -> Load:
    """Load the host's proxy; strike at these seconds."""
    load = Load(URL, RATE)

    async def scenario() -> None:
        asking = asyncio.create_task(load.run(int(seconds * RATE)))
        began_s = time.monotonic()
        for at_s, strike in strikes:
            await asyncio.sleep(began_s + at_s - time.monotonic())
            await asyncio.to_thread(strike)
        await asking

    with host.inside():
        asyncio.run(scenario())
    print(
        f"{load.statuses}, longest gap {load.longest_gap_s:.1f} s, "
        f"longest wait {max(load.waits_s, default=0):.1f} s"
    )
    return load


def check(load: Load) -> None:
    assert set(load.statuses) == {"200"}, load.statuses
    gap_s = load.longest_gap_s
    assert gap_s <= GAP_S, f"{gap_s:.1f} s without a picture, allowed {GAP_S}"


def wait_until_whole(host: Host) -> None:
    began_s = time.monotonic()
    wait_until(lambda: len(replicas(host)) == 3, 200, 0.5, lambda: host.log)
    print(f"all replicas {time.monotonic() - began_s:.1f} s after the load")


def ledger_lines(out: Path) -> list[dict[str, Any]]:
    files = sorted(out.glob("ledger/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_lost_host_costs_no_picture(running: list[Host]) -> None:
    head, victim, _ = running
    check(load_on(head, 30, (BEFORE_S, victim.lose)))


@pytest.mark.long
def test_a_partition_costs_no_picture(running: list[Host]) -> None:
    head, victim, _ = running
    strikes = ((BEFORE_S, victim.cut), (BEFORE_S + APART_S, victim.mend))
    check(load_on(head, 60, *strikes))
    wait_until_whole(head)


@pytest.mark.long
def test_a_partition_loses_no_picture_of_a_job_and_makes_none_twice(cluster: list[Host]) -> None:
    head, victim, _ = cluster
    rows, out = head.folder.parent / "rows.txt", head.folder.parent / "out"
    rows.write_text("".join(f"a red circle, {i}\n" for i in range(ROWS)))
    batch = (sys.executable, "-m", "sdxl.cli", "batch")
    flags = ("--steps", "30", "--shard-size", "64", "--workers", "3", "--quiet")
    place = ("--out", str(out), "--address", f"{head.address}:6379")
    job = head.start(*batch, str(rows), *flags, *place, **token_of(head))
    wait_until(
        lambda: len({line["worker"] for line in ledger_lines(out)}) == 3, 200, 0.2, lambda: head.log
    )
    victim.cut()
    time.sleep(APART_S)
    victim.mend()
    assert job.wait(300) == 0, head.log
    assert "no report for" in head.log, "the driver did not notice"
    lines = Counter(line["ordinal"] for line in ledger_lines(out))
    assert lines == Counter(range(ROWS)), [each for each, n in lines.items() if n > 1]
    assert len(list(out.glob("images/*/*.png"))) == ROWS
    head.run(*batch, "--verify", str(out))


@pytest.mark.long
def test_a_lossy_network_costs_no_picture(running: list[Host]) -> None:
    for host in running:
        for rule in LOSSY:
            host.shell(tool("nft", "nftables"), *rule.split())
    check(load_on(running[0], 60))


@pytest.mark.long
def test_a_head_that_comes_back_finds_its_workers(tmp_path: Path) -> None:
    redis = tool("redis-server", "redis-server")
    with hosts(tmp_path, 4) as (head, client, other, store):
        store.start(redis, "--protected-mode", "no", "--save", "")
        wait_until(lambda: is_open(store, 6379))
        state = {"RAY_REDIS_ADDRESS": f"{store.address}:6379"}
        join(head, client, other, **state)
        deploy(head, client, other)

        def come_back() -> None:
            head.boot()
            start_node(head, "head", **state)

        strikes = ((BEFORE_S, head.lose), (BEFORE_S + APART_S, come_back))
        check(load_on(client, 60, *strikes))
        wait_until_whole(client)
