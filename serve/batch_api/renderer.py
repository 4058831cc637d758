"""The service's own replicas as what makes a batch job's pictures: orders at batch priority.

They come under the name of whoever asked, so that clients share as they do elsewhere, and no faster
than a key may ask. That replicas are busy or restart is waited out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from sdxl.flight import Priority
from sdxl.work import standard_images
from serve.batch.renderers import BUSY, MAX_PAUSE_S, THROUGH_WINDOW, window_of
from serve.errors import Problem
from serve.front.keys import ApiKey, RateLimiter
from serve.orders import ImageBackend, ImageOrder, ModelCard, Update

CARD_PAUSE_S = 1.0


class BackendRenderer:
    """Implements Renderer."""

    def __init__(
        self,
        backend: ImageBackend,
        client: str,
        request_id: str,
        key: ApiKey | None = None,
        limiter: RateLimiter | None = None,
        model: str = "",
    ) -> None:
        """`model`, as the settings name it, alone may make the pictures."""
        self.window = THROUGH_WINDOW
        self._backend, self._key = backend, key
        self._limiter = limiter or RateLimiter()
        weight = 1.0 if key is None else key.weight
        marks = {"client": client, "weight": weight, "request_id": request_id, "model": model}
        self._marks: dict[str, Any] = marks
        self._answers = self._asked = 0

    async def card(self) -> ModelCard:
        while True:
            try:
                card = await self._backend.card()
            except Problem:
                await asyncio.sleep(CARD_PAUSE_S)
            else:
                self.window = window_of(card)
                return card

    async def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        order = replace(order, priority=Priority.BATCH, **self._marks)
        pause_s = 0.5
        await self._granted(order)
        self._asked += 1
        try:
            while True:
                try:
                    async with aclosing(self._backend.generate(order)) as updates:
                        async for update in updates:
                            yield update
                    return
                except Problem as problem:
                    if problem.status not in BUSY:
                        raise
                    hinted = problem.retry_after_s or 0.0
                wait_s = min(max(hinted, pause_s), MAX_PAUSE_S)
                await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))
                pause_s *= 2
        finally:
            self._asked -= 1
            self._answers += 1

    async def _granted(self, order: ImageOrder) -> None:
        """Returns when the key may ask for one more."""
        if self._key is None:
            return
        card = await self.card()
        how = card.embeds_guidance
        work = standard_images(
            order.params, card.sizes, embeds_guidance=how, pasted=order.pasted_pixels
        )
        while wait_s := self._limiter.take(self._key, 1, work)[1]:
            await asyncio.sleep(wait_s)

    def steps(self) -> int:
        return self._answers

    def occupancy(self) -> float:
        return min(self._asked / self.window, 1.0)

    def check(self) -> None:
        """The replicas' health is watched elsewhere."""

    async def close(self) -> None:
        """The replicas stay."""
