"""Ray Serve's controller is killed and stopped. The watch finds the next controller by its handle,
and routers continue without one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.probe_runs import report_by

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
REPLACED = "Ray Serve's controller does not answer; it is replaced"


def test_replicas_are_asked_while_a_controller_restarts(tmp_path: Path) -> None:
    report = report_by(
        "tests.serve.controller_probe",
        str(tmp_path),
        timeout_s=380,
        # Ray's 30 s are too short for a busy machine.
        RAY_raylet_start_wait_time_s="120",
    )
    assert report["asked_alone"] <= 1, "Ray's controller asks more often than every 10 s"
    assert report["asked_by_router"] >= 4, "a router asks twice a second"
    killed, stopped = report["killed"], report["stopped"]
    for each in (killed, stopped):
        assert each["answers"][-1] is True and each["asked"] >= 4, each
    assert killed["messages"] == [], "the next one was killed while it started"
    assert stopped["messages"] == [REPLACED]
