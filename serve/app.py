"""Builds the Ray Serve application from settings. `serve deploy` names it `serve.app:build`.

It sets the number of processes, their resources, and Ray's health checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve import Application

from serve.fleet.router import ROUTING
from serve.front.api import AddRoutes
from serve.front.handover import FRONT
from serve.front.ingress import ImageIngress
from serve.front.results import folder_of, mark
from serve.llm.deployment import place_llm
from serve.models import ImageModel, deployment_names, image_models
from serve.replica_deployment import (
    GPU_AT_START,
    HEALTH_PERIOD_S,
    HEALTH_TIMEOUT_S,
    replicas_of,
    uses_gpu,
)
from serve.settings import ServeSettings, read

MAX_HTTP_REQUESTS = 10_000
"""Per HTTP front. Replicas decide on admission."""


def build(arguments: Mapping[str, Any]) -> Application:
    """Build from a Serve config's `args`: settings by name, and `settings`, a TOML file."""
    flags = dict(arguments)
    file = flags.pop("settings", None)
    return application(read(Path(file) if file else None, flags=flags))


def application(settings: ServeSettings) -> Application:
    gpus = int(ray.cluster_resources().get("GPU", 0))
    is_gpu = uses_gpu(settings, gpus)
    nodes = sum(node["Alive"] for node in ray.nodes())
    taken, bound_llm = place_llm(settings, gpus)
    models = image_models(settings)
    replicas = bind_replicas(models, is_gpu, gpus - taken)
    ingress = ray_serve.deployment(name=FRONT)(ray_serve.ingress()(ImageIngress)).options(
        num_replicas=settings.ingresses,
        # Otherwise Ray may place all of them on one node.
        max_replicas_per_node=math.ceil(settings.ingresses / nodes),
        max_ongoing_requests=MAX_HTTP_REQUESTS,
        graceful_shutdown_timeout_s=settings.shutdown_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0},
        request_router_config=ROUTING,
    )
    # The mark depends on the folder alone, so that deploying again restarts nothing.
    marked = mark(folder_of(settings.results_dir))
    return ingress.bind(settings, replicas, marked, bound_llm, batches(settings, replicas))


def bind_replicas(models: Sequence[ImageModel], is_gpu: bool, gpus: int) -> list[Application]:
    """Bind a deployment for each model."""
    fewest = fewest_of([model.settings for model in models], is_gpu, gpus)
    most = sum(m.settings.max_replicas or few for m, few in zip(models, fewest, strict=True))
    gpu = GPU_AT_START if models[0].settings.models_dir else 1
    return [
        replicas_of(model.settings, name, few, is_gpu, most, gpu).bind(model.settings)
        for model, name, few in zip(models, deployment_names(models), fewest, strict=True)
    ]


def fewest_of(each: Sequence[ServeSettings], is_gpu: bool, gpus: int) -> list[int]:
    """Return each model's least number of replicas. Models without a number share the remaining
    GPUs evenly; the first models get the rest."""
    counts = [s.replicas or int(s.max_replicas > 0) for s in each]
    unset, left = counts.count(0), max(gpus - sum(counts), 0)
    share, rest = divmod(left, unset) if is_gpu and unset else (1, 0)
    shares = iter([max(share + (i < rest), 1) for i in range(unset)])
    return [count or next(shares) for count in counts]


def batches(
    settings: ServeSettings, replicas: Sequence[Application]
) -> tuple[AddRoutes, Application] | None:
    """Bind the routes of files and batches, and the process that runs batches."""
    if not settings.batches_dir:
        return None
    # Imported here, since most services have no batches.
    from serve.batch_api.records import Records
    from serve.batch_api.routes import add_batch_routes
    from serve.batch_api.runner import BatchReplica
    from serve.batch_api.webhooks import read_endpoints

    read_endpoints(settings.webhooks)
    Records(settings.batches_dir).prepare()
    runner = ray_serve.deployment(name="BatchReplica")(BatchReplica).options(
        num_replicas=1,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S * 5,
        graceful_shutdown_timeout_s=settings.shutdown_s,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": 0},
    )
    return add_batch_routes, runner.bind(settings, replicas)
