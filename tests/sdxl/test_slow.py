"""The log names slow work while it runs, and nothing else."""

from __future__ import annotations

import logging
import time

import pytest

from sdxl import slow
from sdxl.slow import log_if_slow


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Collect the log's lines, even if a command line has configured the logger."""
    monkeypatch.setattr(slow.log, "propagate", True)
    monkeypatch.setattr(slow, "PATIENCE_S", 0.05)
    caplog.set_level(logging.INFO, slow.log.name)


def test_slow_work_is_named_before_its_end(caplog: pytest.LogCaptureFixture) -> None:
    with log_if_slow("loading unet"):
        while not caplog.messages:
            time.sleep(0.01)
        assert caplog.messages == ["loading unet …"]
    assert caplog.messages[1:] == ["loading unet took 0 s"]


def test_quick_work_is_not_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow, "PATIENCE_S", 60.0)
    with log_if_slow("loading unet"):
        pass
    assert caplog.messages == []


def test_an_error_ends_the_watch_too(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), log_if_slow("loading unet"):
        raise KeyError
    time.sleep(0.2)
    assert caplog.messages == []
