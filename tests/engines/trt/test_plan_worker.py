"""A build's progress: rising shares, and a named end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.folders.manifest import spec_as_dict
from engines.trt.plan_worker import BuildError, BuildProgress, PlanJob, errors_in, run_worker
from sdxl.specs import network_specs
from tests.fakes import ARCH


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Return a function that runs a worker whose interpreter is a script."""

    def run(script: str) -> object:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        spec = spec_as_dict(network_specs(ARCH)["clip_l"])
        onnx, plan = str(tmp_path / "clip_l.onnx"), str(tmp_path / "clip_l.plan")
        job = PlanJob("clip_l", onnx, plan, "tensorrt_rtx", "SM89", [], spec, None, False)
        return run_worker(job, tmp_path / "log", lambda share: None)

    return run


def test_nested_phases_are_one_share_that_only_rises() -> None:
    reported: list[float] = []
    progress = BuildProgress(reported.append)
    progress.start("build", 4)
    for step in range(4):
        for inner in ("tune", "compile"):
            progress.start(inner, 10)
            for i in range(10):
                progress.step(inner, i)
            progress.finish(inner)
        progress.step("build", step)
    assert reported == sorted(set(reported)) and reported[-1] == 1.0
    assert len(reported) > 10


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -9 $$", "clip_l.onnx: building its plan was ended by SIGKILL; out of memory"),
        ('echo "[E] bad node" >&2; exit 3', "clip_l.onnx: exit code 3: bad node"),
        ('echo \'{"error": "no such layer"}\'; exit 1', "clip_l.onnx: no such layer: nothing else"),
    ],
)
def test_how_a_worker_ended_is_named(
    run: Callable[[str], object], script: str, message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        run(script)


def test_a_full_disk_in_the_worker_is_the_file_systems_own_error(
    run: Callable[[str], object],
) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        run('echo \'{"errno": 28, "error": "No space left on device"}\'; exit 1')
    assert caught.value.errno == 28


def test_a_missing_gpu_is_not_among_a_builds_errors() -> None:
    log = "[W] slow\n[E] Cuda Runtime (cudaError 35: CUDA driver version)\n[E] x\n[E] x\n[E] y"
    assert errors_in(log) == "x y"
