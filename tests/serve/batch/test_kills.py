"""kill -9 at random moments: after the next start nothing is lost, and little was made twice."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from sdxl import cli
from serve.batch import command
from serve.batch.shard_worker import BatchTask
from serve.batch.store import open_store
from serve.batch.workers import ThreadWorker
from tests.interrupts import raising
from tests.serve.batch.drawers import Drawer, make, noted, pictures, prompts
from tests.serve.services import ROOT, is_alive

PATIENCE_S = 300.0


@dataclass
class Job:
    """`python -m tests.serve.batch.killed`, started as often as it takes."""

    folder: Path
    source: Path
    pool: str
    draw_s: float
    flags: tuple[str, ...]

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "tests.serve.batch.killed", self.pool, str(self.draw_s)]
        argv += [str(self.log), str(self.source), str(self.out), *self.flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.folder / "said").open("ab") as said:
            return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=said, stderr=said)

    def kill_after(self, pictures: int, kill: Callable[[psutil.Process], None]) -> None:
        """Start, wait until so many more pictures were made, strike."""
        wanted = len(noted(self.log)) + pictures
        process = self.start()
        self.wait(lambda: len(noted(self.log)) >= wanted or process.poll() is not None)
        if process.poll() is None:
            kill(psutil.Process(process.pid))
        process.wait(PATIENCE_S)

    def finish(self) -> None:
        code = self.start().wait(PATIENCE_S)
        assert code == 0, (self.folder / "said").read_text()[-3000:]

    def wait(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until, (self.folder / "said").read_text()[-3000:]
            time.sleep(0.01)


def kill_driver(process: psutil.Process) -> None:
    """And it alone: what it started must end by itself, or do no harm."""
    children = process.children(recursive=True)
    process.send_signal(signal.SIGKILL)
    psutil.wait_procs(children, timeout=0.2)


def undisturbed(folder: Path, source: Path, flags: tuple[str, ...]) -> dict[str, bytes]:
    assert make(source, folder / "undisturbed", *flags) == 0
    return pictures(folder / "undisturbed")


@pytest.mark.slow
def test_three_kills_of_the_driver_lose_nothing(tmp_path: Path) -> None:
    rows, kills, flags = 60, 3, ("--shard-size", "16")
    source, chance = prompts(tmp_path, rows), random.Random(3)
    job = Job(tmp_path, source, "threads", 0.05, flags)
    for _ in range(kills):
        job.kill_after(chance.randint(1, 15), kill_driver)
    job.finish()
    assert pictures(job.out) == undisturbed(tmp_path, source, flags)
    assert command.main(["--verify", str(job.out)]) == 0
    twice, allowed = len(noted(job.log)) - rows, kills * Drawer().window
    assert twice <= allowed, f"{twice} pictures were made twice, allowed {allowed}"


# Python cannot raise what strikes in a weak reference's callback, or between `open` and its `with`.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_no_worker_behind(tmp_path: Path) -> None:
    source, chance, struck = prompts(tmp_path, 40), random.Random(11), 0
    # Other tests may have left a worker that hangs for ever.
    before = set(threading.enumerate())
    for number in range(30):
        try:
            with raising(signal.SIGALRM):
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.005, 0.1))
                make(source, tmp_path / str(number), load=partial(Drawer, draw_s=0.005))
        except KeyboardInterrupt:
            struck += 1
        new = set(threading.enumerate()) - before
        left = [thread for thread in new if re.fullmatch(r"w\d+", thread.name)]
        assert not left, f"after {number} interrupts: {left}"
    gc.collect()
    assert struck > 15


def test_a_worker_that_is_told_to_end_before_it_began_ends(tmp_path: Path) -> None:
    task = BatchTask(open_store(str(tmp_path), "run"), "run", "png")
    for _ in range(200):
        worker = ThreadWorker("w0", Drawer, task)
        worker.end()
        assert not worker._thread.is_alive() and worker._loop.is_closed()


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("pool", ["threads", "ray"])
def test_twenty_kills_of_the_driver(pool: str, tmp_path: Path) -> None:
    rows, kills, flags = 400, 20, ("--shard-size", "64", "--workers", "2")
    source, chance = prompts(tmp_path, rows), random.Random(5)
    job = Job(tmp_path, source, pool, 0.05, flags)
    for _ in range(kills):
        job.kill_after(chance.randint(0, 18), kill_driver)
    job.finish()
    assert pictures(job.out) == undisturbed(tmp_path, source, flags[:2])
    assert command.main(["--verify", str(job.out)]) == 0
    twice, allowed = len(noted(job.log)) - rows, kills * 64
    print(f"{kills} kills of the driver, {rows} rows: {twice} made twice")
    assert twice <= allowed, f"{twice} pictures were made twice, allowed {allowed}"


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_twenty_kills_of_workers(tmp_path: Path) -> None:
    """One start of the job outlives them all."""
    rows, kills, flags = 400, 20, ("--shard-size", "64", "--workers", "2", "--stall-s", "20")
    source, chance = prompts(tmp_path, rows), random.Random(7)
    job = Job(tmp_path, source, "ray", 0.2, flags)
    process, killed = job.start(), 0
    while killed < kills and process.poll() is None:
        wanted = len(noted(job.log)) + chance.randint(1, 18)
        job.wait(lambda wanted=wanted: len(noted(job.log)) >= wanted or process.poll() is not None)  # type: ignore[misc]
        last = [int(line.split()[0]) for line in noted(job.log)[-1:]]
        for pid in filter(psutil.pid_exists, last):
            worker = psutil.Process(pid)
            if is_alive(worker):
                worker.send_signal(signal.SIGKILL)
                killed += 1
    assert process.wait(PATIENCE_S) == 0, (tmp_path / "said").read_text()[-3000:]
    assert pictures(job.out) == undisturbed(tmp_path, source, flags[:2])
    assert command.main(["--verify", str(job.out)]) == 0
    twice, allowed = len(noted(job.log)) - rows, killed * 64
    print(f"{killed} kills of workers, {rows} rows: {twice} made twice")
    assert killed >= 10 and twice <= allowed, f"{twice} made twice, allowed {allowed}"


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_node_that_goes_away_takes_nothing_with_it(tmp_path: Path) -> None:
    rows, flags = 400, ("--shard-size", "64", "--stall-s", "20")
    source, log, out = prompts(tmp_path, rows), tmp_path / "log", tmp_path / "out"
    argv = [sys.executable, "-m", "tests.serve.batch.removed_node", str(source), str(out), str(log)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*argv, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert pictures(out) == undisturbed(tmp_path, source, flags[:2])
    assert command.main(["--verify", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    twice, lost = len(noted(log)) - rows, summary["run"]["lost_workers"]
    print(f"a node removed, {lost} workers lost: {twice} of {rows} made twice")
    assert lost >= 1 and twice <= lost * 64


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_embedded_model_killed_and_resumed_makes_the_same_bytes(tmp_path: Path) -> None:
    """The command itself, other workers and another order: deterministic by default."""
    source = prompts(tmp_path, 48)
    out, calm, quick = tmp_path / "out", tmp_path / "calm", ["--steps", "4", "--quiet"]

    def start(place: Path, *flags: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "sdxl.cli", "batch", str(source), "--out", str(place)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*argv, *quick, *flags], cwd=tmp_path, env=environment)

    assert start(calm).wait(PATIENCE_S) == 0
    for wanted in (5, 20, 35):
        process = start(out, "--workers", "2")
        until = time.monotonic() + PATIENCE_S
        while len(list(out.glob("images/*/*.png"))) < wanted and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        process.kill()
        process.wait()
    assert start(out, "--workers", "2").wait(PATIENCE_S) == 0
    assert pictures(out) == pictures(calm) and len(pictures(out)) == 48
    assert cli.main(["batch", "--verify", str(out)]) == 0
