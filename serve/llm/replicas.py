"""Language model replicas behind a Ray Serve handle, as one TextBackend.

One that dies or hangs in the middle is no error: the ask, its seed fixed, goes to another one, and
what the client has already read is not sent again. It knows no HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from serve.errors import Problem
from serve.fleet import liveness
from serve.fleet.replicas import Known, ask_any, attempt, gather, persevere
from serve.llm.asks import Ask, Delta, Ended, LlmCard, Taken, Update


class LlmReplicas:
    """Implements TextBackend over a Ray Serve DeploymentHandle."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._stream = handle, handle.options(stream=True)
        self._liveness = liveness.of_deployment(handle.deployment_name)
        self._card: Known[LlmCard] = Known(self._ask_card)

    async def card(self) -> LlmCard:
        return await self._card.now()

    async def _ask_card(self) -> LlmCard:
        found: LlmCard | Problem = await ask_any(self._handle.card)
        if isinstance(found, Problem):
            raise found
        return found

    async def generate(self, ask: Ask) -> AsyncGenerator[Update]:
        def begin(left_s: float) -> AsyncGenerator[Update]:
            timed = replace(ask, deadline_s=left_s)
            return attempt(self._stream.generate, (timed,), Ended, self._liveness)

        resumed, number = _Resumed(), 0
        async with aclosing(persevere(begin, ask.deadline_s)) as updates:
            async for attempt_number, update in updates:
                if attempt_number != number:
                    number = attempt_number
                    resumed.begin()
                if (news := resumed.news(update)) is not None:
                    yield news

    async def metrics(self) -> Sequence[Any]:
        return await gather(self._handle, "metrics")


class _Resumed:
    """What is new in an answer that may have begun before."""

    def __init__(self) -> None:
        self._sent = self._repeated = ""
        self._is_taken = False

    def begin(self) -> None:
        self._repeated = ""

    def news(self, update: Update) -> Update | None:
        if isinstance(update, Taken):
            is_news, self._is_taken = not self._is_taken, True
            return update if is_news else None
        if isinstance(update, Ended):
            if self._repeated != self._sent:
                raise lost()
            return update
        text = self._fresh(update.text)
        self._sent += text
        return Delta(text) if text else None

    def _fresh(self, text: str) -> str:
        """Beyond what was sent before, which must come again to the letter."""
        known = self._sent[len(self._repeated) :]
        same, text = text[: len(known)], text[len(known) :]
        if not known.startswith(same):
            raise lost()
        self._repeated += same + text
        return text


def lost() -> Problem:
    return Problem(503, "The answer was lost.", None, "unavailable", 5.0)
