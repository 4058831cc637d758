"""Loads and unloads models while the service runs: each becomes a Ray Serve application.

Every process reads from Ray Serve's list of applications which models are loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray import serve as ray_serve

from serve import errors, logs
from serve.errors import Problem
from serve.fleet.replicas import Replicas
from serve.models import ImageModel, image_models
from serve.orders import ImageBackend
from serve.ray_errors import last_error
from serve.replica_deployment import GPU_EACH, replicas_of, uses_gpu
from serve.run_time_models import PREFIX, application_name, model_in
from serve.settings import ServeSettings
from serve.worker.replica import RunTimeReplica

log = logging.getLogger(__name__)

POLL_S = 0.5
RUNNING, UNHEALTHY, DEPLOYING, FAILED = "RUNNING", "UNHEALTHY", "DEPLOYING", "DEPLOY_FAILED"
DELETING, ABSENT = "DELETING", ""
States = dict[str, tuple[str, str]]
"""The state of each model's application, and Ray's text of its failure."""


class RayModels:
    """Implements ModelPool."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self._backends = dict[str, Replicas]()
        """by name of the application"""

    async def loaded(self) -> Sequence[ImageModel]:
        # While a replica or the controller is replaced, a loaded model is in state DEPLOYING.
        states = await _states()
        names = [
            name
            for name, (state, _) in states.items()
            if state in (RUNNING, UNHEALTHY) or (state == DEPLOYING and name in self._backends)
        ]
        return [model_in(self.settings, name) for name in names]

    async def load(self, model: ImageModel) -> None:
        name, is_ours = application_name(model), False
        while True:
            state, message = (await _states()).get(name, (ABSENT, ""))
            if state == RUNNING:
                return
            if state == ABSENT:
                if is_ours:
                    raise errors.unloaded()
                await asyncio.to_thread(self._deploy, model, name, len(await _states()))
                is_ours = True
            if state == FAILED:
                await self._delete(name)
                if is_ours:
                    raise failure(message, model)
            # Another front end may be loading or unloading it.
            await asyncio.sleep(POLL_S)

    def _deploy(self, model: ImageModel, name: str, others: int) -> None:
        is_gpu = uses_gpu(self.settings, ray.cluster_resources().get("GPU", 0))
        if is_gpu and (free := ray.available_resources().get("GPU", 0.0)) < GPU_EACH:
            message = f"{model.id} needs {GPU_EACH} of a GPU, {free:.2f} free; unload another model"
            raise Problem(507, message, "model", "no_room")
        sharing = len(image_models(self.settings)) + others + 1
        replicas = replicas_of(
            model.settings, model.deployment, 1, is_gpu, sharing, GPU_EACH, RunTimeReplica
        )
        # Unloading waits for pictures, which may take until their deadline.
        patience_s = max(self.settings.shutdown_s, self.settings.max_deadline_s)
        options: dict[str, Any] = {
            "graceful_shutdown_timeout_s": patience_s,
            "max_constructor_retry_count": 1,
        }
        bound = replicas.options(**options).bind(model.settings)
        ray_serve.api._run(
            bound, _blocking=False, name=name, route_prefix=None, logging_config=logs.OF_RAY
        )

    async def unload(self, model: ImageModel) -> None:
        name = application_name(model)
        if name in self._backends:
            self._backends[name].leave()
        await self._delete(name)
        await self.forget(model)

    async def _delete(self, name: str) -> None:
        while name in (states := await _states()):
            if states[name][0] != DELETING:
                # Also if a controller died before it stored an earlier call.
                await asyncio.to_thread(ray_serve.delete, name, _blocking=False)
            await asyncio.sleep(POLL_S)

    def backend(self, model: ImageModel) -> ImageBackend:
        name = application_name(model)
        if name not in self._backends:
            handle = ray_serve.get_deployment_handle(model.deployment, name)
            self._backends[name] = Replicas(handle)
        return self._backends[name]

    async def forget(self, model: ImageModel) -> None:
        backend = self._backends.pop(application_name(model), None)
        if backend is not None:
            await backend.close()


async def _states() -> States:
    """Return the models' states. Ray Serve's list is complete once it is not empty: it contains at
    least this process's application."""
    while not (applications := (await asyncio.to_thread(ray_serve.status)).applications):
        await asyncio.sleep(POLL_S)
    states = States()
    for name, each in applications.items():
        if name.startswith(PREFIX):
            texts = [each.message, *(d.message for d in each.deployments.values())]
            states[name] = (str(each.status.value), "\n".join(texts))
    return states


def failure(message: str, model: ImageModel) -> Problem:
    cause = last_error([line.strip() for line in message.splitlines()])
    cause = cause.replace(model.settings.model, model.id)
    if "NoMemory: " in message:
        return Problem(507, f"{cause}; unload another model", "model", "no_room")
    return Problem(422, f"The model cannot be loaded: {cause}", "model", "model_not_loadable")
