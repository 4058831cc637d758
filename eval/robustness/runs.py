"""The runs: each takes a service's URL and returns a report."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from eval.measuring.timing import quantile
from eval.robustness import clients
from eval.robustness.clients import DISCONNECTED, WAIT_S, Client, Outcome
from eval.robustness.fuzz import Case, Fuzzer
from eval.robustness.processes import Growth, ProcessWatch, growths, peaks_of, watching
from eval.robustness.raw_http import Exchange, exchange
from eval.robustness.report import Check, RunReport, at_most, none_of, some
from eval.service.client import metric_values
from eval.service.load import connected
from eval.service.traffic import closed_loop, open_loop

REPLICA, FRONT, PROXY, CONTROLLER = "ImageReplica", "ImageIngress", "ProxyActor", "ServeController"
TITLES = (REPLICA, FRONT, PROXY, CONTROLLER)
GROWTH_MB, COUNT_GROWTH = 100.0, 20.0
LATE_GROWTH_MB = 25.0
"""in the second half of a run of LONG_S: the allocator's noise"""
LONG_S = 1200.0
LIFE_SHARE, GENERATIONS = 0.8, 4
RECOVERY_S = 15.0
"""After a kill of a front end or a proxy, requests inside it or just arriving may fail."""
CLIENTS = 8
LEAVING_AT_ONCE = 50
IDLE_S = 60.0
HANG_S = 10.0
AT_ONCE = 16
MOST_FINDINGS = 200
ANSWERS = (501, 503, 507)
"""server errors that a request may get"""
RAW_ERROR = re.compile(rb"Traceback|File \\?\"|\b[A-Z]\w+(?:Error|Exception)\b| object at 0x")
PARSER_TEXT = b"Invalid HTTP request received."
"""the parser's answer to bytes that are not HTTP"""
SOAK: tuple[tuple[float, Client], ...] = (
    (0.45, clients.request_mixed),
    (0.2, clients.request_stream),
    (0.15, clients.fetch_by_url),
    (0.1, clients.disconnect_early),
    (0.1, clients.send_invalid),
)


@dataclass(frozen=True)
class RunPlan:
    """The lengths of the runs."""

    seconds: float = 600.0
    seed: int = 0
    kill_every_s: float = 30.0
    """0: no kills"""
    count: int = 1000
    first: int = 0
    """number of the first fuzzed request, to resume a run"""


# -- load ------------------------------------------------------------------------------------


async def load(url: str, plan: RunPlan, share: float) -> RunReport:
    """Poisson arrivals at a share of a closed loop's rate."""
    name = "overload" if share > 1 else "load"
    report = RunReport(name, {**asdict(plan), "share": share})
    rng = random.Random(plan.seed)

    async def send(_: int, due_s: float) -> Outcome:
        return await clients.request_and_wait(http, rng, due_s)

    async with connected(url, WAIT_S) as http:
        rate = rate_of(await closed_loop(send, CLIENTS, max(plan.seconds / 10, 10.0)))
        with watching(TITLES) as watch:
            report.outcomes = await open_loop(send, share * rate, plan.seconds, plan.seed)
    report.facts = {"capacity_per_s": round(rate, 3), "offered_per_s": round(share * rate, 3)}
    report.checks += [
        none_of("only 200 and 429", not_in(report.outcomes, (200, 429))),
        none_of("whole pictures", [o for o in report.outcomes if o.problem]),
        some("pictures", sum(o.status == 200 for o in report.outcomes)),
        *on_time(report.outcomes),
    ]
    judge_growth(report, watch, plan.seconds, (PROXY, FRONT))
    return report


def rate_of(outcomes: Sequence[Outcome]) -> float:
    """Pictures a second."""
    good = sum(outcome.status == 200 for outcome in outcomes)
    if not good:
        raise SystemExit(
            f"robustness: no picture was returned: {Counter(o.problem for o in outcomes)}"
        )
    return good / (max(o.ended_s for o in outcomes) - min(o.began_s for o in outcomes))


def on_time(outcomes: Sequence[Outcome]) -> list[Check]:
    shares = [o.took_s / o.deadline_s for o in outcomes if o.status == 200]
    p99 = quantile(shares, 0.99)
    return [at_most("p99 of the admitted, as a share of their deadline", p99, 1.0)]


# -- disconnecting clients -------------------------------------------------------------------


async def leave(url: str, plan: RunPlan) -> RunReport:
    """Disconnect in waves; before growth counts, the processes settle."""
    report = RunReport("leavers", asdict(plan))
    rng = random.Random(plan.seed)
    with watching(TITLES) as watch:
        async with connected(url, WAIT_S) as http:
            while len(report.outcomes) < plan.count:
                wave = min(LEAVING_AT_ONCE, plan.count - len(report.outcomes))
                due_s = time.perf_counter()
                coming = [clients.disconnect_early(http, rng, due_s) for _ in range(wave)]
                report.outcomes += await asyncio.gather(*coming)
            idle_s = await until_idle(http)
            after = await clients.request_and_wait(http, rng, time.perf_counter(), deadline_s=60.0)
    report.facts = {"idle_after_s": round(idle_s, 2)}
    outcomes = report.outcomes
    report.checks += [
        none_of("only 200, 429 and disconnected", not_in(outcomes, (200, 429, DISCONNECTED))),
        some("disconnected clients", sum(o.status == DISCONNECTED for o in outcomes)),
        at_most("seconds until nothing was in flight", idle_s, IDLE_S),
        Check("a picture afterwards", after.status, 200, after.status == 200 and not after.problem),
    ]
    judge_growth(report, watch, watch_s(watch), TITLES)
    return report


async def until_idle(http: httpx.AsyncClient) -> float:
    began_s = time.perf_counter()
    while True:
        page = (await http.get("/metrics")).text
        busy = metric_values(page, "sdxl_images_running{", "sdxl_images_queued{")
        took_s = time.perf_counter() - began_s
        if not sum(busy) or took_s > IDLE_S + 1:
            return took_s
        await asyncio.sleep(0.2)


# -- soak ------------------------------------------------------------------------------------


async def soak(url: str, plan: RunPlan, rate: float) -> RunReport:
    """All kinds of clients, while every kind of process is killed in turn."""
    report = RunReport("soak", {**asdict(plan), "rate": rate})
    rng = random.Random(plan.seed)
    shares, kinds = [share for share, _ in SOAK], [kind for _, kind in SOAK]

    async def send(_: int, due_s: float) -> Outcome:
        return await rng.choices(kinds, shares)[0](http, rng, due_s)

    with watching(TITLES) as watch:
        async with connected(url, WAIT_S) as http, killing(watch, plan.kill_every_s, report.kills):
            report.outcomes = await open_loop(send, rate, plan.seconds, plan.seed)
    wrong = [o for o in report.outcomes if is_wrong(o) and not is_excused(o, report.kills)]
    excused = sum(is_wrong(o) and is_excused(o, report.kills) for o in report.outcomes)
    report.facts = {"lost_with_a_killed_front_or_proxy": excused}
    report.checks += [
        none_of("no request lost outside a killed front end or proxy", wrong),
        some("pictures", sum(o.status == 200 for o in report.outcomes)),
        *on_time(report.outcomes),
    ]
    judge_growth(report, watch, plan.seconds, TITLES)
    return report


def is_wrong(outcome: Outcome) -> bool:
    expected = {"invalid": (400, 429, 503), "disconnect": (200, 429, 503, DISCONNECTED)}
    allowed = expected.get(outcome.kind, (200, 429, 503))
    return outcome.status not in allowed or bool(outcome.problem)


def is_excused(outcome: Outcome, kills: Sequence[tuple[float, str]]) -> bool:
    return any(
        title in (FRONT, PROXY)
        and outcome.began_s <= killed_s + RECOVERY_S
        and outcome.ended_s >= killed_s
        for killed_s, title in kills
    )


@asynccontextmanager
async def killing(
    watch: ProcessWatch, every_s: float, kills: list[tuple[float, str]]
) -> AsyncIterator[None]:
    """Send SIGKILL to one process at a time, by title in turn."""

    async def kill() -> None:
        turn = 0
        while every_s:
            await asyncio.sleep(every_s)
            title = TITLES[turn % len(TITLES)]
            victims = watch.find(title)
            if victims:
                kills.append((time.perf_counter(), title))
                victims[0].kill()
            turn += 1

    task = asyncio.create_task(kill())
    try:
        yield
    finally:
        task.cancel()


# -- fuzzed requests -------------------------------------------------------------------------


@dataclass
class FuzzAnswers:
    """The answers to fuzzed requests."""

    requests: int = 0
    slowest_s: float = 0.0
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    """by kind of request"""
    findings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: Case, answer: Exchange) -> None:
        self.requests += 1
        self.slowest_s = max(self.slowest_s, answer.took_s)
        statuses = [str(status) for status in answer.statuses] or ["none"]
        self.statuses.setdefault(case.kind, Counter()).update(statuses)
        if problem := wrong_exchange(case, answer):
            self.findings.append(finding(case, answer, problem))

    def facts(self, first: int) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "next": first + self.requests,
            "statuses": {kind: dict(sorted(n.items())) for kind, n in self.statuses.items()},
            "slowest_s": round(self.slowest_s, 2),
            "findings": self.findings[:MOST_FINDINGS],
        }


async def fuzz(url: str, plan: RunPlan) -> RunReport:
    """Send `count` requests, or as many as time allows."""
    report, answers, parts = RunReport("fuzz", asdict(plan)), FuzzAnswers(), urlsplit(url)
    openapi = httpx.get(f"{url}/openapi.json", timeout=30).json()
    fuzzer = Fuzzer(openapi, parts.netloc, plan.seed)
    numbers = iter(range(plan.first, plan.first + plan.count))
    until_s = time.perf_counter() + plan.seconds

    async def run_client() -> None:
        while time.perf_counter() < until_s and (number := next(numbers, None)) is not None:
            case = fuzzer.case(number)
            host, port = parts.hostname or "", parts.port or 80
            sent = exchange(host, port, case.parts, 2 * HANG_S, half_closes=case.half_closes)
            answers.add(case, await sent)

    with watching(TITLES) as watch:
        await asyncio.gather(*(run_client() for _ in range(AT_ONCE)))
    wrong = [f"{each['number']} ({each['kind']}): {each['problem']}" for each in answers.findings]
    report.facts = answers.facts(plan.first)
    report.checks.append(none_of("valid answers", wrong))
    report.checks.append(at_most("slowest, s", answers.slowest_s, HANG_S))
    judge_growth(report, watch, watch_s(watch), TITLES)
    return report


def wrong_exchange(case: Case, answer: Exchange) -> str:
    """What is wrong with the answer; empty if nothing is."""
    if answer.took_s > HANG_S:
        return f"open for {answer.took_s:.0f} s"
    if bad := [s for s in answer.statuses if s >= 500 and s not in ANSWERS]:
        return f"answered {bad}"
    first = answer.first()
    if first is None:
        return "" if not case.is_http else f"no answer ({answer.error or 'closed'})"
    status, headers, body = first
    if status in (429, 503) and not headers.get("retry-after"):
        return f"{status} without Retry-After"
    if status >= 400 and (raw := RAW_ERROR.search(body)):
        return f"{status}: raw text of an exception, {raw[0].decode()!r}"
    is_refusal = 400 <= status < 600 and case.is_http and body and body != PARSER_TEXT
    if is_refusal and (wrong := clients.wrong_envelope(body)):
        return f"{status}: {wrong}"
    return ""


def finding(case: Case, answer: Exchange, problem: str) -> dict[str, Any]:
    sent = b"".join(case.parts)
    return {
        "number": case.number,
        "kind": case.kind,
        "problem": problem,
        "sent": sent[:2000].decode("latin-1"),
        "sent_bytes": len(sent),
        "received": answer.received[:500].decode("latin-1"),
    }


# -- shared ----------------------------------------------------------------------------------


def not_in(outcomes: Sequence[Outcome], allowed: Sequence[int]) -> list[str]:
    wrong = [o for o in outcomes if o.status not in allowed]
    return [f"{o.kind} {o.status} {o.problem} after {o.took_s:.1f} s" for o in wrong]


def watch_s(watch: ProcessWatch) -> float:
    return time.perf_counter() - watch.began_s


def judge_growth(
    report: RunReport, watch: ProcessWatch, seconds: float, titles: Sequence[str]
) -> None:
    """Judge processes that lived as long as the run by their own growth, and killed ones by the
    peaks of their generations, because a young process still grows."""
    report.watch = watch
    report.growths = growths(watch, LIFE_SHARE * seconds)
    for title in titles:
        of_title = [each for each in report.growths if each.title == title]
        report.checks += growth_checks(title, of_title, seconds)
        peaks = peaks_of(watch, title)
        if len(peaks) >= GENERATIONS:
            half = len(peaks) // 2
            more = statistics.median(peaks[-half:]) - statistics.median(peaks[:half])
            report.checks.append(at_most(f"{title}: MB more in later processes", more, GROWTH_MB))


def growth_checks(title: str, growths: Sequence[Growth], seconds: float) -> list[Check]:
    if not growths:
        return []
    checks = [
        at_most(f"{title}: MB more than after settling", max(g.rss_mb for g in growths), GROWTH_MB),
        at_most(f"{title}: more descriptors", max(g.descriptors for g in growths), COUNT_GROWTH),
        at_most(f"{title}: more threads", max(g.threads for g in growths), COUNT_GROWTH),
    ]
    if seconds >= LONG_S:
        late = max(g.late_rss_mb for g in growths)
        checks.append(at_most(f"{title}: MB more in the second half", late, LATE_GROWTH_MB))
    return checks


def dump(report: RunReport) -> str:
    lines = [str(check) for check in report.checks]
    return "\n".join([json.dumps(report.facts | {"findings": None}), *lines])
