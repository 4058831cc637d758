"""How the service runs: one frozen dataclass, from a TOML file, the environment and flags.

Names, types and defaults are stated here once: SDXL_PORT and --port follow from `port`. An unknown
key or an invalid value is an error that names it. It knows no Ray.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_type_hints

from engines import (
    BACKENDS,
    CONTROLNETS,
    FOLDER,
    IP_ADAPTERS,
    LORAS,
    PRECISION,
    REFINER,
    check_backend,
)
from sdxl.arguments import MODEL, UNCHECKED, VAE, flag_of, model_with
from sdxl.files import read_toml
from sdxl.params import MAX_PROMPT_CHARS, InvalidParams
from sdxl.provenance import CERTIFICATE, HELP, METADATA, PRIVATE_KEY, Provenance
from sdxl.suggestions import did_you_mean
from serve.logs import FORMATS, TEXT

PREFIX = "SDXL_"
OTHERS = ("SDXL_HOME", "SDXL_TRACEBACK")
"""Variables with the prefix that are not settings."""
SAFETY_OFF, BLUR, REFUSE = SAFETY = ("off", "blur", "refuse")
DEVICES = ("auto", "gpu", "cpu")
MAX_N = 10
"""OpenAI's limit of images in a request."""
LLM_BACKENDS = ("auto", "transformers", "tensorrt-llm")
CHOICES: Mapping[str, Sequence[str]] = {
    "device": DEVICES,
    "llm_backend": LLM_BACKENDS,
    "log_format": FORMATS,
    "safety": SAFETY,
}
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
FORM_BYTES = 4096
"""Bytes that a form adds to a file."""
Tables = Sequence[Mapping[str, Any]]
OF_A_MODEL = (
    *("model", "vae", "backend", "precision", "engines", "unchecked", "torch_options"),
    *("loras", "controlnets", "ip_adapters", "refiner", "safety", "safety_checker"),
    *("deterministic", "replicas", "max_replicas", "target_queue_s", "max_side", "max_steps"),
)
"""Settings that a table of `models` may override."""


def setting(default: Any, text: str, low: float | None = None, high: float = math.inf) -> Any:
    return field(default=default, metadata={"text": text, "low": low, "high": high})


@dataclass(frozen=True)
class ServeSettings:
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on", 1, 65_535)
    replicas: int = setting(0, "replicas of the model; 0: one per GPU, or one on a CPU", 0)
    max_replicas: int = setting(0, "upper bound for autoscaling; 0 turns it off", 0)
    target_queue_s: float = setting(2.0, "how long images may wait before a replica is added", 0)
    device: str = setting("auto", "gpu or cpu; auto: gpu if the cluster has one at start")
    ingresses: int = setting(1, "HTTP front ends; two or more survive the loss of one", 1)
    model: str = setting("mini", f"{MODEL}; repeat it for several models")
    models: Tables = setting((), "only in a file: a table of settings for each model")  # noqa: RUF009
    models_dir: str = setting("", "folder of models that may be loaded while the service runs")
    models_idle_s: float = setting(
        0.0, "seconds without a request after which they are unloaded; 0: never", 0
    )
    vae: str = setting("", VAE)
    backend: str = setting("auto", ", ".join(BACKENDS))
    precision: str = setting("", PRECISION)
    engines: str = setting("", FOLDER)
    unchecked: bool = setting(False, UNCHECKED)
    loras: str = setting("", LORAS)
    controlnets: str = setting("", CONTROLNETS)
    ip_adapters: str = setting("", IP_ADAPTERS)
    refiner: str = setting("", REFINER)
    torch_options: str = setting("", "options of --backend torch, such as attention=cudnn,compile")
    deterministic: bool = setting(False, "the same request gives the same bytes under any load")
    llm: str = setting("mini", "language model: a folder or a hub id; none: without one")
    llm_backend: str = setting("auto", "auto, transformers or tensorrt-llm")
    llm_replicas: int = setting(1, "replicas of the language model", 1)
    llm_max_replicas: int = setting(0, "upper bound for their autoscaling; 0 turns it off", 0)
    llm_apart: bool = setting(
        False, "run it on nodes with Ray's label sdxl=llm, and no images there"
    )
    llm_options: str = setting("", "TOML file of the backend's options, by TensorRT-LLM's names")
    llm_python: str = setting("", "TensorRT-LLM's interpreter, such as /opt/trtllm/bin/python")
    llm_start_s: float = setting(900.0, "how long TensorRT-LLM may take to start", 1)
    expand_s: float = setting(2.0, "how long the expansion of a prompt may take", 0)

    keys: str = setting("", "file of API keys; `sdxl key` makes one")
    insecure: bool = setting(False, "listen on a public address without keys")
    client_header: str = setting(
        "", "header with the client's address, set by your proxy; empty: the peer's address"
    )
    provenance: str = setting(METADATA, HELP)
    certificate: str = setting("", CERTIFICATE)
    private_key: str = setting("", PRIVATE_KEY)
    safety: str = setting(
        SAFETY_OFF,
        f"what happens to pictures that a checker flags: {', '.join(SAFETY)}; off: no checker",
    )
    safety_checker: str = setting(
        "",
        "folder of diffusers' checker, or package.module:function; empty: the model's own",
    )
    log_format: str = setting(TEXT, f"format of the log: {', '.join(FORMATS)}")
    log_prompts: bool = setting(False, "write prompts into the log")
    trace_to: str = setting("", "OTLP address for traces, such as http://HOST:4318/v1/traces")
    aliases: str = setting("", "other names of models: gpt-image-1=sdxl-mini,dall-e-3=sdxl-mini")
    nearest_size: bool = setting(
        False, "if the model lacks a size, make the nearest one and report it, instead of an error"
    )
    hosts: str = setting(
        "", "host names that clients may use beside localhost: a,b or * for any; unused with keys"
    )
    public_url: str = setting("", "start of `url` results; empty: as in the client's request")

    sdapi: bool = setting(
        False, "also serve stable-diffusion-webui's API, below /sdapi/v1 and /controlnet"
    )

    queue: int = setting(64, "standard images of one client that may wait at each replica", 0)
    deadline_s: float = setting(20.0, "default deadline of a request", 0)
    max_deadline_s: float = setting(120.0, "the longest deadline of a request", 0)
    body_timeout_s: float = setting(10.0, "how long a request's body may take to arrive", 0)
    shutdown_s: float = setting(25.0, "how long requests in flight may take at shutdown", 0)
    max_body_bytes: int = setting(256 * 1024, "the largest request body without pictures", 1)
    max_edit_bytes: int = setting(32 << 20, "the largest request body with pictures", 1)
    max_bodies_bytes: int = setting(
        0, "bytes of request bodies that a front end holds at once; 0: four of the largest", 0
    )
    edit_timeout_s: float = setting(60.0, "how long a body with pictures may take to arrive", 0)
    max_json_depth: int = setting(32, "the deepest nesting of a JSON body", 1)
    max_prompt_chars: int = setting(MAX_PROMPT_CHARS, "the longest prompt", 1, MAX_PROMPT_CHARS)
    max_prompt_tokens: int = setting(225, "the longest prompt in tokens; 75 fit one pass", 1)
    max_n: int = setting(10, "the most images of a request", 1, MAX_N)
    max_steps: int = setting(100, "the most denoising steps of an image", 1)
    max_side: int = setting(0, "the longest side in pixels; 0: the model's limit", 0)

    results_dir: str = setting("", "folder of `url` results; several nodes must share it")
    results_ttl_s: float = setting(3600.0, "how long `url` results and ended jobs live", 1)
    results_max_bytes: int = setting(1 << 30, "the most bytes of all `url` results", 1)

    batches_dir: str = setting(
        "", "folder that all nodes share, or a URL such as s3://…, for files, batches and jobs"
    )
    batches_ttl_s: float = setting(2_592_000.0, "how long files live by default", 3600)
    max_file_bytes: int = setting(64 << 20, "the largest file of requests", 1)
    max_batch_requests: int = setting(50_000, "the most requests in a file", 1)
    webhooks: str = setting(
        "", "file of URLs to call when a batch or job ends, a line each: URL whsec_SECRET"
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name != MODELS:
                check(each.name, getattr(self, each.name), TYPES[each.name], each.metadata)
        check_backend(self.backend)
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise InvalidParams.unknown(name, getattr(self, name), known)
        if self.max_replicas and self.max_replicas < max(self.replicas, 1):
            raise InvalidParams("max_replicas", self.max_replicas, "must be at least `replicas`")
        if self.max_replicas and not self.target_queue_s:
            raise InvalidParams("target_queue_s", self.target_queue_s, "must be more than 0")
        if self.llm_max_replicas and self.llm_max_replicas < self.llm_replicas:
            needed = "must be at least `llm_replicas`"
            raise InvalidParams("llm_max_replicas", self.llm_max_replicas, needed)
        _ = self.marks, self.alias_table, self.of_models
        if self.max_bodies_bytes and self.max_bodies_bytes < 2 * self.largest_body:
            needed = f"must be at least {2 * self.largest_body}, two of the largest bodies; or 0"
            raise InvalidParams("max_bodies_bytes", self.max_bodies_bytes, needed)
        if self.deadline_s > self.max_deadline_s:
            raise InvalidParams(
                "deadline_s", self.deadline_s, f"must be at most {self.max_deadline_s}"
            )
        if not (self.keys or self.insecure or is_loopback(self.host)):
            raise InvalidParams(
                "host", self.host, "must be a loopback address, --keys FILE, or --insecure"
            )

    @property
    def alias_table(self) -> dict[str, str]:
        """The models by alias."""
        items = [item.strip() for item in self.aliases.split(",") if item.strip()]
        pairs = [item.partition("=") for item in items]
        if not all(name.strip() and target.strip() for name, _, target in pairs):
            raise InvalidParams("aliases", self.aliases, "must be NAME=MODEL, with commas between")
        return {name.strip(): target.strip() for name, _, target in pairs}

    @property
    def marks(self) -> Provenance:
        return Provenance(self.provenance, self.certificate, self.private_key)

    @property
    def of_models(self) -> tuple[ServeSettings, ...]:
        """Each model's settings."""
        if not self.models:
            return (self,)
        check_tables(self.models)
        return tuple(replace(self, models=(), **table) for table in self.models)

    @property
    def max_file_body_bytes(self) -> int:
        return self.max_file_bytes + FORM_BYTES

    @property
    def largest_body(self) -> int:
        return max(self.max_body_bytes, self.max_edit_bytes, self.max_file_body_bytes)

    @property
    def bodies_bytes(self) -> int:
        return self.max_bodies_bytes or 4 * self.largest_body

    @property
    def model_name(self) -> str:
        """The model's name as sdxl/checkpoint.py resolves it."""
        return model_with(self.model, self.vae)


GROUPS = {
    "host": "address and replicas",
    "model": "models",
    "llm": "language model",
    "keys": "access, provenance and logs",
    "queue": "limits",
    "results_dir": "results",
    "batches_dir": "files, batches and jobs",
}
"""The first setting of each group of flags."""
COMMON_FLAGS = (
    *("--settings", "--host", "--port", "--replicas", "--model", "--backend", "--precision"),
    *("--loras", "--llm", "--keys", "--insecure", "--aliases", "--sdapi", "--batches-dir"),
)
TYPES: Mapping[str, type] = get_type_hints(ServeSettings)
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
MODEL_FLAG, MODELS = "model", "models"


def check_tables(tables: object) -> None:
    if not isinstance(tables, list | tuple) or not all(isinstance(t, dict) for t in tables):
        raise InvalidParams(MODELS, tables, "must hold a table of settings for each model")
    for table in tables:
        if MODEL_FLAG not in table:
            raise InvalidParams(MODELS, table, f"must each have {MODEL_FLAG}")
        for name in table:
            if name not in OF_A_MODEL:
                raise InvalidParams.unknown(MODELS, name, OF_A_MODEL)


def check(name: str, value: Any, kind: type, limits: Mapping[str, Any]) -> None:
    low, high = limits["low"], limits["high"]
    is_kind = isinstance(value, int | float if kind is float else kind)
    if not is_kind or (isinstance(value, bool) and kind is not bool):
        raise InvalidParams(name, value, f"must be {KINDS[kind]}")
    if low is not None and not low <= value < math.inf:
        raise InvalidParams(name, value, f"must be at least {low}")
    if low is not None and value > high:
        raise InvalidParams(name, value, f"must be at most {high}")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> ServeSettings:
    """Read the settings; later sources override earlier ones."""
    environment = os.environ if environment is None else environment
    sources = (from_file(file) if file else {}, from_environment(environment), flags or {})
    values: dict[str, Any] = {}
    for source in sources:
        if {MODEL_FLAG, MODELS} <= set(source):
            raise InvalidParams(MODELS, source[MODELS], f"cannot be used with {MODEL_FLAG}")
        if {MODEL_FLAG, MODELS} & set(source):
            values = {k: v for k, v in values.items() if k not in (MODEL_FLAG, MODELS)}
        values |= source
    return ServeSettings(**values)


def from_file(path: Path) -> dict[str, Any]:
    values = read_toml("settings", path)
    for key in values:
        check_known(key, key)
    return values


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, text in environment.items():
        if name.startswith(PREFIX) and name not in OTHERS:
            key = name.removeprefix(PREFIX).lower()
            check_known(key, name)
            values[key] = parse(key, text)
    return values


def check_known(key: str, name: str) -> None:
    if key not in TYPES:
        hint = did_you_mean(key, TYPES)
        raise InvalidParams(name, None, f"must be one of {', '.join(TYPES)}", hint)


def parse(key: str, text: str) -> Any:
    kind = TYPES[key]
    if key == MODELS:
        raise InvalidParams(key, text, "must be in a file of settings, or one --model for each")
    if kind is bool:
        lowered = text.lower()
        if lowered not in TRUE + FALSE:
            raise InvalidParams(key, text, "must be true or false")
        return lowered in TRUE
    try:
        return kind(text)
    except ValueError:
        raise InvalidParams(key, text, f"must be {KINDS[kind]}") from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting. A flag that is not given stays unset."""
    group: argparse._ActionsContainer = parser
    for each in fields(ServeSettings):
        if each.name in GROUPS:
            group = parser.add_argument_group(GROUPS[each.name])
        if each.name == MODELS:
            continue
        default = "" if each.default in (None, "") else f" (default {each.default})"
        shown = each.metadata["text"] + default
        options: dict[str, Any] = {"help": shown, "default": argparse.SUPPRESS, "dest": each.name}
        if TYPES[each.name] is bool:
            options |= {"action": argparse.BooleanOptionalAction, "help": each.metadata["text"]}
        if each.name == MODEL_FLAG:
            options |= {"action": "append"}
        group.add_argument(flag_of(each.name), **options)


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line gives."""
    values = {name: getattr(options, name) for name in TYPES if hasattr(options, name)}
    models = values.pop(MODEL_FLAG, [])
    if len(models) > 1:
        values[MODELS] = [{MODEL_FLAG: model} for model in models]
    elif models:
        values[MODEL_FLAG] = models[0]
    return {k: parse(k, v) if isinstance(v, str) else v for k, v in values.items()}
