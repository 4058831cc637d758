"""After kill -9 at random moments the next run loses nothing and repeats little."""

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
from tests.serve.batch.drawers import Drawer, lines_of, make, pictures, prompts
from tests.serve.services import ROOT, is_alive
from tests.waiting import wait_until

PATIENCE_S = 300.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass
class Job:
    """A job in a process that is killed and started again."""

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

    @property
    def made(self) -> int:
        return len(lines_of(self.log))

    def start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "tests.serve.batch.job_program", self.pool, str(self.draw_s)]
        argv += [str(self.log), str(self.source), str(self.out), *self.flags]
        with (self.folder / "output").open("ab") as file:
            return subprocess.Popen(argv, cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=file)

    def kill_driver_after(self, pictures: int) -> None:
        """Start, wait for this many pictures, and kill the driver. Its children must do no harm."""
        wanted, process = self.made + pictures, self.start()
        wait_until(lambda: self.made >= wanted or process.poll() is not None, PATIENCE_S)
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            psutil.wait_procs(children, timeout=0.2)
        process.wait(PATIENCE_S)

    def check(self, process: subprocess.Popen[bytes], rows: int, allowed: int) -> None:
        """Check that the job finishes with the same pictures as a job that was not killed."""
        code = process.wait(PATIENCE_S)
        assert code == 0, (self.folder / "output").read_text()[-3000:]
        assert make(self.source, self.folder / "calm", *self.flags[:2]) == 0
        assert pictures(self.out) == pictures(self.folder / "calm")
        assert command.main(["--verify", str(self.out)]) == 0
        twice = self.made - rows
        print(f"{rows} rows: {twice} pictures were made twice")
        assert twice <= allowed, f"{twice} pictures were made twice, allowed {allowed}"


def kill_drivers(job: Job, rows: int, kills: int, most: int, allowed: int) -> None:
    chance = random.Random(kills)
    for _ in range(kills):
        job.kill_driver_after(chance.randint(0, most))
    job.check(job.start(), rows, allowed * kills)


@pytest.mark.slow
def test_three_kills_of_the_driver_lose_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, prompts(tmp_path, 60), "threads", 0.05, ("--shard-size", "16"))
    kill_drivers(job, 60, kills=3, most=15, allowed=Drawer().window)


# Python drops an interrupt in a weak reference's callback, or between `open` and its `with`.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_no_worker_behind(tmp_path: Path) -> None:
    source, chance, struck = prompts(tmp_path, 40), random.Random(11), 0
    # Other tests may leave a worker that hangs.
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
    assert struck


def test_a_worker_can_be_ended_before_it_began(tmp_path: Path) -> None:
    task = BatchTask(open_store(str(tmp_path), "run"), "run", "png")
    for _ in range(200):
        worker = ThreadWorker("w0", Drawer, task)
        worker.end()
        assert not worker._thread.is_alive() and worker._loop.is_closed()


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("pool", ["threads", "ray"])
def test_twenty_kills_of_the_driver(pool: str, tmp_path: Path) -> None:
    flags = ("--shard-size", "64", "--workers", "2")
    kill_drivers(
        Job(tmp_path, prompts(tmp_path, 400), pool, 0.05, flags), 400, 20, most=18, allowed=64
    )


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_twenty_kills_of_workers_within_one_run(tmp_path: Path) -> None:
    rows, kills, flags = 400, 20, ("--shard-size", "64", "--workers", "2", "--stall-s", "20")
    job, chance = Job(tmp_path, prompts(tmp_path, rows), "ray", 0.2, flags), random.Random(7)
    process, killed = job.start(), 0
    while killed < kills and process.poll() is None:
        wanted = job.made + chance.randint(1, 18)
        while job.made < wanted and process.poll() is None:
            time.sleep(0.01)
        last = [int(line.split()[0]) for line in lines_of(job.log)[-1:]]
        for pid in filter(psutil.pid_exists, last):
            worker = psutil.Process(pid)
            if is_alive(worker):
                worker.kill()
                killed += 1
    job.check(process, rows, killed * 64)
    assert killed >= 10, f"{killed} workers were killed, needed 10"


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_job_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    rows, flags = 400, ("--shard-size", "64", "--stall-s", "20")
    job = Job(tmp_path, prompts(tmp_path, rows), "nodes", 0.2, flags)
    process = job.start()
    process.wait(1500)
    lost = json.loads((job.out / "summary.json").read_text())["run"]["lost_workers"]
    job.check(process, rows, lost * 64)
    assert lost >= 1, f"{lost} workers were lost, needed 1"


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_embedded_model_killed_and_resumed_makes_the_same_bytes(tmp_path: Path) -> None:
    """The second run has another number of workers and another order."""
    source = prompts(tmp_path, 48)
    out, calm, quick = tmp_path / "out", tmp_path / "calm", ["--steps", "4", "--quiet"]

    def start(place: Path, *flags: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "sdxl.cli", "batch", str(source), "--out", str(place)]
        return subprocess.Popen([*argv, *quick, *flags], cwd=tmp_path, env=ENVIRONMENT)

    assert start(calm).wait(PATIENCE_S) == 0
    for wanted in (5, 20, 35):
        process = start(out, "--workers", "2")
        while len(list(out.glob("images/*/*.png"))) < wanted and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        process.wait()
    assert start(out, "--workers", "2").wait(PATIENCE_S) == 0
    assert pictures(out) == pictures(calm) and len(pictures(out)) == 48
    assert cli.main(["batch", "--verify", str(out)]) == 0
