"""Speakers on a fake engine or on the embedded model, and the REST application over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import cache
from typing import Any

import httpx

from serve.front.api import create_app
from serve.llm.engine import Occupancy, TextPiece
from serve.llm.names import MINI, MINI_ID
from serve.llm.prompts import Prompts
from serve.llm.replica import load
from serve.llm.speaker import Speaker
from serve.llm.text_orders import Delta, Ended, Message, Sampling, TextOrder, Update
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.serve.servers import client_of, listening_to
from tests.serve.workers import running

CHAT = "/v1/chat/completions"
WORDS = ("a", " red", " circle", " on", " a", " blue", " background")
SAID = "".join(WORDS)
CIRCLE = TextOrder((Message("user", "circle"),), Sampling(max_tokens=40, temperature=0.0))


class FakeLlm:
    """An LlmEngine that generates the same words for every request, one for each token."""

    name = "fake"

    def __init__(self, words: Sequence[str] = WORDS, token_s: float = 0.0) -> None:
        self.words, self.token_s = tuple(words), token_s
        self.context = self.longest_prompt = 512
        self.has_json, self.rows, self.waiting = False, 10, 0
        self.open = self.cancelled = 0
        self.asked: list[Sampling] = []
        self.fault: Exception | None = None

    async def generate(self, ids: list[int], sampling: Sampling) -> AsyncGenerator[TextPiece]:
        assert sampling.max_tokens is not None
        self.asked.append(sampling)
        self.open += 1
        is_over, words = False, self.words[: sampling.max_tokens]
        try:
            for i, word in enumerate(words, 1):
                await asyncio.sleep(self.token_s)
                if self.fault is not None:
                    raise self.fault
                is_over = i == len(words)
                reason: Any = "stop" if len(words) == len(self.words) else "length"
                yield TextPiece(word, i, reason if is_over else None)
        finally:
            self.open -= 1
            self.cancelled += not is_over

    async def occupancy(self) -> Occupancy:
        return Occupancy(self.open, self.waiting, self.open / 10)

    def check_health(self) -> None:
        pass

    def close(self) -> None:
        pass


@cache
def prompts() -> Prompts:
    return Prompts(MINI)


def fake_speaker(engine: FakeLlm | None = None, **options: Any) -> Speaker:
    return Speaker(MINI_ID, prompts(), engine or FakeLlm(), **options)


@contextmanager
def mini_speaker(**settings: Any) -> Iterator[Speaker]:
    speaker = load(ServeSettings(llm_backend="transformers", **settings))
    try:
        yield speaker
    finally:
        speaker.engine.close()


async def updates_of(speaker: Any, order: TextOrder) -> list[Update]:
    async with aclosing(speaker.generate(order)) as updates:
        return [update async for update in updates]


def text_of(updates: Sequence[Update]) -> str:
    return "".join(update.text for update in updates if isinstance(update, Delta))


def end_of(updates: Sequence[Update]) -> Ended:
    assert isinstance(updates[-1], Ended)
    return updates[-1]


@asynccontextmanager
async def client(
    worker: Worker, speaker: Any, key: str | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app([worker], ServeSettings(**settings), text=speaker)
    async with client_of(app, key) as found:
        yield found


def asked_of(
    worker: Worker, speaker: Any, path: str, body: Any, key: str | None = None, **settings: Any
) -> httpx.Response:
    async def call() -> httpx.Response:
        async with client(worker, speaker, key, **settings) as http:
            return await http.post(path, json=body)

    return asyncio.run(call())


@contextmanager
def listening(speaker: Any, **settings: Any) -> Iterator[str]:
    """Run a real server on a free loopback port, with pictures on fakes."""
    with (
        running() as worker,
        listening_to(create_app([worker], ServeSettings(**settings), text=speaker)) as url,
    ):
        yield url
