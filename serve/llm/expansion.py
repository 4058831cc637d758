"""Expands a picture's short prompt with the language model, within a time limit.

The same seed gives the same words.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass

from serve.errors import Problem
from serve.llm.text_orders import Delta, Ended, Message, Sampling, TextBackend, TextOrder

log = logging.getLogger(__name__)

TASK = (
    "You write prompts for a text-to-image model. Rewrite the user's prompt as one full "
    "description of a picture in plain English, in at most 60 words. Keep everything it says, "
    "contradict nothing, and add what it leaves open. Answer with the description alone."
)
MAX_TOKENS = 120


@dataclass(frozen=True)
class Expander:
    backend: TextBackend
    limit_s: float

    async def expand(self, prompt: str, seed: int, most_chars: int) -> str:
        """Return the expanded prompt, or `prompt` if the model is too slow, fails or writes too
        much."""
        messages = (Message("system", TASK), Message("user", prompt))
        sampling = Sampling(max_tokens=MAX_TOKENS, seed=seed)
        try:
            async with asyncio.timeout(self.limit_s):
                text = await self._answer(TextOrder(messages, sampling, self.limit_s))
        except (TimeoutError, Problem) as error:
            log.warning("a prompt was not expanded: %s", str(error) or type(error).__name__)
            return prompt
        return text if 0 < len(text) <= most_chars else prompt

    async def _answer(self, order: TextOrder) -> str:
        """Return the answer, or "" if it was cut off."""
        text, is_whole = "", False
        async with aclosing(self.backend.generate(order)) as updates:
            async for update in updates:
                if isinstance(update, Delta):
                    text += update.text
                is_whole = isinstance(update, Ended) and update.reason == "stop"
        return text.strip() if is_whole else ""
