"""The interface that a language model's backend implements: token ids in, text out.

The speaker handles prompts, stop strings, deadlines and metrics.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from serve.llm.text_orders import Reason, Sampling


@dataclass(frozen=True)
class TextPiece:
    """The last piece has a reason."""

    text: str
    tokens: int
    """number made so far"""
    reason: Reason | None = None


class Occupancy(NamedTuple):
    running: int
    waiting: int
    kv_share: float
    """share of the KV cache in use"""


class LlmEngine(Protocol):
    name: str
    context: int
    """the most tokens of prompt and answer together"""
    longest_prompt: int
    """the most tokens of a prompt"""
    rows: int
    """the most answers at once"""
    has_json: bool
    """whether it can restrict an answer to a JSON schema"""

    def generate(self, ids: list[int], sampling: Sampling) -> AsyncGenerator[TextPiece]:
        """Yield an answer; closing cancels it and frees its KV cache. `sampling.max_tokens` is not
        None. An engine may look for stop strings itself and end the text before one."""
        ...

    async def occupancy(self) -> Occupancy: ...

    def check_health(self) -> None:
        """Raises Unhealthy."""
        ...

    def close(self) -> None: ...
