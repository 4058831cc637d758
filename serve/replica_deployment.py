"""The options of image replicas as a Ray Serve deployment: resources and health checks."""

from __future__ import annotations

import os
from typing import Any

from ray import serve as ray_serve

from serve.fleet.autoscaling import ByWork, how_many
from serve.fleet.router import ROUTING
from serve.llm.deployment import NO_GPUS, avoid_llm_nodes
from serve.settings import ServeSettings
from serve.worker.replica import ImageReplica

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 2.0
"""Ray replaces a replica after three of these timeouts without an answer."""
MAX_ORDERS = 10_000
"""Per replica; so high that no order waits in Ray's queue, which is first come, first served."""
LOAD_ATTEMPTS = 2
GPU_AT_START, GPU_EACH = 0.6, 0.05
"""The parts of a GPU that Ray reserves if `models_dir` is set: for a replica of the start, of which
no two fit on one GPU, and for a model loaded later, for which the free memory is checked."""


def replicas_of(
    settings: ServeSettings,
    name: str,
    fewest: int,
    is_gpu: bool,
    sharing: int,
    gpu: float = 1,
    kind: type[ImageReplica] = ImageReplica,
) -> ray_serve.Deployment:
    """Return a deployment of image replicas. `sharing`: the number of all replicas that may share a
    machine's cores; `gpu`: the part of a GPU that Ray reserves for each."""
    most = settings.max_replicas
    return ray_serve.deployment(name=name)(kind).options(
        **how_many(fewest, most, ByWork, target_s=settings.target_queue_s),
        max_ongoing_requests=MAX_ORDERS,
        graceful_shutdown_timeout_s=settings.shutdown_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=LOAD_ATTEMPTS,
        ray_actor_options={**actor_options(is_gpu, sharing, gpu), **avoid_llm_nodes(settings)},
        request_router_config=ROUTING,
    )


def uses_gpu(settings: ServeSettings, gpus: float) -> bool:
    return settings.device == "gpu" or (settings.device == "auto" and gpus > 0)


def actor_options(is_gpu: bool, replicas: int, gpu: float = 1) -> dict[str, Any]:
    """Return an actor's resources: a GPU or a part of it, or an even share of the cores. Ray does
    not reserve cores: it would refuse a second replica on a small machine, and many on a GPU."""
    if is_gpu:
        return {"num_gpus": gpu, "num_cpus": 0}
    share = max((os.cpu_count() or 1) // replicas, 1)
    environment = {
        **NO_GPUS,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share)),
        # A thread that spins while it waits takes a core from the other replicas.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
