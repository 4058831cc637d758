"""Clients of the REST service: they wait, stream, fetch a result by its URL, disconnect early or
send invalid requests. Each returns an outcome; it does not judge it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx

from eval.service.load import GENERATE

PROMPTS = ("a lighthouse in a storm", "a red circle on a blue background", "ein Boot, 円, 🚢")
SIZES = ("1024x1024", "1152x896", "896x1152", "768x768")
INVALID: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": ""},
    {"prompt": "a", "size": "100x100"},
    {"prompt": "a", "n": 0},
    {"prompt": "a", "steps": -1},
    {"prompt": "a", "unknown": 1},
    {"prompt": ["a"]},
)
DISCONNECTED = -1
"""the status of a request whose client disconnected"""
WAIT_S = 150.0


@dataclass(frozen=True)
class Outcome:
    kind: str
    began_s: float
    """its arrival, on time.perf_counter"""
    ended_s: float = 0.0
    status: int = 0
    """0 if the connection broke"""
    problem: str = ""
    """what is wrong with the answer, if anything"""
    deadline_s: float = 20.0

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


Client = Callable[[httpx.AsyncClient, random.Random, float], Awaitable[Outcome]]


def body(rng: random.Random, deadline_s: float, **more: Any) -> dict[str, Any]:
    required = {"prompt": rng.choice(PROMPTS), "seed": rng.randrange(2**32)}
    return {**required, "deadline_s": deadline_s, **more}


async def request_and_wait(
    http: httpx.AsyncClient, rng: random.Random, due_s: float, **more: Any
) -> Outcome:
    request = body(rng, more.pop("deadline_s", 20.0), **more)
    outcome = Outcome("wait", due_s, deadline_s=request["deadline_s"])
    try:
        answer = await http.post(GENERATE, json=request)
    except httpx.HTTPError as error:
        return broken(outcome, error)
    outcome = answered(outcome, answer)
    if answer.status_code != 200:
        return outcome
    pictures = [data["b64_json"] for data in answer.json()["data"]]
    wrong = [problem for text in pictures if (problem := wrong_picture(text))]
    if len(pictures) != request.get("n", 1):
        wrong.append(f"{len(pictures)} pictures of {request.get('n', 1)}")
    return replace(outcome, problem="; ".join(wrong))


async def request_mixed(http: httpx.AsyncClient, rng: random.Random, due_s: float) -> Outcome:
    """Request any size, sometimes two pictures."""
    more = {"size": rng.choice(SIZES), "n": rng.choice((1, 1, 1, 2)), "steps": rng.choice((8, 20))}
    return await request_and_wait(http, rng, due_s, **more, deadline_s=60.0)


async def request_stream(http: httpx.AsyncClient, rng: random.Random, due_s: float) -> Outcome:
    request = body(rng, 60.0, stream=True, partial_images=2, progress=True, steps=12)
    outcome = Outcome("stream", due_s, deadline_s=60.0)
    last: dict[str, Any] = {}
    try:
        async with http.stream("POST", GENERATE, json=request) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    last = json.loads(line.removeprefix("data: "))
            outcome = answered(outcome, answer)
    except httpx.HTTPError as error:
        return broken(outcome, error)
    if outcome.status != 200:
        return outcome
    if "error" in last:
        # The status was sent before the error, which is in the event.
        return replace(outcome, status=503, problem=f"ended with {last['error']['code']}")
    return replace(outcome, problem=wrong_picture(last.get("b64_json", "")))


async def fetch_by_url(http: httpx.AsyncClient, rng: random.Random, due_s: float) -> Outcome:
    request = body(rng, 60.0, response_format="url", steps=8)
    outcome = Outcome("fetch", due_s, deadline_s=60.0)
    try:
        answer = await http.post(GENERATE, json=request)
        outcome = answered(outcome, answer)
        if answer.status_code != 200:
            return outcome
        file = await http.get(answer.json()["data"][0]["url"])
    except httpx.HTTPError as error:
        return broken(outcome, error)
    if file.status_code != 200:
        return replace(outcome, status=file.status_code, problem="its URL does not exist")
    return replace(outcome, problem=wrong_file(file.content))


async def disconnect_early(http: httpx.AsyncClient, rng: random.Random, due_s: float) -> Outcome:
    """Disconnect at a random moment: before the first byte, between events, within a picture."""
    request = body(rng, 60.0, stream=rng.random() < 0.5, partial_images=3, progress=True, steps=50)
    if not request["stream"]:
        del request["stream"], request["partial_images"], request["progress"]
    outcome = Outcome("disconnect", due_s, deadline_s=60.0)
    patience_s = rng.expovariate(1 / 0.7)
    client = httpx.AsyncClient(base_url=http.base_url, headers=http.headers, timeout=WAIT_S)
    try:
        async with asyncio.timeout(patience_s), client:
            answer = await client.post(GENERATE, json=request)
    except TimeoutError:
        return replace(outcome, ended_s=time.perf_counter(), status=DISCONNECTED)
    except httpx.HTTPError as error:
        return broken(outcome, error)
    return answered(outcome, answer)


async def send_invalid(http: httpx.AsyncClient, rng: random.Random, due_s: float) -> Outcome:
    outcome = Outcome("invalid", due_s)
    try:
        answer = await http.post(GENERATE, json=rng.choice(INVALID))
    except httpx.HTTPError as error:
        return broken(outcome, error)
    outcome = answered(outcome, answer)
    if outcome.status == 400:
        return replace(outcome, problem=wrong_envelope(answer.content))
    return replace(outcome, problem="" if outcome.status in (429, 503) else "needed a 400")


def answered(outcome: Outcome, answer: httpx.Response) -> Outcome:
    status = answer.status_code
    lacks_header = status in (429, 503) and "retry-after" not in answer.headers
    problem = "no Retry-After" if lacks_header else ""
    return replace(outcome, ended_s=time.perf_counter(), status=status, problem=problem)


def broken(outcome: Outcome, error: Exception) -> Outcome:
    problem = f"{type(error).__name__}: {error}".rstrip(": ")
    return replace(outcome, ended_s=time.perf_counter(), problem=problem)


def wrong_picture(text: str) -> str:
    """What is wrong with a base64 file; empty for a whole PNG."""
    try:
        return wrong_file(base64.b64decode(text, validate=True))
    except ValueError:
        return "not base64"


def wrong_file(file: bytes) -> str:
    is_whole = file.startswith(b"\x89PNG") and file.endswith(b"IEND\xaeB`\x82")
    return "" if is_whole else f"not a whole PNG: {len(file)} bytes"


def wrong_envelope(content: bytes) -> str:
    """What is wrong with an error body for OpenAI's clients; empty if nothing is."""
    try:
        error = json.loads(content)["error"]
        is_valid = all(isinstance(error[name], str) for name in ("message", "type"))
        is_valid &= all(isinstance(error[name], str | None) for name in ("param", "code"))
    except (ValueError, KeyError, TypeError):
        is_valid = False
    return "" if is_valid else f"no envelope: {content[:100]!r}"
