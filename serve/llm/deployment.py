"""Places a language model on the cluster: its replicas and their GPUs, beside the image replicas.

Both kinds of replica take whole GPUs, so that Ray never puts both on one GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray
from ray import serve as ray_serve

from sdxl.params import InvalidParams
from serve.fleet.autoscaling import by_busy, how_many
from serve.fleet.router import ROUTING
from serve.llm import options as options_
from serve.llm.replica import LlmReplica
from serve.settings import ServeSettings

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 10.0
"""Long, since libraries may keep a loading process from answering."""
NODE, LLM = "sdxl", "llm"
"""Ray's label and its value on nodes that only the language model uses."""
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""the environment of a replica without GPUs: Ray 2.60 shows it those of its node, and its metrics
would be theirs"""
MOST_RUNNING = 2048
"""The most answers that one replica may have in flight; TensorRT-LLM's default."""


def place_llm(settings: ServeSettings, gpus: int) -> tuple[int, Any]:
    """Return how many of the cluster's GPUs the language model may take, and its bound deployment;
    None without a language model."""
    if settings.llm == "none":
        return 0, None
    settings = replace(settings, llm_backend=backend_of(settings, gpus))
    options = options_.read(settings.llm_options, settings.llm_backend)
    each = options_.gpus_of(options) if settings.llm_backend == "tensorrt-llm" else 0
    most = settings.llm_max_replicas or settings.llm_replicas
    bound = deployment(settings, each).bind(settings)
    if settings.llm_apart:
        return gpus_apart(), bound
    check_room(settings, each, each * most, gpus)
    return each * most, bound


def gpus_apart() -> int:
    """Count the GPUs of the language model's nodes that are alive now."""
    apart = [n for n in ray.nodes() if n["Alive"] and n["Labels"].get(NODE) == LLM]
    return int(sum(node["Resources"].get("GPU", 0) for node in apart))


def avoid_llm_nodes(settings: ServeSettings) -> dict[str, Any]:
    """Return an image replica's options that keep it off the language model's nodes."""
    return {"label_selector": {NODE: f"!{LLM}"}} if settings.llm_apart else {}


def backend_of(settings: ServeSettings, gpus: int) -> str:
    """Resolve `auto`: TensorRT-LLM if the cluster has GPUs, but not for the embedded model."""
    if settings.llm_backend != "auto":
        return settings.llm_backend
    return "tensorrt-llm" if gpus and settings.llm != "mini" else "transformers"


def check_room(settings: ServeSettings, each: int, taken: int, gpus: int) -> None:
    """Check that the cluster has enough GPUs: Ray would wait for missing ones for ever."""
    # A cluster that grows may have none yet.
    if not each or (settings.device == "gpu" and not gpus):
        return
    if each > max(node["Resources"].get("GPU", 0) for node in ray.nodes()):
        raise InvalidParams("llm_options", f"{each} GPUs", "must fit on one node")
    is_shared = settings.device != "cpu"
    if taken > (most := gpus - is_shared):
        needed = f"must be at most {most} of the cluster's {gpus} GPUs"
        name = "llm_max_replicas" if settings.llm_max_replicas else "llm_replicas"
        raise InvalidParams(name, f"{taken} GPUs", needed + ": images need one" * is_shared)


def deployment(settings: ServeSettings, gpus: int) -> Any:
    return ray_serve.deployment(name="LlmReplica")(LlmReplica).options(
        **how_many(settings.llm_replicas, settings.llm_max_replicas, by_busy),
        max_ongoing_requests=settings.queue + MOST_RUNNING,
        graceful_shutdown_timeout_s=settings.shutdown_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=ROUTING,
        **(on_gpus(gpus, settings) if gpus else on_cpu(settings)),
    )


def on_cpu(settings: ServeSettings) -> dict[str, Any]:
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **NO_GPUS}
    where = {"label_selector": {NODE: LLM}} if settings.llm_apart else {}
    return {"ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": environment}, **where}}


def on_gpus(gpus: int, settings: ServeSettings) -> dict[str, Any]:
    """Return the options of a replica with `gpus` GPUs. They form one bundle on one node: the
    replica's process sees all of them, and TensorRT-LLM starts a rank on each."""
    python = settings.llm_python
    environment: dict[str, Any] = {"py_executable": python} if python else {}
    if gpus == 1:
        environment["env_vars"] = {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"}
    needs = {"num_cpus": 1, "num_gpus": gpus}
    return {
        "ray_actor_options": {**needs, "runtime_env": environment},
        "placement_group_bundles": [{"CPU": 1, "GPU": gpus}],
        "placement_group_strategy": "STRICT_PACK",
        **({"placement_group_bundle_label_selector": [{NODE: LLM}]} if settings.llm_apart else {}),
    }
