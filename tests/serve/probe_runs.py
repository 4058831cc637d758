"""Run the probe programs, which start Ray clusters and print observations as a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.serve.services import ROOT

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_SERVE_WORKER_PROXY_HTTP_PORT": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


def report_by(
    program: str, *arguments: str, begins: str = '{"', timeout_s: float = 3000, **environment: str
) -> dict[str, Any]:
    """`begins`: the beginning of that line, because Ray also prints lines."""
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (text for text in done.stdout.splitlines() if text.startswith(begins))
    report: dict[str, Any] = json.loads(line)
    return report
