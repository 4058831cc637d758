"""What `sdxl serve` waits for before it accepts requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest

from serve import cli
from serve.ray_errors import last_error
from serve.settings import ServeSettings
from tests.serve.servers import listening
from tests.serve.services import free_port


@pytest.mark.slow
def test_the_process_that_starts_the_service_loads_no_torch() -> None:
    """The start reads the checkpoint and describes the application; only replicas compute.
    Importing torch took a second of every start."""
    code = (
        "import sys, serve.app; from sdxl.checkpoint import check_model; check_model('mini');"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--loras nowhere", 2, "sdxl: loras must be a folder, got 'nowhere'"),
        ("--model nosuch", 2, "sdxl: model must be 'mini', a folder in diffusers layout"),
        (
            "--model no/such",
            1,
            "sdxl: model 'no/such' is neither a folder here nor could be fetched: ",
        ),
    ],
)
def test_a_file_that_is_not_there_is_one_line_before_ray_starts(
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    code: int,
    message: str,
) -> None:
    """Without this check it took 29 s and printed a hundred lines of tracebacks."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.setattr(cli, "supervise", lambda run, *_: run())
    command = ("serve", *flags.split(), "--llm", "none", "--port", str(free_port()))
    assert refused(*command, code=code).startswith(message)


@pytest.mark.parametrize(("llm", "extra_s"), [("none", 0), ("mini", 5)])
def test_a_start_is_given_up_after_the_time_of_what_it_loads(
    llm: str, extra_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count()
    fake = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr(cli, "time", fake)
    with pytest.raises(cli.ServeFailed, match="/readyz"):
        cli.until_ready(ServeSettings(port=free_port(), llm=llm, llm_start_s=5))
    assert next(clock) == cli.READY_TIMEOUT_S + extra_s + 2


def test_the_environment_s_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(cli, "READY_TIMEOUT_S", 10)
    with listening() as (url, _):
        port = int(url.rpartition(":")[2])
        assert cli.until_ready(ServeSettings(port=port, llm="none")) == url


def test_a_replicas_traceback_is_reported_by_its_last_error() -> None:
    lines = [
        "ray.exceptions.RayTaskError: ray::ServeReplica:default:ImageReplica",
        'File "sdxl/warmup.py", line 145, in _decoded',
        "sdxl.warmup.NotReady: no picture: 12 of the image's 49152 values are not finite",
        "RuntimeError: Traceback (most recent call last):",
        "The deployment failed to start 3 times in a row.",
    ]
    assert last_error(lines) == "no picture: 12 of the image's 49152 values are not finite"
    assert last_error(["NameError: name 'x' is not defined"]).startswith("NameError: name")
    assert last_error(["nothing"]) == ""
