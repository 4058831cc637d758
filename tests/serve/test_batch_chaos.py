"""A batch whose replicas, front ends and runner are killed has the pictures of `sdxl batch`.

BATCH_REQUESTS sets the number of requests: 10,000 take hours on two cores.
"""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.batch.drawers import jsonl, pictures
from tests.serve.services import ROOT, Service, service
from tests.serve.test_batch_api import URL, line

COUNT = int(os.environ.get("BATCH_REQUESTS", "10000"))
KILL_PERIOD_S = 20.0
DOOMED = ("ImageReplica", "ImageIngress", "BatchReplica")
QUIET_S = 1800.0
"""The test fails if a batch makes no progress for so long."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(12 * 3600)]


def strike_until_done(running: Service, client: openai.OpenAI, batch: Any) -> tuple[Any, list[str]]:
    chance, struck = random.Random(21), list[str]()
    seen, seen_s, struck_s = -1, time.monotonic(), time.monotonic()
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(1)
        try:
            batch = client.batches.retrieve(batch.id)
        except openai.APIError:
            # The front end may have been killed.
            continue
        done = batch.request_counts.completed
        if done != seen:
            seen, seen_s = done, time.monotonic()
        assert time.monotonic() - seen_s < QUIET_S, f"{batch}\n{running.text[-4000:]}"
        if done and time.monotonic() - struck_s > KILL_PERIOD_S:
            name = chance.choice(DOOMED) if len(struck) >= len(DOOMED) else DOOMED[len(struck)]
            victims = running.named(name)
            if victims:
                chance.choice(victims).kill()
                struck.append(name)
            struck_s = time.monotonic()
    return batch, struck


def test_every_request_is_answered_once_through_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The number of threads changes the rounding.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    asked = [line(f"r{i}", prompt=f"a red circle, {i}", size="64x64") for i in range(COUNT)]
    source = jsonl(tmp_path, asked)
    flags = ("--replicas", "2", "--ingresses", "2", "--llm", "none", "--deterministic")
    with (
        service(tmp_path, *flags, "--batches-dir", str(tmp_path / "batches")) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=20) as client,
    ):
        file = client.files.create(file=source, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint=URL,
            completion_window="30d",  # type: ignore[arg-type]
        )
        batch, struck = strike_until_done(running, client, batch)
        assert batch.status == "completed" and set(struck) == set(DOOMED), (batch, struck)
        text = client.files.content(batch.output_file_id).text
        assert batch.error_file_id is None
    lines = [json.loads(each) for each in text.splitlines()]
    assert [each["custom_id"] for each in lines] == [f"r{i}" for i in range(COUNT)]
    out = tmp_path / "out"
    command = [sys.executable, "-m", "sdxl.cli", "batch", str(source), "--out", str(out), "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    made = {Path(name).stem: data for name, data in pictures(out).items()}
    data = {each["custom_id"]: each["response"]["body"]["data"][0]["b64_json"] for each in lines}
    different = [name for name, text in data.items() if base64.b64decode(text) != made[name]]
    assert len(made) == COUNT and not different, f"{len(different)}: {different[:5]}"
