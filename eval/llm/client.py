"""A client of a language model: prompts, streamed answers with the times of their tokens, and the
wait until the model has loaded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from eval.service.client import auth_headers, metric_values, metrics_page, unlimited_client
from sdxl.arguments import Parser, add_option
from sdxl.params import InvalidParams

AT_ONCE = 128
"""concurrent requests to a service that does not publish a limit"""
DEADLINE_S = 600.0
"""of an answer; the service's default is shorter"""
START_S = 900.0
"""the longest wait for all replicas, after the first is ready"""
RETRY_S = 1.0
RUNNING = "sdxl_llm_running"
"""the metric of a replica whose model has loaded"""
NOT_LOADED = "the language model does not load"
"""a replica's log line before the traceback"""
RAY_PREFIX = re.compile(r"^\([^)]*\) ")
"""the prefix of a line that names its process"""


@dataclass(frozen=True)
class LlmPrompt:
    text: str
    max_tokens: int | None = None
    """of its answer; the benchmark's --max-tokens if None"""


TEXTS = (
    *("circle", "two stars", "a red ring on white", "small yellow star above a green square"),
    *("something blue", "three crosses", "a triangle at the top"),
    "a purple square left of an orange circle",
)
PROMPTS = tuple(map(LlmPrompt, TEXTS))


def add_answer_options(parser: Parser) -> None:
    add = partial(add_option, parser)
    add("--limits", "server", f"MLPerf's limits: {', '.join(LIMITS)}")
    add("--max-tokens", 64, "per answer")
    text = "prompts as JSON lines: text, and max_tokens of its answer (default: eight short ones)"
    add("--prompts", "", text, "FILE")


def read_prompts(file: str) -> tuple[LlmPrompt, ...]:
    """Return the prompts of the file, or the default ones without a file."""
    if not file:
        return PROMPTS
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        prompts = tuple(read_prompt(line) for line in lines if line.strip())
    except (OSError, ValueError, TypeError) as error:
        needed = f'must hold JSON lines such as {{"text": "…", "max_tokens": 256}} ({error})'
        raise InvalidParams("prompts", file, needed) from error
    if not prompts:
        raise InvalidParams("prompts", file, "must hold at least one line")
    return prompts


def read_prompt(line: str) -> LlmPrompt:
    prompt = LlmPrompt(**json.loads(line))
    if not isinstance(prompt.text, str) or not prompt.text:
        raise ValueError(f"text: {prompt.text!r}")
    most = prompt.max_tokens
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"max_tokens: {most!r}")
    return prompt


@dataclass(frozen=True)
class TokenLimits:
    """MLPerf's limits on Llama 2 70B at the 99th percentile: seconds to the first token, and for
    each token after it."""

    benchmark: str
    """LoadGen's name of the benchmark"""
    first_s: float
    token_s: float

    def __str__(self) -> str:
        return f"{1000 * self.first_s:.0f} and {1000 * self.token_s:.0f} ms"


LIMITS = {
    "server": TokenLimits("llama2-70b", 2.0, 0.2),
    "interactive": TokenLimits("llama2-70b-interactive", 0.45, 0.04),
}


def limits_named(name: str) -> TokenLimits:
    if name not in LIMITS:
        raise InvalidParams.unknown("limits", name, LIMITS)
    return LIMITS[name]


@dataclass
class StreamedAnswer:
    """The times of one streamed answer, in seconds, with its tokens and HTTP status."""

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

    def add(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.status = 500
        for choice in event.get("choices", ()):
            if choice["delta"].get("content"):
                self.last_s = time.perf_counter()
                self.first_s = self.first_s or self.last_s
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]


class Client:
    """Requests streamed answers from one service."""

    def __init__(
        self, url: str, model: str, key: str, max_tokens: int, prompts: Sequence[LlmPrompt]
    ) -> None:
        self.http = unlimited_client(url, DEADLINE_S, key)
        self.model, self.max_tokens, self.prompts = model, max_tokens, prompts

    async def request(
        self,
        prompt: LlmPrompt,
        seed: int,
        due_s: float | None = None,
        on_first: Callable[[], None] = lambda: None,
    ) -> StreamedAnswer:
        """Times count from `due_s` if given, else from now. `on_first` runs at the first token."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": prompt.max_tokens or self.max_tokens,
            "deadline_s": DEADLINE_S,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = StreamedAnswer(time.perf_counter() if due_s is None else due_s)
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                answer.status = response.status_code
                async for event in events(response):
                    had_first = answer.first_s > 0
                    answer.add(event)
                    if answer.first_s and not had_first:
                        on_first()
        except httpx.HTTPError:
            answer.status = 0
        return answer


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def first_llm(url: str, key: str) -> str:
    """The id of the first listed model that makes no pictures."""
    headers = auth_headers(key)
    listed = httpx.get(f"{url}/v1/models", headers=headers, timeout=30).json()["data"]
    ids = [model["id"] for model in listed if "images" not in model]
    if not ids:
        raise InvalidParams("url", url, "must be the URL of a service with a language model")
    return str(ids[0])


def concurrent_requests(url: str, key: str) -> int:
    """The number of concurrent requests that all replicas together accept."""
    return int(sum(metric_values(metrics_page(url, key), "sdxl_llm_at_once"))) or AT_ONCE


def wait_until_loaded(url: str, replicas: int, log: Path) -> None:
    """Wait until every replica has loaded; the service is ready before. Raise RuntimeError with the
    first reason in the log."""
    until_s = time.monotonic() + START_S
    while (loaded := len(metric_values(metrics_page(url), RUNNING))) < replicas:
        reason = failure_in(log.read_text(encoding="utf-8", errors="replace"))
        ready = httpx.get(f"{url}/readyz", timeout=30).json()
        if reason or ready.get("llm") == "unavailable" or time.monotonic() > until_s:
            reason = reason or "no reason in the log"
            raise RuntimeError(f"{loaded} of {replicas} replicas loaded: {reason}")
        time.sleep(RETRY_S)


def failure_in(log: str) -> str:
    """The exception of the first replica that did not load; empty if there is none."""
    has_failed = False
    for line in (RAY_PREFIX.sub("", line) for line in log.splitlines()):
        if has_failed and line and not line.startswith((" ", "Traceback")):
            return line
        has_failed = has_failed or NOT_LOADED in line
    return ""
