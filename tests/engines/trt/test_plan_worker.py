"""A build's progress: rising shares, and a named end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engines.folders.manifest import spec_as_dict
from engines.trt.plan_worker import BuildError, BuildProgress, PlanJob, errors_in, run_worker
from sdxl.specs import network_specs
from tests.fakes import ARCH


def job(folder: Path) -> PlanJob:
    spec = network_specs(ARCH)["clip_l"]
    onnx, plan = str(folder / "clip_l.onnx"), str(folder / "clip_l.plan")
    return PlanJob(
        "clip_l", onnx, plan, "tensorrt_rtx", "SM89", [], spec_as_dict(spec), None, False
    )


def interpreter(folder: Path, script: str) -> str:
    """Write a script that replaces Python as the worker's command."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
    with pytest.raises(BuildError, match=message):
        run_worker(job(tmp_path), tmp_path / "log", lambda share: None)


def test_a_full_disk_in_the_worker_is_the_file_systems_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo \'{"errno": 28, "error": "No space left on device"}\'; exit 1'
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
    with pytest.raises(OSError, match="No space left") as caught:
        run_worker(job(tmp_path), tmp_path / "log", lambda share: None)
    assert caught.value.errno == 28


def test_that_there_is_no_gpu_is_not_a_complaint() -> None:
    log = "[W] slow\n[E] Cuda Runtime (cudaError 35: CUDA driver version)\n[E] x\n[E] x\n[E] y"
    assert errors_in(log) == "x y"
