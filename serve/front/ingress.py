"""The HTTP front end as a Ray Serve deployment: the REST application over the replicas' handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI

from serve import logs
from serve.fleet.identity import labelled, replica_name
from serve.fleet.replicas import Replicas, gather
from serve.front.api import AddRoutes, create_app
from serve.front.error_envelope import Front
from serve.front.results import check_shared
from serve.llm.replicas import LlmReplicas
from serve.ray_models import RayModels
from serve.settings import ServeSettings


class ImageIngress:
    def __init__(
        self,
        settings: ServeSettings,
        replicas: Sequence[Any],
        results_mark: str,
        llm: Any = None,
        batches: tuple[AddRoutes, Any] | None = None,
    ) -> None:
        """`replicas`: handles in the order of the settings' models; `results_mark`: the mark of the
        results folder on the deploying node; `batches`: a function that adds the routes of files
        and batches, and the deployment that runs batches, which Ray starts with this one."""
        logs.configure(settings.log_format)
        check_shared(settings.results_dir, results_mark)
        self.settings, self.handles, self.llm = settings, replicas, llm
        self._add_batch_routes = batches[0] if batches else None
        self.front = OneOfFronts(is_signed=False)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray once per process."""
        text = None if self.llm is None else LlmReplicas(self.llm)
        backends = [Replicas(handle) for handle in self.handles]
        pool = RayModels(self.settings) if self.settings.models_dir else None
        return create_app(backends, self.settings, self.front, text, self._add_batch_routes, pool)

    async def metrics_of_front(self) -> Sequence[Any]:
        return labelled(self.front.metrics.collect(), ingress=replica_name())

    async def record_routing_stats(self) -> dict[str, float]:
        """Polled by every proxy. Each open request counts as one second."""
        open_s = float(self.front.open_requests)
        return {"ready_in_s": open_s, "alone_s": 0.0, "each_s": 1.0}

    async def check_health(self) -> None:
        """Called by Ray, which replaces a front end whose event loop does not answer."""

    async def drain(self, timeout_s: float) -> None:
        await self.front.drain(timeout_s)


class OneOfFronts(Front):
    """A front end that reports the metrics of all front ends."""

    async def metrics_of_all(self) -> Sequence[Any]:
        from ray import serve as ray_serve

        context = ray_serve.get_replica_context()
        fronts = ray_serve.get_deployment_handle(context.deployment, context.app_name)
        return await gather(fronts, "metrics_of_front")
