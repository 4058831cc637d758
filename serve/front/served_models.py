"""The image models of a front end, from its start and loaded since, with their backends, cards,
states and metrics.

A model that does not answer delays no request for another model. It knows no Ray and no routes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from serve import errors
from serve.errors import Problem
from serve.llm.names import id_of
from serve.models import ImageModel, choose, image_models
from serve.orders import ImageBackend, ModelCard
from serve.run_time_models import ModelFile, ModelPool, find_file, model_of
from serve.settings import ServeSettings

log = logging.getLogger(__name__)

REFRESH_S, SETTLE_S = 1.0, 1.0
"""How often models that other front ends loaded are listed, and how long other front ends may not
know of an unload."""
PATIENCE_S = 1.0
"""How long to wait for other models once one has answered."""
START_S = 300.0
"""How long a front end waits for a model's first start before it is ready without the model."""


@dataclass(frozen=True)
class ServedModel(ImageModel):
    backend: ImageBackend


class ServedModels:
    def __init__(
        self,
        settings: ServeSettings,
        backends: Sequence[ImageBackend],
        clock: Callable[[], float] = time.monotonic,
        pool: ModelPool | None = None,
    ) -> None:
        """`backends` are in the order of the settings' models; `pool` loads further models."""
        pairs = zip(image_models(settings), backends, strict=True)
        self._start = tuple(
            ServedModel(model.id, model.settings, backend) for model, backend in pairs
        )
        self.settings, self.pool = settings, pool
        self._loaded: tuple[ServedModel, ...] = ()
        self._leaving: set[str] = set()
        self._loading = asyncio.Lock()
        self._unloads = set[asyncio.Task[ServedModel]]()
        self._refreshed_s, self._changes = -math.inf, 0
        self._refresh_task: asyncio.Task[None] | None = None
        self._clock, self._until_s = clock, clock() + START_S
        self._were_ready: set[str] = set()
        self._cards: dict[str, ModelCard] = {}

    @property
    def all(self) -> tuple[ServedModel, ...]:
        return (*self._start, *self._loaded)

    async def choose(self, asked: str | None) -> ServedModel:
        """Return the model of this name, or raise Problem 404."""
        if asked is not None and not any(asked in model.names for model in self._start):
            # Another front end may have loaded or unloaded it.
            await self.refresh()
        return choose(asked, self.all)

    def of_file(self, file: ModelFile) -> ServedModel | None:
        path = file.path(self.settings.models_dir)
        return next((model for model in self.all if model.settings.model == path), None)

    # -- loading ----------------------------------------------------------------------------

    async def load(self, asked: str, id_: str = "", precision: str = "") -> ServedModel:
        """Load a model below `models_dir`, or return it if it is loaded already. Raises
        Problem."""
        pool = self._need_pool()
        file = await asyncio.to_thread(find_file, self.settings.models_dir, asked)
        model = model_of(self.settings, file, id_, precision)
        async with self._loading:
            await self._learn(pool)
            for known in self.all:
                if known.settings == model.settings and known.id == model.id:
                    return known
            names = {name for known in self.all for name in known.names}
            if self.settings.llm != "none":
                names.add(id_of(self.settings.llm))
            if model.id in names:
                message = f"A model named {model.id!r} is loaded; set another id, or unload it."
                raise Problem(409, message, "id", "model_exists")
            await pool.load(model)
            served = ServedModel(model.id, model.settings, pool.backend(model))
            self._set_loaded((*self._loaded, served))
            return served

    async def unload(self, asked: str) -> ServedModel:
        """Unload a model: refuse new requests and finish the others, also if the client no longer
        waits. Raises Problem."""
        # In a new context: in this request's, Ray Serve would cancel the task with the request.
        task = asyncio.create_task(self._unload(asked), context=Context())
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)
        return await asyncio.shield(task)

    async def _unload(self, asked: str) -> ServedModel:
        pool = self._need_pool()
        async with self._loading:
            model = await self.choose(asked)
            if model in self._start:
                message = f"{model.id!r} was loaded at the start and stays loaded."
                raise Problem(409, message, "model", "model_of_start")
            self._leaving.add(model.id)
            self._set_loaded([each for each in self._loaded if each is not model])
            try:
                # Requests that have chosen the model are on their way.
                await asyncio.sleep(SETTLE_S)
                await pool.unload(model)
            finally:
                self._leaving.discard(model.id)
            return model

    def _need_pool(self) -> ModelPool:
        if self.pool is None:
            message = "Loading models is off: this service needs the setting `models_dir`."
            raise Problem(404, message, None, "models_off")
        return self.pool

    async def refresh(self) -> None:
        """Learn which models other front ends have loaded and unloaded. Wait only briefly, since
        Ray's controller may hang."""
        if self.pool is None:
            return
        if self._refresh_task is None and self._clock() - self._refreshed_s >= REFRESH_S:
            # In a new context: in this request's, Ray Serve would cancel the task with the request.
            self._refresh_task = asyncio.create_task(self._learn(self.pool), context=Context())
            self._refresh_task.add_done_callback(self._end_refresh)
        if self._refresh_task is not None:
            await asyncio.wait({self._refresh_task}, timeout=PATIENCE_S)

    def _end_refresh(self, task: asyncio.Task[None]) -> None:
        self._refresh_task, self._refreshed_s = None, self._clock()
        if not task.cancelled() and task.exception() is not None:
            log.warning("the loaded models cannot be listed: %s", task.exception())

    def _set_loaded(self, models: Sequence[ServedModel]) -> None:
        self._loaded, self._changes = tuple(models), self._changes + 1

    async def _learn(self, pool: ModelPool) -> None:
        changes = self._changes
        models = [each for each in await pool.loaded() if each.id not in self._leaving]
        if changes != self._changes:
            # This process has changed its models since the list was made.
            return
        before = {each.id: each for each in self._loaded}
        listed = {model.id: model.settings for model in models}
        known = {id_: m for id_, m in before.items() if listed.get(id_) == m.settings}
        self._loaded = tuple(
            known.get(m.id) or ServedModel(m.id, m.settings, pool.backend(m)) for m in models
        )
        for id_ in before.keys() - known.keys():
            await pool.forget(before[id_])

    # -- answers of the models --------------------------------------------------------------

    async def cards(self) -> list[tuple[ServedModel, ModelCard]]:
        """Return the cards; the last card of a model that does not answer. Raises Problem if there
        is none."""
        await self.refresh()
        answers = await self._answers(lambda backend: backend.card())
        self._cards |= {model.id: card for model, card in answers if isinstance(card, ModelCard)}
        cards = [(model, self._cards[model.id]) for model in self.all if model.id in self._cards]
        return cards or raise_first(answers)

    async def ready(self) -> list[tuple[ServedModel, ModelCard | Problem]]:
        """Return each model's card or Problem. Raise Problem 503 if no model can make a picture, or
        one may still start."""
        await self.refresh()
        answers = await self._answers(lambda backend: backend.ready())
        failed = {model.id for model, card in answers if isinstance(card, Problem)}
        self._were_ready |= {model.id for model, _ in answers} - failed
        may_start = failed - self._were_ready and self._clock() < self._until_s
        if len(failed) == len(answers) or may_start:
            raise_first(answers)
        return answers

    async def metrics(self) -> list[Any]:
        each = await asyncio.gather(*(model.backend.metrics() for model in self.all))
        return [metric for metrics in each for metric in metrics]

    async def _answers(
        self, query: Callable[[ImageBackend], Awaitable[ModelCard]]
    ) -> list[tuple[ServedModel, ModelCard | Problem]]:
        models = self.all
        tasks = [asyncio.ensure_future(query(model.backend)) for model in models]
        try:
            await until_patience_ends(tasks)
            return [(model, answer_of(task)) for model, task in zip(models, tasks, strict=True)]
        finally:
            for task in tasks:
                task.cancel()


async def until_patience_ends(tasks: Sequence[asyncio.Future[ModelCard]]) -> None:
    """Wait for all tasks. Once one has succeeded, stop when none ends within PATIENCE_S."""
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
