"""What is said of a job's progress: to a person, a scraper and `--status`."""

from __future__ import annotations

import io
import json
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from sdxl.params import InvalidParams
from serve.batch.batch_spec import HAS_DEAD
from serve.batch.job import need_job
from serve.batch.lock import locked
from serve.batch.progress import (
    SILENT_S,
    Bar,
    BatchProgress,
    Metrics,
    WorkerState,
    clock,
    counted,
    describe,
    read_status,
)
from serve.batch.store import FolderStore
from tests.serve.batch.drawers import Drawer, make, order_of, prompts
from tests.serve.services import free_port


def some() -> BatchProgress:
    progress = BatchProgress(1000, 0.0, made=40, found=100, dead=2, lost_workers=1)
    progress.workers = {"w0": WorkerState(0.5), "w1": WorkerState(1.0)}
    progress.tick(0.0)
    progress.made = 60
    progress.tick(10.0)
    return progress


def test_rate_and_time_left_are_of_this_run_alone() -> None:
    progress = some()
    assert progress.done == 162 and progress.rate == pytest.approx(2.0)
    assert progress.eta_s == pytest.approx((1000 - 162) / 2)


def test_the_rate_forgets_what_was_long_ago() -> None:
    progress = some()
    for second in range(20, 200):
        progress.tick(float(second))
    assert progress.rate == 0.0 and progress.eta_s is None


def test_the_display_says_everything_that_matters() -> None:
    said = some().describe()
    for wanted in ("2.00 images/s", "6:59 left", "w0  50%", "w1 100%", "2 dead", "1 worker lost"):
        assert wanted in said, f"{wanted!r} is not in {said!r}"
    assert clock(3 * 3600 + 62) == "3:01:02"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_is_one_line_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = Bar(1000)
    bar(some())
    bar.close()
    assert "162/1000" in terminal.getvalue() and "2.00 images/s" in terminal.getvalue()


def test_metrics_are_there_for_a_scraper() -> None:
    metrics = Metrics(free_port())
    try:
        metrics(some())
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics") as answer:
            page = answer.read().decode()
        with pytest.raises(InvalidParams, match="metrics_port"):
            Metrics(metrics.port)
    finally:
        metrics.close()
    for wanted in (
        'sdxl_batch_rows{state="made"} 60.0',
        'sdxl_batch_rows{state="left"} 838.0',
        "sdxl_batch_images_per_second 2.0",
        'sdxl_batch_occupancy{worker="w0"} 0.5',
    ):
        assert wanted in page


def test_the_status_of_a_job_that_broke_off_says_that_it_goes_on(tmp_path: Path) -> None:
    source, out = prompts(tmp_path, 5), tmp_path / "out"
    assert make(source, out) == 0
    store = FolderStore(out, "x")
    job = need_job(store, str(out))
    status = (out / "status.json").read_text().replace('"finished"', '"running"')
    (out / "status.json").write_text(status)
    ledger = out / "ledger" / "000000.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(True)[:2]))
    now = time.time()
    with locked(str(out)):
        running, broken = (read_status(store, job, now + s) for s in (1, SILENT_S + 60))
    assert (running["state"], broken["state"]) == ("running", "broken off")
    assert broken["images"] == 2 and broken["rows"] == 5
    assert "2 of 5 rows" in describe(broken) and "to resume" in describe(broken)
    assert "w0" in describe(running)


def test_a_job_that_was_killed_is_broken_off_at_once(tmp_path: Path) -> None:
    """The lock falls with its process. Of another machine's, the silence alone tells."""
    source, out = prompts(tmp_path, 2), tmp_path / "out"
    assert make(source, out) == 0
    store = FolderStore(out, "x")
    job = need_job(store, str(out))
    status = json.loads((out / "status.json").read_text()) | {"state": "running", "at": time.time()}
    states = []
    for host in (status["host"], "elsewhere"):
        (out / "status.json").write_text(json.dumps(status | {"host": host}))
        states.append(read_status(store, job)["state"])
    assert states == ["broken off", "running"]
    (out / "lock").unlink()
    (out / "status.json").write_text(json.dumps(status))
    assert read_status(store, job)["state"] == "broken off"
    assert not (out / "lock").exists(), "looking changes nothing"


def test_where_no_terminal_is_a_line_comes_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    progress = some()
    bar = Bar(1000)
    began_s = bar._last_s
    for after_s in (1.0, 31.0, 32.0):
        progress.now_s = began_s + after_s
        bar(progress)
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line] == [f"sdxl batch: 162 of 1000, {progress.describe()}"]


@pytest.mark.parametrize(("count", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_one_of_a_kind_is_no_plural(count: int, said: str) -> None:
    assert counted(count, "row") == said


def test_occupancy_of_each_worker_is_told_while_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from serve.batch.running import run
    from tests.serve.batch.drawers import in_threads

    order = order_of(prompts(tmp_path, 60), tmp_path / "out", "--workers", "2", "--shard-size", "4")
    assert run(order, partial(in_threads, load=partial(Drawer, draw_s=0.3))) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(summary["run"]["workers"]) == {"w0", "w1"}
    assert sum(worker["made"] for worker in summary["run"]["workers"].values()) == 60
    assert told[-1]["images"] == 60 and HAS_DEAD == 3
