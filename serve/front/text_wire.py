"""An answer as it goes to the client: whole, or in the chunks that OpenAI's clients read."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve.errors import Problem
from serve.front.openai_text import (
    AnswerMessage,
    ChatChoice,
    ChatResponse,
    CompletionResponse,
    TextChoice,
    TextUsage,
)
from serve.llm.asks import Ended

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Choice:
    text: str
    end: Ended


@dataclass
class Wire:
    """One answer's names; `is_chat` decides between the two shapes."""

    model: str
    is_chat: bool
    has_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self.id = f"{prefix}-{secrets.token_hex(12)}"

    def whole(self, choices: list[Choice], usage: TextUsage) -> ChatResponse | CompletionResponse:
        common: dict[str, Any] = {"id": self.id, "created": self.created, "model": self.model}
        if not self.is_chat:
            texts = [
                TextChoice(index=i, text=c.text, finish_reason=c.end.reason)
                for i, c in enumerate(choices)
            ]
            return CompletionResponse(**common, choices=texts, usage=usage)
        chats = [
            ChatChoice(index=i, message=AnswerMessage(content=c.text), finish_reason=c.end.reason)
            for i, c in enumerate(choices)
        ]
        return ChatResponse(**common, choices=chats, usage=usage)

    def opening(self, index: int) -> str:
        """Before a choice's first text; completions have none."""
        return self._choice(index, {"role": "assistant", "content": ""}) if self.is_chat else ""

    def delta(self, index: int, text: str) -> str:
        return self._choice(index, {"content": text} if self.is_chat else text)

    def ending(self, index: int, end: Ended) -> str:
        return self._choice(index, {} if self.is_chat else "", end.reason)

    def usage(self, usage: TextUsage) -> str:
        return self._chunk({"choices": [], "usage": usage.model_dump()})

    def _choice(self, index: int, content: Any, reason: str | None = None) -> str:
        name = "delta" if self.is_chat else "text"
        choice = {"index": index, name: content, "logprobs": None, "finish_reason": reason}
        return self._chunk({"choices": [choice], **({"usage": None} if self.has_usage else {})})

    def _chunk(self, rest: Mapping[str, Any]) -> str:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        common = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return f"data: {json.dumps({**common, **rest})}\n\n"


def failure(problem: Problem) -> str:
    return f"data: {json.dumps(problem.body())}\n\n"


def usage_of(ends: list[Ended], prompts: int) -> TextUsage:
    """A prompt counts once, however many choices it has."""
    choices = max(len(ends) // max(prompts, 1), 1)
    read = sum(end.prompt_tokens for end in ends[::choices])
    written = sum(end.completion_tokens for end in ends)
    return TextUsage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)
