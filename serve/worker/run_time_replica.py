"""The replica of a model that is loaded while the service runs: it loads only if the free memory
suffices, and unloads itself after `models_idle_s` without a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ray import serve as ray_serve

from sdxl.source import SourceImage
from serve.errors import Problem
from serve.orders import ImageOrder, Update
from serve.settings import ServeSettings
from serve.worker.replica import ImageReplica


class RunTimeReplica(ImageReplica):
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
