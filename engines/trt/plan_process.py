"""Runs the worker that builds one plan, and turns how it ended into a result or an error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.trt.plan_worker import PlanJob

MAX_MESSAGE = 500


class BuildError(RuntimeError):
    """A plan that could not be built: which, and what TensorRT says."""


def run_worker(job: PlanJob, log: Path, on_share: Callable[[float], None]) -> dict[str, Any]:
    """Build; what it cost. `log` takes what TensorRT has to say meanwhile."""
    paper = log.with_suffix(".job")
    paper.write_text(job.as_json(), encoding="utf-8")
    command = [sys.executable, "-m", "engines.trt.plan_worker", str(paper)]
    last: dict[str, Any] = {}
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as worker,
    ):
        assert worker.stdout is not None
        try:
            for line in worker.stdout:
                last = json.loads(line)
                if "share" in last:
                    on_share(last["share"])
        except BaseException:
            worker.kill()
            raise
    if worker.returncode == 0:
        return last
    if last.get("errno"):
        raise OSError(last["errno"], last["error"])
    raise BuildError(_message(job, worker.returncode, last, log))


def _message(job: PlanJob, code: int, last: dict[str, Any], log: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; needed more memory, most likely" if -code == signal.SIGKILL else ""
        return f"{job.onnx}: building its plan was ended by {name}{hint} (see {log})"
    said = complaints(log.read_text(encoding="utf-8", errors="replace"))
    return f"{job.onnx}: {last.get('error', f'exit code {code}')}: {said}"[:MAX_MESSAGE]


def complaints(text: str) -> str:
    """TensorRT's own errors, without the one that there is no GPU: building may need none."""
    lines = [line.strip() for line in text.splitlines() if "[E]" in line]
    told = [line for line in lines if "cudaError" not in line and "CUDA driver" not in line]
    unique = dict.fromkeys(line.removeprefix("[E]").strip() for line in told)
    return " ".join(unique) or "nothing else"
