"""The image models of a front end, each with its backend, and their cards, states and metrics.

A model that does not answer delays no request for another. It knows no Ray and no routes.
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
"""How long to wait for other models once one has answered."""
START_S = 300.0
"""How long a front end waits for a model's first start before it is ready without it."""

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
        """A model that does not answer has its last card. Raises Problem if there is no card."""
        answers = await self._answers(lambda backend: backend.card())
        self._cards |= {model.id: card for model, card in answers if isinstance(card, ModelCard)}
        found = [(model, self._cards[model.id]) for model in self.all if model.id in self._cards]
        return found or raise_first(answers)

    async def ready(self) -> list[tuple[ServedModel, ModelCard | Problem]]:
        """Raises Problem, 503, if no model can make a picture, or one may still start."""
        answers = await self._answers(lambda backend: backend.ready())
        away = {model.id for model, card in answers if isinstance(card, Problem)}
        self._were_ready |= {model.id for model, _ in answers} - away
        if len(away) == len(answers) or (away - self._were_ready and self._clock() < self._until_s):
            raise_first(answers)
        return answers

    async def metrics(self) -> list[Any]:
        each = await asyncio.gather(*(model.backend.metrics() for model in self.all))
        return [metric for metrics in each for metric in metrics]

    async def _answers(self, ask: Ask) -> list[tuple[ServedModel, ModelCard | Problem]]:
        tasks = [asyncio.ensure_future(ask(model.backend)) for model in self.all]
        try:
            await until_patience_ends(tasks)
            return [(model, answer_of(task)) for model, task in zip(self.all, tasks, strict=True)]
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


def answer_of(task: asyncio.Future[ModelCard]) -> ModelCard | Problem:
    if not task.done() or task.cancelled():
        return errors.starting()
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, Problem):
        return error
    raise error


def raise_first(answers: Sequence[tuple[ServedModel, ModelCard | Problem]]) -> Any:
    raise next(problem for _, problem in answers if isinstance(problem, Problem))
