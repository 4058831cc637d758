"""One answer of a language model after the other, streamed over HTTP, and when its tokens came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from eval.llm.prompts import OWN, LlmPrompt
from eval.service import api_key
from eval.service.scraping import values_of
from sdxl.params import InvalidParams

AT_ONCE = 128
"""asks under way at a service that does not say how many it takes"""
DEADLINE_S = 600.0
"""of an answer; a service has a shorter one for asks that name none, and a longest of its own"""


@dataclass
class AnswerTimes:
    """One streamed answer's times, in seconds."""

    began_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    status: int = 0

    @property
    def wait_s(self) -> float:
        return self.first_s - self.began_s

    @property
    def token_s(self) -> float | None:
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


class Client:
    """Streams answers from one service."""

    def __init__(
        self,
        url: str,
        model: str,
        key: str,
        max_tokens: int,
        prompts: Sequence[LlmPrompt] = OWN,
    ) -> None:
        headers = api_key.headers(key)
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=DEADLINE_S, limits=limits
        )
        self.model, self.max_tokens, self.prompts = model, max_tokens, prompts

    async def ask(
        self,
        prompt: LlmPrompt,
        seed: int,
        due_s: float | None = None,
        on_first: Callable[[], None] = lambda: None,
    ) -> AnswerTimes:
        """`due_s`: when it should have been asked, if its times count from there."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": prompt.max_tokens or self.max_tokens,
            "deadline_s": DEADLINE_S,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        heard = AnswerTimes(time.perf_counter() if due_s is None else due_s)
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                heard.status = answer.status_code
                async for event in events(answer):
                    has_begun = heard.first_s > 0
                    told(heard, event)
                    if heard.first_s and not has_begun:
                        on_first()
        except httpx.HTTPError:
            heard.status = 0
        return heard


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def told(heard: AnswerTimes, event: dict[str, Any]) -> None:
    if "error" in event:
        heard.status = 500
    for choice in event.get("choices", ()):
        if choice["delta"].get("content"):
            heard.last_s = time.perf_counter()
            heard.first_s = heard.first_s or heard.last_s
    if event.get("usage"):
        heard.tokens = event["usage"]["completion_tokens"]


def llm_of(url: str, key: str) -> str:
    """The first model that makes no pictures."""
    headers = api_key.headers(key)
    listed = httpx.get(f"{url}/v1/models", headers=headers, timeout=30).json()["data"]
    found = [model["id"] for model in listed if "images" not in model]
    if not found:
        raise InvalidParams("url", url, "needed a service with a language model")
    return str(found[0])


def at_once(url: str, key: str) -> int:
    """Asks that all replicas take; more are refused."""
    page = httpx.get(f"{url}/metrics", headers=api_key.headers(key), timeout=30).text
    return int(sum(values_of(page, "sdxl_llm_at_once"))) or AT_ONCE
