"""The language model over HTTP: `POST /v1/chat/completions` and `/v1/completions`, whole or in the
chunks that OpenAI's clients read.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.types import DecoratedCallable
from starlette.responses import Response

from sdxl.params import DRAWN_SEEDS
from serve.errors import Problem, invalid
from serve.front.answering import (
    EVENTS_IN_OPENAPI,
    deadline_of,
    fan_out,
    server_event,
    stream,
    take_rate,
)
from serve.front.keys import RateLimiter
from serve.front.openai_text import (
    AnswerMessage,
    ChatChoice,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    TextChoice,
    TextUsage,
    check,
)
from serve.llm.text_orders import Accepted, Delta, Ended, TextBackend, Update
from serve.settings import ServeSettings

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def add_text_routes(app: FastAPI, answers: TextAnswers) -> None:
    def post(path: str, model: type) -> Callable[[DecoratedCallable], DecoratedCallable]:
        description = "the answer; as events with `stream`"
        answer = {"model": model, "content": EVENTS_IN_OPENAPI, "description": description}
        return app.post(path, responses={200: answer}, response_model=model)

    @post("/v1/chat/completions", ChatResponse)
    async def complete_chat(body: ChatRequest, request: Request) -> Response:
        """Answer a chat. Compatible with OpenAI's Chat Completions API."""
        return await answers.answer(body, request)

    @post("/v1/completions", CompletionResponse)
    async def complete_text(body: CompletionRequest, request: Request) -> Response:
        """Continue a text. Compatible with OpenAI's Completions API."""
        return await answers.answer(body, request)


@dataclass(frozen=True)
class Choice:
    text: str
    end: Ended


@dataclass
class TextAnswers:
    backend: TextBackend
    model: str
    settings: ServeSettings
    limiter: RateLimiter

    async def answer(self, asked: ChatRequest | CompletionRequest, request: Request) -> Response:
        is_chat = isinstance(asked, ChatRequest)
        if self.settings.log_prompts:
            prompt = asked.messages if isinstance(asked, ChatRequest) else asked.prompt
            log.info("%s asks for %r", request.state.request_id, prompt)
        check(asked, self.model, self.settings)
        seed = secrets.randbelow(DRAWN_SEEDS) if asked.seed is None else asked.seed
        deadline_s = deadline_of(asked.deadline_s, request, self.settings)
        orders = asked.text_orders(seed, deadline_s)
        if len(orders) > self.settings.max_n:
            needed = f"must be at most {self.settings.max_n}"
            raise invalid("prompt", f"prompt asks for {len(orders)} answers; {needed}")
        take_rate(self.limiter, request, len(orders))
        wire = Wire(self.model, is_chat, asked.has_usage, prompts=len(orders) // (asked.n or 1))
        updates = fan_out(self.backend, orders, deadline_s, Ended)
        if asked.stream:
            return await stream(updates, len(orders), Accepted, wire.event, wire.failure, wire.last)
        reply = wire.whole(await collect(updates))
        return Response(reply.model_dump_json(), media_type="application/json")


async def collect(updates: AsyncGenerator[tuple[int, Update]]) -> list[Choice]:
    texts: dict[int, str] = {}
    ends: dict[int, Ended] = {}
    async with aclosing(updates):
        async for index, update in updates:
            match update:
                case Delta():
                    texts[index] = texts.get(index, "") + update.text
                case Ended():
                    ends[index] = update
    return [Choice(texts.get(index, ""), ends[index]) for index in sorted(ends)]


@dataclass
class Wire:
    """Formats one answer, as a chat or a completion."""

    model: str
    is_chat: bool
    has_usage: bool
    prompts: int
    created: int = field(default_factory=lambda: int(time.time()))
    ends: dict[int, Ended] = field(default_factory=dict)
    """ends of streamed choices"""

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self.id = f"{prefix}-{secrets.token_hex(12)}"

    def whole(self, choices: list[Choice]) -> ChatResponse | CompletionResponse:
        common: dict[str, Any] = {"id": self.id, "created": self.created, "model": self.model}
        common["usage"] = usage_of([choice.end for choice in choices], self.prompts)
        if not self.is_chat:
            texts = [
                TextChoice(index=i, text=c.text, finish_reason=c.end.reason)
                for i, c in enumerate(choices)
            ]
            return CompletionResponse(**common, choices=texts)
        chats = [
            ChatChoice(index=i, message=AnswerMessage(content=c.text), finish_reason=c.end.reason)
            for i, c in enumerate(choices)
        ]
        return ChatResponse(**common, choices=chats)

    def event(self, index: int, update: Update) -> bytes:
        match update:
            case Accepted():
                # Completions have no event before their first text.
                opening = {"role": "assistant", "content": ""}
                return self._choice(index, opening) if self.is_chat else b""
            case Delta():
                return self._choice(
                    index, {"content": update.text} if self.is_chat else update.text
                )
            case Ended():
                self.ends[index] = update
                return self._choice(index, {} if self.is_chat else "", update.reason)

    def last(self) -> bytes:
        if not self.has_usage:
            return DONE
        usage = usage_of([self.ends[index] for index in sorted(self.ends)], self.prompts)
        return self._chunk({"choices": [], "usage": usage.model_dump()}) + DONE

    def failure(self, problem: Problem) -> bytes:
        return server_event(problem.body())

    def _choice(self, index: int, content: Any, reason: str | None = None) -> bytes:
        name = "delta" if self.is_chat else "text"
        choice = {"index": index, name: content, "logprobs": None, "finish_reason": reason}
        return self._chunk({"choices": [choice], **({"usage": None} if self.has_usage else {})})

    def _chunk(self, rest: Mapping[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        common = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return server_event({**common, **rest})


def usage_of(ends: list[Ended], prompts: int) -> TextUsage:
    """Sum up the tokens; a prompt with several choices counts once."""
    choices = max(len(ends) // max(prompts, 1), 1)
    read = sum(end.prompt_tokens for end in ends[::choices])
    written = sum(end.completion_tokens for end in ends)
    return TextUsage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)
