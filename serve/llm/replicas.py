"""Language model replicas behind a Ray Serve handle, as one TextBackend.

If a replica dies or hangs, the order, whose seed is fixed, goes to another one; text that the
client already has is not sent again. It knows no HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from serve.errors import Problem
from serve.fleet import liveness
from serve.fleet.replicas import CachedCard, ask_any, attempt, gather, retry
from serve.llm.text_orders import Accepted, Delta, Ended, LlmCard, TextOrder, Update


class LlmReplicas:
    """Implements TextBackend over a Ray Serve DeploymentHandle."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._stream = handle, handle.options(stream=True)
        self._liveness = liveness.of_deployment(handle.deployment_name)
        self._card: CachedCard[LlmCard] = CachedCard(self._query_card)

    async def card(self) -> LlmCard:
        return await self._card.now()

    async def _query_card(self) -> LlmCard:
        card: LlmCard | Problem = await ask_any(self._handle.card)
        if isinstance(card, Problem):
            raise card
        return card

    async def generate(self, order: TextOrder) -> AsyncGenerator[Update]:
        def begin(left_s: float) -> AsyncGenerator[Update]:
            timed = replace(order, deadline_s=left_s)
            return attempt(self._stream.generate, (timed,), Ended, self._liveness)

        resumed, number = _Resumed(), 0
        async with aclosing(retry(begin, order.deadline_s)) as updates:
            async for attempt_number, update in updates:
                if attempt_number != number:
                    number = attempt_number
                    resumed.begin()
                if (news := resumed.news(update)) is not None:
                    yield news

    async def metrics(self) -> Sequence[Any]:
        return await gather(self._handle, "metrics")


class _Resumed:
    """Removes what was already sent from an answer that another replica makes again."""

    def __init__(self) -> None:
        self._sent = self._repeated = ""
        self._is_taken = False

    def begin(self) -> None:
        self._repeated = ""

    def news(self, update: Update) -> Update | None:
        if isinstance(update, Accepted):
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
        """Return the part that was not sent before. The repeated part must be identical."""
        expected = self._sent[len(self._repeated) :]
        same, text = text[: len(expected)], text[len(expected) :]
        if not expected.startswith(same):
            raise lost()
        self._repeated += same + text
        return text


def lost() -> Problem:
    return Problem(503, "The answer was lost.", None, "unavailable", 5.0)
