"""The checks of a robustness run fail for wrong answers only."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval.robustness.clients import DISCONNECTED, Outcome, wrong_envelope, wrong_file
from eval.robustness.fuzz import Case, Fuzzer
from eval.robustness.fuzz_run import Exchange, exchange, fuzz, wrong_exchange
from eval.robustness.processes import ProcessWatch, Sample
from eval.robustness.report import RunReport, at_most, none_of
from eval.robustness.runs import RunPlan, is_excused, is_wrong, judge_growth, leave, load
from eval.service.traffic import closed_loop, open_loop
from serve.front.api import create_app
from serve.settings import ServeSettings
from tests.serve.servers import listening
from tests.serve.workers import fake_pipeline, running

ENVELOPE = b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}'


def http(status: int, body: bytes = b"", headers: str = "") -> Exchange:
    head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode()
    return Exchange(head + body, 0.1)


HTTP, RAW = "mutated", "raw"


@pytest.mark.parametrize(
    ("kind", "answer", "problem"),
    [
        (HTTP, http(200, b"x"), ""),
        (HTTP, http(400, ENVELOPE), ""),
        (HTTP, http(400, b"Invalid"), "no envelope"),
        (HTTP, http(400, b'{"error": {"message": "m"}}'), "no envelope"),
        (HTTP, http(500, ENVELOPE), "answered [500]"),
        (HTTP, http(503, ENVELOPE), "without Retry-After"),
        (HTTP, http(503, ENVELOPE, "retry-after: 1\r\n"), ""),
        (HTTP, http(429, ENVELOPE), "without Retry-After"),
        (HTTP, Exchange(b"", 0.1), "no answer"),
        (HTTP, Exchange(b"", 20.0, "timeout"), "open for 20 s"),
        (HTTP, Exchange(http(200, b"a").received + http(500).received, 0.1), "answered [500]"),
        (RAW, Exchange(b"", 0.1), ""),
        (RAW, http(400, b"Invalid"), ""),
        (RAW, Exchange(b"", 20.0, "timeout"), "open for 20 s"),
        (RAW, http(500), "answered [500]"),
    ],
)
def test_wrong_answers_are_reported(kind: str, answer: Exchange, problem: str) -> None:
    wrong = wrong_exchange(Case(0, kind, (b"",)), answer)
    assert problem in wrong and bool(problem) == bool(wrong), wrong


def test_a_fuzzed_request_depends_only_on_seed_and_number() -> None:
    with running() as worker:
        openapi = create_app([worker], ServeSettings()).openapi()
    one, other = (Fuzzer(openapi, "127.0.0.1:1", 7) for _ in range(2))
    cases = [one.case(number) for number in range(2000)]
    assert [other.case(number) for number in reversed(range(2000))] == cases[::-1]
    assert {case.kind for case in cases} == {make.__name__ for make in one.kinds}
    assert len({case.parts for case in cases}) > 1200
    assert all(sum(map(len, case.parts)) < 2**20 for case in cases)


@pytest.mark.parametrize("data", [b"", b"\x89PNG...", b"IEND\xaeB`\x82"])
def test_an_incomplete_picture_is_wrong(data: bytes) -> None:
    assert wrong_file(data)
    assert not wrong_file(b"\x89PNG" + data + b"IEND\xaeB`\x82")
    assert not wrong_envelope(ENVELOPE)


def outcome(kind: str, status: int, began_s: float = 0.0, ended_s: float = 1.0) -> Outcome:
    return Outcome(kind, began_s, ended_s, status)


def test_a_lost_request_is_excused_by_a_kill_of_its_front_end_or_proxy() -> None:
    assert all(is_wrong(outcome("wait", status)) for status in (0, 400, 500, DISCONNECTED))
    assert not is_wrong(outcome("disconnect", DISCONNECTED))
    assert not is_wrong(outcome("invalid", 400))
    lost = outcome("wait", 0, 10.0, 20.0)
    assert is_excused(lost, [(15.0, "ProxyActor")]) and is_excused(lost, [(15.0, "ImageIngress")])
    assert not is_excused(lost, [(15.0, "ImageReplica")])
    assert not is_excused(lost, [(25.0, "ProxyActor")])


def samples(values: list[float]) -> list[Sample]:
    return [Sample(float(i), value, 10, 5) for i, value in enumerate(values)]


def test_growth_does_not_count_the_warm_up() -> None:
    watch = ProcessWatch(["a"])
    watch.seen["a", 1] = samples([100.0] * 10 + [300.0] * 90)
    watch.seen["a", 2] = samples([1.0] * 5)
    (warm,) = watch.growths(50.0)
    assert warm.rss_mb == 0 and warm.peak_mb == 300


@pytest.mark.parametrize(("later", "holds"), [(300.0, True), (500.0, False)])
def test_replaced_processes_are_judged_by_generations(later: float, holds: bool) -> None:
    watch, report = ProcessWatch(["a"]), RunReport("soak", {})
    for pid in range(6):
        # Each is young and still grows, which must not count.
        watch.seen["a", pid] = samples([100.0, 200.0, 300.0 if pid < 3 else later])
    judge_growth(report, watch, 600.0, ["a"])
    assert len(report.checks) == 1 and report.holds == holds, report.checks


@pytest.mark.parametrize(("rises", "holds"), [(0.0, True), (0.2, False)])
def test_a_process_of_the_whole_run_is_judged_by_its_growth(rises: float, holds: bool) -> None:
    watch, report = ProcessWatch(["a"]), RunReport("soak", {})
    watch.seen["a", 1] = samples([100.0 + rises * i for i in range(2000)])
    judge_growth(report, watch, 2000.0, ["a"])
    assert len(report.checks) == 4 and report.holds == holds, report.checks


def test_a_report_holds_if_all_its_checks_hold(tmp_path: Path) -> None:
    report = RunReport("soak", {}, [at_most("a", 1.0, 2.0), none_of("b", [])])
    assert report.holds
    report.checks.append(none_of("c", ["wrong"]))
    report.watch = ProcessWatch(["a"])
    report.outcomes = [outcome("wait", 200)]
    report.write(tmp_path)
    stored = json.loads((tmp_path / "soak.json").read_text())
    assert stored["holds"] is False and stored["answers"]["wait"]["statuses"] == {"200": 1}
    assert (tmp_path / "soak.png").stat().st_size > 1000


@contextmanager
def url_of(**settings: Any) -> Iterator[str]:
    with (
        listening(fake_pipeline(tick_s=0.001), **settings) as (url, _),
        # The server listens a moment later.
        httpx.Client(transport=httpx.HTTPTransport(retries=8)) as patient,
    ):
        assert patient.get(f"{url}/healthz").status_code == 200
        yield url


@pytest.mark.slow
def test_runs_pass_on_a_fake_service(tmp_path: Path) -> None:
    """The service runs in this process and computes nothing."""
    plan = RunPlan(seconds=2.0, count=60)
    with url_of(max_steps=2, max_n=2, deadline_s=8.0, body_timeout_s=3.0) as url:
        fuzzed = asyncio.run(fuzz(url, plan))
    with url_of() as url:
        loaded = asyncio.run(load(url, plan, 0.5))
        left = asyncio.run(leave(url, RunPlan(count=20)))
    assert fuzzed.facts["requests"] == 60
    for report in (fuzzed, loaded, left):
        assert report.holds, report.as_dict()


def test_bytes_are_sent_unchanged_and_every_answer_is_read() -> None:
    with url_of() as url:
        port = int(url.rpartition(":")[2])
        parts = [b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\nGET /hea", b"lthz HTTP/1.0\r\n\r\n"]
        answer = asyncio.run(exchange("127.0.0.1", port, parts, 20.0))
    assert len(answer.statuses) == 2 and not answer.error


def test_open_loops_do_not_wait_for_answers_and_closed_loops_do() -> None:
    async def send(number: int, due_s: float) -> tuple[int, float]:
        await asyncio.sleep(0.2)
        return number, due_s

    began_s = time.perf_counter()
    answers = asyncio.run(open_loop(send, 200.0, 0.1))
    assert [number for number, _ in answers] == list(range(len(answers))) and len(answers) > 5
    assert all(began_s <= due_s <= began_s + 5 for _, due_s in answers)
    assert len(asyncio.run(closed_loop(send, 3, 0.1))) == 3
