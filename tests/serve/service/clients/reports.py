"""Run a client's calls in a process with that client and without this project's packages, and
report the results. This module imports no client.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
CALLS_S = 240.0
Call = Callable[[], Any]
Report = dict[str, Any]


def report(calls: Mapping[str, Call]) -> None:
    """Print the report as a line of JSON, after the client's output."""
    print(flush=True)
    print(json.dumps({name: outcome(call) for name, call in calls.items()}))


def outcome(call: Call) -> Any:
    try:
        return call()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"error": kinds, "message": str(error)}


def last_line(command: list[str], folder: Path, environment: Mapping[str, str]) -> Report:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=CALLS_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: Report = json.loads(done.stdout.splitlines()[-1])
    return found
