"""Requests from the REST front to a language model, and its updates: plain data, one protocol.

It imports no tensor library, and knows neither Ray nor HTTP.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Reason = Literal["stop", "length"]
COLDEST, NARROWEST = 1e-5, 1e-6
"""A lower temperature or top_p is greedy: in float32 it would leave no token to draw."""


class Message(NamedTuple):
    role: str
    content: str


@dataclass(frozen=True)
class Sampling:
    """Its seed is fixed, so that the same text can be made again elsewhere."""

    max_tokens: int | None = None
    """as many as the context holds, unless given"""
    temperature: float | None = None
    """0 takes the likeliest token each time; the model's own unless given"""
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    json_schema: str | None = None
    """JSON text; `{}` for any object"""

    @property
    def is_greedy(self) -> bool:
        is_cold = self.temperature is not None and self.temperature < COLDEST
        return is_cold or self.top_p < NARROWEST


@dataclass(frozen=True)
class Ask:
    """One answer to a chat, or one continuation of a text."""

    prompt: str | tuple[Message, ...]
    sampling: Sampling = Sampling()
    deadline_s: float = math.inf
    """seconds from when it is handed over"""


class Taken(NamedTuple):
    """It will be answered. The first update of every ask."""

    prompt_tokens: int


class Delta(NamedTuple):
    text: str


class Ended(NamedTuple):
    reason: Reason
    prompt_tokens: int
    completion_tokens: int


Update = Taken | Delta | Ended


@dataclass(frozen=True)
class LlmCard:
    """What a client may know of a language model before it asks."""

    id: str
    context: int
    engine: str = ""
    device: str = ""


class TextBackend(Protocol):
    """Whatever writes text: a speaker in this process, or replicas behind a handle."""

    async def card(self) -> LlmCard:
        """Return the model's card, or raise Problem 503 before its first answer."""
        ...

    def generate(self, ask: Ask) -> AsyncGenerator[Update]:
        """Ends with Ended, or raises Problem. Closing it frees what the ask held."""
        ...

    async def metrics(self) -> Sequence[Any]:
        """prometheus_client's Metric objects."""
        ...
