"""A test that hangs fails alone. pytest-timeout interrupts Python code. If a call to C never
returns, this module prints all stacks and ends the process; pytest-xdist reports the test and
starts a new process for the others.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Generator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

GRACE_S = 5.0
"""Time for pytest-timeout to act first, because it does less harm."""
SLOW_FIXTURES_S = {
    # The first test starts Ray, a service and its models.
    "running": 300.0,
    "on_ray": 180.0,
    # Networks are exported, calibrated and compared.
    "exports": 300.0,
    "tiny_export": 180.0,
    "tiny_exports": 180.0,
    # An evaluation's reference pictures are drawn and measured.
    "judges": 180.0,
    # diffusers loads a model.
    "diffusers_mini": 120.0,
    # A browser starts.
    "browser": 180.0,
}
"""The time limit of a test that uses the fixture and has no timeout mark."""
SHARING = ("tests/serve/service/", "tests/onnx_export/")
"""Folders whose tests share expensive fixtures: one service on Ray, or one export of each model."""
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background job ignores SIGINT, and processes started from here would, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert sys.__stderr__ is not None
    # A copy, because pytest captures stderr while a test runs.
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = getattr(item, "fixturenames", ())
        needed_s = max((SLOW_FIXTURES_S.get(name, 0.0) for name in names), default=0.0)
        if needed_s and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(needed_s))


class InGroups(LoadScopeScheduling):
    """Give all tests of a folder in SHARING to one process, and other tests file by file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return next((place for place in SHARING if file.startswith(place)), file)

    def remove_node(self, node: WorkerController) -> str | None:
        """Drop the test that ended its process; the base class would run it again for ever."""
        units: dict[str, dict[str, bool]] = self.assigned_work[node]
        pending = ((scope, test) for scope, tests in units.items() for test in tests)
        scope, crashed = next(((s, t) for s, t in pending if not units[s][t]), ("", None))
        if crashed is not None:
            units[scope][crashed] = True
        for finished in [scope for scope, tests in units.items() if all(tests.values())]:
            del units[finished]
        super().remove_node(node)
        return crashed


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> InGroups:
    return InGroups(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Raise the limit on a loaded machine, before pytest-timeout reads it."""
    item.add_marker(pytest.mark.timeout(limit_of(item) * load()), append=False)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def limited(item: pytest.Item) -> Generator[None]:
    limit_s = limit_of(item)
    if limit_s:
        file = item.config.stash[STDERR]
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=file)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = limited


def limit_of(item: pytest.Item) -> float:
    """Return the limit as pytest-timeout reads it; 0 is no limit."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    option = item.config.getoption("timeout")
    return float(item.config.getini("timeout") or 0 if option is None else option)


def load() -> float:
    """Return the number of runnable processes per processor, at least 1."""
    return max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)
