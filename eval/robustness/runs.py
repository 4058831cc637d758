"""The runs: each takes a service's URL and returns a report."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import httpx

from eval.measuring.timing import quantile
from eval.robustness import clients
from eval.robustness.clients import DISCONNECTED, WAIT_S, Outcome, Send
from eval.robustness.processes import Growth, ProcessWatch, watching
from eval.robustness.report import Check, RunReport, at_most, none_of, some
from eval.service.client import metric_values, unlimited_client
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
SOAK: dict[Send, float] = {
    clients.wait_mixed: 0.45,
    clients.stream: 0.2,
    clients.fetch: 0.15,
    clients.disconnect: 0.1,
    clients.invalid: 0.1,
}
"""the share of each kind of client"""


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
    rate: float = 1.0
    """clients a second in a soak"""


async def load(url: str, plan: RunPlan, share: float) -> RunReport:
    """Poisson arrivals at a share of a closed loop's rate."""
    name = "overload" if share > 1 else "load"
    report = RunReport(name, {**asdict(plan), "share": share})
    rng = random.Random(plan.seed)

    async def send(_: int, due_s: float) -> Outcome:
        return await clients.request(clients.wait, http, rng, due_s, deadline_s=20.0)

    async with unlimited_client(url, WAIT_S) as http:
        rate = rate_of(await closed_loop(send, CLIENTS, max(plan.seconds / 10, 10.0)))
        with watching(TITLES) as watch:
            report.outcomes = await open_loop(send, share * rate, plan.seconds, plan.seed)
    report.facts = {"capacity_per_s": round(rate, 3), "offered_per_s": round(share * rate, 3)}
    report.checks += [
        none_of("only 200 and 429", list_unexpected(report.outcomes, (200, 429))),
        none_of("whole pictures", [o for o in report.outcomes if o.problem]),
        some("pictures", sum(o.status == 200 for o in report.outcomes)),
        check_deadlines(report.outcomes),
    ]
    judge_growth(report, watch, plan.seconds, (PROXY, FRONT))
    return report


def rate_of(outcomes: Sequence[Outcome]) -> float:
    """Pictures a second."""
    good = sum(outcome.status == 200 for outcome in outcomes)
    if not good:
        problems = Counter(outcome.problem for outcome in outcomes)
        raise SystemExit(f"robustness: no picture was returned: {problems}")
    return good / (max(o.ended_s for o in outcomes) - min(o.began_s for o in outcomes))


def check_deadlines(outcomes: Sequence[Outcome]) -> Check:
    shares = [o.took_s / o.deadline_s for o in outcomes if o.status == 200]
    return at_most("p99 of the admitted, as a share of their deadline", quantile(shares, 0.99), 1.0)


async def leave(url: str, plan: RunPlan) -> RunReport:
    """Disconnect in waves; before growth counts, the processes settle."""
    report = RunReport("leavers", asdict(plan))
    rng = random.Random(plan.seed)
    with watching(TITLES) as watch:
        async with unlimited_client(url, WAIT_S) as http:
            while len(report.outcomes) < plan.count:
                wave = min(LEAVING_AT_ONCE, plan.count - len(report.outcomes))
                due_s = time.perf_counter()
                leaving = (
                    clients.request(clients.disconnect, http, rng, due_s) for _ in range(wave)
                )
                report.outcomes += await asyncio.gather(*leaving)
            idle_s = await until_idle(http)
            after = await clients.request(clients.wait, http, rng, time.perf_counter())
    report.facts = {"idle_after_s": round(idle_s, 2)}
    outcomes = report.outcomes
    report.checks += [
        none_of(
            "only 200, 429 and disconnected", list_unexpected(outcomes, (200, 429, DISCONNECTED))
        ),
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


async def soak(url: str, plan: RunPlan) -> RunReport:
    """All kinds of clients, while every kind of process is killed in turn."""
    report = RunReport("soak", asdict(plan))
    rng = random.Random(plan.seed)

    async def send(_: int, due_s: float) -> Outcome:
        (kind,) = rng.choices([*SOAK], [*SOAK.values()])
        return await clients.request(kind, http, rng, due_s)

    with watching(TITLES) as watch:
        kills = killing(watch, plan.kill_every_s, report.kills)
        async with unlimited_client(url, WAIT_S) as http, kills:
            report.outcomes = await open_loop(send, plan.rate, plan.seconds, plan.seed)
    wrong = [o for o in report.outcomes if is_wrong(o)]
    lost = [o for o in wrong if not is_excused(o, report.kills)]
    report.facts = {"lost_with_a_killed_front_or_proxy": len(wrong) - len(lost)}
    report.checks += [
        none_of("no request lost outside a killed front end or proxy", lost),
        some("pictures", sum(o.status == 200 for o in report.outcomes)),
        check_deadlines(report.outcomes),
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
        for title in itertools.cycle(TITLES if every_s else ()):
            await asyncio.sleep(every_s)
            if victim := watch.oldest(title):
                kills.append((time.perf_counter(), title))
                victim.kill()

    task = asyncio.create_task(kill())
    try:
        yield
    finally:
        task.cancel()


def list_unexpected(outcomes: Sequence[Outcome], allowed: Sequence[int]) -> list[str]:
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
    report.growths = watch.growths(LIFE_SHARE * seconds)
    for title in titles:
        of_title = [each for each in report.growths if each.title == title]
        report.checks += growth_checks(title, of_title, seconds) if of_title else []
        peaks = watch.peaks(title)
        if len(peaks) >= GENERATIONS:
            half = len(peaks) // 2
            more = statistics.median(peaks[-half:]) - statistics.median(peaks[:half])
            report.checks.append(at_most(f"{title}: MB more in later processes", more, GROWTH_MB))


def growth_checks(title: str, growths: Sequence[Growth], seconds: float) -> list[Check]:
    limits = {
        "MB more than after settling": ("rss_mb", GROWTH_MB),
        "more descriptors": ("descriptors", COUNT_GROWTH),
        "more threads": ("threads", COUNT_GROWTH),
    }
    if seconds >= LONG_S:
        limits["MB more in the second half"] = "late_rss_mb", LATE_GROWTH_MB
    return [
        at_most(f"{title}: {text}", max(getattr(each, field) for each in growths), limit)
        for text, (field, limit) in limits.items()
    ]
