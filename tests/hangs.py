"""A test that hangs fails alone. pytest-timeout interrupts what runs in Python; what never comes
back from C ends the process here, with all stacks printed. `make test` runs the tests in a process
of their own, by pytest-xdist, which then reports the test and goes on with the others in a new one.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

GRACE_S = 5.0
"""for pytest-timeout, which comes first and does less harm"""
SLOW_FIXTURES_S = {
    # Whichever test comes first starts it: Ray, a service, its models.
    "running": 300.0,
    "on_ray": 180.0,
    # Networks are exported, calibrated, or compared with pictures.
    "exports": 300.0,
    "tiny_export": 180.0,
    # The pictures that an evaluation is judged by are drawn and measured.
    "judges": 180.0,
    # A model is loaded by the library that ours is compared with.
    "diffusers_mini": 120.0,
    # A browser starts.
    "browser": 180.0,
}
"""What a test may take that needs one of these, unless it says otherwise itself."""
SHARING = ("tests/serve", "tests/onnx_export")
"""One service on one Ray; one export of each model."""
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    assert sys.__stderr__ is not None
    # A copy: while a test runs, its own output is caught.
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item.path.relative_to(config.rootpath))))
        names = getattr(item, "fixturenames", ())
        needed_s = max((SLOW_FIXTURES_S.get(name, 0.0) for name in names), default=0.0)
        if needed_s and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(needed_s))


def group_of(file: Path) -> str:
    """Tests that one process runs: those that share what is made once in a run, and else a file."""
    return next((f"{place}/" for place in SHARING if file.is_relative_to(place)), str(file))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Before pytest-timeout looks: where others compute, too, a test takes longer, and may."""
    item.add_marker(pytest.mark.timeout(limit_of(item) * load()), append=False)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    with limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    with limited(item):
        return (yield)


@contextmanager
def limited(item: pytest.Item) -> Iterator[None]:
    limit_s = limit_of(item)
    if limit_s:
        file = item.config.stash[STDERR]
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=file)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def limit_of(item: pytest.Item) -> float:
    """As pytest-timeout reads it; 0 is none."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    asked = item.config.getoption("timeout")
    return float(item.config.getini("timeout") or 0 if asked is None else asked)


def load() -> float:
    """How many want each processor, at least 1."""
    return max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)
