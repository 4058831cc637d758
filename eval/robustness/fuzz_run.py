"""The run `fuzz`: send invalid requests as bytes, and check every answer."""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse, IncompleteRead
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx

from eval.robustness.clients import wrong_envelope
from eval.robustness.fuzz import Case, Fuzzer
from eval.robustness.processes import watching
from eval.robustness.report import RunReport, at_most, none_of
from eval.robustness.runs import TITLES, RunPlan, judge_growth, watch_s

HANG_S = 10.0
AT_ONCE = 16
MOST_FINDINGS = 200
ALLOWED_ERRORS = (501, 503, 507)
"""server errors that a request may get"""
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})[^\r\n]{0,60}\r\n")
RAW_ERROR = re.compile(rb"Traceback|File \\?\"|\b[A-Z]\w+(?:Error|Exception)\b| object at 0x")
PARSER_TEXT = b"Invalid HTTP request received."
"""the parser's answer to bytes that are not HTTP"""


@dataclass(frozen=True)
class Exchange:
    """The bytes that a server answered on one connection."""

    received: bytes
    took_s: float
    error: str = ""
    """why the exchange ended early; empty if the server closed the connection"""

    @property
    def statuses(self) -> list[int]:
        """The status of every answer on the connection."""
        return [int(status) for status in STATUS_LINE.findall(self.received)]

    def first(self) -> tuple[int, HTTPMessage, bytes] | None:
        """Status, headers and body of the first answer, if it is complete."""
        socket: Any = SimpleNamespace(makefile=lambda *_: io.BytesIO(self.received))
        try:
            response = HTTPResponse(socket)
            response.begin()
            return response.status, response.msg, response.read()
        except IncompleteRead as cut:
            # An answer to HEAD has the length of the body that it omits.
            return response.status, response.msg, cut.partial
        except (HTTPException, OSError, ValueError):
            return None


async def exchange(
    host: str, port: int, parts: Sequence[bytes], timeout_s: float, *, half_closes: bool = False
) -> Exchange:
    """Send the parts one by one, and read until the server closes or `timeout_s` passes. HTTP
    libraries send only valid requests."""
    began_s, received, error = time.perf_counter(), bytearray(), ""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if half_closes:
                writer.write_eof()
            while data := await reader.read(2**16):
                received += data
    except TimeoutError:
        error = "timeout"
    except OSError as broken:
        error = type(broken).__name__
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    return Exchange(bytes(received), time.perf_counter() - began_s, error)


async def fuzz(url: str, plan: RunPlan) -> RunReport:
    """Send `count` requests, or as many as time allows."""
    report, address = RunReport("fuzz", asdict(plan)), urlsplit(url)
    openapi = httpx.get(f"{url}/openapi.json", timeout=30).json()
    fuzzer = Fuzzer(openapi, address.netloc, plan.seed)
    numbers = iter(range(plan.first, plan.first + plan.count))
    until_s = time.perf_counter() + plan.seconds
    statuses: dict[str, Counter[str]] = defaultdict(Counter)
    times_s, findings = [0.0], list[dict[str, Any]]()

    async def run_client() -> None:
        while time.perf_counter() < until_s and (number := next(numbers, None)) is not None:
            case = fuzzer.case(number)
            host, port = address.hostname or "", address.port or 80
            sent = exchange(host, port, case.parts, 2 * HANG_S, half_closes=case.half_closes)
            answer = await sent
            times_s.append(answer.took_s)
            statuses[case.kind].update([str(status) for status in answer.statuses] or ["none"])
            if problem := wrong_exchange(case, answer):
                findings.append(finding(case, answer, problem))

    with watching(TITLES) as watch:
        await asyncio.gather(*(run_client() for _ in range(AT_ONCE)))
    requests = len(times_s) - 1
    report.facts = {
        "requests": requests,
        "next": plan.first + requests,
        "statuses": {kind: dict(sorted(counts.items())) for kind, counts in statuses.items()},
        "slowest_s": round(max(times_s), 2),
        "findings": findings[:MOST_FINDINGS],
    }
    wrong = [f"{each['number']} ({each['kind']}): {each['problem']}" for each in findings]
    report.checks += [none_of("valid answers", wrong), at_most("slowest, s", max(times_s), HANG_S)]
    judge_growth(report, watch, watch_s(watch), TITLES)
    return report


def wrong_exchange(case: Case, answer: Exchange) -> str:
    """What is wrong with the answer; empty if nothing is."""
    if answer.took_s > HANG_S:
        return f"open for {answer.took_s:.0f} s"
    if bad := [s for s in answer.statuses if s >= 500 and s not in ALLOWED_ERRORS]:
        return f"answered {bad}"
    first = answer.first()
    if first is None:
        return f"no answer ({answer.error or 'closed'})" if case.is_http else ""
    status, headers, body = first
    if status in (429, 503) and not headers.get("retry-after"):
        return f"{status} without Retry-After"
    if status >= 400 and (raw := RAW_ERROR.search(body)):
        return f"{status}: raw text of an exception, {raw[0].decode()!r}"
    is_refusal = 400 <= status < 600 and case.is_http and body and body != PARSER_TEXT
    if is_refusal and (wrong := wrong_envelope(body)):
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
