"""The whole service from the start of `sdxl serve` to its end: Ray, proxy, front end, replica."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval.measuring.psnr import psnr_db
from sdxl.images import to_pixels
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from serve.front import form_routes
from tests.serve.monitoring import unanswered
from tests.serve.servers import GENERATE, error_of, leave_midway, measured
from tests.serve.service.browsers import pixels
from tests.serve.services import ROOT, Service, free_port, is_alive
from tests.serve.test_api import picture
from tests.serve.test_connection import answer_to
from tests.serve.test_edits import EDIT, hole, png
from tests.serve.test_form_routes import EXAMPLES
from tests.waiting import wait_until

PROMPT = "a red circle on a blue background"
LONG: dict[str, Any] = {"prompt": PROMPT, "n": 4, "steps": 100, "deadline_s": 100}

pytestmark = pytest.mark.timeout(600)


def test_every_process_listens_on_loopback_alone(running: Service) -> None:
    """Except for one gRPC port of each replica, which Ray fixes (docs/operations.md)."""
    exposed = [
        process.pid
        for process in running.processes()
        for socket in process.net_connections("inet")
        if socket.status == "LISTEN" and not is_loopback(socket.laddr.ip)
    ]
    replicas = running.named("ray::ServeReplica")
    assert replicas and sorted(exposed) == sorted(process.pid for process in replicas)


def is_loopback(address: str) -> bool:
    parsed = ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback


def test_a_cancelled_request_does_not_stop_the_examples_of_others(http: httpx.Client) -> None:
    """Ray Serve cancels the work of a request when its client leaves."""
    for _ in range(3):
        with suppress(httpx.ReadTimeout):
            http.get(EXAMPLES, timeout=0.2)
    result = http.get(EXAMPLES, timeout=90).json()["data"]
    assert sum("b64_json" in each for each in result) == len(form_routes.EMBEDDED)


def test_a_picture_is_the_pipeline_s(http: httpx.Client, mini: Pipeline) -> None:
    body = {"prompt": PROMPT, "seed": 9, "steps": 6, "cache_interval": 2}
    (data,) = http.post(GENERATE, json=body).json()["data"]
    (expected,) = mini.generate([GenerationParams(PROMPT, seed=9, steps=6, cache_interval=2)])
    assert expected.image is not None
    psnr = psnr_db(pixels(picture(data)), to_pixels(expected.image))
    assert psnr >= 45, f"{psnr:.1f} dB from another backend's, needed 45"


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("GET", "/nowhere", {}, 404),
        ("GET", GENERATE, {}, 405),
        ("POST", GENERATE, {"json": {}}, 400),
        ("POST", GENERATE, {"content": b"{"}, 400),
        ("POST", "/v1/images/prompts", {"content": b" " * 300_000}, 413),
        ("POST", GENERATE, {"json": {"prompt": "a", "deadline_s": 0.001}}, 429),
        ("GET", "/v1/models", {"headers": {"host": "evil.example"}}, 403),
    ],
)
def test_errors_keep_their_envelope_behind_the_proxy(
    http: httpx.Client, method: str, path: str, options: dict[str, Any], status: int
) -> None:
    answer = http.request(method, path, **options)
    assert answer.status_code == status and error_of(answer)
    assert len(answer.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize(
    "header",
    [{"x-request-timeout-seconds": "inf"}, {"x-request-id": "<b>"}, {"x-request-id": "é" * 300}],
)
def test_headers_that_the_proxy_trusts_do_no_harm(
    running: Service, http: httpx.Client, header: dict[str, str]
) -> None:
    """The answer repeats the id unchanged. The edge configuration strips it."""
    coded = {name: value.encode() for name, value in header.items()}
    answer = http.get("/healthz", headers=coded)  # type: ignore[arg-type]
    assert answer.status_code == 200 and "<b>" not in running.text


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * (64 << 20), 431, id="endless"),
        pytest.param(b"\x16\x03\x01 hello\r\n\r\n", 400, id="no HTTP"),
    ],
)
def test_refusals_of_the_proxy_itself_have_our_envelope_and_cost_nothing(
    running: Service, http: httpx.Client, sent: bytes, status: int
) -> None:
    (proxy,) = running.named("ray::ProxyActor")
    before = proxy.memory_info().rss
    found, error = answer_to(int(running.url.rpartition(":")[2]), sent)
    grown = (proxy.memory_info().rss - before) >> 20
    assert (found, set(error)) == (status, {"message", "type", "param", "code"})
    assert grown < 16, f"the proxy holds {grown} MiB of what it refused, allowed 16"
    assert http.get("/healthz").status_code == 200 and is_alive(proxy)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"json": LONG}),
        (EDIT, {"data": LONG, "files": {"image": png(), "mask": hole()}}),
    ],
)
def test_a_client_that_leaves_frees_its_slots(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    leave_midway(http, path, LONG["n"], **body)
    assert not measured(http, "sdxl_images_running") + measured(http, "sdxl_images_queued")


def test_metrics_of_every_process_answer_the_dashboard_and_the_alerts(http: httpx.Client) -> None:
    """Only the GPUs' metrics are missing here."""
    http.post(GENERATE, json={"prompt": PROMPT, "steps": 2})
    page = http.get("/metrics").text
    missing = [line for line in unanswered(page) if "sdxl_gpu_" not in line]
    assert not missing, "\n".join(missing)
    for part in ("sdxl_steps_total", "sdxl_tick_seconds_bucket", "sdxl_http_requests_total"):
        assert part in page
    assert 'replica="' in page and 'ingress="' in page


@pytest.mark.parametrize(
    ("phases", "examples"),
    [
        ("examples,fuzzing,stateful", 10),
        pytest.param("examples,coverage,fuzzing,stateful", 30, marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_schemathesis_finds_nothing(running: Service, phases: str, examples: int) -> None:
    """The phase of coverage sends thousands of requests."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        *("run", f"{running.url}/openapi.json", "--no-color"),
        *("--phases", phases, "--max-examples", str(examples)),
        *("--exclude-checks", "positive_data_acceptance"),
        *("--request-timeout", "60", "--suppress-health-check", "all", "--seed", "1"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, cwd=running.log.parent
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_the_longest_shutdown_by_default_is_half_a_minute() -> None:
    from serve import cli
    from serve.settings import ServeSettings

    most = ServeSettings().shutdown_s + cli.FLUSH_S
    assert most <= 26, f"{most} s and Ray's own end, allowed 30 in all"


def test_a_model_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    argv = [sys.executable, "-m", "sdxl.cli", "serve", "--port", str(free_port())]
    done = subprocess.run(
        [*argv, "--model", str(tmp_path / "broken")],
        capture_output=True,
        text=True,
        timeout=200,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sdxl: ") and "model_index.json" in last, done.stderr[-2000:]


def test_a_public_address_without_keys_is_refused_before_anything_starts() -> None:
    argv = [sys.executable, "-m", "sdxl.cli", "serve", "--host", "0.0.0.0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.returncode == 2 and "--insecure" in done.stderr and done.stderr.count("\n") == 1


def test_a_log_in_a_file_has_no_colours(running: Service) -> None:
    httpx.post(running.url + GENERATE, json={"prompt": "x", "n": 99}, timeout=30)
    # Ray forwards lines of its other processes with a delay.
    wait_until(lambda: "ImageIngress" in running.text, 300)
    assert "\x1b" not in running.text
