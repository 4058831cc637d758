"""`sdxl serve`: starts and stops the whole service on this machine.

It starts Ray, waits for a first picture over HTTP, and on Ctrl-C or SIGTERM finishes requests in
flight; supervision.py guarantees the end. On a cluster, `serve deploy` takes its place.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sdxl.arguments import Parser
from sdxl.params import InvalidParams
from serve import logs
from serve import settings as settings_
from serve.cluster import ClusterWatch
from serve.ray_errors import last_error
from serve.settings import ServeSettings
from serve.supervision import supervise

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""calls this service without the environment's http_proxy"""
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default Ray runs its workers at low CPU priority.
    "RAY_worker_niceness": "0",
    # A killed proxy is replaced in 4 s instead of 30.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
    # On a busy machine a proxy needs more than 5 s to start.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # The controller waits this long for a proxy to end, even if the proxy hangs.
    "RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S": "2",
    # A replica that does not answer is killed: the next one may need its GPU.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Calls between processes by gRPC instead of Ray tasks take a third less time.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # gRPC would send these calls through the environment's http_proxy.
    "no_grpc_proxy": "0.0.0.0/0,::/0",
    # A replica itself logs the slow parts of its start.
    "RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S": "600",
    # Period in which processes export metrics, also when idle; Ray's default is 100 ms. Ray
    # publishes them every 10 s.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    # 1 GiB, more than any answer: ten incompressible pictures of 2048² are 170 MB as base64. Ray's
    # default of 4 MiB is too small for two of 1024². Request bodies have other limits.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "1073741824",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve.front.connection:bound",
}
ON_LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
"""On a single node Ray's processes listen on loopback only."""
APPLICATION = "default"
WATCH_S = 1.0
READY_TIMEOUT_S = 60.0
"""Time from loaded replicas to an answer over HTTP."""
FLUSH_S = 0.3
"""Time for the proxy to pass on the last answer."""
FLUSH_TIMEOUT_S = 5.0


class ServeFailed(RuntimeError):
    """The service could not be started."""


def start_ray(**options: Any) -> None:
    import ray

    try:
        ray.init(**options)
    except Exception as error:
        # Ray raises plain Exceptions here, for example if its node has not started after 30 s.
        raise ServeFailed(f"Ray did not start: {' '.join(str(error).split())}") from error


def main(argv: Sequence[str]) -> int:
    settings = read_settings(argv)
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault(*ON_LOOPBACK)
    os.environ.update(log_environment(settings))
    return supervise(partial(run, settings), settings.shutdown_s, say)


def log_environment(settings: ServeSettings) -> dict[str, str]:
    """Return the variables that configure the log of all processes; by default Ray adds colours and
    a prefix."""
    variables = {logs.VARIABLE: settings.log_format}
    if not sys.stderr.isatty():
        variables["RAY_COLOR_PREFIX"] = "0"
    if settings.log_format == logs.JSON:
        variables |= {"RAY_DISABLE_WORKER_LOG_PREFIX": "1", "RAY_DEDUP_LOGS": "0"}
    return variables


def run(settings: ServeSettings) -> int:
    watch = ClusterWatch(say)
    try:
        start(settings, watch)
        url = until_ready(settings)
        say(f"ready: {url}  (OpenAI's API below {url}/v1, its documentation at {url}/docs)")
        while True:
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        return 0
    finally:
        stop(settings, watch)


def read_settings(argv: Sequence[str]) -> ServeSettings:
    parser = Parser(
        prog="sdxl serve", description="Serve pictures over HTTP.", common=settings_.COMMON_FLAGS
    )
    parser.add_argument("--settings", metavar="FILE", help="a TOML file of the settings below")
    settings_.add_flags(parser)
    options = parser.parse_args(argv)
    file = Path(options.settings) if options.settings else None
    return settings_.read(file, flags=settings_.given_settings(options))


def start(settings: ServeSettings, watch: ClusterWatch) -> None:
    """Start the service; return when every replica has made a picture."""
    from ray import serve as ray_serve

    from sdxl.checkpoint import check_model
    from sdxl.model_names import check_folder
    from serve.app import application
    from serve.models import image_models

    check_port(settings.host, settings.port)
    models = [model.settings for model in image_models(settings)]
    check_folder("models_dir", settings.models_dir)
    for each in models:
        check_model(each.model_name)
        check_folder("loras", each.loras)
        check_folder("controlnets", each.controlnets)
        check_folder("ip_adapters", each.ip_adapters)
        if each.refiner:
            check_model(each.refiner, is_refiner=True)
    # This raises if the certificate cannot sign.
    _ = settings.marks.sign
    if not settings_.is_loopback(settings.host):
        say(
            f"{settings.host} may be public, and this is plain HTTP: put haproxy.cfg in front (TLS)"
        )
    llm = [] if settings.llm == "none" else [f"{settings.llm} (llm)"]
    names = [each.model_name for each in models]
    say(f"starting Ray, then loading {', '.join([*names, *llm])}")
    # Ray warns at every start that joining the cluster needs a token, its default.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    start_ray(address="local", include_dashboard=False, logging_level=logging.WARNING)
    # Ray's handler would leave Ray's processes behind.
    signal.signal(signal.SIGTERM, interrupt)
    watch.start()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray_serve.start(
        proxy_location="HeadOnly",
        http_options={"host": settings.host, "port": settings.port},
        logging_config=logs.OF_RAY,
    )
    try:
        ray_serve.run(application(settings), logging_config=logs.OF_RAY)
    except RuntimeError as error:
        wait_for_replacements(error)


def wait_for_replacements(error: RuntimeError) -> None:
    """Wait for Ray to replace replicas that died during the start, which Ray reports as `error`.
    Raise ServeFailed if something cannot start at all."""
    from ray import serve as ray_serve

    is_reported = False
    while True:
        applications = ray_serve.status().applications.values()
        triggers = {
            deployment.status_trigger
            for each in applications
            for deployment in each.deployments.values()
            if deployment.status == "DEPLOY_FAILED"
        }
        if not applications or triggers - {"HEALTH_CHECK_FAILED"}:
            raise ServeFailed(cause_of(error)) from error
        if all(each.status == "RUNNING" for each in applications):
            return
        if not is_reported:
            say("a replica died while others were starting; it is replaced")
            is_reported = True
        time.sleep(WATCH_S)


def check_port(host: str, port: int) -> None:
    """Check that the port is free: Ray's proxy would share a used port with the other program."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        needed = f"must be a free port of {host} ({error.strerror or error})"
        raise InvalidParams("port", port, needed) from error


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def cause_of(error: RuntimeError) -> str:
    """Return the last error in a replica's traceback, as Ray reports it."""
    from ray import serve as ray_serve

    applications = ray_serve.status().applications.values()
    messages = [d.message for a in applications for d in a.deployments.values() if d.message]
    lines = [line.strip() for text in (*messages, str(error)) for line in text.splitlines()]
    return last_error(lines) or lines[-1]


def until_ready(settings: ServeSettings) -> str:
    """Wait until the service can make pictures over HTTP; return its URL."""
    url = url_of(settings)
    llm_s = 0.0 if settings.llm == "none" else settings.llm_start_s
    until_s = time.monotonic() + READY_TIMEOUT_S + llm_s
    while True:
        try:
            with DIRECT.open(f"{url}/readyz", timeout=5) as answer:
                ready = json.load(answer)
            names = ready["models"]
            say(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} loaded")
            if ready.get("llm") == "unavailable":
                say(f"the language model {settings.llm!r} failed; pictures are served without it")
            return url
        except OSError as error:
            if time.monotonic() > until_s:
                raise ServeFailed(f"{url}/readyz: {error}") from error
            time.sleep(0.1)


def url_of(settings: ServeSettings) -> str:
    """Return the URL for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def stop(settings: ServeSettings, watch: ClusterWatch) -> None:
    """Finish accepted requests, refuse new ones, end every process."""
    import ray
    from ray import serve as ray_serve

    if not ray.is_initialized():
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    handle = front()
    if handle is not None:
        drain(handle, settings.shutdown_s)
        flush(settings)
    watch.stop()
    # Ray logs the planned ends of its processes as failures.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        ray_serve.shutdown()
        ray.shutdown()


def front() -> Any:
    """Return a handle to the HTTP fronts if one runs: `start` may not have returned."""
    from ray import serve as ray_serve

    from serve.front.handover import FRONT

    application = ray_serve.status().applications.get(APPLICATION)
    fronts = application and application.deployments.get(FRONT)
    states = fronts.replica_states.items() if fronts else ()
    is_up = any(count for state, count in states if state == "RUNNING")
    return ray_serve.get_app_handle(APPLICATION) if is_up else None


def drain(handle: Any, timeout_s: float) -> None:
    say("finishing the requests in flight")
    try:
        handle.broadcast("drain", timeout_s).results(timeout_s=timeout_s + 1)
    except Exception as error:
        say(f"not everything could be finished: {type(error).__name__}")


def flush(settings: ServeSettings) -> None:
    """Let the proxy send the front ends' last answers: it answers one more request after them,
    however slow the machine is."""
    try:
        with DIRECT.open(f"{url_of(settings)}/healthz", timeout=FLUSH_TIMEOUT_S):
            pass
    except OSError as error:
        say(f"the HTTP proxy stopped answering: {type(error).__name__}")
    time.sleep(FLUSH_S)


def say(text: str) -> None:
    print(f"sdxl serve: {text}", file=sys.stderr, flush=True)
