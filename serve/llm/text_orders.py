"""Orders from the REST front to a language model, and the updates that come back, as plain data.

No tensor library is imported. It knows neither Ray nor HTTP.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Reason = Literal["stop", "length"]
COLDEST, NARROWEST = 1e-5, 1e-6
"""Sampling below this temperature or top_p is greedy: in float32 no token would be left to draw."""


class Message(NamedTuple):
    role: str
    content: str


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The seed is fixed, so that another replica can make the same text."""

    max_tokens: int | None = None
    """None: as many as the context holds"""
    temperature: float | None = None
    """0 always takes the likeliest token; None: the model's default"""
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
class TextOrder:
    """One answer to a chat, or one continuation of a text."""

    prompt: str | tuple[Message, ...]
    sampling: Sampling = Sampling()
    deadline_s: float = math.inf
    """seconds from submission to the last token"""


class Accepted(NamedTuple):
    """The order will be answered. The first update of every order."""

    prompt_tokens: int


class Delta(NamedTuple):
    text: str


class Ended(NamedTuple):
    reason: Reason
    prompt_tokens: int
    completion_tokens: int


Update = Accepted | Delta | Ended


@dataclass(frozen=True)
class LlmCard:
    """A language model's public facts."""

    id: str
    context: int
    engine: str = ""
    device: str = ""


class TextBackend(Protocol):
    """A source of text: a speaker in this process, or replicas behind a handle."""

    async def card(self) -> LlmCard:
        """Return the model's card, or raise Problem 503 until it is loaded."""
        ...

    def generate(self, order: TextOrder) -> AsyncGenerator[Update]:
        """Yield updates; the last is Ended, or a Problem is raised. Closing cancels the order."""
        ...

    async def metrics(self) -> Sequence[Any]:
        """Return prometheus_client's Metric objects."""
        ...
