"""Clients of the REST service: they wait, stream, fetch a result by its URL, disconnect early or
send invalid requests. Each reports its answer and what is wrong with it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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

Answer = tuple[int, str]
"""the status, and what is wrong with the answer, if anything"""
Send = Callable[[httpx.AsyncClient, random.Random, float], Awaitable[Answer]]
"""takes the deadline in seconds"""


@dataclass(frozen=True)
class Outcome:
    kind: str
    began_s: float
    """its arrival, on time.perf_counter"""
    ended_s: float = 0.0
    status: int = 0
    """0 if the connection broke"""
    problem: str = ""
    deadline_s: float = 60.0

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


async def request(
    send: Send, http: httpx.AsyncClient, rng: random.Random, due_s: float, deadline_s: float = 60.0
) -> Outcome:
    try:
        status, problem = await send(http, rng, deadline_s)
    except TimeoutError:
        status, problem = DISCONNECTED, ""
    except httpx.HTTPError as error:
        status, problem = 0, f"{type(error).__name__}: {error}".rstrip(": ")
    kind = send.__name__.removesuffix("_mixed")
    return Outcome(kind, due_s, time.perf_counter(), status, problem, deadline_s)


def body(rng: random.Random, deadline_s: float, **more: Any) -> dict[str, Any]:
    required = {"prompt": rng.choice(PROMPTS), "seed": rng.randrange(2**32)}
    return {**required, "deadline_s": deadline_s, **more}


async def wait(
    http: httpx.AsyncClient, rng: random.Random, deadline_s: float, **more: Any
) -> Answer:
    answer = await http.post(GENERATE, json=body(rng, deadline_s, **more))
    if answer.status_code != 200:
        return refused(answer)
    pictures = [data["b64_json"] for data in answer.json()["data"]]
    wrong = [problem for text in pictures if (problem := wrong_picture(text))]
    if len(pictures) != more.get("n", 1):
        wrong.append(f"{len(pictures)} pictures of {more.get('n', 1)}")
    return 200, "; ".join(wrong)


async def wait_mixed(http: httpx.AsyncClient, rng: random.Random, deadline_s: float) -> Answer:
    """Request any size, sometimes two pictures."""
    more = {"size": rng.choice(SIZES), "n": rng.choice((1, 1, 1, 2)), "steps": rng.choice((8, 20))}
    return await wait(http, rng, deadline_s, **more)


async def stream(http: httpx.AsyncClient, rng: random.Random, deadline_s: float) -> Answer:
    sent = body(rng, deadline_s, stream=True, partial_images=2, progress=True, steps=12)
    last: dict[str, Any] = {}
    async with http.stream("POST", GENERATE, json=sent) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                last = json.loads(line.removeprefix("data: "))
    if answer.status_code != 200:
        return refused(answer)
    if "error" in last:
        # The status was sent before the error, which is in the event.
        return 503, f"ended with {last['error']['code']}"
    return 200, wrong_picture(last.get("b64_json", ""))


async def fetch(http: httpx.AsyncClient, rng: random.Random, deadline_s: float) -> Answer:
    """Fetch the result from its URL."""
    answer = await http.post(GENERATE, json=body(rng, deadline_s, response_format="url", steps=8))
    if answer.status_code != 200:
        return refused(answer)
    file = await http.get(answer.json()["data"][0]["url"])
    if file.status_code != 200:
        return file.status_code, "its URL does not exist"
    return 200, wrong_file(file.content)


async def disconnect(http: httpx.AsyncClient, rng: random.Random, deadline_s: float) -> Answer:
    """Disconnect at a random moment: before the first byte, between events, within a picture."""
    streamed = {"stream": True, "partial_images": 3, "progress": True}
    sent = body(rng, deadline_s, steps=50, **(streamed if rng.random() < 0.5 else {}))
    patience_s = rng.expovariate(1 / 0.7)
    client = httpx.AsyncClient(base_url=http.base_url, headers=http.headers, timeout=WAIT_S)
    async with asyncio.timeout(patience_s), client:
        return refused(await client.post(GENERATE, json=sent))


async def invalid(http: httpx.AsyncClient, rng: random.Random, _: float) -> Answer:
    answer = await http.post(GENERATE, json=rng.choice(INVALID))
    if answer.status_code == 400:
        return 400, wrong_envelope(answer.content)
    if answer.status_code in (429, 503):
        return refused(answer)
    return answer.status_code, "expected a 400"


def refused(answer: httpx.Response) -> Answer:
    lacks_header = answer.status_code in (429, 503) and "retry-after" not in answer.headers
    return answer.status_code, "no Retry-After" if lacks_header else ""


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
