"""Builds the Ray Serve application from settings. `serve deploy` names it `serve.app:build`.

It sets how many processes there are, their resources, and Ray's health checks; replica.py and
ingress.py do the work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve import Application

from serve.fleet.autoscaling import ByWork, how_many
from serve.fleet.router import ROUTING
from serve.front.api import AddRoutes
from serve.front.ingress import ImageIngress
from serve.front.results import folder_of, mark
from serve.llm.deployment import elsewhere, place
from serve.models import ImageModel, deployment_names, image_models
from serve.settings import ServeSettings, read
from serve.worker.replica import ImageReplica

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 2.0
"""A third of the time after which Ray replaces a replica that does not answer."""
MAX_ORDERS = 10_000
"""Per replica; high enough that no order waits in Ray's queue, which knows only arrival order."""
MAX_HTTP_REQUESTS = 10_000
"""Per HTTP front. Replicas decide on admission."""
LOAD_ATTEMPTS = 2


def build(arguments: Mapping[str, Any]) -> Application:
    """Build from a Serve config's `args`: settings by name, and `settings`, a TOML file."""
    flags = dict(arguments)
    file = flags.pop("settings", None)
    return application(read(Path(file) if file else None, flags=flags))


def application(settings: ServeSettings) -> Application:
    gpus = int(ray.cluster_resources().get("GPU", 0))
    # A cluster that grows may have none yet.
    is_gpu = settings.device == "gpu" or (settings.device == "auto" and gpus > 0)
    taken, bound_llm = place(settings, gpus)
    models = image_models(settings)
    replicas = bind_replicas(models, is_gpu, gpus - taken)
    front = ray_serve.ingress()(ImageIngress)
    ingress = ray_serve.deployment(name="ImageIngress")(front).options(
        num_replicas=settings.ingresses,
        max_ongoing_requests=MAX_HTTP_REQUESTS,
        graceful_shutdown_timeout_s=settings.shutdown_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0},
        request_router_config=ROUTING,
    )
    # The mark stays the same as long as the folder does, so that deploying again restarts nothing.
    marked = mark(folder_of(settings.results_dir))
    return ingress.bind(settings, replicas, marked, bound_llm, batches(settings, replicas))


def bind_replicas(models: Sequence[ImageModel], is_gpu: bool, gpus: int) -> list[Application]:
    """Bind a deployment for each model."""
    fewest = fewest_of([model.settings for model in models], is_gpu, gpus)
    most = sum(m.settings.max_replicas or few for m, few in zip(models, fewest, strict=True))
    named = zip(models, deployment_names(models), fewest, strict=True)
    return [
        replicas_of(model.settings, name, few, is_gpu, most).bind(model.settings)
        for model, name, few in named
    ]


def fewest_of(each: Sequence[ServeSettings], is_gpu: bool, gpus: int) -> list[int]:
    """Return each model's fewest replicas. Models without a number share the remaining GPUs; the
    first get one more."""
    counts = [s.replicas or int(s.max_replicas > 0) for s in each]
    silent, left = counts.count(0), max(gpus - sum(counts), 0)
    share, more = divmod(left, silent) if is_gpu and silent else (1, 0)
    shares = iter([max(share + (i < more), 1) for i in range(silent)])
    return [count or next(shares) for count in counts]


def replicas_of(
    settings: ServeSettings, name: str, fewest: int, is_gpu: bool, sharing: int
) -> ray_serve.Deployment:
    """Return a deployment's options; `sharing` counts all replicas that may share a machine's
    cores."""
    most = settings.max_replicas
    return ray_serve.deployment(name=name)(ImageReplica).options(
        **how_many(fewest, most, ByWork, target_s=settings.target_queue_s),
        max_ongoing_requests=MAX_ORDERS,
        graceful_shutdown_timeout_s=settings.shutdown_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=LOAD_ATTEMPTS,
        ray_actor_options={**actor_options(is_gpu, sharing), **elsewhere(settings)},
        request_router_config=ROUTING,
    )


def batches(
    settings: ServeSettings, replicas: Sequence[Application]
) -> tuple[AddRoutes, Application] | None:
    """Bind the routes of files and batches, and the process that runs batches."""
    if not settings.batches_dir:
        return None
    # Here and not above: most services have no need of it.
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


def actor_options(is_gpu: bool, replicas: int) -> dict[str, Any]:
    """Return an actor's resources: a whole GPU, or without GPUs an even share of the cores, which
    Ray does not reserve: it would refuse a second replica on a small machine."""
    if is_gpu:
        return {"num_gpus": 1, "num_cpus": 1}
    share = max((os.cpu_count() or 1) // replicas, 1)
    threads = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share)),
        # A thread that spins while it waits takes its core from the other replicas.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {"num_cpus": 0, "runtime_env": {"env_vars": threads}}
