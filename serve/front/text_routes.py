"""The language model's part of the REST application."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.types import DecoratedCallable
from starlette.responses import Response

from serve.front.answering import EVENTS_IN_OPENAPI
from serve.front.openai_text import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
)
from serve.front.text_answers import TextAnswers

log = logging.getLogger(__name__)


def add_text_routes(app: FastAPI, answers: TextAnswers) -> None:
    def note(request: Request, asked: object) -> None:
        if answers.settings.log_prompts:
            log.info("%s asks for %r", request.state.request_id, asked)

    def post(path: str, model: type) -> Callable[[DecoratedCallable], DecoratedCallable]:
        told = "the answer; as events with `stream`"
        answer = {"model": model, "content": EVENTS_IN_OPENAPI, "description": told}
        return app.post(path, responses={200: answer}, response_model=model)

    @post("/v1/chat/completions", ChatResponse)
    async def complete_chat(body: ChatRequest, request: Request) -> Response:
        """Answer a chat. Compatible with OpenAI's Chat Completions API."""
        note(request, body.messages)
        return await answers.answer(body, request)

    @post("/v1/completions", CompletionResponse)
    async def complete_text(body: CompletionRequest, request: Request) -> Response:
        """Continue a text. Compatible with OpenAI's Completions API."""
        note(request, body.prompt)
        return await answers.answer(body, request)
