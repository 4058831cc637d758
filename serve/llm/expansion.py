"""A short prompt for a picture, expanded by the language model within a time limit, or left as it
was. A seed gives the same words each time.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass

from serve.errors import Problem
from serve.llm.asks import Ask, Delta, Ended, Message, Sampling, TextBackend

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
        """The prompt itself where the model is too slow, fails, or says too much."""
        messages = (Message("system", TASK), Message("user", prompt))
        sampling = Sampling(max_tokens=MAX_TOKENS, seed=seed)
        try:
            async with asyncio.timeout(self.limit_s):
                text = await self._written(Ask(messages, sampling, self.limit_s))
        except (TimeoutError, Problem) as error:
            log.warning("a prompt was not expanded: %s", str(error) or type(error).__name__)
            return prompt
        return text if 0 < len(text) <= most_chars else prompt

    async def _written(self, ask: Ask) -> str:
        """Nothing, unless it came to its end."""
        text, is_whole = "", False
        async with aclosing(self.backend.generate(ask)) as updates:
            async for update in updates:
                if isinstance(update, Delta):
                    text += update.text
                is_whole = isinstance(update, Ended) and update.reason == "stop"
        return text.strip() if is_whole else ""
