"""A service and a job on three hosts (netns.py), each a node of Ray, while a host or its network
fails. These tests print the gaps in the table of docs/operations.md.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serve.loads import PICTURE, Load, is_answered, reported
from tests.serve.netns import Host, hosts
from tests.serve.services import ROOT
from tests.tools import tool
from tests.waiting import wait_until

START_NODE = str(ROOT / "serve/deploy/start_node.sh")
NODE = ("--num-cpus=1", "--num-gpus=1", "--object-store-memory=100000000")
"""A simulated GPU on each host places a replica there."""
URL = "http://127.0.0.1:8000"
GAP_S = 10.0
RATE = 4.0
BEFORE_S, APART_S = 4.0, 20.0
REPLACING_S = 10.0
"""time in which Ray would have started a new process"""
WRITES = 4
"""writes a second of a slow disk"""
BATCH = (sys.executable, "-m", "sdxl.cli", "batch")
LLM = "ServeReplica:sdxl:LlmReplica"
FRONT = "ServeReplica:sdxl:ImageIngress"
CHAT: dict[str, Any] = {
    "path": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "a red circle"}], "max_tokens": 40},
}
CONNECTION_LOST = ("ConnectError", "ReadError", "RemoteProtocolError")
STARTED = "Ray runtime started."
"""the message of a started node of Ray"""
LOSSY = (
    "add table inet loss",
    "add chain inet loss input { type filter hook input priority 0 ; }",
    "add rule inet loss input iifname eth0 numgen random mod 100 < 5 counter drop",
)
"""a rule for nft that drops every twentieth packet at random; a kernel may lack netem"""

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
    for host in others:
        start_node(host, f"{head.address}:6379")


def start_node(host: Host, role: str, **environment: str) -> None:
    """Start a node of Ray and wait until it runs."""
    before = host.text.count(STARTED)
    host.start(START_NODE, role, *NODE, **token_of(host), **environment)
    wait_until(lambda: host.text.count(STARTED) > before, 120, 0.2, lambda: host.log)


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


def deploy(head: Host, *others: Host, **settings: Any) -> None:
    """Deploy the service of several_nodes.yaml with the embedded model: a proxy and a replica on
    each host, and two front ends."""
    count = len(others) + 1
    apply(head, replicas=count, **settings)
    for host in (head, *others):
        wait_until(lambda: len(replicas(host)) == count, 300, 0.5, lambda: head.log)  # noqa: B023


def apply(head: Host, **settings: Any) -> None:
    """Run `serve deploy` on the head."""
    config = yaml.safe_load((ROOT / "serve/deploy/several_nodes.yaml").read_text())
    folder = head.folder.parent
    config["applications"][0]["args"] |= {
        "model": "mini",
        "backend": "onnxruntime",
        "precision": "",
        "keys": "",
        "results_dir": str(folder / "results"),
        **settings,
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    wait_until(lambda: is_open(head, 8265), 120, 0.2, lambda: head.log)
    head.run("serve", "deploy", str(file), **token_of(head))


def replicas(host: Host, kind: str = "replica") -> set[str]:
    """The replicas, or the front ends (`ingress`), that are reported on this host."""
    with host.inside():
        return reported(URL, kind)


def load_on(
    host: Host, seconds: float, *strikes: tuple[float, Callable[[], object]], **kind: Any
) -> Load:
    """Load the host's proxy, and call each strike at its second."""
    load = Load(URL, RATE, **kind)

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


def check(load: Load, gap_s: float = GAP_S) -> None:
    assert set(load.statuses) == {"200"}, load.statuses
    longest_s = load.longest_gap_s
    assert longest_s <= gap_s, f"{longest_s:.1f} s without a picture, allowed {gap_s}"


def wait_until_whole(host: Host) -> None:
    began_s = time.monotonic()
    wait_until(lambda: len(replicas(host)) == 3, 200, 0.5, lambda: host.log)
    print(f"all replicas {time.monotonic() - began_s:.1f} s after the load")


def carriers(head: Host, *workers: Host) -> list[Host]:
    """The workers with a replica of the language model. One on the head is killed, to restart."""
    for process in head.named(LLM):
        process.kill()
    return [host for host in workers if host.named(LLM)]


@contextmanager
def job(host: Host, rows: int, *flags: str) -> Iterator[Path]:
    """Start a job on the host and yield its folder. The job ends with the block."""
    source, out = host.folder.parent / "rows.txt", host.folder.parent / "out"
    source.write_text("".join(f"a red circle, {i}\n" for i in range(rows)))
    asked = ("--steps", "30", "--quiet", "--out", str(out), *flags)
    running = host.start(*BATCH, str(source), *asked, **token_of(host))
    yield out
    assert running.wait(600) == 0, host.log


@contextmanager
def job_on_ray(head: Host, rows: int, shard: int) -> Iterator[Path]:
    """Start a job on Ray and yield its folder when a worker on each host works."""
    flags = ("--shard-size", str(shard), "--workers", "3", "--address", f"{head.address}:6379")
    with job(head, rows, *flags) as out:
        wait_until(
            lambda: len({line["worker"] for line in ledger_lines(out)}) == 3,
            *(200, 0.2, lambda: head.log),
        )
        yield out


def check_job(host: Host, out: Path, rows: int) -> list[dict[str, Any]]:
    """Check that the ledger has each row once, and return its lines."""
    lines = ledger_lines(out)
    counts = Counter(line["ordinal"] for line in lines)
    assert counts == Counter(range(rows)), [each for each, n in counts.items() if n > 1]
    assert len(list(out.glob("images/*/*.png"))) == rows
    host.run(*BATCH, "--verify", str(out))
    return lines


def ledger_lines(out: Path) -> list[dict[str, Any]]:
    files = sorted(out.glob("ledger/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "gap_s",
    [pytest.param(math.inf, marks=pytest.mark.slow), pytest.param(GAP_S, marks=pytest.mark.long)],
)
def test_a_lost_host_costs_no_picture(running: list[Host], gap_s: float) -> None:
    """Only long tests check the gap, because a busy machine has its own gaps."""
    head, *workers = running
    assert max(len(host.named(FRONT)) for host in running) == 1, "two front ends share a host"
    victim = next(host for host in workers if host.named(FRONT))
    check(load_on(head, 30, (BEFORE_S, victim.lose)), gap_s)


@pytest.mark.long
def test_a_partition_costs_no_picture(running: list[Host]) -> None:
    head, victim, _ = running
    strikes = ((BEFORE_S, victim.cut), (BEFORE_S + APART_S, victim.mend))
    check(load_on(head, 60, *strikes))
    wait_until_whole(head)


@pytest.mark.long
def test_a_partition_loses_no_picture_of_a_job_and_makes_none_twice(cluster: list[Host]) -> None:
    head, victim, _ = cluster
    with job_on_ray(head, 384, shard=64) as out:
        victim.cut()
        time.sleep(APART_S)
        victim.mend()
    assert "no report for" in head.log, "the driver did not notice"
    check_job(head, out, 384)


def check_disk_was_slow(lines: Sequence[Mapping[str, Any]]) -> None:
    stored_s = [line["timings"]["store_s"] for line in lines]
    print(f"longest write {max(stored_s):.1f} s, median {statistics.median(stored_s):.3f}")
    assert max(stored_s) > 1, "no disk was slow"


@pytest.mark.long
def test_a_slow_disk_loses_no_picture_of_a_job_and_makes_none_twice(cluster: list[Host]) -> None:
    head, victim, _ = cluster
    with job_on_ray(head, 384, shard=8) as out:
        victim.slow_disk(WRITES)
    check_disk_was_slow(check_job(head, out, 384))


@pytest.mark.long
def test_a_slow_disk_slows_no_other_request(running: list[Host]) -> None:
    head, victim, _ = running
    with job(victim, 32, "--through", URL) as out:
        check(load_on(head, 30, (BEFORE_S, lambda: victim.slow_disk(WRITES))))
    check_disk_was_slow(check_job(victim, out, 32))


@pytest.mark.long
def test_an_upgrade_loses_no_request_and_the_same_again_replaces_nothing(
    running: list[Host],
) -> None:
    """The upgrade changes the model's backend, replica by replica, and every front end."""
    before = replicas(running[0]) | replicas(running[0], "ingress")

    def upgrade() -> None:
        apply(running[0], replicas=3, backend="torch")
        for host in running:
            wait_until(lambda: is_new(host), 300, 0.5, lambda: host.log)  # noqa: B023

    def is_new(host: Host) -> bool:
        now, fronts = replicas(host), replicas(host, "ingress")
        return (len(now), len(fronts)) == (3, 2) and before.isdisjoint(now | fronts)

    def serving() -> set[int]:
        return {each.pid for host in running for each in host.named("ServeReplica:sdxl:")}

    check(load_on(running[1], 120, (BEFORE_S, upgrade)))
    with running[0].inside():
        ready = httpx.get(f"{URL}/readyz", timeout=10).json()
    assert ready["backend"] == "torch", ready
    wait_until(lambda: len(serving()) == 3 + 2, 60)
    kept = serving()
    apply(running[0], replicas=3, backend="torch")
    time.sleep(REPLACING_S)
    assert serving() == kept


@pytest.mark.long
def test_a_queue_brings_a_replica(cluster: list[Host]) -> None:
    head = cluster[0]
    apply(head, replicas=1, max_replicas=2, target_queue_s=0.2)
    wait_until(lambda: len(replicas(head)) == 1, 300, 0.5, lambda: head.log)

    def wait_for_another() -> None:
        wait_until(lambda: len(replicas(head)) == 2, 300, 0.5, lambda: head.log)

    load_on(head, 20, (BEFORE_S, wait_for_another), body={**PICTURE, "steps": 60})


@pytest.mark.long
def test_a_host_that_was_cut_off_loses_only_what_its_proxy_held(running: list[Host]) -> None:
    """When Ray can reach the host again, it kills the proxy because of failed health checks."""
    _, victim, _ = running
    mended_s: list[float] = []

    def mend() -> None:
        mended_s.append(time.monotonic())
        victim.mend()

    load = load_on(victim, 60, (BEFORE_S, victim.cut), (BEFORE_S + APART_S, mend))
    assert set(load.statuses) <= {"200", *CONNECTION_LOST}, load.statuses
    assert all(failed_s > mended_s[0] for failed_s in load.failed_s), "lost while it was apart"
    assert max(load.answered_s) > max(load.failed_s, default=0), "its proxy did not come back"


@pytest.mark.long
def test_chats_outlive_other_hosts_and_come_back_after_their_own(cluster: list[Host]) -> None:
    head, *workers = cluster
    deploy(*cluster, llm="mini")
    (carrier,) = wait_until(lambda: carriers(*cluster), 300, 10, lambda: head.log)
    with head.inside():
        wait_until(lambda: is_answered(URL, **CHAT), 200, 0.5, lambda: head.log)
    (other,) = (each for each in workers if each is not carrier)
    check(load_on(head, 30, (BEFORE_S, other.lose), **CHAT))
    other.boot()
    start_node(other, f"{head.address}:6379")
    wait_until_whole(head)
    # The only replica is missing until Ray declares its host dead, after a minute, and starts
    # another.
    load = load_on(head, 180, (BEFORE_S, carrier.lose), **CHAT)
    assert set(load.statuses) <= {"200", "408", "503"}, load.statuses
    assert max(load.answered_s) > max(load.failed_s), "no chat was answered again"


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
