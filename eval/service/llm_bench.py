"""`sdxl bench llm`: a language model behind the REST API under Poisson load.

Time to first token and per output token against the benchmark's limits, tokens a second against
plain `generate` called request by request, and what a token costs. It talks HTTP.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx

from eval.measuring.timing import quantile
from eval.service import api_key
from eval.service.local_service import local_service
from eval.service.traffic import closed_loop, open_loop
from sdxl.arguments import Parser, number, whole
from sdxl.params import InvalidParams

FIRST_LIMIT_S, TOKEN_LIMIT_S = 2.0, 0.2
"""MLPerf Inference, Llama 2 70B, Server scenario."""
PROMPTS = (
    "circle",
    "two stars",
    "a red ring on white",
    "small yellow star above a green square",
    "something blue",
    "three crosses",
    "a triangle at the top",
    "a purple square left of an orange circle",
)


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


@dataclass
class Figures:
    answers: list[AnswerTimes]
    took_s: float
    joules: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(heard.tokens for heard in self.answers)

    def table(self, price: float | None) -> dict[str, Any]:
        good = [heard for heard in self.answers if heard.status == 200]
        # An answer may be empty: then there was no first token to wait for.
        waits = [heard.wait_s for heard in good if heard.first_s]
        each = [heard.token_s for heard in good if heard.token_s is not None]
        rate = self.tokens / self.took_s
        found: dict[str, Any] = {
            "answers": len(good),
            "failed": len(self.answers) - len(good),
            "tokens_per_s": rate,
            "first_token_ms": [1000 * quantile(waits, q) for q in (0.5, 0.99)],
            "output_token_ms": [1000 * quantile(each, q) for q in (0.5, 0.99)],
        }
        found["is_within_limits"] = (
            quantile(waits, 0.99) <= FIRST_LIMIT_S and quantile(each, 0.99) <= TOKEN_LIMIT_S
        )
        if price:
            found["tokens_per_dollar"] = rate * 3600 / price
        if self.joules:
            found["tokens_per_joule"] = self.tokens / self.joules
        return {**found, **self.extra}


class Client:
    """Streams answers from one service."""

    def __init__(self, url: str, model: str, key: str, max_tokens: int) -> None:
        headers = api_key.headers(key)
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits)
        self.model, self.max_tokens = model, max_tokens

    async def ask(self, prompt: str, seed: int, due_s: float | None = None) -> AnswerTimes:
        """`due_s`: when it should have been asked, if its times count from there."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        heard = AnswerTimes(time.perf_counter() if due_s is None else due_s)
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                heard.status = answer.status_code
                async for event in events(answer):
                    told(heard, event)
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


async def poisson(client: Client, rate: float, seconds: float) -> Figures:
    """Arrivals do not wait for answers."""
    drawn, began_s = random.Random(0), time.perf_counter()

    async def ask(number: int, due_s: float) -> AnswerTimes:
        return await client.ask(drawn.choice(PROMPTS), number, due_s)

    answers = await open_loop(ask, rate, seconds)
    return Figures(answers, time.perf_counter() - began_s)


async def streams(client: Client, count: int, seconds: float) -> Figures:
    """So many at once, each asking again as soon as it is answered."""
    began_s = time.perf_counter()

    async def ask(number: int, _: float) -> AnswerTimes:
        return await client.ask(PROMPTS[number % len(PROMPTS)], number)

    answers = await closed_loop(ask, count, seconds)
    return Figures(answers, time.perf_counter() - began_s)


def plain_generate(folder: str, max_tokens: int, seconds: float) -> float:
    """Tokens a second of transformers' own `generate`, request by request, in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens, number = 0, -1
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        number += 1
        chat = [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]
        asked = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        torch.manual_seed(number)
        made = model.generate(**asked, max_new_tokens=max_tokens, do_sample=True)
        tokens += made.shape[1] - asked["input_ids"].shape[1]
        if not number:
            # The first call pays for what happens once.
            tokens, began_s = 0, time.perf_counter()
    return tokens / (time.perf_counter() - began_s)


def llm_of(url: str, key: str) -> str:
    """The first model that makes no pictures."""
    headers = api_key.headers(key)
    listed = httpx.get(f"{url}/v1/models", headers=headers, timeout=30).json()["data"]
    found = [model["id"] for model in listed if "images" not in model]
    if not found:
        raise InvalidParams("url", url, "needed a service with a language model")
    return str(found[0])


def service(url: str) -> AbstractContextManager[str]:
    return nullcontext(url.rstrip("/")) if url else local_service()


def joules_of(url: str, key: str) -> float | None:
    """What the service's GPUs have used so far; None without GPUs."""
    headers = api_key.headers(key)
    lines = httpx.get(f"{url}/metrics", headers=headers, timeout=30).text.splitlines()
    values = [float(x.split()[-1]) for x in lines if x.startswith("sdxl_gpu_energy_joules_total")]
    return sum(values) if values else None


def measure(url: str, options: Any) -> dict[str, dict[str, Any]]:
    client_of = lambda: Client(url, llm_of(url, options.key), options.key, options.max_tokens)  # noqa: E731
    before = joules_of(url, options.key)
    load = asyncio.run(poisson(client_of(), options.rate, options.seconds))
    if before is not None:
        load.joules = (joules_of(url, options.key) or before) - before
    together = asyncio.run(streams(client_of(), options.streams, options.seconds))
    found = {
        f"Poisson, {options.rate:g}/s": load.table(options.price_per_hour),
        f"{options.streams} streams": together.table(options.price_per_hour),
    }
    if options.peer:
        rate = plain_generate(options.peer, options.max_tokens, options.seconds)
        found["plain generate"] = {"tokens_per_s": rate}
    return found


def show(found: dict[str, dict[str, Any]]) -> None:
    for name, figures in found.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:18} {shown(value)}")


def shown(value: Any) -> str:
    if isinstance(value, list):
        return "  ".join(f"{name} {x:.1f}" for name, x in zip(("p50", "p99"), value, strict=True))
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="sdxl bench llm", description="A language model under load, over HTTP.")
    parser.add_argument("--url", default="", help="a running service; one is started unless given")
    parser.add_argument("--key", default="", help=f"its API key, unless {api_key.VARIABLE} has it")
    parser.add_argument("--rate", type=number, default=5.0, help="arrivals a second (%(default)s)")
    parser.add_argument("--seconds", type=number, default=30.0, help="of load (%(default)s)")
    parser.add_argument("--streams", type=whole, default=8, help="at once (%(default)s)")
    parser.add_argument("--max-tokens", type=whole, default=64, help="an answer (%(default)s)")
    parser.add_argument("--peer", default="", metavar="MODEL", help="also run plain generate on it")
    parser.add_argument("--price-per-hour", type=number, help="dollars, for tokens a dollar")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    options = parser.parse_args(argv)
    for name in ("rate", "seconds", "streams", "max_tokens"):
        if not getattr(options, name) > 0:
            raise InvalidParams(name, getattr(options, name), "needed more than 0")
    with service(options.url) as url:
        found = measure(url, options)
    print(json.dumps(found)) if options.json else show(found)
    return 0
