"""Clients of the REST service as a service has them: who waits, who streams, who fetches later, who
leaves, who asks for nonsense. Each says what became of it; what that is worth, the caller judges.
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
NONSENSE: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": ""},
    {"prompt": "a", "size": "100x100"},
    {"prompt": "a", "n": 0},
    {"prompt": "a", "steps": -1},
    {"prompt": "a", "unknown": 1},
    {"prompt": ["a"]},
)
LEFT = -1
"""the status of an answer that its client did not wait for"""
WAIT_S = 150.0


@dataclass(frozen=True)
class Outcome:
    kind: str
    began_s: float
    """when it was due, on time.perf_counter"""
    ended_s: float = 0.0
    status: int = 0
    """0: the connection broke"""
    problem: str = ""
    """what is wrong with the answer"""
    deadline_s: float = 20.0

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


Client = Callable[[httpx.AsyncClient, random.Random, float], Awaitable[Outcome]]


def body(rng: random.Random, deadline_s: float, **more: Any) -> dict[str, Any]:
    asked = {"prompt": rng.choice(PROMPTS), "seed": rng.randrange(2**32), "deadline_s": deadline_s}
    return {**asked, **more}


async def waits(http: httpx.AsyncClient, rng: random.Random, due_s: float, **more: Any) -> Outcome:
    """For a picture, or a few."""
    asked = body(rng, more.pop("deadline_s", 20.0), **more)
    outcome = Outcome("waits", due_s, deadline_s=asked["deadline_s"])
    try:
        answer = await http.post(GENERATE, json=asked)
    except httpx.HTTPError as error:
        return broken(outcome, error)
    outcome = answered(outcome, answer)
    if answer.status_code != 200:
        return outcome
    pictures = [data["b64_json"] for data in answer.json()["data"]]
    wrong = [problem for text in pictures if (problem := wrong_picture(text))]
    if len(pictures) != asked.get("n", 1):
        wrong.append(f"{len(pictures)} pictures of {asked.get('n', 1)}")
    return replace(outcome, problem="; ".join(wrong))


async def mixes(http: httpx.AsyncClient, rng: random.Random, due_s: float) -> Outcome:
    """Any size, now and then several."""
    more = {"size": rng.choice(SIZES), "n": rng.choice((1, 1, 1, 2)), "steps": rng.choice((8, 20))}
    return await waits(http, rng, due_s, **more, deadline_s=60.0)


async def streams(http: httpx.AsyncClient, rng: random.Random, due_s: float) -> Outcome:
    asked = body(rng, 60.0, stream=True, partial_images=2, progress=True, steps=12)
    outcome = Outcome("streams", due_s, deadline_s=60.0)
    last: dict[str, Any] = {}
    try:
        async with http.stream("POST", GENERATE, json=asked) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    last = json.loads(line.removeprefix("data: "))
            outcome = answered(outcome, answer)
    except httpx.HTTPError as error:
        return broken(outcome, error)
    if outcome.status != 200:
        return outcome
    if "error" in last:
        # The answer had begun: what it would have been is in the event.
        return replace(outcome, status=503, problem=f"ended with {last['error']['code']}")
    return replace(outcome, problem=wrong_picture(last.get("b64_json", "")))


async def fetches(http: httpx.AsyncClient, rng: random.Random, due_s: float) -> Outcome:
    """By the URL that it is told."""
    asked = body(rng, 60.0, response_format="url", steps=8)
    outcome = Outcome("fetches", due_s, deadline_s=60.0)
    try:
        answer = await http.post(GENERATE, json=asked)
        outcome = answered(outcome, answer)
        if answer.status_code != 200:
            return outcome
        file = await http.get(answer.json()["data"][0]["url"])
    except httpx.HTTPError as error:
        return broken(outcome, error)
    if file.status_code != 200:
        return replace(outcome, status=file.status_code, problem="its URL is not there")
    return replace(outcome, problem=wrong_file(file.content))


async def leaves(http: httpx.AsyncClient, rng: random.Random, due_s: float) -> Outcome:
    """At any moment: before the first byte, between two events, within a picture. On a connection
    of its own, which it closes."""
    asked = body(rng, 60.0, stream=rng.random() < 0.5, partial_images=3, progress=True, steps=50)
    if not asked["stream"]:
        del asked["stream"], asked["partial_images"], asked["progress"]
    outcome = Outcome("leaves", due_s, deadline_s=60.0)
    patience_s = rng.expovariate(1 / 0.7)
    own = httpx.AsyncClient(base_url=http.base_url, headers=http.headers, timeout=WAIT_S)
    try:
        async with asyncio.timeout(patience_s), own:
            answer = await own.post(GENERATE, json=asked)
    except TimeoutError:
        return replace(outcome, ended_s=time.perf_counter(), status=LEFT)
    except httpx.HTTPError as error:
        return broken(outcome, error)
    return answered(outcome, answer)


async def blunders(http: httpx.AsyncClient, rng: random.Random, due_s: float) -> Outcome:
    outcome = Outcome("blunders", due_s)
    try:
        answer = await http.post(GENERATE, json=rng.choice(NONSENSE))
    except httpx.HTTPError as error:
        return broken(outcome, error)
    outcome = answered(outcome, answer)
    if outcome.status == 400:
        return replace(outcome, problem=wrong_envelope(answer.content))
    return replace(outcome, problem="" if outcome.status in (429, 503) else "needed a 400")


def answered(outcome: Outcome, answer: httpx.Response) -> Outcome:
    status = answer.status_code
    is_lacking = status in (429, 503) and "retry-after" not in answer.headers
    problem = "no Retry-After" if is_lacking else ""
    return replace(outcome, ended_s=time.perf_counter(), status=status, problem=problem)


def broken(outcome: Outcome, error: Exception) -> Outcome:
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return replace(outcome, ended_s=time.perf_counter(), problem=said)


def wrong_picture(text: str) -> str:
    """Of base64; empty where it is a whole file."""
    try:
        return wrong_file(base64.b64decode(text, validate=True))
    except ValueError:
        return "no base64"


def wrong_file(file: bytes) -> str:
    is_whole = file.startswith(b"\x89PNG") and file.endswith(b"IEND\xaeB`\x82")
    return "" if is_whole else f"no whole PNG: {len(file)} bytes"


def wrong_envelope(content: bytes) -> str:
    """Of an error, as OpenAI's clients read it; empty where it fits."""
    try:
        error = json.loads(content)["error"]
        found = {name: type(error[name]) for name in ("message", "type", "param", "code")}
    except (ValueError, KeyError, TypeError):
        return f"no envelope: {content[:100]!r}"
    text, maybe = str, (str, type(None))
    fits = found["message"] is text and found["type"] is text
    fits = fits and found["param"] in maybe and found["code"] in maybe
    return "" if fits else f"no envelope: {content[:100]!r}"
