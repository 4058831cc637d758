"""A job's progress on the terminal, in metrics and by `--status`."""

from __future__ import annotations

import io
import json
import time
import urllib.request
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdxl.params import InvalidParams
from serve.batch.batch_spec import HAS_DEAD
from serve.batch.driver import Driver
from serve.batch.intake import BATCH_URL
from serve.batch.job import open_job
from serve.batch.ledger import Entry
from serve.batch.lock import locked
from serve.batch.progress import (
    SILENT_S,
    Bar,
    BatchProgress,
    Metrics,
    WorkerState,
    describe,
    read_status,
)
from serve.batch.rows import BatchRow, ShardPiece
from serve.batch.shard_worker import BatchTask
from serve.batch.store import open_store
from tests.serve.batch.drawers import Drawer, jsonl, make, prompts
from tests.serve.services import free_port


def some() -> BatchProgress:
    progress = BatchProgress(1000, 0.0, made=40, found=100, dead=2, lost_workers=1)
    progress.workers = {"w0": WorkerState(0.5), "w1": WorkerState(1.0)}
    progress.tick(0.0)
    progress.made = 60
    progress.tick(10.0)
    return progress


def test_rate_and_time_left_count_this_run_and_the_last_minute() -> None:
    progress = some()
    assert progress.done == 162 and progress.rate == pytest.approx(2.0)
    assert progress.eta_s == pytest.approx((1000 - 162) / 2)
    for second in range(20, 200):
        progress.tick(float(second))
    assert progress.rate == 0.0 and progress.eta_s is None


def test_the_display_shows_rate_time_left_workers_and_failures() -> None:
    text = "2.00 images/s, 0:06:59 left, w0  50% w1 100%, 2 dead, 1 worker lost"
    assert some().describe() == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = Bar(1000)
    bar(some())
    bar.close()
    assert "162/1000" in terminal.getvalue() and "2.00 images/s" in terminal.getvalue()


def test_without_a_terminal_a_line_is_printed_every_30_s(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress, bar = some(), Bar(1000)
    began_s = bar._last_s
    for after_s in (1.0, 31.0, 32.0):
        progress.now_s = began_s + after_s
        bar(progress)
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line] == [f"sdxl batch: 162 of 1000, {progress.describe()}"]


def test_prometheus_reads_the_metrics() -> None:
    metrics = Metrics(free_port())
    try:
        metrics(some())
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics") as answer:
            page = answer.read().decode()
        with pytest.raises(InvalidParams, match="metrics_port"):
            Metrics(metrics.port)
    finally:
        metrics.close()
    for expected in (
        'sdxl_batch_rows{state="made"} 60.0',
        'sdxl_batch_rows{state="left"} 838.0',
        "sdxl_batch_images_per_second 2.0",
        'sdxl_batch_occupancy{worker="w0"} 0.5',
    ):
        assert expected in page


def test_the_status_of_an_unfinished_job_counts_its_ledger_and_says_how_to_resume(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    assert make(prompts(tmp_path, 5), out) == 0
    store, job = open_job(str(out))
    status = json.loads((out / "status.json").read_text()) | {"state": "running"}
    (out / "status.json").write_text(json.dumps(status))
    ledger = out / "ledger" / "000000.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(True)[:2]))
    with locked(str(out)):
        running, silent = (read_status(store, job, status["at"] + s) for s in (1, SILENT_S + 60))
    assert (running["state"], silent["state"]) == ("running", "broken off")
    assert silent["images"] == 2 and silent["rows"] == 5
    assert "2 of 5 rows" in describe(silent) and "to resume" in describe(silent)
    assert "w0" in describe(running)


def test_a_killed_job_is_broken_off_at_once_on_its_own_machine(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert make(prompts(tmp_path, 2), out) == 0
    store, job = open_job(str(out))
    status = json.loads((out / "status.json").read_text()) | {"state": "running", "at": time.time()}
    states = []
    for host in ("elsewhere", status["host"]):
        (out / "status.json").write_text(json.dumps(status | {"host": host}))
        states.append(read_status(store, job)["state"])
    assert states == ["running", "broken off"]
    (out / "lock").unlink()
    assert read_status(store, job)["state"] == "broken off"
    assert not (out / "lock").exists(), "reading the status changed the folder"


BAD, SAME = {"prompt": 5}, {"prompt": "a", "id": "x"}
LINE = {"custom_id": "x", "method": "POST", "url": BATCH_URL, "body": {"prompt": "a", "n": 4}}


@pytest.mark.parametrize(
    ("rows", "made", "dead"),
    [([SAME, SAME, {"prompt": "c"}], 6, 3), ([{"prompt": "a"}, BAD], 3, 1), ([LINE], 4, 0)],
)
def test_a_finished_job_s_rows_are_its_pictures_and_dead_letters(
    rows: list[dict[str, Any]], made: int, dead: int, tmp_path: Path
) -> None:
    """Bad rows make no pictures, and lines of the Batch API have their own number of them."""
    out, done = tmp_path / "out", made + dead
    make(jsonl(tmp_path, rows), out, "--n", "3")
    run = json.loads((out / "summary.json").read_text())["run"]
    assert {name: run[name] for name in ("made", "dead", "done", "rows")} == {
        "made": made,
        "dead": dead,
        "done": done,
        "rows": done,
    }
    text = describe(read_status(*open_job(str(out))))
    assert f"finished: {done} of {done} rows" in text and "to resume" not in text


def test_files_of_one_name_have_dead_letters_of_their_own(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        jsonl(tmp_path / folder, [BAD])
    assert make(tmp_path / "?" / "rows.jsonl", tmp_path / "out") == HAS_DEAD
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["run"]["dead"] == 2


def test_a_lost_worker_s_dead_letters_are_not_counted_as_pictures(tmp_path: Path) -> None:
    """Three dead letters of one line."""
    store = open_store(str(tmp_path), "run")
    store.prepare("ledger")
    rows = tuple(BatchRow(number, "line 1", f"x-{number}") for number in range(3))
    with closing(store.append("000000")) as writer:
        for row in rows:
            writer.add(Entry(row.ordinal, row.id, row.line, "run", error="bad").as_line())
    driver = Driver.__new__(Driver)
    driver.task = BatchTask(store, "run", "png")
    left, tally = driver._left(ShardPiece(0, rows))
    assert (left, tally.made, len(tally.dead)) == ([], 0, 3)


def test_the_rows_are_never_fewer_than_those_done() -> None:
    progress = BatchProgress(2, 0.0, made=8)
    progress.tick(1.0)
    assert progress.rows == 8


def test_the_summary_counts_each_workers_pictures(tmp_path: Path) -> None:
    load, flags = partial(Drawer, draw_s=0.3), ("--workers", "2", "--shard-size", "4")
    assert make(prompts(tmp_path, 60), tmp_path / "out", *flags, load=load) == 0
    workers = json.loads((tmp_path / "out" / "summary.json").read_text())["run"]["workers"]
    assert set(workers) == {"w0", "w1"}
    assert sum(worker["made"] for worker in workers.values()) == 60
