"""One service for all tests that do not harm it, because its start takes longer than most tests.
All tests in this folder are slow, and one process runs them (tests/hangs.py). On a phone, tests
marked `phone`, which depend on layout or touch, are slow, and the others are long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.serve import double
from tests.serve.service.browsers import EITHER_WIDTH, View, Visit, chromium, visit
from tests.serve.services import ROOT, Service, service

SCREENSHOTS = os.environ.get("WEB_SCREENSHOTS")
"""The folder, relative to the repository, that `make screenshots` writes to."""
FOLDER = Path(__file__).parent
OPEN, BROWSERS = ExitStack(), list[Browser]()
FIRST = "test_a_cancelled_request_does_not_stop_the_examples_of_others"
"""Later tests find the page's examples finished."""
GRACE_S = 400
"""the longest time that a service at full size takes to end"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            if is_on_phone(item) and not item.get_closest_marker("phone"):
                item.add_marker(pytest.mark.long)
            if not item.get_closest_marker("long"):
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.name != FIRST)


def is_on_phone(item: pytest.Item) -> bool:
    params = (
        item.callspec.params.values()
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else ()
    )
    return any(isinstance(value, View) and value.name == "phone" for value in params)


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with service(folder, "--sdapi", "--results-dir", str(folder / "results")) as found:
        yield found


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service over a double of SDXL's full size: real shapes, bytes and ratios of times."""
    folder = tmp_path_factory.mktemp("full-size")
    model = double.write(folder / "sdxl-double", speed=50.0)
    flags = ["--model", str(model), "--backend", double.BACKEND, "--llm", "none"]
    flags += ["--results-dir", str(folder / "results")]
    flags += ["--shutdown-s", str(GRACE_S), "--max-deadline-s", str(GRACE_S)]
    with service(folder, *flags) as found:
        yield found


@pytest.fixture
def browser() -> Browser:
    """The browser of all tests in this folder."""
    if not BROWSERS:
        BROWSERS.append(OPEN.enter_context(chromium()))
    return BROWSERS[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Close the browser before other folders' tests: this thread can have only one event loop."""
    if nextitem is None or not nextitem.path.is_relative_to(FOLDER):
        OPEN.close()
        BROWSERS.clear()


@pytest.fixture(params=EITHER_WIDTH, ids=str)
def view(request: pytest.FixtureRequest) -> View:
    found: View = request.param
    return found


@pytest.fixture
def web(browser: Browser, running: Service, view: View) -> Iterator[Visit]:
    """The page when it is connected to its service."""
    with visit(browser, running.url, view) as found:
        expect(found.page.locator("#service")).to_have_text("sdxl-mini")
        yield found


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """The folder for screenshots: the requested one, or a temporary folder."""
    return ROOT / SCREENSHOTS if SCREENSHOTS else tmp_path


@pytest.fixture
def http(running: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=60) as found:
        yield found
