"""The image models that a front can ask, each with whoever makes its pictures, and what all say.

One that is away holds up nobody who asks for another. It knows no Ray and no routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serve import errors
from serve.errors import Problem
from serve.models import ImageModel, choose, image_models
from serve.orders import ImageBackend, ModelCard
from serve.settings import ServeSettings

PATIENCE_S = 1.0
"""What is left to the others once one model has answered."""
START_S = 300.0
"""How long a front is not ready while one of its models was never there."""

Ask = Callable[[ImageBackend], Awaitable[ModelCard]]


@dataclass(frozen=True)
class ServedModel(ImageModel):
    backend: ImageBackend


class ServedModels:
    def __init__(
        self,
        settings: ServeSettings,
        backends: Sequence[ImageBackend],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`backends` in the order of the settings' models."""
        pairs = zip(image_models(settings), backends, strict=True)
        self.all = tuple(ServedModel(model.id, model.settings, backend) for model, backend in pairs)
        self._clock, self._until_s = clock, clock() + START_S
        self._were_ready: set[str] = set()
        self._cards: dict[str, ModelCard] = {}

    def choose(self, asked: str | None) -> ServedModel:
        """Raises Problem, 404."""
        return choose(asked, self.all)

    async def cards(self) -> list[tuple[ServedModel, ModelCard]]:
        """Of one that is away, its last; raises Problem where none was ever there."""
        told = await self._told(lambda backend: backend.card())
        self._cards |= {model.id: card for model, card in told if isinstance(card, ModelCard)}
        found = [(model, self._cards[model.id]) for model in self.all if model.id in self._cards]
        return found or raised(told)

    async def ready(self) -> list[tuple[ServedModel, ModelCard | Problem]]:
        """Raises Problem, 503, where none can make a picture, or one may still come up first."""
        told = await self._told(lambda backend: backend.ready())
        away = {model.id for model, card in told if isinstance(card, Problem)}
        self._were_ready |= {model.id for model, _ in told} - away
        if len(away) == len(told) or (away - self._were_ready and self._clock() < self._until_s):
            raised(told)
        return told

    async def metrics(self) -> list[Any]:
        each = await asyncio.gather(*(model.backend.metrics() for model in self.all))
        return [metric for metrics in each for metric in metrics]

    async def _told(self, ask: Ask) -> list[tuple[ServedModel, ModelCard | Problem]]:
        tasks = [asyncio.ensure_future(ask(model.backend)) for model in self.all]
        try:
            await until_patience_ends(tasks)
            return [(model, said(task)) for model, task in zip(self.all, tasks, strict=True)]
        finally:
            for task in tasks:
                task.cancel()


async def until_patience_ends(tasks: Sequence[asyncio.Future[ModelCard]]) -> None:
    waiting, patience_s = set(tasks), None
    while waiting:
        done, waiting = await asyncio.wait(
            waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            return
        if any(task.exception() is None for task in done):
            patience_s = PATIENCE_S


def said(task: asyncio.Future[ModelCard]) -> ModelCard | Problem:
    if not task.done() or task.cancelled():
        return errors.starting()
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, Problem):
        return error
    raise error


def raised(told: Sequence[tuple[ServedModel, ModelCard | Problem]]) -> Any:
    raise next(problem for _, problem in told if isinstance(problem, Problem))
