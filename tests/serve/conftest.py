"""One service for all tests that do not harm it: starting one takes longer than most of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from eval.service import double
from serve.worker.worker import Worker
from tests.serve import workers
from tests.serve.browsers import EITHER_WIDTH, View, Visit, chromium, visit
from tests.serve.services import ROOT, Service, service

SCREENSHOTS = os.environ.get("WEB_SCREENSHOTS")
"""a folder, relative to the repository, where `make screenshots` wants them"""


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with service(folder, "--sdapi", "--results-dir", str(folder / "results")) as found:
        yield found


@pytest.fixture(scope="session")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The same over a double of SDXL's full size: real shapes, bytes and ratios of times."""
    folder = tmp_path_factory.mktemp("full-size")
    model = double.write(folder / "sdxl-double", double.Settings(speed=50.0))
    flags = ("--model", str(model), "--backend", double.BACKEND, "--llm", "none")
    with service(folder, *flags, "--results-dir", str(folder / "results")) as found:
        yield found


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """On fake engines."""
    with workers.running() as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(params=EITHER_WIDTH, ids=str)
def view(request: pytest.FixtureRequest) -> View:
    found: View = request.param
    return found


@pytest.fixture
def web(browser: Browser, running: Service, view: View) -> Iterator[Visit]:
    """The page, once it has found its service."""
    with visit(browser, running.url, view) as found:
        expect(found.page.locator("#service")).to_have_text("sdxl-mini")
        yield found


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """Where the pictures of the page go: into docs/ when they are asked for."""
    return ROOT / SCREENSHOTS if SCREENSHOTS else tmp_path


@pytest.fixture
def http(running: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"b{abs(hash(request.node.name)) % 10**9}"
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}/job"
    s3fs.S3FileSystem.clear_instance_cache()
