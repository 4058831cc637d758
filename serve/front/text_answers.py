"""`POST /v1/chat/completions` and `/v1/completions`: from a checked request to its answer, whole or
streamed.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from sdxl.params import DRAWN_SEEDS
from serve.errors import Problem
from serve.front.answering import deadline_of, event_stream, in_time, take_rate, taken_on
from serve.front.fan_out import fan_out, in_order
from serve.front.keys import RateLimiter
from serve.front.openai_text import ChatRequest, CompletionRequest, check
from serve.front.text_wire import DONE, Choice, Wire, failure, usage_of
from serve.llm.asks import Delta, Ended, Taken, TextBackend, Update
from serve.settings import ServeSettings

Stream = AsyncGenerator[tuple[int, Update]]


@dataclass
class TextAnswers:
    backend: TextBackend
    model: str
    settings: ServeSettings
    limiter: RateLimiter

    async def answer(self, asked: ChatRequest | CompletionRequest, request: Request) -> Response:
        check(asked, self.model, self.settings)
        seed = secrets.randbelow(DRAWN_SEEDS) if asked.seed is None else asked.seed
        deadline_s = deadline_of(asked.deadline_s, request, self.settings)
        asks = asked.asks(seed, deadline_s)
        if len(asks) > self.settings.max_n:
            message = f"prompt: {len(asks)} answers are not allowed; at most {self.settings.max_n}"
            raise Problem(400, message, "prompt", "invalid_value")
        take_rate(self.limiter, request, len(asks))
        wire = Wire(self.model, isinstance(asked, ChatRequest), asked.has_usage)
        updates = in_time(fan_out(self.backend, asks, Ended), deadline_s)
        prompts = len(asks) // (asked.n or 1)
        if asked.stream:
            early = await taken_on(updates, len(asks), Taken)
            return event_stream(narrate(wire, early, updates, prompts))
        choices = await collect(updates)
        reply = wire.whole(choices, usage_of([c.end for c in choices], prompts))
        return Response(reply.model_dump_json(), media_type="application/json")


async def collect(updates: Stream) -> list[Choice]:
    texts: dict[int, str] = {}
    ends: dict[int, Ended] = {}
    async with aclosing(updates):
        async for index, update in updates:
            match update:
                case Delta():
                    texts[index] = texts.get(index, "") + update.text
                case Ended():
                    ends[index] = update
                case Taken():
                    pass
    return [Choice(texts.get(index, ""), ends[index]) for index in sorted(ends)]


async def narrate(
    wire: Wire, early: list[tuple[int, Update]], updates: Stream, prompts: int
) -> AsyncIterator[str]:
    ends: dict[int, Ended] = {}

    def tell(index: int, update: Update) -> str:
        match update:
            case Taken():
                return wire.opening(index)
            case Delta():
                return wire.delta(index, update.text)
            case Ended():
                ends[index] = update
                return wire.ending(index, update)

    try:
        async with aclosing(in_order(early, updates)) as news:
            async for index, update in news:
                if text := tell(index, update):
                    yield text
        if wire.has_usage:
            yield wire.usage(usage_of([ends[index] for index in sorted(ends)], prompts))
        yield DONE
    except Problem as problem:
        yield failure(problem)
