"""A worker as a Ray Serve replica: one per device.

Answers are plain data, Problems included, since Ray wraps raised exceptions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray import serve as ray_serve

from sdxl.source import SourceImage, WholeImage
from serve import errors, logs
from serve.errors import Problem
from serve.fleet.beats import with_checks
from serve.fleet.identity import labelled, replica_name
from serve.orders import ImageOrder, ModelCard, PromptFacts, Update
from serve.settings import ServeSettings
from serve.tracing import tracer_to

log = logging.getLogger(__name__)

OUTLOOK_S = 0.1
"""Routers that ask within this time get the same prediction, which takes milliseconds to make."""


class ImageReplica:
    """Its constructor returns after a first picture."""

    def __init__(self, settings: ServeSettings) -> None:
        logs.configure(settings.log_format)
        # Imported here, so that deploying a replica does not load PyTorch.
        import engines
        from serve.worker.safety import read_safety
        from serve.worker.worker import Worker

        began = time.monotonic()
        pipeline = engines.load(
            settings.model_name,
            settings.backend,
            precision=settings.precision or None,
            torch_options=settings.torch_options,
            is_deterministic=settings.deterministic,
            folder=settings.engines,
            takes_unchecked=settings.unchecked,
            loras=settings.loras,
            controlnets=settings.controlnets,
            ip_adapters=settings.ip_adapters,
            refiner=settings.refiner,
        )
        log.info("loaded %s in %.1f s", settings.model_name, time.monotonic() - began)
        self.worker = Worker(
            pipeline,
            queue=settings.queue,
            max_prompt_tokens=settings.max_prompt_tokens,
            tracer=tracer_to(settings.trace_to),
            provenance=settings.marks,
            safety=read_safety(settings, pipeline.checkpoint.folder, pipeline.engines.device),
        )
        self.worker.start()
        self.model = settings.model_name
        self._outlook_s = -math.inf
        self._wholes: WeakValueDictionary[str, WholeImage] = WeakValueDictionary()

    async def generate(
        self, order: ImageOrder, source: SourceImage | None = None
    ) -> AsyncGenerator[Update | Problem]:
        """Generate a picture. An edit's `source` is sent once for all pictures of a request."""
        if source is not None:
            order = replace(order, source=self._shared(source))
        if order.model and order.model != self.model:
            yield errors.other_model()
            return
        try:
            made = self.worker.generate(order)
            async with aclosing(with_checks(made, self.worker.check_health)) as updates:
                async for update in updates:
                    yield update
        except Exception as error:
            from serve.worker.outcomes import as_problem

            yield as_problem(error)

    def _shared(self, source: SourceImage) -> SourceImage:
        """Keep equal sources in memory once, although Ray copies them for each call."""
        if source.whole is None:
            return source
        whole = self._wholes.setdefault(source.whole.key, source.whole)
        return replace(source, whole=whole)

    async def card(self) -> ModelCard:
        card = await self.worker.card()
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        node = str(ray.get_runtime_context().get_node_id())
        return replace(card, engines={**card.engines, "devices": devices, "node": node})

    async def examine(self, prompt: str) -> PromptFacts | Problem:
        try:
            return await self.worker.examine(prompt)
        except Problem as problem:
            return problem

    async def metrics(self) -> Sequence[Any]:
        return labelled(await self.worker.metrics(), replica=replica_name())

    async def check_health(self) -> None:
        """Called by Ray, which replaces the replica if this raises."""
        self.worker.check_health()

    async def record_routing_stats(self) -> dict[str, float]:
        """Called by every router, which skips a replica that raises."""
        self.worker.check_health()
        if time.monotonic() - self._outlook_s > OUTLOOK_S:
            self._outlook_s = time.monotonic()
            self._outlook = asyncio.ensure_future(asyncio.to_thread(self.worker.outlook))
        return asdict(await asyncio.shield(self._outlook))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray for the policy in autoscaling.py."""
        return self.worker.demand()

    def __del__(self) -> None:
        """Called by Ray after the last order."""
        if hasattr(self, "worker"):
            self.worker.close()


class RunTimeReplica(ImageReplica):
    """The replica of a model that is loaded while the service runs. It loads only if the free
    memory suffices, and unloads itself after `models_idle_s` without a request."""

    def __init__(self, settings: ServeSettings) -> None:
        from engines.room import check_room
        from sdxl.checkpoint import find

        check_room(find(settings.model_name), settings.precision)
        super().__init__(settings)
        self._idle_s = settings.models_idle_s
        self._used_s = time.monotonic()

    async def generate(
        self, order: ImageOrder, source: SourceImage | None = None
    ) -> AsyncGenerator[Update | Problem]:
        async with aclosing(super().generate(order, source)) as updates:
            async for update in updates:
                yield update
        self._used_s = time.monotonic()

    async def check_health(self) -> None:
        await super().check_health()
        if not self.worker.is_idle:
            self._used_s = time.monotonic()
        elif self._idle_s and time.monotonic() - self._used_s > self._idle_s:
            # Ray drains the replica, so an order that arrives now is finished.
            name = ray_serve.get_replica_context().app_name
            await asyncio.to_thread(ray_serve.delete, name, _blocking=False)
