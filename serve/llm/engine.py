"""The one small interface that a language model's backend implements: token ids in, text out.

Prompts, stop strings, deadlines and metrics are the speaker's; an engine knows none of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from serve.llm.asks import Reason, Sampling


@dataclass(frozen=True)
class TextPiece:
    """`tokens` were made so far; the last piece has a reason."""

    text: str
    tokens: int
    reason: Reason | None = None


class Occupancy(NamedTuple):
    running: int
    waiting: int
    kv_share: float
    """of the KV cache, in use"""


class LlmEngine(Protocol):
    name: str
    context: int
    """tokens of prompt and answer together"""
    longest_prompt: int
    """tokens that it can read before it writes"""
    rows: int
    """answers that it writes at once"""
    has_json: bool
    """whether it can be made to write JSON of a schema"""

    def generate(self, ids: list[int], sampling: Sampling) -> AsyncGenerator[TextPiece]:
        """Closing it cancels the generation and frees its KV cache. `max_tokens` is given.
        An engine may itself look for stop strings; the text then ends before one."""
        ...

    async def occupancy(self) -> Occupancy: ...

    def check_health(self) -> None:
        """Raises Unhealthy."""
        ...

    def close(self) -> None: ...
