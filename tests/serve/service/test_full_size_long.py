"""Jobs and benchmarks at SDXL's own size with thousands of pictures, on the double's engines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.quality.accuracy_log import FILE, AccuracyLog
from eval.quality.task import embedded_task
from sdxl import cli
from tests.serve import double
from tests.serve.service.test_full_size import SIDE, batch, check, rows
from tests.serve.services import ROOT, Service
from tests.waiting import wait_until

MANY, IN_BUCKET = 2000, 200

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture
def model(full_size: Service) -> tuple[str, ...]:
    folder = full_size.log.parent / "sdxl-double"
    return ("--model", str(folder), "--backend", double.BACKEND)


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    path = tmp_path / "captions.tsv"
    lines = [f"{i}\t{i}\ta lighthouse, number {i}" for i in range(64)]
    path.write_text("\n".join(["id\timage_id\tcaption", *lines]) + "\n")
    return path


def test_a_job_of_thousands_is_killed_and_ends_whole(
    model: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = [*model, "--workers", "2", "--steps", "4"]
    argv = [sys.executable, "-m", "sdxl.cli", "batch", str(rows(tmp_path, MANY))]
    job = subprocess.Popen([*argv, "--out", str(out), "--quiet", *flags], cwd=ROOT)
    try:
        wait_until(lambda: len([*out.glob("images/*/*.png")]) >= 100 or job.poll() is not None, 900)
        assert job.poll() is None
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    batch(tmp_path / "prompts.txt", str(out), *flags, timeout_s=2400)
    files = sorted(out.glob("images/*/*.png"))
    assert len(files) == MANY
    for file in files[:: MANY // 50]:
        check(file.read_bytes())


@pytest.mark.parametrize("form", [(), ("--tar",)])
def test_a_job_fills_an_object_store(
    full_size: Service, bucket: str, tmp_path: Path, form: tuple[str, ...]
) -> None:
    flags = ("--through", full_size.url, "--steps", "4", "--shard-size", "64", *form)
    batch(rows(tmp_path, IN_BUCKET), bucket, *flags, timeout_s=1500)


@pytest.mark.parametrize("scenario", ["Offline", "Server", "SingleStream"])
def test_loadgen_calls_the_service_valid(
    full_size: Service, captions: Path, tmp_path: Path, scenario: str
) -> None:
    flags = ["--scenario", scenario, "--url", full_size.url, "--short", "--captions", str(captions)]
    out = tmp_path / "out"
    code = cli.main(
        ["bench", "mlperf", *flags, "--model", "sdxl", "--steps", "4", "--out", str(out)]
    )
    result = json.loads((out / scenario / "performance" / "result.json").read_text())
    assert code == 0 and result["valid"] is True, result


def test_an_accuracy_run_logs_pictures_that_are_read_again(
    full_size: Service, captions: Path, tmp_path: Path
) -> None:
    """64 pictures are 400 MB of hex; the benchmark's 5000 are 31 GB in the same form."""
    flags = ["--url", full_size.url, "--short", "--captions", str(captions), "--accuracy"]
    code = cli.main(
        ["bench", "mlperf", *flags, "--model", "sdxl", "--steps", "2", "--out", str(tmp_path)]
    )
    assert code == 0
    log = tmp_path / "Offline" / "accuracy" / FILE
    assert log.stat().st_size > 64 * 2 * 3 * SIDE**2
    task = replace(embedded_task({}, 64), side=SIDE)
    found = AccuracyLog(log, task).pictures([0, 63])
    assert [picture.shape for picture in found] == [(SIDE, SIDE, 3)] * 2
    # The benchmark begins every sample with the same noise, and the double's picture depends on it
    # alone.
    assert (found[0] == found[1]).all() and np.ptp(found[0]) > 200
